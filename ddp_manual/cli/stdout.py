"""What a command prints as its result, once or again and again."""

from __future__ import annotations

import errno
import itertools
import math
import shutil
import signal
from collections.abc import Iterator
from contextlib import contextmanager

import click

from ddp_manual import terminal
from ddp_manual.terminal import Say

BROKEN_PIPE = 128 + signal.SIGPIPE


def print_result(text: str) -> None:
    """Print the text on stdout.

    Raises:
        DiskFull, BadOption: stdout cannot take it. Exit: its reader has gone.
    """
    try:
        click.echo(text)
    except OSError as error:
        failed = terminal.stdout_failed(error)
        if error.errno == errno.EPIPE:
            raise click.exceptions.Exit(BROKEN_PIPE) from error
        raise failed from error


@contextmanager
def redrawing() -> Iterator[Say]:
    """Yield a function that replaces the text on the terminal, as far as it has room; at the end all is there.

    The terminal itself wraps long lines, so that a command that is copied from there is still one line.
    """
    shown, cut_off = 0, ""

    def draw(text: str, *, cut: bool = True) -> None:
        nonlocal shown, cut_off
        width, height = shutil.get_terminal_size()
        lines = text.splitlines()
        rows = [*itertools.accumulate(max(1, math.ceil(len(line) / width)) for line in lines)]
        fitting = [line for line, row in zip(lines, rows, strict=True) if row < height or not cut]
        up = f"\x1b[{shown}F\x1b[J" if shown else ""
        print(up + "\n".join(fitting), flush=True)
        shown = rows[len(fitting) - 1] if fitting else 0
        cut_off = text if len(fitting) < len(lines) else ""

    try:
        yield draw
    finally:
        if cut_off:
            draw(cut_off, cut=False)
