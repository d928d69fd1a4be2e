"""The health of all ranks, judged on rank 0 from their heartbeats: which are silent, stopped, stuck or slow.

Only rank 0's monotonic clock counts, so the clocks of the hosts need not agree.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ddp_manual.protocol.stalls import Stall, find_stall
from ddp_manual.protocol.watched_rank import WatchedRank, began_fewer, by_group, since
from ddp_manual.ranks_and_runs import Beat, RunInfo

# A rank is slow if its own work takes this many times the median, for this many seconds.
SLOW = 1.5
SLOW_FOR = 30.0
# A rank is late once it has said nothing for as long as so many heartbeats.
LATE_AFTER_BEATS = 2.5
# Seconds of silence after which a line names the silent ranks, and again after as many more, until they are given up;
# in the last GIVEN_UP_SOON seconds before that no line does.
NAMED_AFTER = 10.0
GIVEN_UP_SOON = 2.0
# Seconds that all other ranks may be in the call that opens a process group, after one rank has finished.
OPENS_WITHIN = 15.0
# Seconds per step. A smaller difference is noise, as where a step takes less than a millisecond.
SLOW_BY_AT_LEAST = 0.002


class Silence:
    """The lines about silent ranks, before these are given up: a network may come back.

    Args:
        who: returns words for these ranks, such as ``ranks 1 and 2``.
    """

    def __init__(self, who: Callable[[Sequence[int]], str]) -> None:
        self._who = who
        self.named: dict[int, int] = {}
        """Rank that is silent -> how often it was named."""

    def look(self, heard: Mapping[int, float], run: RunInfo, now: float) -> str | None:
        """Return the line to print now, if there is one.

        Args:
            heard: rank -> when it was heard last; no line is about a rank that is not among these.
        """
        seconds = {rank: now - at for rank, at in heard.items() if now - at >= NAMED_AFTER}
        given_up_in = run.silent_after - max(seconds.values(), default=0.0)
        if given_up_in < GIVEN_UP_SOON:
            return None
        times = {rank: int(silent / NAMED_AFTER) for rank, silent in seconds.items()}
        back = [rank for rank in self.named if rank in heard and rank not in times]
        newly = [rank for rank, count in times.items() if count > self.named.get(rank, 0)]
        self.named = times
        if newly:
            has = "has" if len(newly) == 1 else "have"
            silent = f"{self._who(newly)} {has} been silent for {seconds[newly[0]]:.0f} s"
            return f"{silent}, and will be given up in {given_up_in:.0f} s (--peer_timeout)"
        return f"{self._who(back)} {'is' if len(back) == 1 else 'are'} heard again" if back else None


class Health:
    """What rank 0 knows of all ranks.

    Args:
        now: rank 0's monotonic clock, as in all methods.
    """

    def __init__(self, run: RunInfo, now: float) -> None:
        self._run = run
        self._looked = now
        self._ranks = [WatchedRank(now, now) for _ in range(run.world_size)]
        self._at_work = set(range(run.world_size))

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        """Note a heartbeat; ``beat`` is what the worker does, if that has changed."""
        known = self._ranks[rank]
        if now - known.heard >= NAMED_AFTER:
            self._give_all_their_time(now)  # its part of collectives could not reach the others either
        known.heard = now
        if beat is None:
            return
        if known.finished:  # the groups that it closes now make no difference
            beat = replace(beat, collectives=known.beat.collectives, closed=known.beat.closed)
        if beat.steps != known.beat.steps or not 0 < known.beat.step <= beat.step:  # such as in another epoch
            known.counts_since = (beat.step, now) if beat.steps else None
        before, known.beat = known.mark, beat
        if known.mark != before:
            known.changed, known.inside_since = now, None
        if not beat.inside and now - since(known.inside_since, now) > 2 * self._run.heartbeat_period:
            known.went_on = now
        known.inside_since = since(known.inside_since, now) if beat.inside else None
        known.stopped_since = since(known.stopped_since, now) if beat.stopped else None
        if "debugging" in known.named and not beat.debugging:
            self._give_all_their_time(now)  # the ranks that have waited for it send their next heartbeats later
        known.named -= {state for state in ("stopped", "debugging") if not getattr(beat, state)}

    def forget(self, rank: int, now: float) -> None:
        """Begin anew with a rank, which is another process from now on."""
        self._ranks[rank] = WatchedRank(now, now)
        self._at_work.add(rank)

    def finish(self, rank: int) -> None:
        """Note that a rank has done its work; it may still wait for other ranks."""
        self._ranks[rank].finished = True
        self._at_work.discard(rank)

    @property
    def finished(self) -> list[int]:
        """The ranks that have done their work, without those that have left for another reason."""
        return [rank for rank, known in enumerate(self._ranks) if known.finished]

    @property
    def all_finished(self) -> bool:
        return not self._at_work

    def has_finished(self, *, and_left: bool = False) -> bool:
        """Return whether any rank has done its work; with ``and_left``, whether such a rank has also left."""
        return any(known.left or not and_left for known in self._ranks if known.finished)

    def leave(self, rank: int) -> None:
        """Watch a rank no longer: it has left in order, or the others go on without it."""
        self._ranks[rank].left = True
        self._at_work.discard(rank)

    def restart(self, now: float) -> None:
        """Give all ranks the full time again: rank 0 itself was stopped for long, perhaps with its whole host."""
        for known in self._ranks:
            known.heard = now
            known.stopped_since = known.stopped_since and now
        self._give_all_their_time(now)

    def _give_all_their_time(self, now: float) -> None:
        """Start the time anew in which each rank has to make progress."""
        for known in self._ranks:
            known.changed = now
            known.inside_since = known.inside_since and now

    def beat(self, rank: int) -> Beat:
        return self._ranks[rank].beat

    def silent(self, now: float) -> dict[int, float]:
        """Return the ranks that have been silent for too long and those that soon will be, each with its seconds of
        silence, the longest first."""
        seconds = {rank: now - known.heard for rank, known in self._watched()}
        if max(seconds.values(), default=0.0) <= self._run.silent_after:
            return {}
        least = LATE_AFTER_BEATS * self._run.heartbeat_period
        late = {rank: silence for rank, silence in seconds.items() if silence > least}
        return dict(sorted(late.items(), key=lambda found: -found[1]))

    def late(self, now: float) -> tuple[int, float] | None:
        """Return the rank that has been silent for longest, with its seconds, if that is more than two heartbeats."""
        silences = ((now - known.heard, rank) for rank, known in self._watched())
        seconds, rank = max(silences, default=(0.0, 0))
        return (rank, seconds) if seconds > LATE_AFTER_BEATS * self._run.heartbeat_period else None

    def newly(self, state: str) -> list[int]:
        """Return the ranks that by their last heartbeats are in this state, ``stopped`` or ``debugging``; each once."""
        found = [rank for rank, known in self._watched() if getattr(known.beat, state) and state not in known.named]
        for rank in found:
            self._ranks[rank].named.add(state)
        return found

    def stopped(self, now: float, seconds: float) -> tuple[int, float] | None:
        """Return a rank whose worker has been stopped for longer than ``seconds``, and for how long."""
        for rank, known in self._watched():
            if known.stopped_since is not None and now - known.stopped_since > seconds:
                return rank, now - known.stopped_since
        return None

    def waiting_in_vain(self, now: float, seconds: float) -> list[int]:
        """Return the ranks that are at work, if each of them waits for finished ranks: for so long in a collective that
        these have not begun, or longer in a call of torch for which it is not known which ranks it waits for."""
        active = {rank: known for rank, known in self._watched() if not known.finished}
        fewest = self.fewest_over()

        def in_vain(known: WatchedRank) -> bool:
            waited = now - since(known.inside_since, now)
            if began_fewer(fewest, known.beat.collectives):
                return waited > seconds
            return bool(self.finished) and waited > (OPENS_WITHIN if known.beat.opening else self._run.stall_timeout)

        return list(active) if all(map(in_vain, active.values())) else []

    def finished_before(self, rank: int, without: Collection[int] = ()) -> list[int]:
        """Return the ranks, ``without`` some of them, that have finished, or have closed a process group in which
        ``rank`` has begun more collectives."""
        begun = self._ranks[rank].beat.begun
        early = [other for other, known in enumerate(self._ranks) if began_fewer(known.over, begun)]
        return [other for other in early if other not in without]

    def fewest_over(self, without: Collection[int] = ()) -> Mapping[str, int]:
        """Return process group -> the fewest collectives of the ranks that take part in it no more."""
        return by_group((known.over for rank, known in enumerate(self._ranks) if rank not in without), min)

    def find_stall(self, now: float, longer_than: float | None = None) -> Stall | None:
        """Find ranks that have waited in a collective for longer than they may, or than ``longer_than`` seconds."""
        return find_stall(dict(self._watched()), self._run, now, longer_than)

    def newly_slow(self, now: float) -> list[tuple[int, float, float]]:
        """Return the ranks that became slow, each once, with its own seconds per step and the median of all."""
        training = {
            rank: known
            for rank, known in self._watched()
            if known.beat.phase == "training" and known.beat.step_seconds > 0
        }
        passed, self._looked = now - self._looked, now
        if len(training) < 2:
            return []
        # The median of two ranks is the faster one.
        median = statistics.median_low(known.beat.step_seconds for known in training.values())
        found = []
        for rank, known in training.items():
            seconds = known.beat.step_seconds
            is_slow = seconds >= SLOW * median and seconds - median >= SLOW_BY_AT_LEAST
            known.slow_for = min(2 * SLOW_FOR, max(0.0, known.slow_for + (passed if is_slow else -passed)))
            if known.slow_for >= SLOW_FOR and "slow" not in known.named:
                known.named.add("slow")
                found.append((rank, seconds, median))
        return found

    def progress(self, now: float) -> list[dict[str, Any]]:
        """Return one entry per rank for observers."""
        return [
            {
                "rank": rank,
                "phase": "finished" if known.finished else _describe(known.beat),
                "epoch": known.beat.epoch,
                "step": known.beat.step,
                "steps": known.beat.steps,
                "seconds_left": known.seconds_left(now),
                "loss": known.beat.loss,
                "samples_per_second": known.beat.samples_per_second,
                "step_seconds": known.beat.step_seconds,
                "place": known.beat.place,
                "waits_seconds": 0.0 if known.inside_since is None else round(now - known.inside_since, 1),
                "slow": "slow" in known.named and known.slow_for >= SLOW_FOR / 2,
                "silent_seconds": 0.0 if known.left else round(now - known.heard, 1),
            }
            for rank, known in enumerate(self._ranks)
        ]

    def _watched(self) -> Iterable[tuple[int, WatchedRank]]:
        return ((rank, known) for rank, known in enumerate(self._ranks) if not known.left)


def _describe(beat: Beat) -> str:
    if beat.stopped:
        return f"stopped by {beat.stopped}"
    return "in a debugger" if beat.debugging else beat.phase
