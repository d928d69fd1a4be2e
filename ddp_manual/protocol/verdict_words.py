"""The verdict that ends a run, as every rank prints it: which rank is gone, silent or stuck, where, and what next.

``lost_or_to_blame.py`` decides, on rank 0, when there is one.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence

from msgspec.structs import asdict, replace

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    MasterLost,
    PeerFailed,
    PeerLost,
    PeerStalled,
    ReplicasDiffer,
    TrainingFailed,
    signal_name,
)
from ddp_manual.protocol.collective_comparison import rank_words
from ddp_manual.protocol.reachability import Pair, unreachable
from ddp_manual.protocol.roll_call import MOST_NAMED
from ddp_manual.protocol.stalls import Stall
from ddp_manual.ranks_and_runs import LONGEST_TEXT, Beat, LastWords, RankInfo, RunInfo, Verdict
from ddp_manual.wording import as_ranges, counted, in_words

# Errors that all ranks find at the same moment, with the same words.
FOUND_ALIKE = (ConfigMismatch.identifier, ReplicasDiffer.identifier)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)


def verdict_about(info: RankInfo, words: LastWords, *, judged: bool = True) -> Verdict:
    """Return a verdict about a rank with these last words.

    Args:
        judged: whether they are from the coordinator or the rank's agent, not from its worker.
    """
    return Verdict(**asdict(words), rank=info.rank, host=info.host, pid=info.pid, judged=judged)


def error_for(rank: int, verdict: Verdict) -> DdpManualError:
    """Return the error that ends ``rank``: its own, the coordinator's, or that another rank has failed."""
    error = verdict.error()
    if verdict.rank == rank:
        return error
    if verdict.judged or verdict.identifier in FOUND_ALIKE:
        error.exit_code = type(error).exit_code
    else:
        said = verdict.what.removeprefix(f"rank {verdict.rank} on {verdict.host}: ")
        error = PeerFailed(
            f"rank {verdict.rank} ({verdict.host}, pid {verdict.pid}) left with error[{verdict.identifier}]: {said}",
            why=verdict.why,
            next=verdict.next,
        )
        error.of_rank = verdict.rank
    error.on_its_rank = verdict.identifier, verdict.exit_code
    return error


def lost_rank(info: RankInfo, what: str, *, why: str, next: str, exit_code: int | None = None) -> Verdict:
    words = LastWords.of((PeerLost if info.rank else MasterLost)(f"{info.who} {what}", why=why, next=next))
    return verdict_about(info, words if exit_code is None else replace(words, exit_code=exit_code))


def closed_because(info: RankInfo, beat: Beat, waiting: int) -> Verdict:
    """Return the verdict about a rank that has closed its process group because of an exception of its own code, and
    has not ended yet; the rank ``waiting`` is in a collective of that group."""
    error = TrainingFailed(
        f"rank {info.rank} on {info.host}: {beat.raised}",
        why=f"it has closed its process group because of that, while rank {waiting} was still in a collective\n"
        f"it was {beat.last_seen()}, and had not ended yet",
        next="fix the code or the data that raised it, then start all ranks again",
    )
    return verdict_about(info, LastWords.of(error), judged=False)


def rank_0_lost(run: RunInfo, beat: Beat, what: str, why: str) -> MasterLost:
    """Return the error for a rank that has lost rank 0; ``beat`` is what that rank was doing."""
    return MasterLost(
        f"rank 0 ({run.host}, pid {run.pid}) {what}",
        why=f"{why}\nthis rank was {beat.last_seen()}",
        next=f"look at rank 0's last lines and at {run.host}, then {run.start_again}",
    )


STORE_REPLACED = (
    "rank 0's program has become another one (exec), without torch's store, which was in its process: no rank can open "
    "a process group"
)
WITHOUT_PYTHON = "start it with --no_python, as --no_python python train.py: then torch hosts the store in the program"


