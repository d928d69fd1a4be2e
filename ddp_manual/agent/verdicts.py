"""The verdict that ends a run, as every rank prints it: which rank is gone, silent or stuck, where, and what next."""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_manual.agent.health import Stall
from ddp_manual.agent.roll_call import MOST_NAMED, as_ranges, in_words
from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    MasterLost,
    PeerFailed,
    PeerLost,
    PeerStalled,
    from_dict,
    signal_name,
)
from ddp_manual.messages import LONGEST_TEXT, Beat, RankInfo, RunInfo, Verdict, shortened

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def verdict_by(info: RankInfo, words: Mapping[str, Any]) -> Verdict:
    """Make a verdict of the last words of a rank, which speaks for no other rank.

    Raises:
        KeyError, TypeError, ValueError: they are not an error.
    """
    about = {"rank": info.rank, "host": info.host, "pid": info.pid, "exit_code": int(words["exit_code"])}
    return {**shortened(words), **about}


def verdict_about(info: RankInfo, error: DdpManualError, exit_code: int | None = None) -> Verdict:
    """Make a verdict of what the coordinator says about a rank.

    Args:
        exit_code: that rank's own exit code, if it differs from the error's.
    """
    about = {"rank": info.rank, "host": info.host, "pid": info.pid, "judged": True}
    return {**shortened(error.as_dict()), **about, "exit_code": exit_code or error.exit_code}


def error_for(rank: int, verdict: Mapping[str, Any]) -> DdpManualError:
    """Return the error that ends ``rank``: its own, the coordinator's, or that another rank has failed."""
    if verdict["rank"] == rank:
        return from_dict(shortened(verdict), int(verdict["exit_code"]))
    if verdict.get("judged") or verdict["identifier"] == ConfigMismatch.identifier:  # which all ranks find alike
        return from_dict(shortened(verdict))
    return PeerFailed(
        f"rank {verdict['rank']} ({verdict['host']}, pid {verdict['pid']}) left with error[{verdict['identifier']}]",
        why=f"{verdict['what']}\n{verdict['why']}",
        next=str(verdict["next"]),
    )


def _lost(info: RankInfo, what: str, *, why: str, next: str, exit_code: int | None = None) -> Verdict:
    kind = PeerLost if info.rank else MasterLost
    return verdict_about(info, kind(f"{info.who} {what}", why=why, next=next), exit_code)


def rank_0_lost(run: RunInfo, beat: Beat, what: str, why: str) -> MasterLost:
    """Another rank has lost rank 0.

    Args:
        beat: what that other rank was doing.
    """
    return MasterLost(
        f"rank 0 ({run.host}, pid {run.pid}) {what}",
        why=f"{why}\nthis rank was {beat.at_step()}",
        next=f"look at rank 0's last lines and at {run.host}, then {run.start_again}",
    )


def gone(info: RankInfo, beat: Beat, reason: str, again: str) -> Verdict:
    """The connection of a rank's agent has ended: so has the agent, or its host."""
    return _lost(
        info,
        "is gone without a word",
        why=f"its connection to rank 0 ended: {reason}; agent and worker of that rank have both ended, or its host "
        f"has\nit was {beat.at_step()}, when it was last heard",
        next=f"look at its last lines; if there are none its agent was killed, or {info.host} is down\nthen {again}",
    )


def lost(info: RankInfo, beat: Beat, again: str, *, status: int | None, oom: bool, stack: str) -> Verdict:
    """A rank's worker has ended without a word; its agent says how.

    Args:
        status: its exit code, or minus the signal's number; None if nobody could see that.
        oom: whether the kernel ended it because memory ran out.
        stack: the Python stack that a native crash has left.
    """
    next = "look at its last lines"
    if status is None:
        what, why = "its process has ended", "nobody could see how it ended"
    elif oom:
        what = f"{signal_name(-status)}, since memory ran out"
        why = "the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill"
        next = "give it more memory, or a smaller --batch_size"
    elif -status in CRASHES:
        what = signal_name(-status)
        why = f"its worker crashed in native code: {what}"
        next = "mend the call that the stack shows; its last lines may say more"
    elif status < 0:
        what = signal_name(-status)
        why = f"{what} ended its worker; no memory cgroup of it has run out of memory"
        next = f"look at its last lines, and at who sends signals on {info.host}"
    else:
        what = f"its worker exited with code {status} without a word"
        why = "the program ended itself, or its interpreter could not go on"
    where = f"it was {beat.at_step()}, when it was last heard"
    return _lost(
        info,
        f"is gone: {what}",
        why="\n".join(filter(None, (why, where, stack and f"its Python stack:\n{stack[-LONGEST_TEXT:]}"))),
        next=f"{next}\nthen {again}",
        exit_code=1 if status is None else 128 - status if status < 0 else status,
    )


def stopped(info: RankInfo, beat: Beat, seconds: float, again: str) -> Verdict:
    """A signal has stopped a rank's worker, and nobody has let it go on."""
    return _lost(
        info,
        f"has been stopped by {beat.stopped} for {seconds:.0f} s",
        why=f"it was {beat.at_step()}; its agent runs, and sees its worker stopped",
        next=f"let nobody stop it (Ctrl-Z, a batch system), or give a larger --peer_timeout\nthen {again}",
    )


