"""How a rank ends: by its result, by an error of any of its parts, or by a signal."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_manual.errors import DdpManualError, MasterLost, Stopped, asked_by, traceback_of
from ddp_manual.signals import NOTHING_TO_SAVE, ONCE_WITHIN, SAVE


@dataclass(kw_only=True)
class Ended:
    """How a rank has ended."""

    error: DdpManualError | None = None
    result: Any = None
    """What the worker has said of its work, if that is complete."""

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error is not None else 0


class Ending:
    """The end of one rank: the first result, or the first error of what runs in its event loop."""

    def __init__(self, rank: int) -> None:
        self._rank = rank
        self._done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._working: set[asyncio.Task[None]] = set()

    @property
    def has_come(self) -> bool:
        return self._done.done()

    async def wait(self) -> Ended:
        """Wait until the rank ends, and return how."""
        try:
            return Ended(result=await self._done)
        except DdpManualError as error:
            return Ended(error=error)

    def finish(self, result: Any) -> None:
        """End the rank with its result: Stopped if a signal has stopped all ranks, which then left in order."""
        if isinstance(result, DdpManualError):
            self.fail(result)
        elif not self._done.done():
            self._done.set_result(result)

    def fail(self, error: BaseException) -> None:
        if self._done.done():
            return
        if not isinstance(error, DdpManualError):
            error = MasterLost(
                f"the agent of rank {self._rank} broke",
                why=traceback_of(error),
                next="start all ranks again; this is a mistake in ddp_manual and worth reporting",
            )
        self._done.set_exception(error)

    def guarded(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap a handler so that what it raises ends the rank."""

        def guarded(message: Any) -> None:
            try:
                handler(message)
            except Exception as error:
                self.fail(error)

        return guarded

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that takes time; what it raises ends the rank."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.create_task(guarded())
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def cancel_background(self) -> None:
        for task in self._working:
            task.cancel()


class StopSignals:
    """What signals do to one rank: SIGUSR1 saves a checkpoint; Ctrl-C, SIGTERM and SIGHUP stop all ranks after the same
    step, and a second one stops this rank at once.

    Args:
        is_script: whether the worker is a user's own script, which takes its signals itself.
    """

    def __init__(
        self,
        rank: int,
        is_script: bool,
        log: Callable[[str], None],
        to_worker: Callable[[Mapping[str, Any]], None],
    ) -> None:
        self._rank, self._is_script, self._log, self._to_worker = rank, is_script, log, to_worker
        self.noted = False
        """Whether the worker takes requests to stop or to save; before that a signal simply ends the rank."""
        self.heeded = True
        """Whether it still follows them; False once its work is done."""
        self._first: dict[str, float] = {}

    def take(self, number: int, seen_by: str, run_dir: str | None) -> Stopped | None:
        """Take a signal; returns the error that ends the rank at once, if any.

        Args:
            seen_by: the process that has seen the signal.
        """
        heeded = self.noted and self.heeded
        if self._is_script and not self.noted:
            return None  # the script handles it as any program does
        if number == SAVE:
            if heeded and not self._is_script:
                self._to_worker({"save": True})
            does = "a checkpoint at the next step all ranks agree on" if heeded else NOTHING_TO_SAVE
            self._log(f"SIGUSR1: {does}")
            return None
        now, error = time.monotonic(), None
        if not self.noted:
            error = Stopped(number)
        elif now - self._first.get(seen_by, now) > ONCE_WITHIN:
            error = self._stopped_at_once(number, run_dir)
        elif not self._first:
            if heeded and not self._is_script:
                self._to_worker({"stop": number})
            what = "stopping after the next step all ranks agree on" if heeded else "this rank is done, and is leaving"
            self._log(f"{asked_by(number)}: {what}; a second signal ends this rank at once")
        # A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
        self._first.setdefault(seen_by, now)
        return error

    def _stopped_at_once(self, number: int, run_dir: str | None) -> Stopped:
        resume = f"; with --run_dir {run_dir} --resume auto they go on from the last one" if run_dir else ""
        if self.heeded:
            why = "the ranks had not yet agreed on a step to stop after: what was trained since the last save is lost"
        elif self._rank == 0:
            why = "rank 0 left early; ranks that were still working lost their store"
        else:
            why = "this rank had done its part, and was leaving"
        # Without a command: the other ranks show this too, and each has a command of its own.
        return Stopped(number, "at once, by a second signal", why=why, next=f"start all ranks again{resume}")