def lost(
    info: RankInfo, beat: Beat, again: str, *, status: int | None, oom: bool, stack: str, replaced: bool = False
) -> Verdict:
    """Return the verdict that an agent sends if its worker has ended without a word.

    Args:
        status: its exit code, or minus the signal's number; None if nobody could see that.
        oom: whether the kernel ended it because memory ran out.
        stack: the Python stack that a native crash has left.
        replaced: whether its program had become another one by exec, on rank 0.
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
        next = "repair the call that the stack shows; its last lines may say more"
        if status == -signal.SIGABRT and not stack:
            next += "\nif they say 'terminate called without an active exception', a thread of gloo still held a tensor"
            next += "\nwhile Python ended: call torch.distributed.destroy_process_group() at the end of the program"
    elif status < 0:
        what = signal_name(-status)
        why = f"{what} ended its worker; its memory cgroup has not run out of memory"
        next = f"look at its last lines, and at who sends signals on {info.host}"
    else:
        what = f"its worker exited with code {status} without a word"
        why = "the program ended itself, or its interpreter could not go on"
    where = f"it was {beat.last_seen()}, when it was last heard"
    if replaced:
        why, next = f"{why}\n{STORE_REPLACED}", WITHOUT_PYTHON
    return lost_rank(
        info,
        f"is gone: {what}",
        why="\n".join(filter(None, (why, where, stack and f"its Python stack:\n{stack[-LONGEST_TEXT:]}"))),
        next=f"{next}\nthen {again}",
        exit_code=1 if status is None else 128 - status if status < 0 else status,
    )


def stalled(
    members: Mapping[int, RankInfo],
    stall: Stall,
    beats: Mapping[int, Beat],
    stacks: Mapping[int, str],
    again: str,
    cut: Sequence[Pair] = (),
) -> Verdict:
    """Return the verdict about ranks that are alive, and do not come to the collective in which the others wait.

    Args:
        cut: the hosts that cannot connect to each other any more.
    """
    shown = stall.behind[:2] or one_per_place(stall, beats)
    ranks = [*stall.behind, *stall.waiting]
    why = [
        f"{members[rank].who}: {beats[rank].at_step()}, on {beats[rank].place or 'no line of Python'}"
        + f", {counted(beats[rank].unfinished, 'collective')} not completed by its GPU" * (beats[rank].unfinished > 0)
        for rank in ranks[:MOST_NAMED]
    ]
    if len(ranks) > MOST_NAMED:
        why.append("...")
    if stall.fewer:
        why.append(
            f"{in_words(as_ranges(sorted(stall.fewer)))} began fewer collectives than the others: cut off in the last "
            "one, or busy inside torch before the next"
        )
    for rank in shown:
        if rank in stacks:
            why.append(f"the Python stack of {members[rank].who}:\n{stacks[rank][-LONGEST_TEXT:]}")
        else:
            why.append(f"{members[rank].who} did not send its Python stack in time")
    if stall.behind:
        first, *others = stall.behind
        info = members[first]
        also = f", and {in_words(as_ranges(others))}" if others else ""
        waiting = f"{in_words(as_ranges(sorted(stall.waiting)))} wait" + "s" * (len(stall.waiting) == 1)
        are = "are" if others else "is"
        what = f"{info.who}{also} {are} stuck while others wait: {waiting} for {stall.seconds:.0f} s"
        next = f"repair what the stack shows; work that takes this long while others wait needs {stall.longest.larger}"
    else:
        info = members[stall.waiting[0]]
        what = f"all ranks have waited in a collective for {stall.seconds:.0f} s"
        next = (
            "a connection between two of them may be cut: ddp-manual check tries them all\n"
            f"or a step takes longer than that, and needs {stall.longest.larger}"
        )
        if any(beats[rank].unfinished for rank in ranks):
            next = f"{next}\nor one of their GPUs hangs: nvidia-smi on each host, and dmesg for Xid"
        if len(shown) > 1:
            next = (
                "look at their lines: a collective is for all ranks, so no collective, and no call that contains one "
                f"(a step, train()), may be below a line such as `if rank == 0`\nor {next}"
            )
        if cut:
            apart = unreachable(cut)
            what, why = f"{what}: {apart.what}", [apart.why, *why]
            next = "they could when the run began: look at cables, switches and firewalls between these hosts"
        else:
            what = f"{what}, and none is behind"
    return verdict_about(info, LastWords.of(PeerStalled(what, why="\n".join(why), next=f"{next}\nthen {again}")))


def with_last_collectives(verdict: Verdict, last: Mapping[int, str]) -> Verdict:
    """Return the verdict about ranks that wait for each other with a line for each last collective in ``last``, which
    names all ranks that began it."""
    together: dict[str, list[int]] = {}
    for rank, words in last.items():
        together.setdefault(words, []).append(rank)
    lines = [f"{rank_words(ranks)} began last {words}" for words, ranks in [*together.items()][:MOST_NAMED]]
    return replace(verdict, why="\n".join([verdict.why, *lines, *["..."] * (len(together) > MOST_NAMED)]))


def one_per_place(stall: Stall, beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks whose stacks to show: one for each line of the program on which ranks wait, two at most."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(beats[rank].place, rank)
    return sorted([*first.values()][:2])
