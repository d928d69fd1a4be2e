"""What a person sees in a rank's terminal: log lines that name the rank, and a progress bar on rank 0."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

LOGGER = logging.getLogger("ddp_manual")


class _CurrentStderr(logging.StreamHandler):  # type: ignore[type-arg]
    """Looks sys.stderr up at each line: a progress bar puts its own in place while it is drawn."""

    def __init__(self) -> None:
        logging.Handler.__init__(self)

    @property
    def stream(self):  # type: ignore[no-untyped-def]
        return sys.stderr


def tag(rank: int) -> str:
    return f"[rank {rank}]"


def log_to_stderr(rank: int) -> None:
    """Send this package's log lines to stderr, each tagged with the rank; a second call only changes the tag."""
    for handler in LOGGER.handlers:
        if isinstance(handler, _CurrentStderr):
            break
    else:
        handler = _CurrentStderr()
        LOGGER.addHandler(handler)
        LOGGER.propagate = False
    handler.setFormatter(logging.Formatter(f"{tag(rank)} %(message)s"))
    LOGGER.setLevel(logging.INFO)


@contextmanager
def progress_bar(total_steps: int, *, shown: bool) -> Iterator[Callable[[str], None]]:
    """A bar over ``total_steps`` on stderr; yields the function that advances it by one step.

    The function takes a short description, such as the epoch. Where ``shown`` is False it does nothing.
    """
    if not shown:
        yield lambda description: None
        return
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        task = progress.add_task("", total=total_steps)
        yield lambda description: progress.update(task, advance=1, description=description)


def on_a_terminal() -> bool:
    return sys.stderr.isatty()
