"""What follows a loss, on rank 0: whether the others wait or go on without a rank, from which state, and what is said.

Whether it ends the run is decided in ``end_or_begin_anew.py``. Times are seconds of rank 0's monotonic clock.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from msgspec.structs import asdict, replace

from ddp_manual.errors import MasterLost, PeerLost
from ddp_manual.on_rank_loss import SHRINK
from ddp_manual.protocol.end_or_begin_anew import OWN_CODE, Loss
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.verdict_words import verdict_about
from ddp_manual.ranks_and_runs import LastWords, Moment, RankInfo, RunInfo, RunSoFar, Verdict
from ddp_manual.text_wrapping import whole
from ddp_manual.wording import as_ranges, counted, in_words

# How often a rank whose agent starts its worker again by itself may be lost without a step of the run in between.
MOST_WITHOUT_A_STEP = 3
# Seconds from the moment a rank knows that rank 0 is lost until it has found another one that was there already.
SURVIVORS_WITHIN = 5.0
# Where no state is held, nobody knows the steps: ranks that have worked for this many seconds have come further.
LONG_ENOUGH = 60.0


@dataclass
class Pause:
    """The time from a loss, or from the return of ranks to a world that has shrunk, until all ranks go on."""

    since: float
    own_code: Collection[int] = ()
    """The ranks that were lost because their own code has raised."""
    steps_done: int = 0
    """How many steps the rank had done that had come furthest."""
    has_judged: bool = False
    """Whether ``refusal`` has judged, once, if ranks are lost again and again."""
    said: str = ""
    """The line that was printed about what is lost and held; "" before it, and after another rank was lost."""

    @property
    def is_said(self) -> bool:
        return self.has_judged and self.said != ""


class WaitOrShrink:
    """Decides, after a loss, whether the others wait or go on without a rank, and from which state; puts it into words.

    Args:
        max_restarts: how often a rank may be lost by its own code.
        shrink: the command that lets the run go on without the ranks that are missing.
        run_dir: the folder that this rank 0 was given, with ``{run_id}`` for its name; it writes to no other one that
            is named over the network.
    """

    def __init__(self, max_restarts: int, shrink: str, run_dir: str | None = None) -> None:
        self.run_dir = run_dir
        self.generation = 0
        """How often the ranks have begun anew."""
        self.count, self.seconds = 0, 0.0
        """How many losses there were, and the sum of the seconds from each loss until all ranks went on."""
        self.lost: dict[int, Verdict] = {}
        """The ranks that were lost in this pause, or in the last one, or before it and are missing since."""
        self.back: set[int] = set()
        """The ranks that had come back to a world that has shrunk, if this pause, or the last one, is for them."""
        self.held: dict[int, Moment | None] = {}
        """Rank that has said which state it holds -> the moment of that state; None if it holds none."""
        self._max_restarts, self._shrink = max_restarts, shrink
        self._pause: Pause | None = None
        self._went_on: float | None = None
        """When all ranks went on for the last time; None where this process was not rank 0 then."""
        self._agreed: Moment | None = None
        self._furthest = 0
        self._same: dict[int, int] = {}
        self._tries: Counter[int] = Counter()
        self._own_failures = 0

    @property
    def began(self) -> bool:
        """Whether the run has begun: from then on a rank that is missing is one that was lost."""
        return self._pause is not None or self._went_on is not None

    @property
    def paused(self) -> bool:
        return self._pause is not None

    @property
    def is_unsaid(self) -> bool:
        """Whether the line about what is lost and held, or the judgement of ``refusal``, is still to come."""
        return self._pause is not None and not self._pause.is_said

    @property
    def adopted(self) -> bool:
        """Whether another process was rank 0 until now: only the roll call will show which other ranks were lost."""
        return self.paused and self._went_on is None

    def begin(
        self,
        lost: Mapping[int, Loss],
        now: float,
        back: Collection[int] = (),
        replaced: Collection[int] = (),
        missing: Collection[int] = (),
    ) -> None:
        """Note that all begin anew: these ranks were ``lost``, or others are ``back`` in a world that has shrunk.

        Args:
            missing: the ranks whose seats are free, perhaps since an earlier loss.
            replaced: the ranks whose workers are replaced, and whose agents will say what they hold.
        """
        own_code = {rank for rank, loss in lost.items() if loss.kind == OWN_CODE and not loss.is_newcomer}
        self._pause = Pause(now, own_code)
        before = {rank: verdict for rank, verdict in self.lost.items() if rank in missing}
        self.lost, self.back = before | {rank: loss.verdict for rank, loss in lost.items()}, {*back}
        for rank in {*lost, *replaced}:
            self.held.pop(rank, None)
        self.count += len(lost)
        self._tries.clear()

    def take_held(self, rank: int, held: Moment | None, steps_done: int) -> None:
        """Note which state a rank holds, and how many steps it has done."""
        self.held[rank] = held
        if self._pause is not None:
            self._pause.steps_done = max(self._pause.steps_done, steps_done)

    def have_said(self, ranks: Collection[int]) -> bool:
        """Return whether all these ranks have said which state they hold."""
        return self.held.keys() >= {*ranks}

    def lose_too(self, info: RankInfo, how: str) -> None:
        """Note that one more rank is lost, while the others begin anew."""
        error = PeerLost(f"{info.who} {how}", why="it was lost while the others began anew", next="")
        self.lost[info.rank] = verdict_about(info, LastWords.of(error))
        self.held.pop(info.rank, None)
        self.count += 1
        if self._pause is not None:
            self._pause.said = ""

    def count_try(self, rank: int) -> bool:
        """Count a try to start a worker that failed before it was ready; return whether its agent may try again."""
        self._tries[rank] += self.began
        return self.began and self._tries[rank] <= MOST_WITHOUT_A_STEP

    def adopt(self, so_far: RunSoFar, now: float) -> None:
        """Go on with a run that another process has begun as rank 0."""
        words = LastWords.of(MasterLost(so_far.lost, why="", next=""))
        lost = Verdict(**asdict(words), rank=0, host=so_far.host, pid=so_far.pid)
        self._pause = Pause(now - so_far.seconds)
        self.lost = {0: lost}
        self.generation, self.count, self.seconds = so_far.generation, so_far.losses + 1, so_far.lost_seconds

    def shrinks(self, run: RunInfo, here: Collection[int], waited: float, *, since_a_stop: float, stops: bool) -> bool:
        """Return whether the run goes on without the ranks that are missing, with those that are ``here``.

        Rank 0 goes on alone, of three or more, only to stop: it may be its own host that is cut off from the others.

        Args:
            waited: seconds for which ranks are missing.
            since_a_stop: seconds since this process was stopped, such as by Ctrl-Z; that time does not count.
            stops: whether a rank was asked to stop the run.
        """
        shrink_after = math.inf if run.shrink_after is None else run.shrink_after
        shrink_after = 0.0 if run.on_loss == SHRINK or stops else shrink_after
        # Survivors may be on their way to a new rank 0, or back to this one, which they have given up.
        until_they_are_here = run.silent_after + SURVIVORS_WITHIN
        if self.adopted:
            shrink_after = max(shrink_after, min(until_they_are_here, run.rejoin_timeout))
        if since_a_stop < until_they_are_here:
            shrink_after = math.inf
        enough = 1 if stops else min(2, run.world_size - 1)
        return waited >= shrink_after and len(here) >= enough

    def newest(self, among: Collection[int]) -> tuple[Moment | None, int | None]:
        """Return the state to go on from, and the first rank that has it: the buffers of that rank's model count."""
        held = {rank: self.held.get(rank) for rank in sorted(among)}
        found = [(moment, -rank) for rank, moment in held.items() if moment is not None]
        moment, rank = max(found, default=(None, 0))
        return moment, None if moment is None else -rank

    def refusal(self, among: Collection[int]) -> Verdict | None:
        """Return why the run ends, if a rank is lost again and again without a step in between; None before all ranks
        have said what they hold. Where no state is held, time counts in place of steps. Lost ranks that are among them
        are those whose agents start another worker by themselves.
        """
        pause = self._pause
        if pause is None or pause.has_judged or not self.have_said(among):
            return None
        pause.has_judged = True
        moment, _ = self.newest(among)
        came_further = pause.steps_done > self._furthest or _step(moment) != _step(self._agreed)
        self._furthest = max(self._furthest, pause.steps_done)
        worked_for = pause.since - self._went_on if self._went_on is not None else math.inf
        if moment is None and worked_for > LONG_ENOUGH:
            came_further = True
        if came_further:
            self._same.clear()
        for rank, verdict in self.lost.items():
            before = self._same.get(rank, 0)
            self._same[rank] = before + 1
            self._own_failures += rank in pause.own_code
            if rank in pause.own_code:
                too_often = before > 0 or self._own_failures > self._max_restarts
            else:
                too_often = rank in among and before >= MOST_WITHOUT_A_STEP
            if too_often:
                after = moment.named if moment else "before the first step"
                how = f"lost {counted(before + 1, 'time')} {after}: no step was done in between"
                if not before:
                    how = f"ranks were lost by their own code more than {counted(self._max_restarts, 'time')}"
                return replace(verdict, why=f"{verdict.why}\n{how}")
        self._agreed = moment
        return None

    def complete(self, run: RunInfo, here: Mapping[int, RankInfo], now: float) -> tuple[str, dict[str, Any]] | None:
        """Go on: all ranks are here. Return a line to print and a record for the run's folder; None at the start."""
        pause, went_on = self._pause, self._went_on
        self._pause, self._went_on = None, now
        if pause is None:
            return None
        self.generation += 1
        seconds = now - pause.since
        self.seconds += seconds
        moment, source = self.newest(here)
        step = "from the newest checkpoint, or from the beginning" if moment is None else moment.named
        go = "start again" if moment is None and not run.resumes else f"go on {step}"
        gone_on = max(0, pause.steps_done - moment.step) if moment is not None else 0
        unit = "call" if moment is not None and moment.counts_calls else "step"
        repeat = counted(gone_on, unit) if gone_on else f"no {unit}"
        if moment is None:  # before this process took over, another one was rank 0
            work = "the" if went_on is None else f"about {max(1, round(pause.since - went_on))} s of"
            repeat = f"{work} work, unless a checkpoint has it"
        lost = f"; the break took {seconds:.{0 if seconds >= 10 else 1}f} s, and the ranks repeat {repeat}"
        back = [rank for rank in here if rank in self.lost or rank in self.back]
        who = f"{in_words(as_ranges(sorted(back)))} {'is' if len(back) == 1 else 'are'} back" if back else ""
        on = {here[rank].host for rank in back}
        where = f", on {on.pop()}" if len(on) == 1 else ""
        everybody = f"all {run.world_size}" if len(here) == run.world_size else f"{len(here)} of {run.world_size}"
        line = f"{who}{where}: {everybody} {go}{lost}" if who else f"{everybody} ranks {go}{lost}"
        record = {
            "generation": self.generation,
            "lost": [
                {name: getattr(verdict, name) for name in ("rank", "host", "pid", "what")}
                for verdict in self.lost.values()
            ],
            "ranks": sorted(here),
            "after_step": _step(moment),
            "state_from_rank": source,
            "steps_lost": gone_on,
            "seconds": round(seconds, 3),
        }
        return line, record

    def kept(self, roll_call: RollCall) -> str | None:
        """Return the line about a loss, once, when all ranks that are here have said what they hold; otherwise None."""
        if self._pause is None or self._pause.said:
            return None
        waits = roll_call.run.resumes and not self.have_said(roll_call.have_worked)
        if waits or not self.lost:
            return None
        self._pause.said = self._words_of_loss(roll_call)
        return self._pause.said

    def _words_of_loss(self, roll_call: RollCall) -> str:
        run, missing = roll_call.run, roll_call.missing
        here = {rank for rank in roll_call.members if roll_call.has_worked_before(rank)}
        moment, _ = self.newest(here)
        holders = [rank for rank in sorted(here) if self.held.get(rank) == moment]
        state = "no state is held yet"
        if not run.resumes:
            state = "all ranks' programs will start again, those that call hold() with what they hold"
        elif moment is not None:
            state = f"state of step {moment.step} is held by {in_words(as_ranges(holders))}"
        seats = missing or sorted(self.lost.keys() & set(roll_call.left_out))
        whats = "; ".join(verdict.what for rank, verdict in self.lost.items() if rank in seats or not seats)
        are = "are" if len(seats) > 1 else "is"
        whats = whats or f"{in_words(as_ranges(seats))} {are} not back since rank 0 was lost"
        if not seats:
            return f"{whats}. It is started again; {state}"
        commands = "\n".join(dict.fromkeys(run.command_for(rank) for rank in seats))
        it = "it" if len(seats) == 1 else "them"
        to_replace = f"to replace {in_words(as_ranges(seats))}, type {run.where_to_type}:\n{commands}"
        if not missing:
            return f"{whats}. The others go on without {it}; {state}\n{to_replace}"
        kept = "Its seat is kept" if len(seats) == 1 else "Their seats are kept"
        return f"{whats}. {kept}; {state}\n{to_replace}\nor go on without {it}:\n{whole(self._shrink)}"

    def said_of(self, left_out: Sequence[int]) -> str:
        """Return the line about the lost ranks that the others wait for, or how the ranks were lost without which they
        go on; "" if no rank is lost."""
        if self._pause is not None and not left_out:
            return self._pause.said
        return "; ".join(self.lost[rank].what for rank in left_out if rank in self.lost)

    def never_taken(self, run: RunInfo, missing: Sequence[int], waited: float) -> Verdict | None:
        """Return why the run ends when nobody has taken a seat in time; None if no loss is known."""
        verdict, ranks = next((self.lost[rank] for rank in missing if rank in self.lost), None), as_ranges(missing)
        last = next(iter(self.lost.values()), None)
        if verdict is None and last is not None:  # they were lost with an earlier rank 0, or left out to stop the run
            what = f"{in_words(ranks)} did not come back after rank {last.rank} was lost"
            verdict = replace(last, identifier=PeerLost.identifier, what=what, why=last.what, judged=True)
        if verdict is None:
            return None
        nobody = f"nobody has taken the seat of {in_words(ranks)} within {waited:.0f} s (--rejoin_timeout)"
        return replace(verdict, why=f"{verdict.why}\n{nobody}", next=run.start_again)


def _step(moment: Moment | None) -> int | None:
    return moment.step if moment is not None else None
