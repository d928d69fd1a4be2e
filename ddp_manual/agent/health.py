"""Who is silent, stopped, stuck or slow: decided on rank 0 from the heartbeats of all.

Only rank 0's monotonic clock counts, so the clocks of the hosts need not agree. Nothing here talks to anybody.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_manual.messages import LEAVING, Beat, RunInfo

# A rank is slow if its own work takes this many times the median, for this many seconds.
SLOW = 1.5
SLOW_FOR = 30.0
# Seconds per step. Less is noise, also where a step takes less than a millisecond.
SLOW_BY_AT_LEAST = 0.002


_NOTHING_YET = Beat()


@dataclass(frozen=True)
class Stall:
    """Some ranks wait in a collective, and the others do not come."""

    waiting: list[int]
    behind: list[int]
    """Empty where all wait: the network between two of them is cut, or they are in different collectives."""
    seconds: float
    fewer: Sequence[int] = ()
    """Of those that wait, the ones that have begun fewer collectives than others: that is where a connection is cut, or
    they are busy inside torch."""


@dataclass
class _Rank:
    heard: float
    beat: Beat
    changed: float
    """When it last got anywhere: another phase, step or collective."""
    inside_since: float | None = None
    """Since when it has been seen inside a collective, or a backward pass, each time; None while it is not."""
    finished: bool = False
    """Whether its work is done: it takes part in no more collectives."""
    gone: bool = False
    stopped_since: float | None = None
    named_stopped: bool = False
    named_debugging: bool = False
    slow_for: float = 0.0
    """Seconds of training in which it has been slow, less those in which it was not: a busy machine is noisy."""
    named_slow: bool = False

    @property
    def mark(self) -> tuple[Any, ...]:
        return (self.beat.phase, self.beat.epoch, self.beat.step, self.beat.collectives)


class Health:
    """What rank 0 knows of all ranks.

    Args:
        now: rank 0's monotonic clock, as everywhere here.
    """

    def __init__(self, run: RunInfo, now: float) -> None:
        self._run = run
        self.async_collectives = False
        """Whether they return at once, as NCCL's do, and the program waits for them in a line of its own."""
        self._looked = now
        self._ranks = [_Rank(now, _NOTHING_YET, now) for _ in range(run.world_size)]

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        """``beat``: what its worker does, if that has changed."""
        known = self._ranks[rank]
        known.heard = now
        if beat is None:
            return
        if known.finished:  # its process groups may be closed by now
            beat = replace(beat, collectives={**known.beat.collectives, **beat.collectives})
        before, known.beat = known.mark, beat
        if known.mark != before:
            known.changed, known.inside_since = now, None
        if not beat.inside:
            known.inside_since = None
        elif known.inside_since is None:
            known.inside_since = now
        if not beat.stopped:
            known.stopped_since, known.named_stopped = None, False
        elif known.stopped_since is None:
            known.stopped_since = now
        known.named_debugging &= beat.debugging

    def forget(self, rank: int, now: float) -> None:
        """Another process is to be this rank."""
        self._ranks[rank] = _Rank(now, _NOTHING_YET, now)

    def finish(self, rank: int) -> None:
        self._ranks[rank].finished = True

    @property
    def finished(self) -> list[int]:
        return [rank for rank, known in enumerate(self._ranks) if known.finished or known.gone]

    def leave(self, rank: int) -> None:
        """It has left in order, and is judged no more."""
        self._ranks[rank].gone = True

    def restart(self, now: float) -> None:
        """Rank 0 itself was stopped for long, perhaps with all its host: everybody gets the full time again."""
        for known in self._ranks:
            known.heard = known.changed = now
            known.stopped_since = known.stopped_since and now
            known.inside_since = known.inside_since and now

    def beat(self, rank: int) -> Beat:
        return self._ranks[rank].beat

    def silence(self, rank: int, now: float) -> float:
        """Seconds since it was heard."""
        return now - self._ranks[rank].heard

    def silent(self, now: float) -> list[int]:
        """The ranks that have been silent for too long, and those that are on their way there."""
        seconds = {rank: now - known.heard for rank, known in self._active()}
        if not seconds or max(seconds.values()) <= self._run.silence:
            return []
        late = 2.5 * self._run.beat_every
        return sorted((rank for rank in seconds if seconds[rank] > late), key=lambda rank: -seconds[rank])

    def newly_stopped(self) -> list[tuple[int, str]]:
        """Ranks whose worker a signal has stopped, with that signal. Each is named once."""
        found = []
        for rank, known in self._active():
            if known.beat.stopped and not known.named_stopped:
                known.named_stopped = True
                found.append((rank, known.beat.stopped))
        return found

    def stopped(self, now: float, seconds: float) -> tuple[int, float] | None:
        """A rank whose worker has been stopped for longer than ``seconds``, and for how long."""
        for rank, known in self._active():
            if known.stopped_since is not None and now - known.stopped_since > seconds:
                return rank, now - known.stopped_since
        return None

    def newly_debugging(self) -> list[int]:
        """Ranks that wait for a person in a debugger. Each is named once."""
        found = [rank for rank, known in self._active() if known.beat.debugging and not known.named_debugging]
        for rank in found:
            self._ranks[rank].named_debugging = True
        return found

    def waiting_in_vain(self, now: float, seconds: float) -> list[int]:
        """Ranks that wait in a collective, each for this long, for ranks that have finished."""
        active = {rank: known for rank, known in self._active() if not known.finished}
        if any(self._inside_for(rank, now) <= seconds for rank in active):
            return []
        fewest = _by_group((self._ranks[rank].beat for rank in self.finished), min)
        in_vain = (
            any(count > fewest.get(group, count) for group, count in known.beat.collectives.items())
            for known in active.values()
        )
        return list(active) if all(in_vain) else []

    def finished_before(self, rank: int) -> list[int]:
        """The ranks that have finished, and begun fewer collectives than this one in a group that both are in."""
        begun = self._ranks[rank].beat.collectives
        return [
            other
            for other in self.finished
            if any(count < begun.get(group, 0) for group, count in self._ranks[other].beat.collectives.items())
        ]

    def _inside_for(self, rank: int, now: float) -> float:
        since = self._ranks[rank].inside_since
        return 0.0 if since is None else now - since

    def stall(self, now: float) -> Stall | None:
        """The ranks that have waited in a collective for longer than stall_timeout, and those they wait for."""
        active = {rank: known for rank, known in self._active() if known.beat.phase != LEAVING and not known.finished}
        # A person in a debugger may take as long as he likes.
        if len(active) < 2 or any(known.beat.debugging for known in active.values()):
            return None
        long = [rank for rank, known in active.items() if now - known.changed > self._run.stall_timeout]
        waiting = [rank for rank in long if self._inside_for(rank, now) > self._run.stall_timeout]
        if self.async_collectives and len(long) == len(active) and not waiting:
            # Nobody gets anywhere. Whoever has begun more collectives than another waits for it.
            fewest = _by_group((known.beat for known in active.values()), min)
            waiting = [
                rank
                for rank in long
                if any(count > fewest[group] for group, count in active[rank].beat.collectives.items())
            ]
        if not waiting:
            return None
        most = _by_group((active[rank].beat for rank in waiting), max)
        behind = [
            rank
            for rank, known in active.items()
            if any(count < most.get(group, 0) for group, count in known.beat.collectives.items())
        ]
        fewer = []
        if not self.async_collectives:
            # One that is inside is most likely there with what the others want from it, and waits for theirs: where a
            # connection is cut, some may have had all of a collective that others still wait for.
            fewer = [rank for rank in behind if rank in waiting]
            behind = [rank for rank in behind if rank not in waiting]
        behind = behind or [rank for rank, known in active.items() if not known.beat.inside]
        if set(behind) >= set(waiting):  # as under NCCL, where the program waits in a line of its own
            usual, _ = Counter(known.beat.place for known in active.values()).most_common(1)[0]
            behind = [rank for rank, known in active.items() if known.beat.place != usual]
        waiting = [rank for rank in waiting if rank not in behind] if behind else list(active)
        longest = max(now - active[rank].changed for rank in waiting or behind)
        return Stall(waiting, behind, longest, [] if behind else fewer)

    def newly_slow(self, now: float) -> list[tuple[int, float, float]]:
        """Ranks that have become slow: rank, seconds its own work takes per step, the median's. Each is named once."""
        at_work = {
            rank: known
            for rank, known in self._active()
            if known.beat.phase == "training" and known.beat.step_seconds > 0
        }
        seconds_passed, self._looked = now - self._looked, now
        if len(at_work) < 2:
            return []
        # Of two ranks the faster one.
        median = statistics.median_low(known.beat.step_seconds for known in at_work.values())
        found = []
        for rank, known in at_work.items():
            seconds = known.beat.step_seconds
            if seconds < SLOW * median or seconds - median < SLOW_BY_AT_LEAST:
                known.slow_for = max(0.0, known.slow_for - seconds_passed)
                continue
            known.slow_for = min(2 * SLOW_FOR, known.slow_for + seconds_passed)
            if known.slow_for >= SLOW_FOR and not known.named_slow:
                known.named_slow = True
                found.append((rank, seconds, median))
        return found

    def progress(self, now: float) -> list[dict[str, Any]]:
        """One entry per rank for whoever looks on."""
        return [
            {
                "rank": rank,
                "phase": _doing(known.beat),
                "epoch": known.beat.epoch,
                "step": known.beat.step,
                "samples_per_second": known.beat.samples_per_second,
                "step_seconds": known.beat.step_seconds,
                "slow": known.named_slow and known.slow_for >= SLOW_FOR / 2,
                "silent_seconds": 0.0 if known.gone else round(now - known.heard, 1),
            }
            for rank, known in enumerate(self._ranks)
        ]

    def _active(self) -> Iterable[tuple[int, _Rank]]:
        return ((rank, known) for rank, known in enumerate(self._ranks) if not known.gone)


def _doing(beat: Beat) -> str:
    if beat.stopped:
        return f"stopped by {beat.stopped}"
    return "in a debugger" if beat.debugging else beat.phase


def _by_group(beats: Iterable[Beat], choose: Callable[[int, int], int]) -> dict[str, int]:
    """The least or the most collectives that ranks have begun, in each process group."""
    found: dict[str, int] = {}
    for beat in beats:
        for group, count in beat.collectives.items():
            found[group] = choose(found.get(group, count), count)
    return found
