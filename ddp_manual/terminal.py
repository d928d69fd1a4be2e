"""What a person sees in a rank's terminal: log lines that name the rank, lines about waiting, and a progress bar."""

from __future__ import annotations

import errno
import io
import logging
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TextIO

from ddp_manual import launchers
from ddp_manual.errors import BadOption, DdpManualError, DiskFull
from ddp_manual.run_folder import RunPaths

if TYPE_CHECKING:
    from rich.progress import Progress

LOGGER = logging.getLogger("ddp_manual")
COLOURS = (36, 33, 32, 35, 34, 31)
# Seconds. With POLL_EVERY and Python's own start, the first line about waiting comes within a second.
FIRST_LINE = 0.6
LINE_EVERY = 10.0
POLL_EVERY = 0.2

Say = Callable[[str], None]
"""Shows a line to the person at this rank's terminal."""


class _CurrentStderr(logging.Handler):
    """Looks up sys.stderr for each line, since a progress bar replaces it while it is drawn."""

    def emit(self, record: logging.LogRecord) -> None:
        say(self.format(record))


def tag(rank: int) -> str:
    return f"[rank {rank}]"


def log_to_stderr(rank: int | None) -> None:
    """Send this package's log lines to stderr, tagged with the rank if there is one; a second call changes the tag."""
    handler = next((found for found in LOGGER.handlers if isinstance(found, _CurrentStderr)), _CurrentStderr())
    LOGGER.addHandler(handler)
    LOGGER.propagate = False
    handler.setFormatter(logging.Formatter("%(message)s" if rank is None else f"{tag(rank)} %(message)s"))
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
    """Print the error that ends this process; the exit code also says it, in case the terminal is gone."""
    show_cursor = "\x1b[?25h" if sys.stderr.isatty() else ""  # an interrupted progress bar leaves it hidden
    say(show_cursor + error.render())


def result_text(summary: Mapping[str, Any]) -> str:
    """Return what rank 0 prints on stdout when the run is complete: the figures, and where the files are."""
    paths = RunPaths(Path(summary["run_dir"]))
    files = (paths.summary, paths.model, paths.metrics, paths.accuracies, paths.samples, *paths.predictions.all)
    lines = [
        f"{summary['model']} on {summary['dataset']}: {100 * summary['final_test_accuracy']:.2f}% test accuracy "
        f"after {summary['epochs']} epochs on {summary['world_size']} rank(s) ({summary['backend']}, "
        f"{summary['device']}), {summary['samples_per_second']:,.0f} samples/s",
        *(f"  {path}" for path in (*files, paths.config) if path.exists()),
    ]
    return "\n".join(lines)


def escape_what_cannot_be_shown() -> None:
    """Have stdout escape characters that its encoding lacks, as stderr does anyway."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escaped(text: str) -> str:
    """Escape what is not Unicode, such as a stray byte in a file name, since not every library accepts it."""
    return text.encode(errors="backslashreplace").decode()


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
    """Writes the output of one rank to the terminal, with the rank in front, and unchanged to its log."""

    def __init__(self, log: BinaryIO, rank: int) -> None:
        self._log = log
        self._tag = tag(rank)
        self._colour = COLOURS[rank % len(COLOURS)]
        if log.tell():
            log.write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())

    def write(self, text: bytes, sink: TextIO | None = None) -> None:
        """Write to both; the rank continues even if the log or the terminal fails."""
        sink = sys.stderr if sink is None else sink
        shown = f"\x1b[{self._colour}m{self._tag}\x1b[0m" if sink.isatty() and launchers.colour_allowed() else self._tag
        with suppress(OSError, ValueError):
            self._log.write(text)
            self._log.flush()
        with suppress(OSError, ValueError):
            for line in text.decode(errors="replace").splitlines(keepends=True):
                sink.write(f"{shown} {line.removeprefix(self._tag + ' ')}")
            sink.flush()


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
            self._bar.update(self._bar.task_ids[0], description=line)
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
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        bar.add_task("", total=total_steps, completed=done)
        yield ProgressLines(bar)


@contextmanager
def redrawing() -> Iterator[Say]:
    """Yield a function that replaces the text on the terminal."""
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as drawn:
        yield lambda text: drawn.update(Text(text), refresh=True)


class Waiting:
    """A deadline ``timeout`` seconds from now, with lines about what is waited for: the first within a second, then one
    every 10 s and on each change."""

    def __init__(self, timeout: float, say: Say) -> None:
        self._say = say
        self._started = time.monotonic()
        self._deadline = self._started + timeout
        self._next_line = self._started + FIRST_LINE
        self._said: str | None = None
        self._advised = False

    @property
    def waited(self) -> float:
        return time.monotonic() - self._started

    @property
    def remaining(self) -> float:
        return max(0.0, self._deadline - time.monotonic())

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._deadline

    def about(self, text: str, news: Sequence[str] = (), *, each_change: bool = True) -> bool:
        """Say ``text`` and ``news`` if a line is due, the text changed or there is news; return whether it was said.

        Args:
            each_change: False lets a changed text wait until a line is due.
        """
        now = time.monotonic()
        changed = self._said is not None and ((each_change and text != self._said) or bool(news))
        if now < self._next_line and not changed:
            return False
        words = "; ".join([text, *news])
        self._say(f"{words} ({self.waited:.0f} s of {self._deadline - self._started:.0f} s)")
        self._said = text
        self._next_line = now + LINE_EVERY
        return True

    def advise(self, commands: list[str]) -> None:
        """Say what to type, once, after the first line."""
        if self._said is None or self._advised:
            return
        self._advised = True
        self._say("to start what is missing:\n" + "\n".join(f"  {command}" for command in commands))


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Align rows of texts in columns; returns one line for each row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def byte_size(count: float, unit: int = 1024) -> str:
    """Format bytes, such as ``64 MB``; ``unit`` is 1000 for bandwidths, which are counted so."""
    for name in ("B", "KB", "MB"):
        if count < unit:
            return f"{count:.3g} {name}"
        count /= unit
    return f"{count:.3g} GB"
