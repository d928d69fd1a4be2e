"""The verdict that ends a run, as every rank prints it: which rank is lost or stuck, where, and what next.

``lost_or_to_blame.py`` decides, on rank 0, when there is one, and has the words for ranks that are gone or silent.
"""

from __future__ import annotations

import re
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
)
from ddp_manual.protocol.collective_comparison import rank_words
from ddp_manual.protocol.health import Health
from ddp_manual.protocol.reachability import Pair, unreachable
from ddp_manual.protocol.roll_call import MOST_NAMED, RollCall
from ddp_manual.protocol.stalls import Stall
from ddp_manual.ranks_and_runs import LONGEST_TEXT, Beat, LastWords, RankInfo, RunInfo, Verdict
from ddp_manual.wording import as_ranges, counted, in_words

# Errors that all ranks find at the same moment, with the same words.
FOUND_ALIKE = (ConfigMismatch.identifier, ReplicasDiffer.identifier)


def verdict_about(info: RankInfo, words: LastWords, *, judged: bool = True, is_loss: bool = False) -> Verdict:
    """Return a verdict about a rank with these last words; ``Verdict`` says what the arguments mean."""
    return Verdict(**asdict(words), rank=info.rank, host=info.host, pid=info.pid, judged=judged, is_loss=is_loss)


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


def without_start_again(next: str) -> str:
    """Return what there is to do before all ranks are started again."""
    return re.sub(r"(\W+then |^)start all ranks again\b.*", "", next, flags=re.DOTALL)


def lost_rank(info: RankInfo, what: str, *, why: str, next: str) -> DdpManualError:
    return (PeerLost if info.rank else MasterLost)(f"{info.who} {what}", why=why, next=next)


def closed_because(info: RankInfo, beat: Beat, waiting: int, then: str) -> Verdict:
    """Return the verdict about a rank that has closed its process group because of an exception of its own code, and
    has not ended yet; the rank ``waiting`` needs that group, and ``then`` is a line about what became of it."""
    error = TrainingFailed(
        f"rank {info.rank} on {info.host}: {beat.raised}",
        why=f"it has closed its process group because of that, and rank {waiting} cannot go on without it\n"
        f"it was {beat.last_seen()}, and had not ended yet{then}",
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


def stalled(
    roll_call: RollCall, health: Health, stall: Stall, stacks: Mapping[int, str], cut: Sequence[Pair]
) -> Verdict:
    """Return the verdict about ranks that are alive, and do not come to the collective in which the others wait.

    Args:
        cut: the hosts that cannot connect to each other any more.
    """
    shown = stall.behind[:2] or one_per_place(stall, health)
    why = _where_they_are(roll_call, health, stall, stacks, shown)
    if stall.behind:
        first, *others = stall.behind
        info = roll_call.info(first)
        also = f", and {in_words(as_ranges(others))}" if others else ""
        waiting = f"{in_words(as_ranges(sorted(stall.waiting)))} wait" + "s" * (len(stall.waiting) == 1)
        are = "are" if others else "is"
        what = f"{info.who}{also} {are} stuck while others wait: {waiting} for {stall.seconds:.0f} s"
        next = f"repair what the stack shows; work that takes this long while others wait needs {stall.longest.larger}"
    else:
        info = roll_call.info(stall.waiting[0])
        what = f"all ranks have waited in a collective for {stall.seconds:.0f} s"
        next = (
            "a connection between two of them may be cut: ddp-manual check tries them all\n"
            f"or a step takes longer than that, and needs {stall.longest.larger}"
        )
        if any(health.beat(rank).unfinished for rank in stall.waiting):
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
    error = PeerStalled(what, why="\n".join(why), next=f"{next}\nthen {roll_call.run.start_again}")
    return verdict_about(info, LastWords.of(error))


def _where_they_are(
    roll_call: RollCall, health: Health, stall: Stall, stacks: Mapping[int, str], shown: Sequence[int]
) -> list[str]:
    """Return lines about where stalled ranks are, with the Python stacks of the ranks ``shown``."""
    ranks = [*stall.behind, *stall.waiting]
    why = []
    for rank in ranks[:MOST_NAMED]:
        beat = health.beat(rank)
        gpu = f", {counted(beat.unfinished, 'collective')} not completed by its GPU" if beat.unfinished > 0 else ""
        why.append(f"{roll_call.info(rank).who}: {beat.at_step()}, on {beat.place or 'no line of Python'}{gpu}")
    if len(ranks) > MOST_NAMED:
        why.append("...")
    if stall.fewer:
        why.append(
            f"{in_words(as_ranges(sorted(stall.fewer)))} began fewer collectives than the others: cut off in the last "
            "one, or busy inside torch before the next"
        )
    for rank in shown:
        if rank in stacks:
            why.append(f"the Python stack of {roll_call.info(rank).who}:\n{stacks[rank][-LONGEST_TEXT:]}")
        else:
            why.append(f"{roll_call.info(rank).who} did not send its Python stack in time")
    return why


def with_last_collectives(verdict: Verdict, last: Mapping[int, str]) -> Verdict:
    """Return the verdict about ranks that wait for each other with a line for each last collective in ``last``, which
    names all ranks that began it."""
    together: dict[str, list[int]] = {}
    for rank, words in last.items():
        together.setdefault(words, []).append(rank)
    lines = [f"{rank_words(ranks)} began last {words}" for words, ranks in [*together.items()][:MOST_NAMED]]
    return replace(verdict, why="\n".join([verdict.why, *lines, *["..."] * (len(together) > MOST_NAMED)]))


def one_per_place(stall: Stall, health: Health) -> list[int]:
    """Return the ranks whose stacks to show: one for each line of the program on which ranks wait, two at most."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(health.beat(rank).place, rank)
    return sorted([*first.values()][:2])
