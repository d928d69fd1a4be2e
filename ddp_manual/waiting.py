"""Waiting that tells what it waits for: one line within a second, then one every 10 s and one on each change."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

Say = Callable[[str], None]
"""Says a line to the person at this rank's terminal."""

FIRST_LINE = 0.6
LINE_EVERY = 10.0
# Added to the above, and to what Python takes to start, it stays below the second that a first line may take.
POLL_EVERY = 0.2


class Waiting:
    """A deadline, and when the next line about it is due. Times are seconds.

    Args:
        timeout: how long the waiting may last.
        say: where the lines go.
    """

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
        """Say ``text`` and ``news`` if a line is due, if the text is not the last one said or if there is news; returns
        whether it was said.

        Args:
            each_change: of the text; otherwise a change waits until a line is due.
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
        """Say once, after the first line, what to type."""
        if self._said is None or self._advised:
            return
        self._advised = True
        self._say("to start what is missing:\n" + "\n".join(f"  {command}" for command in commands))
