"""What ends a run, in the words that every rank prints: who is gone, silent or stuck, where it was, and what next."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual import environment
from ddp_manual.errors import DdpManualError, PeerFailed, PeerLost, PeerStalled, from_dict
from ddp_manual.rendezvous.entries import MOST_NAMED, as_ranges, in_words
from ddp_manual.rendezvous.judging import Stall
from ddp_manual.rendezvous.progress import Beat

# Letters. Last words are what a rank says of itself, with the end of a traceback.
LONGEST_WORDS = 20_000


@dataclass(frozen=True, kw_only=True)
class Member:
    """A rank as the roll call admitted it."""

    rank: int
    host: str
    pid: int
    nonce: str
    address: str
    probe_port: int
    """Where it answers until its lifeline is open."""

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


Verdict = dict[str, Any]
"""An error as it travels: identifier, what, why, next; rank, host and pid of the rank it is about; ``judged`` where it
is rank 0's judgement and not that rank's own words; ``closed``, unless it says no, where that rank's connections have
closed or are about to."""


def last_words(rank: int, error: DdpManualError) -> Verdict:
    """What this process says of itself before it leaves."""
    return {**_cut(error.as_dict()), "rank": rank, "host": environment.host_name(), "pid": os.getpid()}


def from_store(failure: Mapping[str, Any]) -> Verdict:
    """A verdict that was left in the store.

    Raises:
        KeyError, TypeError, ValueError: it is none.
    """
    about = {"rank": int(failure["rank"]), "host": str(failure["host"]), "pid": int(failure["pid"])}
    return {**_cut(failure), **about, "judged": bool(failure.get("judged"))}


def as_error(verdict: Mapping[str, Any]) -> DdpManualError:
    """The error that ends this rank: what rank 0 judged, or that another rank has left with last words."""
    if verdict.get("judged"):
        return from_dict(_cut(verdict))
    return PeerFailed(
        f"rank {verdict['rank']} ({verdict['host']}, pid {verdict['pid']}) left with error[{verdict['identifier']}]",
        why=f"{verdict['what']}\n{verdict['why']}",
        next=str(verdict["next"]),
    )


def _cut(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(words[name])[-LONGEST_WORDS:] for name in ("identifier", "what", "why", "next")}


def _judged(member: Member, error: DdpManualError, *, closed: bool = False) -> Verdict:
    about = {"rank": member.rank, "host": member.host, "pid": member.pid}
    return {**error.as_dict(), **about, "judged": True, "closed": closed}


def words_of(member: Member, words: Mapping[str, Any]) -> Verdict:
    """The last words of a rank, which speaks for nobody else.

    Raises:
        KeyError: they are none.
    """
    return {**_cut(words), "rank": member.rank, "host": member.host, "pid": member.pid}


def gone(member: Member, beat: Beat, reason: str, again: str) -> Verdict:
    """Its process has ended, or its host has."""
    return _judged(
        member,
        PeerLost(
            f"{member.who} is gone, without last words",
            why=f"its connection to rank 0 ended: {reason}\nit was {beat.at_step()}, when it was last heard",
            next=f"look at its last lines; if there are none it was killed, and `dmesg` on {member.host} says whether "
            f"memory had run out\nthen {again}",
        ),
        closed=True,
    )


def silent(found: Sequence[tuple[Member, Beat, float]], world_size: int, again: str) -> Verdict:
    """The first of ``found`` has said nothing for too long; the others are on their way there."""
    member, beat, seconds = found[0]
    why = [f"it was {beat.at_step()}, when it was last heard"]
    if len(found) > 1:
        others = ", ".join(other.who for other, _, _ in found[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
        why.append(f"as silent: {others}")
    why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
    if world_size > 2 and len(found) == world_size - 1:
        why[-1] = "rank 0 hears nobody any more: it may be rank 0's own host that is cut off"
    return _judged(
        member,
        PeerLost(
            f"{member.who} has been silent for {seconds:.0f} s",
            why="\n".join(why),
            next=f"look whether {member.host} can be reached, and whether its process runs: ps -o stat= -p {member.pid}"
            f"\nthen {again}",
        ),
    )


def stalled(
    members: Sequence[Member], stall: Stall, beats: Mapping[int, Beat], stacks: Mapping[int, str], again: str
) -> Verdict:
    """Ranks that live and do not come to where the others wait for them."""
    who_waits = f"{in_words(as_ranges(sorted(stall.waiting)))} wait" + "s" * (len(stall.waiting) == 1)
    if not stall.behind:
        shown = one_per_place(stall, beats)
        cause = "a connection between two of them may be cut: ddp-manual check tries them all"
        if len(shown) > 1:
            cause = (
                "look at their lines: a collective is for all ranks, so neither one nor what calls one (a step, "
                f"train()) may be below a line such as `if rank == 0`\nor {cause}"
            )
        return _judged(
            members[stall.waiting[0]],
            PeerStalled(
                f"all ranks have waited in a collective for {stall.seconds:.0f} s, and none is behind",
                why="\n".join(
                    [
                        *_places(members, stall.waiting, beats),
                        *_fewer(stall),
                        *(_stack(members[rank], stacks.get(rank)) for rank in shown),
                    ]
                ),
                next=f"{cause}\nor a step takes longer than that, and needs a larger --stall_timeout\nthen {again}",
            ),
        )
    first, *others = stall.behind
    member = members[first]
    also = f", and {in_words(as_ranges(others))}" if others else ""
    return _judged(
        member,
        PeerStalled(
            f"{member.who}{also} is stuck while others wait: {who_waits} for {stall.seconds:.0f} s",
            why="\n".join(
                [
                    *_places(members, [*stall.behind, *stall.waiting], beats),
                    *(_stack(members[rank], stacks.get(rank)) for rank in stall.behind[:2]),
                ]
            ),
            next="mend what the stack shows; work that takes this long while others wait needs a larger "
            f"--stall_timeout\nthen {again}",
        ),
    )


def one_per_place(stall: Stall, beats: Mapping[int, Beat]) -> list[int]:
    """A rank on each line of the program that ranks wait on, of at most two lines: whose stacks are worth a look."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(beats[rank].place, rank)
    return sorted([*first.values()][:2])


def _fewer(stall: Stall) -> list[str]:
    if not stall.fewer:
        return []
    who = in_words(as_ranges(sorted(stall.fewer)))
    return [
        f"{who} began fewer collectives than the others: cut off in the last one, or busy inside torch before the next"
    ]


def _places(members: Sequence[Member], ranks: Sequence[int], beats: Mapping[int, Beat]) -> list[str]:
    shown = [
        f"{members[rank].who}: {beats[rank].at_step()}, on {beats[rank].place or 'no line of Python'}"
        for rank in ranks[:MOST_NAMED]
    ]
    return [*shown, *(["..."] if len(ranks) > MOST_NAMED else [])]


def _stack(member: Member, text: str | None) -> str:
    if text is None:
        return f"{member.who} did not say where it is within the time for it"
    return f"the Python stack of {member.who}:\n{text[-LONGEST_WORDS:]}"


def slow(member: Member, seconds: float, median: float) -> str:
    return (
        f"{member.who} is slow: its own part of a step takes {1e3 * seconds:.1f} ms, {seconds / median:.1f} times the "
        f"median of all ranks, and all wait for it (named once)"
    )
