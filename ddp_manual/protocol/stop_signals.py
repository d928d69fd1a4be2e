"""What signals do to one rank: they stop all ranks in order, or this one at once."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ddp_manual.errors import DdpManualError, Stopped, asked_by
from ddp_manual.messages import Beat
from ddp_manual.signals import NOTHING_TO_SAVE, ONCE_WITHIN, SAVE
from ddp_manual.world_spec import WorldSpec

# Seconds after which Ctrl-C ends a program that does not come out of a collective, where Python cannot react to it, and
# after which that is said.
OUT_WITHIN = 5.0
SAID_AFTER = 1.0


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

    def take(self, number: int, seen_by: str, here: int, again: str, now: float, *, goes_on: bool) -> Stopped | None:
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
        error = None
        if not self.noted and not goes_on:
            error = self._stopped_early(number, here, again)
        elif now - self._first.get(seen_by, now) > ONCE_WITHIN:
            error = self._stopped_at_once(number, again)
        elif not self._first:
            is_followed = heeded or goes_on
            if is_followed and not self._is_script:
                self._to_worker(number)
            what = "stopping after the next step all ranks agree on" if heeded else "this rank is done, and is leaving"
            if not self.noted:
                what = "all that are here go on for a step, save a checkpoint, and stop"
            self._log(f"{asked_by(number)}: {what}; a second signal ends this rank at once")
        # A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
        self.asked = self.asked or number
        self._first.setdefault(seen_by, now)
        return error

    def look(self, beat: Beat, now: float) -> str | Stopped | None:
        """Return what all are to be told, or what ends this rank, because a signal does not reach the worker."""
        return None

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


@dataclass
class Unreached:
    """A program that is in a collective, after so many of each process group, since Ctrl-C was sent to it."""

    collectives: Mapping[str, int]
    said_at: float
    ended_at: float

    @classmethod
    def since(cls, now: float, collectives: Mapping[str, int]) -> Unreached:
        return cls(collectives, now + SAID_AFTER, now + OUT_WITHIN)


class ProgramSignals(StopSignals):
    """What signals do to a rank that runs a user's own program: the program gets them, as it would from a terminal, and
    a second one that asks to stop ends the rank at once. So does Ctrl-C itself, if the program stays in a collective.
    """

    _unreached: Unreached
    """Since the last time that the program has moved after Ctrl-C."""

    def look(self, beat: Beat, now: float) -> str | Stopped | None:
        if self.stop != signal.SIGINT:
            return None
        if not beat.inside or beat.collectives != self._unreached.collectives:
            self._unreached = Unreached.since(now, beat.collectives)
        wait = self._unreached
        where = f"in a collective, on {beat.place or 'no line of Python'}"
        if now >= wait.ended_at:
            why = f"the program was {where}, and Python does not react to Ctrl-C there"
            return Stopped(self.stop, f"after {OUT_WITHIN:.0f} s", why=why)
        if now >= wait.said_at:
            wait.said_at = wait.ended_at
            return f"Ctrl-C cannot reach the program, which is {where}; it is ended in {wait.ended_at - now:.0f} s"
        return None

    def take(self, number: int, seen_by: str, here: int, again: str, now: float, *, goes_on: bool) -> Stopped | None:
        if not self.noted:
            return None if number == SAVE else self._stopped_early(number, here, again)
        if number == SAVE:
            self._to_worker(number)
        elif not self.stop:
            self.stop, self._asked, self._unreached = number, now, Unreached.since(now, {})
            self._to_worker(number)
            self._log(f"{asked_by(number)}: the program gets it; a second signal ends this rank at once")
        elif now - self._asked > ONCE_WITHIN:
            return Stopped(number, "at once, by a second signal", why="the program had not ended by itself", next=again)
        return None
