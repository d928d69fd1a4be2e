"""What a person sees in a rank's terminal: log lines that name the rank, lines about waiting, and a progress bar."""

from __future__ import annotations

import errno
import io
import itertools
import logging
import math
import os
import re
import shutil
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from ddp_manual import unread
from ddp_manual.environment import settings
from ddp_manual.errors import BadOption, DdpManualError, DiskFull
from ddp_manual.run_folder import RunPaths

if TYPE_CHECKING:
    from concurrent.futures import Executor, Future

    from rich.progress import Progress, Task

LOGGER = logging.getLogger("ddp_manual")
COLOURS = (36, 33, 32, 35, 34, 31)
# Seconds. With POLL_EVERY and Python's own start, the first line about waiting comes within a second.
FIRST_LINE = 0.6
LINE_EVERY = 10.0
POLL_EVERY = 0.2
# Ranges of ranks that a sentence names.
MOST_RANGES = 16

Say = Callable[[str], None]
"""Shows a line to the person at this rank's terminal."""


class _CurrentStderr(logging.Handler):
    """Looks up sys.stderr for each line, since a progress bar replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def tag(rank: int) -> str:
    return f"[rank {rank}]"


def log_to_stderr(rank: int | None, *, over_bar: bool = False) -> None:
    """Send this package's log lines to stderr, tagged with the rank if there is one; a second call changes the tag.

    Args:
        over_bar: whether another process may be drawing its progress bar, which each line then replaces.
    """
    handler = next((found for found in LOGGER.handlers if isinstance(found, _CurrentStderr)), _CurrentStderr())
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    line = "%(message)s" if rank is None else f"{tag(rank)} %(message)s"
    handler.setFormatter(logging.Formatter(_clear_line() + line if over_bar else line))
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


def log(line: str) -> None:
    LOGGER.info("%s", line)


def say(line: str) -> None:
    """Print a line on stderr, unless its reader has gone."""
    with suppress(OSError, ValueError):
        print(line, file=sys.stderr, flush=True)


def print_error(error: DdpManualError) -> None:
    """Print the error that ends this process, in place of a progress bar; the exit code also says it, in case the
    terminal is gone."""
    show_cursor = "\x1b[?25h" if _clear_line() else ""  # an interrupted progress bar leaves it hidden
    with unread.never_block():
        say(_clear_line() + show_cursor + in_colour(error.render(), sys.stderr))


def _clear_line() -> str:
    return "\r\x1b[2K" if sys.stderr.isatty() and not settings.terminal_is_dumb() else ""


def in_colour(text: str, sink: TextIO) -> str:
    """Colour the beginnings of an error's parts, if ``sink`` is a terminal that shows colours."""
    if not (sink.isatty() and settings.colour_allowed()):
        return text
    text = re.sub(r"(?m)^error\[[\w-]+\]:", "\x1b[1;31m\\g<0>\x1b[0m", text)
    return re.sub(r"(?m)^  (why|next):", "  \x1b[1m\\1:\x1b[0m", text)


def result_text(summary: Mapping[str, Any]) -> str:
    """Return what rank 0 prints on stdout when the run is complete: the figures, and where the files are."""
    paths = RunPaths(Path(summary["run_dir"]))
    files = (paths.summary, paths.model, paths.metrics, paths.accuracies, paths.samples, *paths.predictions.all)
    others = (paths.config, paths.checkpoints, paths.track, paths.tensorboard, paths.wandb)
    return "\n".join([result_line(summary), *(f"  {path}" for path in (*files, *others) if path.exists())])


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


class RankOutput:
    """Writes the output of one rank to the terminal, with the rank in front, and unchanged to its log.

    Args:
        writer: the thread that writes. It waits for a slow reader of the terminal, as the event loop, which sends
            heartbeats, must not; it does not wait for a reader who has stopped, since the log goes on.
    """

    def __init__(self, log: BinaryIO, rank: int, writer: Executor) -> None:
        self._log = log
        self._writer = writer
        self._tag = tag(rank)
        self._colour = COLOURS[rank % len(COLOURS)]
        if log.tell():
            log.write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())

    def write(self, text: bytes, sink: TextIO | None = None) -> Future[None]:
        """Write to both, in turn with all other output; the rank continues even if the log or the terminal fails."""
        return self._writer.submit(self._write, text, sink)

    def print(self, line: str) -> None:
        """Write a line to the log and to stderr."""
        self.write(f"{line}\n".encode())

    def _write(self, text: bytes, sink: TextIO | None) -> None:
        sink = sys.stderr if sink is None else sink
        shown = f"\x1b[{self._colour}m{self._tag}\x1b[0m" if sink.isatty() and settings.colour_allowed() else self._tag
        with suppress(OSError, ValueError):
            self._log.write(text)
            self._log.flush()
        lines = text.decode(errors="replace").splitlines(keepends=True)
        unread.write("".join(f"{shown} {in_colour(line.removeprefix(self._tag + ' '), sink)}" for line in lines), sink)


