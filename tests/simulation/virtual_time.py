"""An event loop whose clock jumps to the next event, with simulated processes that can be frozen and killed.

What runs in the loop belongs to the process in whose context it was scheduled. While a process is frozen its callbacks
wait, as they do after SIGSTOP; once it has ended they are dropped.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from contextvars import Context, ContextVar, copy_context
from typing import Any

PROCESS: ContextVar[Process | None] = ContextVar("process", default=None)
# The time of day at which the clock begins; messages show times of day.
EPOCH = 1_750_000_000.0


class Deadlock(Exception):
    """No callback is scheduled any more, but a task still waits."""


class Process:
    """A simulated process: a rank's agent, or a person's command."""

    def __init__(self, loop: VirtualLoop, name: str) -> None:
        self.name = name
        self.alive, self.frozen = True, False
        self._loop = loop
        self._waiting: list[Scheduled] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def runs(self, scheduled: Scheduled) -> bool:
        """Return whether a callback may run now; if the process is frozen, it runs once it goes on."""
        if self.frozen:
            self._waiting.append(scheduled)
        return self.alive and not self.frozen

    def freeze(self) -> None:
        self.frozen = True

    def go_on(self) -> None:
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for scheduled in waiting:
            self._loop.run_at(self._loop.now, scheduled)

    def end(self) -> None:
        self.alive = False
        self._waiting.clear()


class Scheduled:
    """A callback that is scheduled: what ``asyncio.Handle`` is, in fewer steps, of which a run has thousands."""

    __slots__ = ("args", "call", "context", "is_cancelled")

    def __init__(self, call: Callable[..., Any], args: tuple[Any, ...], context: Context | None) -> None:
        self.call, self.args, self.is_cancelled = call, args, False
        self.context = copy_context() if context is None else context

    def cancel(self) -> None:
        self.is_cancelled = True


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times, and of their scheduling where those are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.errors: list[BaseException] = []
        """What callbacks and tasks have raised, and nobody has caught."""
        self.winding_up = False
        """Whether the run is over, and its tasks are cancelled: then dead processes run too."""
        self._queue: list[tuple[float, int, Scheduled]] = []
        self._number = 0
        self.set_exception_handler(lambda loop, about: self._keep(about.get("exception")))

    def _keep(self, error: BaseException | None) -> None:
        if error is not None and not self.winding_up:
            self.errors.append(error)

    def time(self) -> float:
        return self.now

    def run_at(self, when: float, scheduled: Scheduled) -> Any:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, scheduled))
        return scheduled

    def call_at(self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.run_at(when if when > self.now else self.now, Scheduled(callback, args, context))

    def call_later(self, delay: float, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.run_at(self.now + delay if delay > 0 else self.now, Scheduled(callback, args, context))

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> Any:
        return self.run_at(self.now, Scheduled(callback, args, context))

    call_soon_threadsafe = call_soon

    def _run_once(self) -> None:
        """Run callbacks until the loop is told to stop."""
        while not self._stopping:  # type: ignore[has-type]
            if not self._queue:
                raise Deadlock("nothing is scheduled any more")
            when, _, scheduled = heapq.heappop(self._queue)
            if scheduled.is_cancelled:
                continue
            self.now = when
            process = scheduled.context.get(PROCESS)
            if process is None or self.winding_up or process.runs(scheduled):
                try:
                    scheduled.context.run(scheduled.call, *scheduled.args)
                except Exception as error:
                    self._keep(error)

    def wind_up(self) -> None:
        """Cancel all tasks, and those that they start while they end, and wait until they have ended."""
        self.winding_up = True
        for _ in range(5):
            if tasks := asyncio.all_tasks(self):
                for task in tasks:
                    task.cancel()
                self.run_until_complete(asyncio.wait(tasks, timeout=60))

    def _process_events(self, event_list: Any) -> None:
        """Do nothing: there are no files."""

    def _write_to_self(self) -> None:
        """Do nothing: there are no threads."""
