"""A stall: ranks wait in a collective for ranks that live, and do not come to it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ddp_manual.longest_wait import LongestWait, longest_wait
from ddp_manual.protocol.watched_rank import WatchedRank, began_fewer, by_group, since
from ddp_manual.ranks_and_runs import LEAVING, RunInfo


@dataclass(frozen=True)
class Stall:
    """Some ranks wait in a collective for the others, which do not come."""

    waiting: list[int]
    behind: list[int]
    """Empty if all ranks wait: the network between two of them is cut, or they are in different collectives."""
    seconds: float
    fewer: Sequence[int] = ()
    """The waiting ranks that have begun fewer collectives than others: their connection is cut, or they are busy inside
    torch."""
    longest: LongestWait = field(default_factory=lambda: LongestWait(0.0))
    """How long the waiting ranks may wait."""


def find_stall(
    watched: Mapping[int, WatchedRank], run: RunInfo, now: float, longer_than: float | None = None
) -> Stall | None:
    """Find ranks that have waited in a collective for longer than they may, and the ranks they wait for.

    Ranks that have begun fewer collectives in the same process group are those they wait for.

    Args:
        watched: the ranks that have not left.
        now: seconds of rank 0's monotonic clock.
        longer_than: seconds to use in place of those for which they may wait.

    Returns:
        None if no rank waits for that long, or if one may still turn out to wait too: two heartbeats later it is known.
    """
    active = {rank: known for rank, known in watched.items() if known.beat.phase != LEAVING and not known.finished}
    # A person in a debugger may take as long as he likes.
    if len(active) < 2 or any(known.beat.debugging for known in active.values()):
        return None
    fewest = by_group((known.beat.begun for known in active.values()), min)
    # The heartbeat of a rank, and the look at it, may each be one period late.
    late = 2 * run.heartbeat_period
    longest = {rank: longest_wait(run, known.beat.timeout_of_wait(fewest), late) for rank, known in active.items()}
    seconds = {rank: longer_than or one.seconds for rank, one in longest.items()}
    long = [rank for rank, known in active.items() if now - known.changed > seconds[rank]]
    inside = {rank: now - since(known.inside_since, now) for rank, known in active.items()}
    waiting = [rank for rank in active if inside[rank] > seconds[rank]]
    return_at_once = any(known.beat.return_at_once for known in active.values())
    if return_at_once and len(long) == len(active) and not waiting:
        # No rank makes progress. A rank that has begun more collectives than another waits for it.
        waiting = [rank for rank in long if began_fewer(fewest, active[rank].beat.collectives)]
    if not waiting:
        return None
    may_wait = min((longest[rank] for rank in waiting), key=lambda one: one.seconds)
    most = by_group((active[rank].beat.collectives for rank in waiting), max)
    behind = [rank for rank, known in active.items() if began_fewer(known.beat.begun, most)]
    # A rank inside a collective has most likely brought what the others need from it, and waits for what they
    # bring: if a connection is cut, some ranks may have completed a collective that others still wait for.
    least = min(seconds[rank] for rank in waiting)  # one that may wait for longer, in another group, waits too
    fewer = [rank for rank in behind if rank in waiting or inside[rank] > least]
    behind = [rank for rank in behind if rank not in fewer]
    shortest = max(0.0, least - late)
    if max(inside[rank] for rank in waiting) <= least + late and any(inside[rank] > shortest for rank in behind):
        return None  # soon it is known whether they wait too
    if not behind:
        behind = [rank for rank, known in active.items() if not known.beat.inside]
        if behind and all(now - max(active[rank].changed, active[rank].went_on) <= late for rank in behind):
            return None  # they have just gone on; most likely the others too, whose heartbeats come later
    if set(behind) >= set(waiting):  # as with NCCL: the program waits on a line of its own
        usual, _ = Counter(known.beat.place for known in active.values()).most_common(1)[0]
        behind = [rank for rank, known in active.items() if known.beat.place != usual]
    if behind:  # ranks whose heartbeats came later wait for as long
        nearly = [rank for rank in active if inside[rank] > shortest]
        waiting = [rank for rank in active if rank in (*waiting, *nearly) and rank not in behind]
    else:
        waiting = list(active)
    waited = max(now - active[rank].changed for rank in waiting or behind)
    return Stall(waiting, behind, waited, [] if behind else fewer, may_wait)