class ProgressLines:
    """Shows how training goes: as a bar with the last line beside it, otherwise as lines of the log, or not at all."""

    def __init__(self, bar: Progress | None = None, *, shown: bool = True) -> None:
        self._bar = bar
        self._shown = shown

    def advance(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def say(self, line: str) -> None:
        """Show a line, every so many steps."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=re.sub(r"^step \S+ | lr \S+| samples(?=/s)", "", line))
        elif self._shown:
            LOGGER.info("%s", line)


@contextmanager
def progress(total_steps: int, *, done: int, shown: bool) -> Iterator[ProgressLines]:
    """Show progress over ``total_steps``, of which some are ``done``: on a terminal as a bar, otherwise as lines.

    Args:
        shown: only on rank 0, which speaks for all ranks.
    """
    if not (shown and sys.stderr.isatty()):
        yield ProgressLines(shown=shown)
        return
    # rich takes 0.05 s to import, so only processes that draw import it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, ProgressColumn, TimeRemainingColumn
    from rich.table import Column
    from rich.text import Text

    class LastLine(ProgressColumn):
        """The only column that gives way where the terminal is narrow."""

        def render(self, task: Task) -> Text:
            return Text(task.description, no_wrap=True, overflow="ellipsis")

    console = Console(stderr=True, soft_wrap=True)  # lines above the bar are never cut, so that they can be copied
    bar_width = 40 if console.width > 110 else 10
    # What is left beside the bar, the steps, the time (7) and spaces between them (3), less 3 for ^C: that would
    # otherwise push the bar to the line above, where nothing clears it.
    rest = console.width - bar_width - len(f"{total_steps}/{total_steps}") - 7 - 3 - 3
    columns = (BarColumn(bar_width), MofNCompleteColumn(), TimeRemainingColumn(), LastLine(Column(max_width=rest)))
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task("", total=total_steps, completed=done)
        yield ProgressLines(bar)


@contextmanager
def redrawing() -> Iterator[Say]:
    """Yield a function that replaces the text on the terminal, as far as it has room; in the end all of it is there.

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


class Waiting:
    """A deadline, with lines about what is waited for: the first within a second, others every 10 s and on each change.

    Args:
        timeout: seconds in all.
        waited: the seconds of these that have passed already.
    """

    def __init__(self, timeout: float, say: Say, waited: float = 0.0) -> None:
        self._say = say
        self.timeout = timeout
        self._started = time.monotonic() - waited
        self._next_line = time.monotonic() + FIRST_LINE
        self._said: dict[str, float] = {}
        self._advised = False

    @property
    def waited(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining(self) -> float:
        return max(0.0, self.timeout - self.waited)

    @property
    def over(self) -> bool:
        return self.waited >= self.timeout

    def about(self, text: str, news: Sequence[str] = (), *, kind: str = "", each_change: bool = True) -> bool:
        """Say ``text`` and ``news`` if a line is due, the text changed or there is news; return whether it was said.

        A text that was said in the last 10 s does not count as changed, so that two that alternate are no flood.

        Args:
            kind: what counts instead of the text, such as where it quotes an operating system's words.
            each_change: False lets a changed text wait until a line is due.
        """
        now = time.monotonic()
        kind = kind or text
        said_before = now - self._said.get(kind, -LINE_EVERY) < LINE_EVERY
        changed = bool(self._said) and ((each_change and not said_before) or bool(news))
        if now < self._next_line and not changed:
            return False
        words = "; ".join([text, *news])
        most = f" of {self.timeout:.0f} s" if math.isfinite(self.timeout) else ""
        self._say(f"{words} ({min(self.waited, self.timeout):.0f} s{most})")
        self._said[kind] = now
        self._next_line = now + LINE_EVERY
        return True

    def wait_on(self, line: str, error: DdpManualError, *, kind: str = "", advice: Sequence[str] = ()) -> None:
        """Say why this waits, and what to type about it; raise the error if the time is up."""
        self.about(line, kind=kind)
        if advice:
            self.advise(advice)
        if self.over:
            raise error

    def advise(self, commands: Sequence[str]) -> None:
        """Say what to type, once, after the first line."""
        if not self._said or self._advised:
            return
        self._advised = True
        self._say("to start what is missing:\n" + "\n".join(f"  {command}" for command in commands))


def stdout_width() -> int | None:
    """Return how wide the terminal is; None if stdout is something else."""
    return shutil.get_terminal_size().columns if sys.stdout.isatty() else None


def columns(rows: Sequence[Sequence[str]], *, width: int | None = None, least_first: Sequence[str] = ()) -> list[str]:
    """Align rows of texts in columns; returns one line for each row.

    Args:
        width: where the lines have to fit; without it nothing is left out.
        least_first: headings of the columns that are left out, one after the other, until the lines fit.
    """
    left_out = iter(least_first)
    while True:
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        heading = next(left_out, None) if width is not None and sum(widths) + 2 * len(widths) > width else None
        if heading is None:
            break
        if heading in rows[0]:
            place = rows[0].index(heading)
            rows = [[*row[:place], *row[place + 1 :]] for row in rows]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def at(address: str, port: int) -> str:
    """``10.0.0.1:29500``, ``[fe80::1]:29500``"""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def as_ranges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """[1, 2, 3, 7] -> [(1, 3), (7, 7)]: short even for thousands of missing ranks."""
    ranges: list[tuple[int, int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1] = ranges[-1][0], rank
        else:
            ranges.append((rank, rank))
    return ranges


def in_words(ranges: Sequence[Sequence[int]]) -> str:
    """[(1, 3), (7, 7)] -> ``ranks 1-3, 7``; after MOST_RANGES of them ``, ...``"""
    alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:MOST_RANGES]]
    return ("rank " if alone else "ranks ") + ", ".join([*shown, *["..."] * (len(ranges) > MOST_RANGES)])


def byte_size(count: float, unit: int = 1024) -> str:
    """Format bytes, such as ``64 MB``; ``unit`` is 1000 for bandwidths, which are counted so."""
    for name in ("B", "KB", "MB"):
        if count < unit:
            return f"{count:.3g} {name}"
        count /= unit
    return f"{count:.3g} GB"
