"""How training goes, on the terminal of rank 0: a progress bar, or lines of the log."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress

from ddp_manual.terminal import LOGGER


class ProgressLines:
    """Shows how training goes: as a bar with the last line beside it, otherwise as lines of the log, or not at all."""

    def __init__(self, bar: Progress | None = None, *, shown: bool = True) -> None:
        self._bar = bar
        self._shown = shown

    def advance(self) -> None:
        """Count a step."""
        if self._bar is not None:
            self._bar.advance(self._bar.task_ids[0])

    def say(self, line: str, *, passes: bool = False) -> None:
        """Show a line; a line that ``passes`` is shown only beside a bar, where the next line replaces it."""
        if self._bar is not None:
            self._bar.update(self._bar.task_ids[0], description=re.sub(r"^step \S+ | lr \S+| samples(?=/s)", "", line))
        elif self._shown and not passes:
            LOGGER.info("%s", line)


@contextmanager
def progress(total_steps: int, *, done: int, shown: bool) -> Iterator[ProgressLines]:
    """Show progress over ``total_steps``, of which some are ``done``: on a terminal as a bar, otherwise as lines.

    Args:
        shown: True only on rank 0, which speaks for all ranks.
    """
    if not (shown and sys.stderr.isatty()):
        yield ProgressLines(shown=shown)
        return
    # rich takes 0.05 s to import, so only processes that draw import it.
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    from rich.table import Column

    console = Console(stderr=True, soft_wrap=True)  # lines above the bar are never cut, so that they can be copied
    bar_width = 40 if console.width > 110 else 10
    # What is left beside the bar, the steps, the time (12, with hours) and spaces between them (3), less 3 for ^C: that
    # would otherwise push the bar to the line above, where nothing clears it.
    rest = console.width - bar_width - len(f"{total_steps}/{total_steps}") - 12 - 3 - 3
    # The only column that gives way where the terminal is narrow.
    last_line = Column(max_width=rest, no_wrap=True, overflow="ellipsis")
    columns = (
        BarColumn(bar_width),
        MofNCompleteColumn(),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        TextColumn("{task.description}", markup=False, table_column=last_line),
    )
    with Progress(*columns, console=console, transient=True) as bar:
        bar.add_task("", total=total_steps, completed=done)
        yield ProgressLines(bar)
