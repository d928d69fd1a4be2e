"""The engine of every launch: it starts all ranks, passes on signals, starts the ranks again after a failure that may
not recur, and says why the run has ended. Its parts know where the ranks are: on this host or on others.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ddp_manual import signal_handlers
from ddp_manual.agent.to_type import status_command
from ddp_manual.errors import (
    DdpManualError,
    DiskFull,
    MasterLost,
    PeerGone,
    PeerLost,
    RunFilesError,
    Stopped,
    TrainingFailed,
)
from ddp_manual.launch.job import Job
from ddp_manual.terminal import say
from ddp_manual.text_wrapping import whole
from ddp_manual.wording import duration

# Another attempt may go well after an exception of the training or the loss of a peer. After other errors it would not:
# options, names, versions, files, data and devices would be the same. A rank that a signal stopped was asked to end.
FIXED_BY_A_RESTART = (TrainingFailed.exit_code, PeerGone.exit_code)
ASKED_TO_STOP = tuple(128 + number for number in signal_handlers.STOP)

Failure = tuple[int, DdpManualError]
"""A rank, and the error that has ended it."""
Tell = Callable[[Failure], None]
"""A function that is called with each failure as soon as it is known."""


class Part(Protocol):
    """Ranks of a run that are started and ended together, such as those of this host."""

    @property
    def has_saved(self) -> bool:
        """Whether our own training has left a checkpoint, where these ranks are, from which it can go on."""

    async def attempt(self, restarts: int, tell: Tell) -> None:
        """Start all these ranks, and wait until the last has ended.

        Args:
            restarts: how often all ranks were started again before.
        """

    def take_signal(self, number: int) -> None:
        """Pass a signal on to the ranks."""


class Launch:
    """All attempts at a run.

    Args:
        parts: the part with rank 0 first.
    """

    def __init__(self, job: Job, parts: Sequence[Part] = ()) -> None:
        self.job, self.parts = job, parts
        self.signalled = 0
        """The first signal that has asked the run to stop, or 0."""
        self.restarts = 0
        self.failed: list[Failure] = []
        """The failures in this attempt, in the order in which they became known."""
        self._began = time.monotonic()

    async def attempts(self) -> None:
        """Have all parts start their ranks, and again after each failure that may not recur."""
        while True:
            await self.attempt()
            first = root_failure(self.failed)
            if first is None or not self.may_start_again(first[1]):
                break
            self.restarts += 1
            say(f"restart {self.restarts} of {self.job.max_restarts} after {in_short(first[1])}")

    async def attempt(self) -> None:
        """Have all parts start their ranks once, and wait until the last has ended."""
        self.failed.clear()
        await asyncio.gather(*(part.attempt(self.restarts, self.failed.append) for part in self.parts))

    def may_start_again(self, error: DdpManualError) -> bool:
        return not self.signalled and may_be_fixed(error) and self.restarts < self.job.max_restarts

    def take_signal(self, number: int) -> None:
        if number != signal_handlers.SAVE:
            if not self.signalled:
                say("stopping; a second signal ends all ranks at once")
            self.signalled = self.signalled or number
        # In our own training rank 0 saves for all ranks, so only the first part gets that signal.
        for part in self.parts[: 1 if number == signal_handlers.SAVE and self.job.program is None else None]:
            part.take_signal(number)

    def conclude(self) -> int:
        """Say why all ranks have ended, and how to go on; return the exit code.

        Raises:
            Stopped: a signal has stopped them.
        """
        has_saved, took = any(part.has_saved for part in self.parts), duration(time.monotonic() - self._began)
        failed = root_failure(self.failed)
        again = f"to {'go on from the newest checkpoint' if has_saved else 'start again'}:\n{whole(self.job.go_on)}"
        if self.signalled:
            raise self._stopped(took, again)
        if failed is None:
            say(f"all ranks finished after {took}")
            return 0
        rank, error = failed
        # With PeerGone all ranks only report which rank is gone: none of them has failed with an error of its own.
        first = "the run has ended" if error.exit_code == PeerGone.exit_code else f"rank {rank} failed first"
        why = "" if sys.stderr.isatty() else f": {in_short(error)}"  # readers of a log file look at its end
        say(f"{first}, with exit code {error.exit_code}, after {took}{why}")
        its_files = error.exit_code == RunFilesError.exit_code and error.identifier != DiskFull.identifier
        if (has_saved or may_be_fixed(error)) and not its_files:  # for those the error says what to do
            say(again)
        return error.exit_code

    def _stopped(self, took: str, way_on: str) -> Stopped:
        """Return the error of a stopped run, with the shortest ``why`` of a rank: others add what the stop broke."""
        ranks = [error for _, error in self.failed if isinstance(error, Stopped)]
        said = min(ranks, key=lambda error: len(error.why), default=None)
        stopped = Stopped(self.signalled, f"after {took}", next=way_on)
        if said is not None:
            stopped.what, stopped.why = f"{said.what}; the run took {took}", said.why
        return stopped


def say_how_to_look(address: dict[str, Any]) -> None:
    """Say which command shows the run that meets at this address."""
    say(f"to look at this run from another terminal:\n{whole(status_command(watch=True, **address))}")


def may_be_fixed(error: DdpManualError) -> bool:
    """Return whether another attempt may go well; it also may after the kernel has killed a rank for lack of memory.

    An error about another rank counts as that rank's own error, as on its host: no host starts its ranks again alone.
    """
    identifier, code = error.on_its_rank or (error.identifier, error.exit_code)
    if identifier == TrainingFailed.identifier:  # its exit code is the program's own
        return True
    is_loss = identifier in (PeerLost.identifier, MasterLost.identifier)  # a program may have ended with any code
    return code in FIXED_BY_A_RESTART or ((is_loss or code > 128) and code not in ASKED_TO_STOP)


def root_failure(failed: Sequence[Failure]) -> Failure | None:
    """Return the first failure, PeerGone only if there is no other: a rank may lose a peer before that peer ends."""
    return min(failed, key=lambda failure: failure[1].exit_code == PeerGone.exit_code, default=None)


def in_short(error: DdpManualError) -> str:
    return f"error[{error.identifier}]: {error.what}"
