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
        self._waiting: list[asyncio.Handle] = []
        self.context = copy_context()
        self.context.run(PROCESS.set, self)

    def runs(self, handle: asyncio.Handle) -> bool:
        """Return whether a callback may run now; if the process is frozen, it runs once it goes on."""
        if self.frozen:
            self._waiting.append(handle)
        return self.alive and not self.frozen

    def freeze(self) -> None:
        self.frozen = True

    def go_on(self) -> None:
        self.frozen = False
        waiting, self._waiting = self._waiting, []
        for handle in waiting:
            self._loop.run_soon(handle)

    def end(self) -> None:
        self.alive = False
        self._waiting.clear()


class VirtualLoop(asyncio.BaseEventLoop):
    """Runs callbacks in the order of their times, and of their scheduling where those are equal."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.errors: list[BaseException] = []
        """What callbacks and tasks have raised, and nobody has caught."""
        self.winding_up = False
        """Whether the run is over, and its tasks are cancelled: then dead processes run too."""
        self._queue: list[tuple[float, int, asyncio.Handle]] = []
        self._number = 0
        self.set_exception_handler(lambda loop, about: self._keep(about.get("exception")))

    def _keep(self, error: BaseException | None) -> None:
        if error is not None and not self.winding_up:
            self.errors.append(error)

    def time(self) -> float:
        return self.now

    def run_soon(self, handle: asyncio.Handle) -> None:
        self._push(self.now, handle)

    def call_soon(self, callback: Callable[..., Any], *args: Any, context: Context | None = None) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._push(self.now, handle)
        return handle

    def call_soon_threadsafe(
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        return self.call_soon(callback, *args, context=context)

    def call_at(
        self, when: float, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        self._push(max(when, self.now), handle)
        return handle

    def _push(self, when: float, handle: asyncio.Handle) -> None:
        self._number += 1
        heapq.heappush(self._queue, (when, self._number, handle))

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Do nothing: a cancelled callback is left out when its turn comes."""

    def _run_once(self) -> None:
        while self._queue:
            when, _, handle = heapq.heappop(self._queue)
            if handle.cancelled():
                continue
            self.now = max(self.now, when)
            process = handle._context.get(PROCESS)  # type: ignore[attr-defined]
            if process is None or self.winding_up or process.runs(handle):
                handle._run()
            return
        raise Deadlock("nothing is scheduled any more")

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