def lost_its_place(info: RankInfo, seconds: float) -> PeerLost:
    """A rank was frozen during the roll call; it reads this when it goes on."""
    return PeerLost(
        f"{info.who} was silent for {seconds:.0f} s, and has lost its place",
        why="its agent was stopped or frozen, or the network was cut, while rank 0 waited for other ranks",
        next="start this rank again: the others still wait for it",
    )


def is_stopped(info: RankInfo, name: str) -> str:
    return f"{info.who} is stopped: {name}; on {info.host}, kill -CONT {info.pid} lets it go on"


def is_debugging(info: RankInfo, beat: Beat) -> str:
    return f"{info.who} is in a debugger, on {beat.place or 'a line of its own'}: the other ranks wait for it"


def finished_early(info: RankInfo, place: str, early: Sequence[int]) -> Verdict:
    """A rank waits in a collective for ranks that have done their work."""
    error = PeerLost(
        f"{in_words(as_ranges(early))} had finished while rank {info.rank} was still in a collective",
        why="a collective needs every rank, and they did not make the same number of calls\n"
        f"this one was on {place or 'no line of Python'}",
        next="give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for less\n"
        "and let no rank alone, as below `if rank == 0`, call a collective or what contains one: a step, train()",
    )
    return verdict_about(info, error)


def silent(found: Sequence[tuple[RankInfo, Beat, float]], world_size: int, again: str) -> Verdict:
    """The first rank of ``found`` has been silent for too long; the others soon will be."""
    member, beat, seconds = found[0]
    why = [f"it was {beat.at_step()}, when it was last heard"]
    if len(found) > 1:
        others = ", ".join(other.who for other, _, _ in found[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
        why.append(f"as silent: {others}")
    why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
    if world_size > 2 and len(found) == world_size - 1:
        why[-1] = "rank 0 hears nobody any more: it may be rank 0's own host that is cut off"
    return _lost(
        member,
        f"has been silent for {seconds:.0f} s",
        why="\n".join(why),
        next=f"look whether {member.host} can be reached, and whether its process runs: ps -o stat= -p {member.pid}\n"
        f"then {again}",
    )


def stalled(
    members: Sequence[RankInfo], stall: Stall, beats: Mapping[int, Beat], stacks: Mapping[int, str], again: str
) -> Verdict:
    """Ranks are alive, and do not come to the collective in which the others wait."""
    shown = stall.behind[:2] or one_per_place(stall, beats)
    why = _places(members, [*stall.behind, *stall.waiting], beats)
    if stall.fewer:
        why.append(
            f"{in_words(as_ranges(sorted(stall.fewer)))} began fewer collectives than the others: cut off in the last "
            "one, or busy inside torch before the next"
        )
    why += [_stack(members[rank], stacks.get(rank)) for rank in shown]
    if stall.behind:
        first, *others = stall.behind
        info = members[first]
        also = f", and {in_words(as_ranges(others))}" if others else ""
        waiting = f"{in_words(as_ranges(sorted(stall.waiting)))} wait" + "s" * (len(stall.waiting) == 1)
        what = f"{info.who}{also} is stuck while others wait: {waiting} for {stall.seconds:.0f} s"
        next = "mend what the stack shows; work that takes this long while others wait needs a larger --stall_timeout"
    else:
        info = members[stall.waiting[0]]
        what = f"all ranks have waited in a collective for {stall.seconds:.0f} s, and none is behind"
        next = (
            "a connection between two of them may be cut: ddp-manual check tries them all\n"
            "or a step takes longer than that, and needs a larger --stall_timeout"
        )
        if len(shown) > 1:
            next = (
                "look at their lines: a collective is for all ranks, so neither one nor what calls one (a step, "
                f"train()) may be below a line such as `if rank == 0`\nor {next}"
            )
    return verdict_about(info, PeerStalled(what, why="\n".join(why), next=f"{next}\nthen {again}"))


def one_per_place(stall: Stall, beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks whose stacks to show: one for each line of the program on which ranks wait, two at most."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(beats[rank].place, rank)
    return sorted([*first.values()][:2])


def _places(members: Sequence[RankInfo], ranks: Sequence[int], beats: Mapping[int, Beat]) -> list[str]:
    shown = [
        f"{members[rank].who}: {beats[rank].at_step()}, on {beats[rank].place or 'no line of Python'}"
        for rank in ranks[:MOST_NAMED]
    ]
    return [*shown, *(["..."] if len(ranks) > MOST_NAMED else [])]


def _stack(member: RankInfo, text: str | None) -> str:
    if text is None:
        return f"{member.who} did not say where it is within the time for it"
    return f"the Python stack of {member.who}:\n{text[-LONGEST_TEXT:]}"


def slow(member: RankInfo, seconds: float, median: float) -> str:
    return (
        f"{member.who} is slow: its own part of a step takes {1e3 * seconds:.1f} ms, {seconds / median:.1f} times the "
        f"median of all ranks, and all wait for it (named once)"
    )
