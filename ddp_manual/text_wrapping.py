"""Text at the width of a terminal: prose is wrapped, while commands, which people copy, and code stay whole."""

from __future__ import annotations

import re
import shlex
import textwrap
from collections.abc import Iterable

MARGIN = "  "
"""Begins a line that is never wrapped."""
# Columns; in a terminal that has fewer, lines are wider than it.
LEAST = 20
CONTROL = re.compile(r"[\0-\x1f\x7f]")


def whole(command: str) -> str:
    """Return a command as a line of its own, for a text that is wrapped later."""
    return MARGIN + command if command else ""


def as_shell_words(words: Iterable[str]) -> str:
    """Quote words for a shell, as one line: a word with control characters becomes ``$'a\\nb'``, of bash and zsh."""
    return " ".join(_with_escapes(word) if CONTROL.search(word) else shlex.quote(word) for word in words)


def _with_escapes(word: str) -> str:
    escaped = word.replace("\\", r"\\").replace("'", r"\'")
    return f"$'{CONTROL.sub(lambda found: found[0].encode('unicode_escape').decode(), escaped)}'"


def wrapped(text: str, width: int | None, *, margin: str = MARGIN) -> str:
    """Wrap the lines of a text, except for those that begin with a space.

    Args:
        width: in columns; None: lines are not wrapped.
        margin: what all lines of prose but the first begin with.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if not line or line.startswith(" "):
            lines.append(line)
            continue
        first = margin if lines else ""
        if width is None or len(first + line) <= width:
            lines.append(first + line)
        else:
            found = textwrap.wrap(
                re.sub(r"(?<=\d) (?=s\b|samples/s)", "\xa0", line),  # keeps a number beside its unit
                width,
                initial_indent=first,
                subsequent_indent=margin,
                break_long_words=False,
                break_on_hyphens=False,
            )
            lines += [row.replace("\xa0", " ") for row in found]
    return "\n".join(lines)


def labelled(label: str, text: str, width: int | None) -> str:
    """Return a part of an error, such as ``  why:  nothing listens there``, with its lines below each other; a command
    that does not fit beside the label is the next line."""
    indent, room = " " * len(label), None if width is None else max(LEAST, width - len(label))
    text = wrapped(text, room, margin="")
    if text.startswith(MARGIN):
        first = text.partition("\n")[0]
        text = text.removeprefix(MARGIN) if room is None or len(first) <= room + len(MARGIN) else f"\n{text}"
    return (label + textwrap.indent(text, indent).removeprefix(indent)).replace(f"{label}\n", f"{label.rstrip()}\n", 1)
