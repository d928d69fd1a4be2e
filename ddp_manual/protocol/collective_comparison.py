"""Whether all ranks call the same collectives: their comparison on rank 0.

An agent reads its worker's records (``agent/collective_records.py``) and sends the chains of some numbers with each
heartbeat. Where chains of the same number differ, rank 0 asks the agents for more, finds the first number at which the
ranks differ, and what each of them called there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from ddp_manual import collective_memory
from ddp_manual.errors import CollectiveMismatch
from ddp_manual.messages import Begun, RecordsReply
from ddp_manual.wording import MOST_RANGES, as_ranges

# A heartbeat has the chains of at least so many of a group's last numbers.
LAST = 16
# How many chains an agent replies with: MOST_CHAINS if at most MANY_RANKS ranks are asked, otherwise FEWER_CHAINS. Each
# of its groups has the same share.
MANY_RANKS = 64
MOST_CHAINS = 2048
FEWER_CHAINS = 256
# How many chains rank 0 keeps to compare others with: of a group, and of all groups; and of how many groups it keeps.
MOST_KEPT = 4096
MOST_KEPT_OF_ALL = 1 << 18
MOST_GROUPS_KEPT = 4096
# Groups whose calls rank 0 asks for at once: a line of the protocol has 256 KiB.
MOST_GROUPS_ASKED = 128
# Seconds: after which a rank that begins no collective counts as waiting; between two looks at such ranks; and the most
# between two looks at the same rank, since a rank that saves a checkpoint lags behind the others for long.
WAITS_AFTER = 0.8
LOOK_AGAIN_AFTER = 5.0
LOOK_AGAIN_WITHIN = 60.0
# Sides of a difference that an error shows.
MOST_SIDES = 4


class Difference(NamedTuple):
    """The first collective of a group that ranks did not call alike."""

    error: CollectiveMismatch
    rank: int
    """One of the ranks that differ from most ranks."""


class _Heard:
    """What rank 0 has heard of a group."""

    def __init__(self) -> None:
        self.chains: dict[tuple[int, int], tuple[int, int]] = {}
        """(Number, key) -> (value, the rank that has sent it first); ``comparable`` gives key and value of a chain."""
        self.last: dict[int, tuple[int, float]] = {}
        """Rank -> the last number that it has sent, and when it first sent that number."""


class Seen(NamedTuple):
    """What a look at some ranks has found."""

    ranks: Collection[int]
    difference: Difference | None
    last: Mapping[int, str]
    """Rank -> its last collective, in words."""


Look = Generator[tuple[Collection[int], Mapping[str, Any]], Mapping[int, RecordsReply], Seen]
"""Looks at what ranks have called: yields which ranks are to be asked what (the fields of ``AskRecords``), is sent the
replies that have come, and returns what it has seen."""


class Comparison:
    """What rank 0 knows of the collectives of all ranks."""

    def __init__(self) -> None:
        self._groups: dict[str, _Heard] = {}
        """Process group -> what was heard of it; the group that was heard of last is the last one."""
        self._looked = -LOOK_AGAIN_AFTER
        self._next_looks: dict[tuple[str, int], tuple[float, float]] = {}
        """(Group, number at which ranks wait) -> when to look at them next, and seconds until the look after that."""
        self._differ: tuple[str, int, int, int] | None = None

    def __bool__(self) -> bool:
        """Whether any rank has sent something to compare."""
        return bool(self._groups)

    def hear(self, rank: int, calls: Mapping[str, Sequence[int]], now: float) -> bool:
        """Note the chains of a heartbeat; return whether any two ranks are known to have made different calls."""
        for group, sent in calls.items():
            heard = self._groups.get(group)
            before = 0 if heard is None else heard.last.get(rank, (0, now))[0]
            if not sent or sent[0] == before:
                continue
            self._groups[group] = heard = self._groups.pop(group, None) or _Heard()
            for number, chain in zip(sent[::2], sent[1::2], strict=False):
                if number <= before:
                    break
                for compared, value in collective_memory.comparable(chain).items():
                    other = heard.chains.setdefault((number, compared), (value, rank))
                    if other[0] != value and self._differ is None:
                        self._differ = group, number, rank, other[1]
            heard.last[rank] = sent[0], now
            most = min(MOST_KEPT, MOST_KEPT_OF_ALL // len(self._groups))
            if len(heard.chains) > most:
                for oldest in sorted(heard.chains)[: -most // 2]:
                    del heard.chains[oldest]
            if len(self._groups) > MOST_GROUPS_KEPT:
                del self._groups[next(iter(self._groups))]
        return self._differ is not None

    def lagging(self, now: float) -> tuple[int, int] | None:
        """Return a rank that waits so far behind another one in a group that their heartbeats have no number in common,
        and that other rank, if it is time to look at them."""
        if now - self._looked < LOOK_AGAIN_AFTER:
            return None
        found: dict[tuple[str, int], tuple[int, int]] = {}
        for group, heard in self._groups.items():
            most, ahead = max((number, rank) for rank, (number, _) in heard.last.items())
            for rank, (number, since) in heard.last.items():
                if most - number >= LAST and now - since > WAITS_AFTER:
                    found.setdefault((group, number), (rank, ahead))
        self._next_looks = {lag: self._next_looks.get(lag, (now, LOOK_AGAIN_AFTER)) for lag in found}
        lag = min(found, key=lambda one: self._next_looks[one], default=None)
        if lag is None or self._next_looks[lag][0] > now:
            return None
        self._looked, (_, after) = now, self._next_looks[lag]
        self._next_looks[lag] = now + after, min(2 * after, LOOK_AGAIN_WITHIN)
        return found[lag]

    def look(self, ranks: Collection[int], seen: Difference | None = None) -> Look:
        """Look at the chains of ranks, and then at the calls at which these differ.

        Args:
            seen: the difference that an earlier look at some of these ranks has found.
        """
        replies = yield ranks, {"chains": MOST_CHAINS if len(ranks) <= MANY_RANKS else FEWER_CHAINS}
        names: dict[str, str] = {}
        chains: dict[str, dict[int, dict[int, int]]] = {}
        for rank, reply in replies.items():
            for group, records in reply.groups.items():
                names.setdefault(group, records.name)
                chains.setdefault(group, {})[rank] = dict(records.chains)
        last = {
            rank: f"the {ordinal(call.number)} of {names.get(call.group, 'another group')}, {at(call)}"
            for rank, reply in replies.items()
            for call in reply.calls
        }
        last.update(self._last_of_absent(set(ranks) - replies.keys(), names))
        differ = {group: first for group, one in chains.items() if (first := first_difference(one)) is not None}
        found: list[tuple[int, Difference]] = []
        if differ:
            wanted = {group: [max(0, first - 1), first] for group, first in [*differ.items()][:MOST_GROUPS_ASKED]}
            replies = yield {rank for group in wanted for rank in chains[group]}, {"calls": wanted}
            for group, (_, first) in wanted.items():
                calls = {
                    (rank, call.number): call
                    for rank, reply in replies.items()
                    for call in reply.calls
                    if call.group == group and rank in chains[group]  # a rank may have begun in it since
                }
                found += _differences(calls, chains[group], first, names[group])
        difference = min(found, key=lambda one: one[0])[1] if found else seen
        if difference is None and self._differ is not None:
            difference = self._unseen(names)
        return Seen(ranks, difference, last)

    def _last_of_absent(self, ranks: Iterable[int], names: Mapping[str, str]) -> dict[int, str]:
        """Return the last collectives of ranks that do not reply, perhaps since their agents have left."""
        found: dict[int, str] = {}
        for rank in sorted(ranks):
            groups = [(group, heard.last) for group, heard in self._groups.items() if rank in heard.last]
            began = [(group in names, last[rank][0], group) for group, last in groups]
            if began:
                named, number, group = max(began, key=lambda one: one[0])
                found[rank] = f"the {ordinal(number)} of {names[group] if named else 'another group'}"
        return found

    def _unseen(self, names: Mapping[str, str]) -> Difference:
        """Return a difference that is known from heartbeats only: the records of it were overwritten."""
        assert self._differ is not None
        group, number, rank, other = self._differ
        name = names.get(group, "a process group")
        error = CollectiveMismatch(
            f"rank {rank} and rank {other} called different collectives, at or before the {ordinal(number)} of {name}",
            why=f"{WHY}\nwhich of them differed is not known any more: the records of it are overwritten",
            next=OTHER_CALL,
        )
        return Difference(error, rank)


def _differences(
    calls: Mapping[tuple[int, int], Begun], chains: Mapping[int, Mapping[int, int]], first: int, group: str
) -> list[tuple[int, Difference]]:
    """Return how the ranks of a group differ at the number ``first``, and the fewest collectives that one of them had
    begun by then, in all groups; [] if that is not known any more.

    Args:
        calls: (rank, number) -> call.
        chains: rank -> number -> chain.
        group: its name.
    """
    at_first = {rank: call for (rank, number), call in calls.items() if number == first}
    before = next((call for (_, number), call in calls.items() if number == first - 1), None)
    sides = sides_of(at_first, {rank: chains[rank].get(first) for rank in at_first})
    if len(sides) < 2:
        return []
    error = mismatch(sides, first, group, before)
    return [(min(call.begun for call in at_first.values()), Difference(error, sides[0].ranks[0]))]


class Side(NamedTuple):
    """Ranks that made the same call on the same line."""

    ranks: list[int]
    call: Begun
    """The call of the first of these ranks."""


def sides_of(calls: Mapping[int, Begun], chains: Mapping[int, int | None]) -> list[Side]:
    """Return who called what: first the side that differs from most ranks, of equal sides the one with fewest ranks. A
    rank is on no side if what is known of its call matches the calls of all others; [] if all calls match."""
    compared = {rank: collective_memory.comparable(chains[rank] or 0) for rank in calls}
    known = Counter(key for of_rank in compared.values() for key in of_rank)
    alike = Counter(pair for of_rank in compared.values() for pair in of_rank.items())
    differ = {rank: sum(known[key] - alike[key, value] for key, value in compared[rank].items()) for rank in calls}
    sides: dict[tuple[str, str, str], list[int]] = {}
    for rank, said in sorted(calls.items()):
        if differ[rank]:
            sides.setdefault((said.call, said.detail, said.line), []).append(rank)
    return sorted(
        (Side(ranks, calls[ranks[0]]) for ranks in sides.values()),
        key=lambda side: (-differ[side.ranks[0]], len(side.ranks), side.ranks),
    )


def first_difference(chains: Mapping[int, Mapping[int, int]]) -> int | None:
    """Return the first number at which the chains of ranks differ.

    Args:
        chains: rank -> number -> chain, as far as they are known.
    """
    seen: dict[tuple[int, int], int] = {}
    differ = [
        number
        for of_rank in chains.values()
        for number, chain in of_rank.items()
        for compared, value in collective_memory.comparable(chain).items()
        if seen.setdefault((number, compared), value) != value
    ]
    return min(differ, default=None)


WHY = (
    "all ranks of a group must call the same collectives in the same order; where they do not,\n"
    "they wait for each other, a rank aborts, or the numbers are wrong"
)
OTHER_CALL = (
    "let all ranks make the same calls in the same order: look before these lines for what is not the same on all\n"
    "ranks, such as `if rank == 0`, an uneven number of batches, or an exception that one rank has caught"
)
OTHER_SIZE = (
    "let all ranks call it with tensors of the same number of elements: drop_last=True leaves out a smaller last\n"
    "batch, and all_gather_object takes objects that differ in length"
)
OTHER_DTYPE = "let all ranks call it with tensors of the same dtype, such as tensor.to(torch.float32)"
OTHER_DETAIL = "let all ranks call it with the same reduce operation, and the same src or dst"


def mismatch(sides: Sequence[Side], number: int, group: str, before: Begun | None) -> CollectiveMismatch:
    """Return the error that names what each side called.

    Args:
        before: what all ranks had called just before; None if that is not known.
    """
    calls = [side.call.call for side in sides]
    names = {call.partition(" ")[0] for call in calls}
    dtypes = {call.partition("[")[0] for call in calls}
    detailed = len(set(calls)) == 1
    said = [f"{rank_words(side.ranks)} called {at(side.call, detailed=detailed)}" for side in sides[:MOST_SIDES]]
    said += ["..."] * (len(sides) > MOST_SIDES)
    # Where the lines differ too, the ranks were most likely not about to make the same call.
    if len(names) > 1 or len({side.call.line for side in sides}) > 1:
        next = OTHER_CALL
    elif len(dtypes) > 1:
        next = OTHER_DTYPE
    else:
        next = OTHER_DETAIL if detailed else OTHER_SIZE
    why = [WHY]
    if before is not None:
        why.append(f"the last one alike was the {ordinal(number - 1)}: {at(before)}")
    return CollectiveMismatch(f"{', '.join(said)}, as the {ordinal(number)} of {group}", why="\n".join(why), next=next)


def at(call: Begun, *, detailed: bool = False) -> str:
    """Return ``all_reduce float32[4] at train.py:91``, with ``(max)`` or ``(from rank 0)`` if asked for."""
    detail = f" ({call.detail})" if detailed and call.detail else ""
    return f"{call.call}{detail} at {call.line or 'no line of Python'}"


def rank_words(ranks: Sequence[int]) -> str:
    """Return ``rank 2``, ``ranks 0 and 1`` or ``ranks 0, 2 and 4-7``; of more than MOST_RANGES ``ranks 0, 2, ...``"""
    words = [
        word
        for first, last in as_ranges(sorted(ranks))
        for word in ([str(first), str(last)][: last - first + 1] if last - first < 2 else [f"{first}-{last}"])
    ]
    if len(words) > MOST_RANGES:
        return f"ranks {', '.join(words[:MOST_RANGES])}, ..."
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {' and '.join(filter(None, [', '.join(words[:-1]), words[-1]]))}"


def group_name(ranks: Sequence[int], description: str, device: str = "") -> str:
    """Return ``the default group``, ``the default group on cuda``, or ``the group of ranks 0 and 2 (dp)``."""
    of_backend = f" on {device}" if device else ""
    if description == "default_pg":
        return f"the default group{of_backend}"
    described = f" ({description})" if description not in ("", "undefined") else ""
    return f"the group of {rank_words(ranks)}{described}{of_backend}"


def ordinal(number: int) -> str:
    """Return ``1st``, ``2nd``, ``3rd``, ``137th``."""
    ending = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th") if number % 100 not in (11, 12, 13) else "th"
    return f"{number}{ending}"
