"""Deadlines, and the lines that a person sees while a process waits."""

from __future__ import annotations

import asyncio
import math
import threading
import time
from collections.abc import Callable, Sequence

from ddp_manual.errors import DdpManualError
from ddp_manual.terminal import Say

# Seconds. With POLL_EVERY and Python's own start, the first line about waiting comes within a second.
FIRST_LINE = 0.6
POLL_EVERY = 0.2
# Seconds between lines that stay on the terminal: in the first minute, and after it.
LINE_EVERY = 10.0
OFTEN_WITHIN = 60.0
THEN_EVERY = 60.0


class Waiting:
    """A deadline, with lines about what is waited for: the first within a second, others on each change and every 10 s,
    after a minute every 60 s. On a terminal that is one line, which shows each second.

    Args:
        timeout: seconds in all.
        say: shows a line; if it has ``in_place``, until the next one: see ``terminal.log``.
        waited: the seconds of ``timeout`` that have passed already.
    """

    def __init__(self, timeout: float, say: Say, waited: float = 0.0) -> None:
        self._say = say
        self.timeout = timeout
        self._started = time.monotonic() - waited
        self._next_line = time.monotonic() + FIRST_LINE
        self._said: dict[str, float] = {}
        self._last = ""
        self._advised = False
        self._show_in_place: Callable[[str], bool] = getattr(say, "in_place", lambda line: False)
        self._shown = ""

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

        A text that was said in the last 10 s does not count as changed: two texts that alternate would flood the log.

        Args:
            kind: compared instead of the text, such as for a text that quotes an operating system's words.
            each_change: False lets a changed text wait until a line is due.
        """
        now = time.monotonic()
        if (self._said or now >= self._next_line) and self._is_shown_in_place(text, news):
            self._said[text] = now
            return True
        kind = kind or text
        said_before = now - self._said.get(kind, -LINE_EVERY) < LINE_EVERY
        is_other = each_change and kind != self._last and not said_before
        changed = bool(self._said) and (is_other or bool(news))
        if now < self._next_line and not changed:
            return False
        self._said[kind], self._last = now, kind
        self._next_line = now + (LINE_EVERY if self.waited < OFTEN_WITHIN else THEN_EVERY)
        self._say(self._with_seconds("; ".join([text, *news])))
        return True

    def _with_seconds(self, text: str) -> str:
        most = f" of {self.timeout:.0f} s" if math.isfinite(self.timeout) else ""
        return f"{text} (waited {min(self.waited, self.timeout):.0f} s{most})"

    def _is_shown_in_place(self, text: str, news: Sequence[str]) -> bool:
        """Show the text as the last line of a terminal, and news above it; return False if that is impossible."""
        line = self._with_seconds(text)
        if line == self._shown and not news:
            return True
        if not self._show_in_place(line):
            return False
        if news:
            self._say("; ".join(news))
            self._show_in_place(line)
        self._shown = line
        return True

    def ends(self) -> None:
        """Remove the line that shows what is waited for."""
        self._show_in_place("")

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
        self._shown = ""
        self._say("\n".join(["to start what is missing:", *commands]))


async def wait_until(holds: Callable[[], bool], within: float = math.inf) -> None:
    """Wait until the condition holds, ``within`` seconds at most; look every 10 ms at first, in the end every 50 ms."""
    began = time.monotonic()
    while not holds() and (waited := time.monotonic() - began) < within:
        await asyncio.sleep(min(max(waited / 10, 0.01), 0.05))


def done_within(seconds: float, act: Callable[[], object], name: str) -> bool:
    """Have a thread of this package do something, and wait for so many seconds; return whether it is done. What it
    raises is raised here."""
    failed: list[BaseException] = []

    def run() -> None:
        try:
            act()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=run, name=f"ddp_manual {name}", daemon=True)
    thread.start()
    thread.join(seconds)
    if failed:
        raise failed[0]
    return not thread.is_alive()
