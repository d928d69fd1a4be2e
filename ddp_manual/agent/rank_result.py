"""How a rank ends: by its result, by an error of any of its parts, or by a signal."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict

from ddp_manual.atomic_files import write_json
from ddp_manual.environment.machine import host_name
from ddp_manual.errors import DdpManualError, MasterLost, traceback_of
from ddp_manual.protocol import states
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.ranks_and_runs import LastWords, RunInfo, first_command_and, named_from_outside, resume_flags
from ddp_manual.run_folder import RunPaths, holder_of, holds_another_run
from ddp_manual.terminal import result_line
from ddp_manual.text_wrapping import whole


@dataclass(kw_only=True)
class Ended:
    """How a rank has ended."""

    error: DdpManualError | None = None
    result: Any = None
    """The result that the worker has sent, if its work is complete."""

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error is not None else 0


class Ending:
    """The end of one rank: the first result, or the first error of what runs in its event loop."""

    def __init__(self, rank: ThisRank) -> None:
        self._rank = rank
        self._ended: Ended | None = None
        self._has_come = asyncio.Event()
        self._working: set[asyncio.Task[None]] = set()

    async def wait(self) -> Ended:
        """Wait until the rank ends, and return how."""
        await self._has_come.wait()
        assert self._ended is not None
        return self._ended

    def finish(self, result: Any) -> None:
        """End the rank with its result, or, if a signal has stopped all ranks in order, with the error Stopped."""
        if isinstance(result, DdpManualError):
            self.fail(result)
        else:
            self._end(Ended(result=result))

    def fail(self, error: BaseException) -> None:
        if not isinstance(error, DdpManualError):
            error = MasterLost(
                f"the agent of rank {self._rank.number} broke",
                why=traceback_of(error),
                next="start all ranks again; this is a mistake in ddp_manual and worth reporting",
            )
        self._end(Ended(error=error))

    def _end(self, ended: Ended) -> None:
        if self._ended is None:
            self._ended = ended
            self._rank.enter(states.Ended(was=self._rank.state))
            self._has_come.set()

    def guarded(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """Wrap a handler so that an exception that it raises ends the rank."""

        def guarded(message: Any) -> None:
            try:
                handler(message)
            except Exception as error:
                self.fail(error)

        return guarded

    def in_background(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run ``work`` in the background, and return its task; an exception that it raises ends the rank."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self.fail(error)

        task = asyncio.create_task(guarded())
        self._working.add(task)
        task.add_done_callback(self._working.discard)
        task.add_done_callback(lambda task: work.close())  # cancelled before its turn, ``work`` was never awaited
        return task

    def cancel_background(self) -> None:
        for task in self._working:
            task.cancel()


def how_it_ended(error: DdpManualError | None, result: Any) -> dict[str, Any]:
    """Return what rank 0 tells observers last: the ``LastWords`` of an error; if there is no error, None as the
    ``identifier``, and the result as ``what``."""
    if error is not None:
        return {**asdict(LastWords.of(error)), "what": named_from_outside(error.what, 0)}
    is_training = isinstance(result, Mapping) and "final_test_accuracy" in result
    return {"identifier": None, "what": result_line(result) if is_training else "all ranks have left in order"}


def leave_failure(run_dir: str, rank: int, pid: int, error: DdpManualError, run: RunInfo) -> Exception | None:
    """Write why a rank has left into the run's folder, unless another run trains into it. If the folder still has the
    files of another run, which this one was to resume, the file's name says that it does not belong to that run.

    Args:
        pid: the pid of this rank's worker.
        run: the run of this rank; its rank 0's worker holds the folder while the run trains.

    Returns:
        The error because of which nothing was written; otherwise None.
    """
    paths, about = RunPaths(Path(run_dir)), {"rank": rank, "host": host_name(), "pid": pid}
    if paths.holder not in (None, holder_of(run.pid, run.host)):
        return None
    try:
        paths.run_dir.mkdir(parents=True, exist_ok=True)
        failure = paths.failure(rank)
        if holds_another_run(run_dir, run.run_id):
            failure = paths.of_another_attempt(failure)
        else:
            paths.set_failures_aside(rank)
        write_json(failure, {**asdict(LastWords.of(error)), **about})
    except (DdpManualError, OSError) as kept:
        return kept
    return None


def add_own_command(error: DdpManualError, go_on: str | None, run_dir: str | None, world_size: int) -> None:
    """Put the command to type in this terminal into the error, where it says how each rank goes on.

    Args:
        go_on: what was typed in this terminal; None if something else has started the rank.
    """
    if run_dir and go_on is not None:
        here = ":" if world_size == 1 else "; in this terminal:"
        command = whole(f"{go_on} {resume_flags(run_dir)}")
        error.next = error.next.replace(f": {first_command_and(run_dir)}", f"{here}\n{command}")
