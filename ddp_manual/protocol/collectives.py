"""Whether all ranks call the same collectives: their comparison on rank 0.

An agent reads its worker's records (``agent/records.py``) and sends the chains of some numbers with each heartbeat.
Where chains of the same number differ, rank 0 asks the agents for more, finds the first number at which the ranks
differ, and what each of them called there.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from ddp_manual import collectives
from ddp_manual.errors import CollectiveMismatch
from ddp_manual.terminal import MOST_RANGES, as_ranges
from ddp_manual.wire import printable

# A heartbeat has the chains of at least so many of a group's last numbers.
LAST = 16
# Numbers that an agent replies with, for up to this many ranks that are asked; for more of them fewer. Each of its
# groups has the same share.
MANY_RANKS = 64
MOST_CHAINS = 2048
FEWER_CHAINS = 256
# Numbers that rank 0 keeps to compare others with: of a group, and of all groups; and how many groups.
MOST_KEPT = 4096
MOST_KEPT_OF_ALL = 1 << 18
MOST_GROUPS_KEPT = 4096
# Seconds after which a rank that begins no collective is taken to wait; between two looks at such ranks; and at most
# between two looks at the same, since a rank that saves a checkpoint lags behind the others for long.
WAITS_AFTER = 0.8
LOOK_AGAIN_AFTER = 5.0
LOOK_AGAIN_WITHIN = 60.0
# Sides of a difference that are shown.
MOST_SIDES = 4

# What a reply that says something else than expected raises when it is read.
UNREADABLE = (AttributeError, KeyError, TypeError, ValueError)


class Last(NamedTuple):
    """The last collective that a rank has begun."""

    group: str
    number: int
    call: collectives.Call

    def in_words(self, names: Mapping[str, str]) -> str:
        return f"the {ordinal(self.number)} of {names[self.group]}, {at(self.call)}"


class Difference(NamedTuple):
    """The first collective of a group that ranks did not call alike."""

    error: CollectiveMismatch
    rank: int
    """One of those that differ from most ranks."""


class _Heard:
    """What rank 0 has heard of a group."""

    def __init__(self) -> None:
        self.chains: dict[tuple[int, int], tuple[int, int]] = {}
        """Number and a key of what is ``comparable`` in its chain -> the value, and the rank that has sent it first."""
        self.last: dict[int, tuple[int, float]] = {}
        """Rank -> the last number that it has sent, and since when it is that."""


class _Reply(NamedTuple):
    """What the agent of a rank replies of its groups."""

    names: dict[str, str]
    chains: dict[str, dict[int, int]]
    """Group -> number -> chain."""
    last: Last | None

    @classmethod
    def read(cls, reply: Mapping[str, Any]) -> _Reply:
        """Read what the network brought.

        Raises:
            AttributeError, KeyError, TypeError, ValueError: it is no such reply.
        """
        names: dict[str, str] = {}
        chains: dict[str, dict[int, int]] = {}
        for group, of_group in reply["groups"].items():
            names[group] = printable(of_group["name"])
            sent = [*map(operator.index, of_group["chains"])]
            chains[group] = dict(zip(sent[::2], sent[1::2], strict=True))
        last = None
        if reply["last"] is not None and reply["last"][0] in names:
            group, number, *call = reply["last"]
            last = Last(group, operator.index(number), _call(call))
        return cls(names, chains, last)


def _call(texts: Sequence[str]) -> collectives.Call:
    return collectives.Call(*map(printable, texts))


def _calls(reply: Mapping[str, Any]) -> dict[int, tuple[int, collectives.Call]]:
    """Return number -> how many collectives the rank had begun with it, and what it called; {} if it is unreadable."""
    with suppress(*UNREADABLE):
        return {operator.index(number): (operator.index(begun), _call(call)) for number, begun, *call in reply["calls"]}
    return {}


@dataclass(frozen=True)
class Look:
    """A look at what ranks have called: first at their chains, then at the calls at which these differ."""

    ranks: Collection[int]
    seen: Difference | None
    """What an earlier look at some of these ranks has found."""

    @property
    def question(self) -> tuple[Collection[int], Mapping[str, Any]]:
        """Ranks, and what their agents are asked next: see ``Records.answer``."""
        return self.ranks, {"chains": MOST_CHAINS if len(self.ranks) <= MANY_RANKS else FEWER_CHAINS}


@dataclass(frozen=True)
class CloserLook(Look):
    """A look at the calls of groups in which chains differ."""

    last: Mapping[int, str]
    """Rank -> its last collective, in words."""
    names: Mapping[str, str]
    chains: Mapping[str, Mapping[int, Mapping[int, int]]]
    """Group -> rank -> number -> chain."""
    differ: Sequence[tuple[str, int]]
    """The groups whose calls are not known yet, and the first number at which their chains differ."""
    found: Sequence[tuple[int, Difference]] = ()
    """Each difference, behind how many collectives its first rank had begun before."""

    @property
    def question(self) -> tuple[Collection[int], Mapping[str, Any]]:
        group, first = self.differ[0]
        return self.chains[group], {"group": group, "calls": [first - 1, first]}

    def take(self, replies: Mapping[int, Any]) -> CloserLook:
        (group, first), *others = self.differ
        calls, chains = {rank: _calls(reply) for rank, reply in replies.items()}, self.chains[group]
        at_first = {rank: of_rank[first][1] for rank, of_rank in calls.items() if first in of_rank}
        before = next((of_rank[first - 1][1] for of_rank in calls.values() if first - 1 in of_rank), None)
        sides = sides_of(at_first, {rank: chains[rank].get(first) for rank in at_first})
        if len(sides) < 2:
            return replace(self, differ=others)
        error = mismatch(sides, first, self.names[group], before)
        begun = min(calls[rank][first][0] for rank in at_first)
        return replace(self, differ=others, found=[*self.found, (begun, Difference(error, sides[0].ranks[0]))])


class Seen(NamedTuple):
    """What a look at some ranks has found."""

    ranks: Collection[int]
    difference: Difference | None
    last: Mapping[int, str]
    """Rank -> its last collective, in words."""


class Comparison:
    """What rank 0 knows of the collectives of all ranks."""

    def __init__(self) -> None:
        self._groups: dict[str, _Heard] = {}
        """Those that were heard last are the last."""
        self._looked = -LOOK_AGAIN_AFTER
        self._next_looks: dict[tuple[str, int], tuple[float, float]] = {}
        """Group, number of ranks that wait in it -> when to look at them next, and how long after that again."""
        self._differ: tuple[str, int, int, int] | None = None

    def __bool__(self) -> bool:
        """Whether any rank has sent something to compare."""
        return bool(self._groups)

    def hear(self, rank: int, calls: Mapping[str, Sequence[int]], now: float) -> bool:
        """Take what a heartbeat says; return whether a rank has made other calls than another, as far as is known."""
        for group, sent in calls.items():
            heard = self._groups.get(group)
            before = 0 if heard is None else heard.last.get(rank, (0, now))[0]
            if not sent or sent[0] == before:
                continue
            self._groups[group] = heard = self._groups.pop(group, None) or _Heard()
            for number, chain in zip(sent[::2], sent[1::2], strict=False):
                if number <= before:
                    break
                for compared, value in collectives.comparable(chain).items():
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

    def take(self, look: Look, replies: Mapping[int, Any]) -> Look | Seen:
        """Take what ranks have replied to the question of a look; return what asks the next one, or the result."""
        closer = look.take(replies) if isinstance(look, CloserLook) else self._look_closer(look, replies)
        if closer.differ:
            return closer
        difference = min(closer.found, key=lambda one: one[0])[1] if closer.found else look.seen
        if difference is None and self._differ is not None:
            difference = self._unseen(closer.names)
        return Seen(look.ranks, difference, closer.last)

    def _look_closer(self, look: Look, replies: Mapping[int, Any]) -> CloserLook:
        read: dict[int, _Reply] = {}
        for rank, reply in replies.items():
            with suppress(*UNREADABLE):  # it counts as absent
                read[rank] = _Reply.read(reply)
        names: dict[str, str] = {}
        chains: dict[str, dict[int, dict[int, int]]] = {}
        for rank, said in read.items():
            names = {**said.names, **names}
            for group, of_rank in said.chains.items():
                chains.setdefault(group, {})[rank] = of_rank
        last = {rank: said.last.in_words(names) for rank, said in read.items() if said.last is not None}
        last.update(self._last_of_absent(set(look.ranks) - read.keys(), names))
        differ = [(group, first) for group, one in chains.items() if (first := first_difference(one)) is not None]
        return CloserLook(look.ranks, look.seen, last, names, chains, differ)

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


class Side(NamedTuple):
    """Ranks that called the same, on the same line."""

    ranks: list[int]
    call: collectives.Call


def sides_of(calls: Mapping[int, collectives.Call], chains: Mapping[int, int | None]) -> list[Side]:
    """Return who called what, the fewest ranks first; none if all called what goes together. A rank is on no side if
    what is known of its call goes together with the calls of all others."""
    compared = {rank: collectives.comparable(chains[rank] or 0) for rank in calls}
    known = Counter(key for of_rank in compared.values() for key in of_rank)
    alike = Counter(pair for of_rank in compared.values() for pair in of_rank.items())
    differ = {rank: sum(known[key] - alike[key, value] for key, value in compared[rank].items()) for rank in calls}
    sides: dict[collectives.Call, list[int]] = {}
    for rank in sorted(calls):
        if differ[rank]:
            sides.setdefault(calls[rank], []).append(rank)
    return sorted(
        (Side(ranks, call) for call, ranks in sides.items()),
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
        for compared, value in collectives.comparable(chain).items()
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


def mismatch(sides: Sequence[Side], number: int, group: str, before: collectives.Call | None) -> CollectiveMismatch:
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


def at(call: collectives.Call, *, detailed: bool = False) -> str:
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
