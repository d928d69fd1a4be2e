"""What rank 0 knows of one rank that it watches."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_manual.ranks_and_runs import Beat


@dataclass
class WatchedRank:
    heard: float
    changed: float
    """When it last made progress: another phase, step or collective."""
    beat: Beat = field(default_factory=Beat)
    counts_since: tuple[int, float] | None = None
    """(Step, when the rank said it): the pace of its steps is counted from there; None if it does not say how many."""
    inside_since: float | None = None
    """Since when each heartbeat has said that it waits for others (``Beat.inside``); None while it does not."""
    went_on: float = -math.inf
    """When it last came out of a collective in which it had waited for more than two heartbeats."""
    finished: bool = False
    """Whether its work is done: it takes part in no more collectives."""
    left: bool = False
    stopped_since: float | None = None
    slow_for: float = 0.0
    """Seconds of training in which it was slow, minus those in which it was not: a busy machine is noisy."""
    named: set[str] = field(default_factory=set)
    """What a line has said of it already: that it is ``stopped``, ``debugging`` or ``slow``."""

    @property
    def mark(self) -> tuple[Any, ...]:
        beat = self.beat
        return (beat.phase, beat.epoch, beat.step, beat.collectives, beat.operations, beat.unfinished)

    def seconds_left(self, now: float) -> float | None:
        """Return the seconds that its work will still take at the pace so far; None if that is not known."""
        step, at = self.counts_since or (self.beat.step, now)
        done, left = self.beat.step - step, self.beat.steps - self.beat.step
        return left * (now - at) / done if done > 0 and left > 0 else None

    @property
    def over(self) -> Mapping[str, int]:
        """How many collectives it has begun in the process groups in which it takes part no more, unless it has closed
        them because another rank takes part no more."""
        return self.beat.begun if self.finished else {} if self.beat.broken else self.beat.closed


def began_fewer(one: Mapping[str, int], other: Mapping[str, int]) -> bool:
    """Return whether ``one`` has begun fewer collectives than ``other``, in any process group that both have."""
    return any(group in other and count < other[group] for group, count in one.items())


def since(before: float | None, now: float) -> float:
    return now if before is None else before


def by_group(begun: Iterable[Mapping[str, int]], choose: Callable[[int, int], int]) -> dict[str, int]:
    """Return the fewest or the most collectives that ranks have begun, by process group."""
    found: dict[str, int] = {}
    for counts in begun:
        for group, count in counts.items():
            found[group] = choose(found.get(group, count), count)
    return found
