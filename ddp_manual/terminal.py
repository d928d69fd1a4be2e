"""What a person sees in a rank's terminal: log lines that name the rank, and a progress bar on rank 0."""

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
    from rich.progress import Progress as RichProgress
    from rich.progress import TaskID

LOGGER = logging.getLogger("ddp_manual")
COLOURS = (36, 33, 32, 35, 34, 31)


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks sys.stderr up at each line: a progress bar puts its own in place while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


def tag(rank: int) -> str:
    return f"[rank {rank}]"


def log_to_stderr(rank: int | None) -> None:
    """Send this package's log lines to stderr, each tagged with the rank if there is one; a second call only changes
    the tag.
    """
    for handler in LOGGER.handlers:
        if isinstance(handler, _CurrentStderr):
            break
    else:
        handler = _CurrentStderr()
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    handler.setFormatter(logging.Formatter("%(message)s" if rank is None else f"{tag(rank)} %(message)s"))
    LOGGER.setLevel(logging.INFO)


@contextmanager
def log_as_found() -> Iterator[None]:
    """After the body, this package's log is as it was before it."""
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
    """On stderr, unless its reader has gone."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


def print_error(error: DdpManualError) -> None:
    """The last thing on this rank's screen; the exit code says it too, should the screen be gone."""
    with suppress(OSError):
        if sys.stderr.isatty():
            sys.stderr.write("\x1b[?25h")  # a progress bar that was cut off has left the cursor hidden
        print(error.render(), file=sys.stderr, flush=True)


def result_text(summary: Mapping[str, Any]) -> str:
    """What rank 0 prints on stdout when the run is complete: the figures, and where the files are."""
    paths = RunPaths(Path(summary["run_dir"]))
    lines = [
        f"{summary['model']} on {summary['dataset']}: {100 * summary['final_test_accuracy']:.2f}% test accuracy "
        f"after {summary['epochs']} epochs on {summary['world_size']} rank(s) ({summary['backend']}, "
        f"{summary['device']}), {summary['samples_per_second']:,.0f} samples/s",
        *(
            f"  {path}"
            for path in (
                paths.summary,
                paths.model,
                paths.metrics,
                paths.accuracies,
                paths.samples,
                *paths.predictions.all,
                paths.config,
            )
            if path.exists()
        ),
    ]
    return "\n".join(lines)


def escape_what_cannot_be_shown() -> None:
    """A name that stdout's encoding does not know is printed with escapes, as stderr does by itself."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")


def escaped(text: str) -> str:
    """With escapes for what is no Unicode, such as a byte in a file's name: not all that takes a text takes that."""
    return text.encode(errors="backslashreplace").decode()


def stdout_failed(error: OSError) -> DdpManualError:
    """What an ``error`` of a write to stdout ends as; from here on all that is written there is dropped."""
    with suppress(OSError, ValueError):  # else what is left in its buffer fails once more when the process ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    return (DiskFull if full else BadOption)(
        "stdout cannot be written",
        why=str(error.strerror),
        next="free some space there, or send stdout elsewhere" if full else "send stdout elsewhere",
    )


class RankOutput:
    """What one rank says: to the terminal with its rank in front, and to its log as it is."""

    def __init__(self, log: BinaryIO, rank: int) -> None:
        self._log = log
        self._tag = tag(rank)
        self._colour = COLOURS[rank % len(COLOURS)]
        if log.tell():
            log.write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())

    def write(self, text: bytes, sink: TextIO | None = None) -> None:
        """Whatever becomes of the log or the terminal, the rank goes on."""
        sink = sys.stderr if sink is None else sink
        shown = f"\x1b[{self._colour}m{self._tag}\x1b[0m" if sink.isatty() and launchers.colour_allowed() else self._tag
        with suppress(OSError, ValueError):
            self._log.write(text)
            self._log.flush()
        with suppress(OSError, ValueError):
            for line in text.decode(errors="replace").splitlines(keepends=True):
                sink.write(f"{shown} {line.removeprefix(self._tag + ' ')}")
            sink.flush()


class Progress:
    """Where there is no bar: each line goes to the log.

    Args:
        lines: whether there are any; what all ranks would say alike, rank 0 says.
    """

    def __init__(self, *, lines: bool = True) -> None:
        self._lines = lines

    def advance(self) -> None:
        """One step is done."""

    def say(self, line: str) -> None:
        """How it goes, every so many steps."""
        if self._lines:
            LOGGER.info("%s", line)


class _Bar(Progress):
    """A bar with the last line beside it."""

    def __init__(self, drawn: RichProgress, task: TaskID) -> None:
        super().__init__()
        self._drawn = drawn
        self._task = task

    def advance(self) -> None:
        self._drawn.advance(self._task)

    def say(self, line: str) -> None:
        self._drawn.update(self._task, description=line)


@contextmanager
def progress(total_steps: int, *, done: int, bar: bool, lines: bool = True) -> Iterator[Progress]:
    """Progress over ``total_steps``, of which some are ``done``, as a ``bar`` on stderr or as lines alone."""
    if not bar:
        yield Progress(lines=lines)
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as RichProgress

    columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
    with RichProgress(*columns, console=Console(stderr=True), transient=True) as drawn:
        yield _Bar(drawn, drawn.add_task("", total=total_steps, completed=done))


def on_a_terminal() -> bool:
    return sys.stderr.isatty()


@contextmanager
def redrawing(wanted: bool) -> Iterator[Callable[[str], None] | None]:
    """What draws each text in the place of the one before, on a terminal; None where that is not ``wanted``."""
    if not wanted:
        yield None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(auto_refresh=False) as drawn:
        yield lambda text: drawn.update(Text(text), refresh=True)


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
