"""How a rank ends: by its result, by an error of any of its parts, or by a signal."""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from ddp_manual.errors import DdpManualError, MasterLost, Stopped, asked_by, traceback_of
from ddp_manual.launchers import host_name
from ddp_manual.messages import (
    LastWords,
    RunInfo,
    first_command_and,
    from_last_checkpoint,
    named_from_outside,
    resume_flags,
)
from ddp_manual.run_folder import RunPaths, holder_of, write_json
from ddp_manual.signals import NOTHING_TO_SAVE, ONCE_WITHIN, SAVE
from ddp_manual.terminal import result_line
from ddp_manual.world_spec import WorldSpec


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
    """The end of one rank: the first result, or the first error of what runs in its event loop.

    Args:
        come: called at once when it has come.
    """

    def __init__(self, rank: int, come: Callable[[], None]) -> None:
        self._rank, self._come = rank, come
        self._done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._working: set[asyncio.Task[None]] = set()

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
            self._come()

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
        self._come()

    def guarded(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap a handler so that what it raises ends the rank."""

        def guarded(message: Any) -> None:
            try:
                handler(message)
            except Exception as error:
                self.fail(error)

        return guarded

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Do something that takes time; what it raises ends the rank."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.create_task(guarded())
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        return task

    def cancel_background(self) -> None:
        for task in self._working:
            task.cancel()


def how_it_ended(error: DdpManualError | None, result: Any) -> dict[str, Any]:
    """Return what rank 0 tells observers last: the ``LastWords`` of an error; otherwise no identifier, and in ``what``
    the result."""
    if error is not None:
        return {**asdict(LastWords.of(error)), "what": named_from_outside(error.what, 0)}
    is_training = isinstance(result, Mapping) and "final_test_accuracy" in result
    return {"identifier": None, "what": result_line(result) if is_training else "all ranks have left in order"}


def leave_failure(run_dir: str, rank: int, pid: int, error: DdpManualError, run: RunInfo | None) -> None:
    """Write why a rank has left into the run's folder, if that takes it, and no other run trains into it.

    Args:
        pid: of the worker.
        run: its rank 0's worker holds the folder while the run trains; None for a rank without others.
    """
    paths, about = RunPaths(Path(run_dir)), {"rank": rank, "host": host_name(), "pid": pid}
    own_holder = holder_of(run.pid, run.host) if run is not None else holder_of(pid, host_name())
    if paths.holder not in (None, own_holder):
        return
    with suppress(DdpManualError, OSError):
        paths.run_dir.mkdir(parents=True, exist_ok=True)
        paths.set_failures_aside(rank)
        write_json(paths.failure(rank), {**asdict(LastWords.of(error)), **about})


class StopSignals:
    """What signals do to one rank: SIGUSR1 saves a checkpoint; Ctrl-C, SIGTERM and SIGHUP stop all ranks after the same
    step, and a second one stops this rank at once.

    Args:
        is_script: whether the worker is a user's own script, which takes its signals itself.
        to_worker: lets the worker do what a signal asks for.
    """

    def __init__(
        self, spec: WorldSpec, is_script: bool, log: Callable[[str], None], to_worker: Callable[[int], None]
    ) -> None:
        self._spec, self._is_script, self._log, self._to_worker = spec, is_script, log, to_worker
        self.noted = False
        """Whether the worker takes requests to stop or to save; before that a signal simply ends the rank."""
        self.heeded = True
        """Whether it still follows them; False once its work is done."""
        self.asked = 0
        """The first signal that has asked this rank to stop, or 0."""
        self.stop = 0
        """The first signal that has asked a user's own program to stop, or 0."""
        self._first: dict[str, float] = {}

    def take(self, number: int, seen_by: str, here: int, again: str, *, goes_on: bool) -> Stopped | None:
        """Take a signal; returns the error that ends the rank at once, if any.

        Args:
            seen_by: the process that has seen the signal.
            here: how many ranks are here.
            again: what to do after the run has ended; "" before all ranks have joined.
            goes_on: whether the worker will take requests when all ranks go on after a loss.
        """
        heeded = self.noted and self.heeded
        if self._is_script and not self.noted:  # the script handles it as any program does
            if number == signal.SIGTERM:
                self.stop = self.stop or number
            return None
        if number == SAVE:
            if heeded and not self._is_script:
                self._to_worker(number)
            does = "a checkpoint at the next step all ranks agree on" if heeded else NOTHING_TO_SAVE
            self._log(f"SIGUSR1: {does}")
            return None
        now, error = time.monotonic(), None
        if not self.noted and not goes_on:
            error = self._stopped_early(number, here, again)
        elif now - self._first.get(seen_by, now) > ONCE_WITHIN:
            error = self._stopped_at_once(number, again)
        elif not self._first:
            if (heeded or goes_on) and not self._is_script:
                self._to_worker(number)
            what = "stopping after the next step all ranks agree on" if heeded else "this rank is done, and is leaving"
            if not self.noted:
                what = "all that are here go on for a step, save a checkpoint, and stop"
            self._log(f"{asked_by(number)}: {what}; a second signal ends this rank at once")
        # A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
        self.asked = self.asked or number
        self._first.setdefault(seen_by, now)
        return error

    def stopped_by(self, exit_code: int | None, again: str, because_of: DdpManualError | None = None) -> Stopped | None:
        """Return the error for a program that has ended itself with this exit code after a signal; None without one.

        Args:
            exit_code: None if it has not ended within the time that it has.
            because_of: what it has raised, such as that a collective broke when another rank had ended.
        """
        if not self.stop:
            return None
        ended = "did not end within its time" if exit_code is None else f"ended with exit code {exit_code}"
        why = [f"the program has it, and {ended}"] if exit_code != 128 + self.stop else []
        why += [because_of.what, because_of.why] if because_of is not None else []
        return Stopped(self.stop, why="\n".join(why), next=again)

    def _stopped_at_once(self, number: int, again: str) -> Stopped:
        if self.heeded:
            why = "the ranks had not yet agreed on a step to stop after: what was trained since the last save is lost"
        elif self._spec.rank == 0:
            why = "rank 0 left early; ranks that were still working lost their store"
        else:
            why = "this rank had done its part, and was leaving"
        return Stopped(number, "at once, by a second signal", why=why, next=again)

    def _stopped_early(self, number: int, here: int, again: str) -> Stopped:
        if self._spec.world_size == 1:
            return Stopped(number)
        if not again and here == 1:
            return Stopped(number, "while it waited for the other ranks")
        if self._spec.rank == 0:
            again = again or "start all ranks again: the others leave too"
        return Stopped(number, next=again or "start this rank again: the others wait for it")


class ProgramSignals(StopSignals):
    """What signals do to a rank that runs a user's own program: the program gets them, as it would from a terminal, and
    a second one that asks to stop ends the rank at once.
    """

    def take(self, number: int, seen_by: str, here: int, again: str, *, goes_on: bool) -> Stopped | None:
        if not self.noted:
            return None if number == SAVE else self._stopped_early(number, here, again)
        now = time.monotonic()
        if number == SAVE:
            self._to_worker(number)
        elif not self.stop:
            self.stop, self._asked = number, now
            self._to_worker(number)
            self._log(f"{asked_by(number)}: the program gets it; a second signal ends this rank at once")
        elif now - self._asked > ONCE_WITHIN:
            return Stopped(number, "at once, by a second signal", why="the program had not ended by itself", next=again)
        return None


def start_alone_again(run_dir: str | None) -> str:
    """Say what to do after the end of a rank that had no coordinator: with --no_ddp, or before it found rank 0."""
    return from_last_checkpoint(first_command_and(run_dir)) if run_dir else "start this rank again"


def add_own_command(error: DdpManualError, go_on: str | None, run_dir: str | None, world_size: int) -> None:
    """Where the error says how each rank goes on, show what to type in this terminal.

    Args:
        go_on: what was typed here; None if nothing was.
    """
    if run_dir and go_on is not None:
        how, command = f" {first_command_and(run_dir)}", f"\n{go_on} {resume_flags(run_dir)}"
        error.next = error.next.replace(how, command if world_size == 1 else f"{how}; here:{command}")
