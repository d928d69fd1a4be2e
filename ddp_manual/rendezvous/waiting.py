"""Waiting that tells what it waits for: one line within 2 s, then one every 10 s and one on each change."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

FIRST_LINE = 1.5
LINE_EVERY = 10.0
# Added to the above it stays below the 2 s that a first line may take.
POLL_EVERY = 0.25


class Waiting:
    """A deadline, and when the next line about it is due. Times are seconds.

    Args:
        timeout: how long the waiting may last.
        logger: where the lines go.
    """

    def __init__(self, timeout: float, logger: logging.Logger) -> None:
        self._logger = logger
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

    @property
    def until_next_line(self) -> float:
        """Seconds until there is something to do: say a line, or give up."""
        return max(0.0, min(self._next_line, self._deadline) - time.monotonic())

    def about(self, text: str, news: Sequence[str] = ()) -> bool:
        """Say ``text`` and ``news`` if a line is due, if the text is not the last one said or if there is news; returns
        whether it was said."""
        now = time.monotonic()
        changed = self._said is not None and (text != self._said or bool(news))
        if now < self._next_line and not changed:
            return False
        words = "; ".join([text, *news])
        self._logger.info("%s (%.0f s of %.0f s)", words, self.waited, self._deadline - self._started)
        self._said = text
        self._next_line = now + LINE_EVERY
        return True

    def advise(self, commands: list[str]) -> None:
        """Say once, after the first line, what to type."""
        if self._said is None or self._advised:
            return
        self._advised = True
        self._logger.info("to start what is missing:\n%s", "\n".join(f"  {command}" for command in commands))
