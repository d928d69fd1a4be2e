"""Who has fallen silent, who keeps the others waiting, who is slow: decided on rank 0 from the heartbeats of all.

Only rank 0's monotonic clock counts, so the clocks of the hosts need not agree. Nothing here talks to anybody.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.rendezvous.progress import LEAVING, Beat

# A rank is slow if its own work takes this many times the median, for this many seconds.
SLOW = 1.5
SLOW_FOR = 30.0
# Seconds per step. Less is noise, also where a step takes less than a millisecond.
SLOW_BY_AT_LEAST = 0.002


@dataclass(frozen=True)
class Limits:
    """Seconds. Rank 0's count for all ranks, which are told them."""

    peer_timeout: float
    stall_timeout: float
    beat_every: float
    """Heartbeats, in both directions."""

    @classmethod
    def of_a_world(cls, world_size: int, peer_timeout: float, stall_timeout: float) -> Limits:
        """Rank 0 reads at most about 4,000 heartbeats a second."""
        return cls(peer_timeout, stall_timeout, max(0.5, world_size / 4000))

    @property
    def silence(self) -> float:
        """A process may be held up for peer_timeout just before its next heartbeat is due, and another one is on its
        way."""
        return self.peer_timeout + 2 * self.beat_every


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
    gone: bool = False
    slow_for: float = 0.0
    """Seconds of training in which it has been slow, less those in which it was not: a busy machine is noisy."""
    named_slow: bool = False

    @property
    def mark(self) -> tuple[Any, ...]:
        return (self.beat.phase, self.beat.epoch, self.beat.step, self.beat.collectives)


class Judge:
    """What rank 0 knows of all ranks.

    Args:
        now: rank 0's monotonic clock, as everywhere here.
        async_collectives: they return at once, as NCCL's do, and the program waits for them in a line of its own.
    """

    def __init__(self, world_size: int, limits: Limits, now: float, *, async_collectives: bool = False) -> None:
        self._limits = limits
        self._async = async_collectives
        self._looked = now
        self._ranks = [_Rank(now, Beat(), now) for _ in range(world_size)]

    def hear(self, rank: int, beat: Beat, now: float) -> None:
        known = self._ranks[rank]
        before, known.beat, known.heard = known.mark, beat, now
        if known.mark != before:
            known.changed = now

    def part_with(self, rank: int) -> None:
        """It has left in order, and is judged no more."""
        self._ranks[rank].gone = True

    def restart(self, now: float) -> None:
        """Rank 0 itself was stopped for long, perhaps with all its host: everybody gets the full time again."""
        for known in self._ranks:
            known.heard = known.changed = now

    def beat(self, rank: int) -> Beat:
        return self._ranks[rank].beat

    def silence(self, rank: int, now: float) -> float:
        """Seconds since it was heard."""
        return now - self._ranks[rank].heard

    def silent(self, now: float) -> list[int]:
        """The ranks that have been silent for too long, and those that are on their way there."""
        seconds = {rank: now - known.heard for rank, known in self._active()}
        if not seconds or max(seconds.values()) <= self._limits.silence:
            return []
        late = 2.5 * self._limits.beat_every
        return sorted((rank for rank in seconds if seconds[rank] > late), key=lambda rank: -seconds[rank])

    def stall(self, now: float) -> Stall | None:
        """The ranks that have waited in a collective for longer than stall_timeout, and those they wait for."""
        active = {rank: known for rank, known in self._active() if known.beat.phase != LEAVING}
        if len(active) < 2:
            return None
        long = [rank for rank, known in active.items() if now - known.changed > self._limits.stall_timeout]
        waiting = [rank for rank in long if active[rank].beat.inside]
        if self._async and len(long) == len(active) and not waiting:
            # Nobody gets anywhere. Whoever has begun more collectives than another waits for it.
            fewest = _by_group((known.beat.collectives for known in active.values()), min)
            waiting = [
                rank
                for rank in long
                if any(count > fewest[group] for group, count in active[rank].beat.collectives.items())
            ]
        if not waiting:
            return None
        most = _by_group((active[rank].beat.collectives for rank in waiting), max)
        behind = [
            rank
            for rank, known in active.items()
            if any(count < most.get(group, 0) for group, count in known.beat.collectives.items())
        ]
        fewer = []
        if not self._async:
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
                "phase": known.beat.phase,
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


def _by_group(counts: Iterable[Any], choose: Any) -> dict[str, int]:
    found: dict[str, int] = {}
    for one in counts:
        for group, count in one.items():
            found[group] = choose(found[group], count) if group in found else count
    return found
