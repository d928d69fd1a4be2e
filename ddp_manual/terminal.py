"""What a person sees in a rank's terminal: log lines that name the rank, and lines about waiting."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ddp_manual import unread
from ddp_manual.environment import user_variables
from ddp_manual.errors import BadOption, DdpManualError, DiskFull
from ddp_manual.text_wrapping import wrapped
from ddp_manual.wording import counted, duration

LOGGER = logging.getLogger("ddp_manual")

Say = Callable[[str], None]
"""Shows a line to the person at this rank's terminal."""


class _Log(logging.Handler):
    """Shows lines to the person at this terminal, with the rank in front, once ``log_to_stderr`` was called.

    It looks up sys.stderr for each line, since a progress bar replaces it while it is drawn.
    """

    tag = ""
    over_bar = False
    _shown = ""
    """The line that the next one replaces."""
    _whole = ""
    """The last text that was too long for one line, and so was printed in full above it."""

    def __call__(self, line: str) -> None:
        LOGGER.info("%s", line)

    def emit(self, record: logging.LogRecord) -> None:
        clear = _clear_line() if self.over_bar or self._shown else ""
        self._shown = ""
        _print(clear + wrapped(self.tag + self.format(record), width_of(sys.stderr)))

    def in_place(self, line: str) -> bool:
        """Show a line until the next one; return whether this terminal can do that."""
        if not (self in LOGGER.handlers and _clear_line() and _is_in_foreground()):
            return False
        if line or self._shown:
            room = (width_of(sys.stderr) or sys.maxsize) - 1  # the cursor stays on the same row
            shown = line and self.tag + line
            if len(shown) > room:
                text, paren, waited = shown.rpartition(" (")
                if text != self._whole:
                    self._whole = text
                    _print(_clear_line() + wrapped(text, room + 1))
                shown = f"{text[: room - len(waited) - 6]} ...{paren}{waited}"
            _print(_clear_line() + shown, end="")
        self._shown = line
        return True


log = _Log()


def open_what_is_closed() -> None:
    """Open /dev/null in place of each standard stream that is closed, here and in what this process starts: no file and
    no socket gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # gets the lowest number that is free
    sys.stdout = sys.stdout or open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", closefd=False)  # noqa: SIM115


def tag(rank: int) -> str:
    return f"[rank {rank}]"


def log_to_stderr(rank: int | None, *, over_bar: bool = False) -> None:
    """Send this package's log lines to stderr, tagged with the rank if there is one; a second call changes the tag.

    Args:
        over_bar: whether another process may be drawing its progress bar, which each line then replaces.
    """
    LOGGER.addHandler(log)
    LOGGER.propagate = False
    log.tag, log.over_bar = "" if rank is None else f"{tag(rank)} ", over_bar
    LOGGER.setLevel(logging.INFO)


@contextmanager
def log_as_found() -> Iterator[None]:
    """Restore the configuration of this package's log after the body."""
    propagate, disabled = LOGGER.propagate, LOGGER.disabled
    handlers, level = [*LOGGER.handlers], LOGGER.level
    try:
        yield
    finally:
        LOGGER.handlers, LOGGER.propagate, LOGGER.disabled = handlers, propagate, disabled
        LOGGER.setLevel(level)


def say(line: str) -> None:
    """Print a line on stderr."""
    _print(wrapped(line, width_of(sys.stderr)))


def _print(text: str, end: str = "\n") -> None:
    """Print on stderr, unless its reader has gone."""
    with suppress(OSError, ValueError):
        # In one piece: another rank may share the terminal, and print between this text and its end.
        print(f"{text}{end}", end="", file=sys.stderr, flush=True)


def width_of(sink: TextIO) -> int | None:
    """Return how wide lines for a person are: as COLUMNS says, or the terminal; None in a file or a pipe, where a
    message is one line, which is found and counted as such."""
    if (columns := user_variables.columns()) is not None:
        return columns
    with suppress(OSError, ValueError):
        return os.get_terminal_size(sink.fileno()).columns or None
    return None


def stdout_width() -> int | None:
    return width_of(sys.stdout)


def print_error(error: DdpManualError, took: float | None = None) -> None:
    """Print the error that ends this process, in place of a progress bar; the exit code also says it, in case the
    terminal is gone.

    Args:
        took: seconds that the rank has run.
    """
    show_cursor = "\x1b[?25h" if _clear_line() else ""  # an interrupted progress bar leaves it hidden
    text = error.render(width_of(sys.stderr))
    if took is not None:
        text += f"\n  exit code {error.exit_code}, after {duration(took)}"
    with unread.never_block():
        _print(_clear_line() + show_cursor + in_colour(text, sys.stderr))


def _is_in_foreground() -> bool:
    """Return whether this process is not in the background, where a person may be typing at the terminal."""
    with suppress(OSError, ValueError):
        return os.tcgetpgrp(sys.stderr.fileno()) == os.getpgrp()
    return False


def _clear_line() -> str:
    return "\r\x1b[2K" if sys.stderr.isatty() and not user_variables.terminal_is_dumb() else ""


def in_colour(text: str, sink: TextIO) -> str:
    """Colour the beginnings of an error's parts, if ``sink`` is a terminal that shows colours."""
    if not (sink.isatty() and user_variables.colour_allowed()):
        return text
    text = re.sub(r"(?m)^error\[[\w-]+\]:", "\x1b[1;31m\\g<0>\x1b[0m", text)
    return re.sub(r"(?m)^  (why|next):", "  \x1b[1m\\1:\x1b[0m", text)


def result_text(summary: Mapping[str, Any]) -> str:
    """Return what rank 0 prints on stdout when the run is complete: the figures, and where the files are."""
    return f"{result_line(summary)}; files in {summary['run_dir']}"


def result_line(summary: Mapping[str, Any]) -> str:
    """Return the figures of a run that is complete."""
    return (
        f"{summary['model']} on {summary['dataset']}: {100 * summary['final_test_accuracy']:.2f}% test accuracy "
        f"after {counted(summary['epochs'], 'epoch')} on {counted(summary['world_size'], 'rank')} "
        f"({summary['backend']}, {summary['device']}), {summary['samples_per_second']:,.0f} samples/s"
    )


def escape_what_cannot_be_shown() -> None:
    """Have stdout escape characters that its encoding lacks, as stderr does anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def stdout_failed(error: OSError) -> DdpManualError:
    """Return the error for a failed write to stdout, and drop everything that is written there from now on."""
    with suppress(OSError, ValueError):  # otherwise its buffer fails once more when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (DiskFull if full else BadOption)(
        "stdout cannot be written",
        why=str(error.strerror),
        next="free some space there, or send stdout elsewhere" if full else "send stdout elsewhere",
    )


def columns(rows: Sequence[Sequence[str]], *, width: int | None = None, least_first: Sequence[str] = ()) -> list[str]:
    """Align rows of texts in columns; returns one line for each row.

    Args:
        width: where the lines have to fit; without it nothing is left out.
        least_first: headings of the columns that are left out, one after the other, until the lines fit.
    """

    def widths() -> list[int]:
        return [max(map(len, column)) for column in zip(*rows, strict=True)]

    for heading in least_first:
        if width is None or sum(widths()) + 2 * len(widths()) <= width:
            break
        kept = [other != heading for other in rows[0]]
        rows = [[*itertools.compress(row, kept)] for row in rows]
    aligned = widths()
    return ["  " + "  ".join(map(str.ljust, row, aligned)).rstrip() for row in rows]
