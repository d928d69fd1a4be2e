"""The invariants, by their numbers, that are checked at the end of a simulated run; and how well faults are named."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, field

from ddp_manual.agent.reachability import CONNECT_TIMEOUT
from ddp_manual.errors import BadOption, PeerLost, PortInUse, RankMissing, RankTaken, TrainingFailed
from ddp_manual.protocol import states
from ddp_manual.protocol.reachability import ALL_PAIRS_UP_TO
from ddp_manual.signal_handlers import ONCE_WITHIN
from tests.simulation.plan import FOR_EVER, OF_LINKS, RECOVERABLE, SILENT, Fault
from tests.simulation.rank import TYPED_AGAIN_WITHIN, Rank
from tests.simulation.run import Run
from tests.simulation.worker import LEFT

# Faults after which the run goes on, so that no rank is to blame for them.
HARMLESS = ("type twice", "wrong world size", "type without the token", "garbage", "mute stranger", "shrink")
# A pause of fewer seconds is no fault: peer_timeout, and the time-outs of probes of rank 0 and of hosts, are longer.
SHORT = {"stop": 9.0, "freeze agent": 2.5, "freeze host": 2.5, "cut": 2.0, "cut one way": 2.0}

# Seconds from what ends a process until every rank has left, or has said that it waits: see docs/faults.md.
IN_SECONDS = 2.0
# Seconds for one step more, and for a worker that is to end.
STOPS_WITHIN = 5.0


def is_fault(fault: Fault) -> bool:
    if fault.kind in HARMLESS:
        return fault.rank == 0 and fault.kind == "wrong world size"  # that process may be the first rank 0
    return fault.seconds >= SHORT.get(fault.kind, 0.0)


def affected(run: Run, fault: Fault) -> set[int]:
    """Return the ranks that a verdict about this fault may name."""
    hosts = {run.plan.hosts[fault.rank]}
    if fault.kind in ("cut", "cut one way"):
        hosts.add(run.plan.hosts[fault.other])
    elif "host" not in fault.kind and not run.plan.launched:  # a launch ends with all ranks of its host
        hosts.clear()
    return {fault.rank, *(rank for rank, host in enumerate(run.plan.hosts) if host in hosts)}


def is_stuck_alone(rank: Rank) -> bool:
    """Return whether a rank is stuck and no other rank waits for it to say so, since its whole group is stuck."""
    program = rank.program
    return (
        program is not None and program.group is not None and all(one.hangs for one in program.group.members.values())
    )


def check(run: Run) -> None:
    """Add to ``run.broken`` the invariants that do not hold at the end of a run."""
    breaks = run.break_invariant
    plan = run.plan
    for error in run.loop.errors:
        breaks(19, f"an event raised {type(error).__name__}: {error}")
    faults = [fault for _, fault in run.struck if is_fault(fault)]
    for rank in run.ranks:
        stopped = rank.process.frozen or not rank.host.up
        if rank.runs and not stopped and not any(map(is_stuck_alone, run.of_process(rank))):
            breaks(1, f"{rank.who}, typed at {rank.typed:.2f} s, never ends")
        if rank.ended is None:
            continue
        errors = len(rank.errors)
        if errors != (rank.exit_code != 0):
            breaks(16, f"{rank.who} ends with {rank.exit_code} and {errors} errors")
        if rank.held is not None and rank.held.closed != 1:
            breaks(15, f"the memory of {rank.who} is closed {rank.held.closed} times")
        for worker in rank.workers:
            if not worker.closed:
                breaks(15, f"a worker of {rank.who} is never closed")
        expired = errors == 1 and "nobody has taken" in rank.errors[0].why and rank.held and rank.held.moment
        if expired and not run.plan.script and len(faults) == 1 and "saved a checkpoint" not in rank.errors[0].why:
            breaks(7, f"{rank.who} holds {rank.held.moment}, which dies by expiry without a checkpoint")
        error = rank.errors[0] if errors == 1 else None
        gave_up = isinstance(error, (BadOption, RankMissing))
        if error is not None and plan.launched:
            gave_up |= error.what.endswith(" has left") and plan.on_loss != "leave" and not run.finished
        elif error is not None and "seat was free" in error.what:
            gave_up |= not any(one.signals for one in run.ranks if one.number == 0)
        if error is not None and gave_up and rank.held is not None and rank.held.moment is not None:
            breaks(7, f"{rank.who} gives up {rank.held.moment}: {error.what}")
        check_what_is_held(run, rank)
        work_is_done = rank.program is not None and rank.program.phase == LEFT
        if rank.exit_code == 0 and not work_is_done:
            breaks(12, f"{rank.who} ends with 0, and its work is not done")
    recoverable = (
        plan.on_loss == "wait"
        and plan.shrink_after is None
        and plan.types_again >= 3
        and not plan.launched
        and len(run.struck) <= 3
    )
    recoverable &= len({fault.rank for _, fault in run.struck}) < plan.ranks  # one is always here, and holds the state
    pauses = [fault.seconds if fault.kind in SILENT else 0.0 for _, fault in run.struck]
    recoverable &= run.began is not None and sum(pauses) + TYPED_AGAIN_WITHIN * len(pauses) < plan.rejoin_timeout
    first_finished = min(run.finished.values(), default=run.loop.now)
    if recoverable and all(
        fault.kind in RECOVERABLE and (run.began or 0) < at and at + pause < first_finished
        for (at, fault), pause in zip(run.struck, pauses, strict=True)
    ):
        done = {rank.number for rank in run.ranks if rank.exit_code == 0}
        if len(done) < plan.ranks:
            breaks(20, f"a run that keeps its seats does not end: only ranks {sorted(done)} are done")
    came_second = [rank for rank in run.ranks if rank.belongs and _came_second(run, rank)]
    if not faults and len(plan.times) == plan.ranks and not (came_second and plan.launched):  # a launch ends with it
        for rank in run.ranks:
            if rank.belongs and rank.exit_code != 0 and rank not in came_second:
                breaks(17, f"{rank.who} ends with {rank.exit_code} in a run without a fault")
    if len(run.struck) == 1 and faults:
        check_time(run, *run.struck[0])
    check_signals(run)
    check_ways_out(run)
    check_who_is_cut_off(run)
    if len(faults) == 1:
        for rank in verdicts(run, faults[0]):
            if not names(run, rank, faults[0]):
                breaks(2, f"{rank.who} does not name the fault: {rank.errors[0].what}")
    blamed_falsely(run)


def check_time(run: Run, struck: float, fault: Fault) -> None:
    """Check that every rank is gone in time after the only fault of a run, which struck while all worked; in a run that
    keeps seats, that each has said something."""
    plan, within = run.plan, IN_SECONDS + 2 * run.plan.saves
    if fault.kind in ("freeze agent", "freeze host", "host vanishes", "stop") and fault.seconds == FOR_EVER:
        within += plan.peer_timeout + 1
    elif fault.kind in ("cut", "cut one way") and fault.seconds == FOR_EVER:
        of_rank_0 = plan.hosts[0] in (plan.hosts[fault.rank], plan.hosts[fault.other])
        within += plan.peer_timeout + 1 if of_rank_0 else plan.stall_timeout + CONNECT_TIMEOUT + 1.2 * plan.step_seconds
    elif fault.kind == "hang":
        within += plan.stall_timeout + 1.2 * plan.step_seconds
    elif fault.kind == "raise":  # a rank raises before its next collective
        within += 1.2 * plan.step_seconds
    elif fault.kind not in ("kill", "abort", "exit", "kill agent"):
        return
    finished = min(run.finished.values(), default=run.loop.now)
    if run.began is None or not run.began < struck < finished or (plan.launched and plan.on_loss != "leave"):
        return
    for rank in run.ranks:
        if rank.number in run.finished:
            continue  # a program that is done is given the time to leave by itself
        if plan.on_loss == "leave" and rank.ended is not None and rank.ended - struck > within:
            run.break_invariant(3, f"{rank.who} has left {rank.ended - struck:.1f} s after {fault}")
        said = [at for at, _ in rank.lines if struck <= at <= struck + within]
        left = rank.ended is not None and rank.ended <= struck + within
        if rank.typed < struck and not (left or said or rank.killed or rank.process.frozen or not rank.host.up):
            run.break_invariant(3, f"{rank.who} has said nothing {within:.1f} s after {fault}")


def check_what_is_held(run: Run, rank: Rank) -> None:
    """Check that a rank which looks for rank 0 keeps what it holds, whatever becomes of its idle worker."""
    state = rank.agent.rank.state if rank.agent is not None else None
    looked = isinstance(state, states.Ended) and isinstance(state.was, states.Looking)
    if looked and rank.errors and rank.errors[0].identifier in (PeerLost.identifier, TrainingFailed.identifier):
        run.break_invariant(7, f"{rank.who} looked for rank 0, and gives up: {rank.errors[0].what}")


def check_ways_out(run: Run) -> None:
    """Check that, once all have done their work, no rank fails because another one ends or is silent, and none leaves
    late. Without kept seats check only the latter: there the end of any worker ends all ranks."""
    harmless = {*HARMLESS, *SILENT} - {"stop"}
    struck = set[int]().union(*(affected(run, fault) for _, fault in run.struck if fault.kind not in harmless))
    for rank in run.ranks:
        program = rank.program
        if rank.number in struck or not rank.belongs or rank.killed or rank.signals or rank.ended is None:
            continue
        told = next((worker._program for worker in rank.workers if worker._program.closes_with_all), None)
        told = None if run.plan.on_loss == "leave" else told
        if told is not None and told.has_left_by_itself and (rank.exit_code != 0 or told is not program):
            how = rank.errors[0].what if rank.errors else "another worker"
            run.break_invariant(12, f"{rank.who} ends with {rank.exit_code}, and all had done their work: {how}")
        late = rank.ended - max(run.finished.values(), default=rank.ended)
        if not run.struck and late > IN_SECONDS + run.plan.closes[1]:
            run.break_invariant(12, f"{rank.who} leaves {late:.1f} s after all had done their work")


def check_who_is_cut_off(run: Run) -> None:
    """Check that a rank which has worked is given up as cut off only if another one that has worked was cut off from it
    or silent: where a newcomer cannot be reached, the newcomer has to go."""
    kinds = {*SILENT} - {*OF_LINKS}
    silent = set[int]().union(*(affected(run, fault) for _, fault in run.struck if fault.kind in kinds))
    for rank in run.ranks:
        error, here = next(iter(rank.errors), None), rank.host.number
        if error is None or error.identifier != "peer-unreachable" or "start this rank" not in error.next:
            continue
        worked = [one for one in run.ranks if one.worked_since < (rank.ended or run.loop.now) - CONNECT_TIMEOUT]
        cut = {host for pair in run.network.were_cut if here in pair for host in pair} - {here}
        excused = rank.number in silent or any(one.number in silent or one.host.number in cut for one in worked)
        if rank in worked and not excused:
            run.break_invariant(2, f"{rank.who} is given up for the sake of a newcomer: {error.what}")


def check_signals(run: Run) -> None:
    """Check that the first signal stops all ranks after one step more, or gives a verdict; the second ends its rank."""
    for rank in run.ranks:
        if rank.insists and rank.errors and "at once" not in rank.errors[0].what:
            run.break_invariant(9, f"{rank.who} does not end by a second signal: {rank.errors[0].what}")
        times = [at for at, _ in rank.signals]
        second = next((at for at in times if at > times[0] + ONCE_WITHIN), None)
        if any(fault.kind.startswith("freeze") and rank.number in affected(run, fault) for _, fault in run.struck):
            continue
        if second is not None and rank.ended is not None and rank.ended - second > IN_SECONDS + STOPS_WITHIN:
            run.break_invariant(9, f"{rank.who} leaves {rank.ended - second:.1f} s after a second signal")
    plan, asked = run.plan, [rank for rank in run.ranks if rank.signals]
    others = [fault for _, fault in run.struck if not fault.kind.startswith("ctrl-c") and fault.kind not in HARMLESS]
    if not asked or others:
        return
    at, step = min(rank.signals[0] for rank in asked)
    if run.began is None or not run.began < at < min(run.finished.values(), default=run.loop.now):
        return
    for rank in run.ranks:
        late = rank.ended - at if rank.belongs and rank.ended is not None else 0.0
        if plan.script and late > STOPS_WITHIN + 2 * plan.saves + plan.works_on:
            run.break_invariant(9, f"{rank.who} leaves {late:.1f} s after the first signal")
    # A signal before the first step is done ends its rank; a signal as all finish finds nothing to stop.
    stopped = [rank for rank in asked if rank.program is not None and rank.program.has_stopped]
    others_go_on = step == 0 and plan.on_loss != "leave" and not stopped
    stops = 0 < step < plan.steps - 2 and all(len(rank.signals) == 1 for rank in asked)
    here = [rank for rank in run.ranks if rank.ended is None or rank.ended > at]  # not one that came second
    for rank in here if not plan.script else ():
        last = rank.program.step if rank.program is not None else 0
        if stops and rank.belongs and rank.program is not None and not rank.program.has_stopped:
            run.break_invariant(9, f"{rank.who} does not stop in order at the first signal")
        is_late = rank.ended is not None and (rank.ended - at > STOPS_WITHIN or last > step + 2)
        if rank.belongs and is_late and (rank in asked or not others_go_on):
            run.break_invariant(9, f"{rank.who} leaves after step {last}: step {step} was done at the first signal")
        if rank.belongs and rank.exit_code == 0 and last < plan.steps:
            run.break_invariant(9, f"{rank.who} leaves after step {last} without a verdict")


def _came_second(run: Run, rank: Rank) -> bool:
    """Return whether a second process of this rank was typed, and has come first: to rank 0, or to rank 0's port."""
    was_typed_twice = any(fault.kind == "type twice" and fault.rank == rank.number for _, fault in run.struck)
    return was_typed_twice and bool(rank.errors) and isinstance(rank.errors[0], (PortInUse, RankTaken))


def verdicts(run: Run, fault: Fault) -> list[Rank]:
    """Return the ranks whose error has to name the fault; the affected ranks only if their error is about a peer."""
    ranks = affected(run, fault)
    return [
        rank
        for rank in run.ranks
        if rank.errors
        and rank.belongs
        and rank.errors[0].identifier != "rank-taken"
        and not (rank.number in ranks and not _judged(rank))
    ]


def _judged(rank: Rank) -> bool:
    return rank.errors[0].identifier in ("peer-lost", "peer-failed", "peer-stalled")


def names(run: Run, rank: Rank, fault: Fault) -> bool:
    """Return whether the error that has ended a rank names the rank or the host of the fault."""
    error = rank.errors[0]
    if run.plan.launched and error.what.endswith(" has left"):  # in the same terminal the rank that has left says why
        beside = [one for one in run.of_process(rank) if one.errors and not one.errors[0].what.endswith(" has left")]
        return any(names(run, one, fault) for one in beside)
    text = f"{error.what}\n{error.why}"
    ranks = affected(run, fault)
    hosts = {run.network.hosts[run.plan.hosts[number]].name for number in ranks}
    if fault.kind in ("cut", "cut one way"):
        # With so many hosts not all pairs are tried, so no rank knows between which two the network is cut.
        is_suspected = len(set(run.plan.hosts)) > ALL_PAIRS_UP_TO and "may be cut" in error.next
        if is_suspected or any(host in text for host in hosts):
            return True
    if error.identifier.startswith("master-") and 0 in ranks:
        return True
    numbers = set(map(int, re.findall(r"\branks? (\d+)", text)))
    for first, last in re.findall(r"(\d+)(?:-| to | and |, )(\d+)", text):
        numbers |= {int(first), int(last)}
    return bool(numbers & ranks) or (error.identifier == "stopped" and fault.kind.startswith("ctrl-c"))


def blamed_falsely(run: Run) -> None:
    """Check that no verdict begins with a rank that nothing has struck."""
    guilty = set[int]().union(*(affected(run, fault) for _, fault in run.struck if fault.kind not in HARMLESS))
    guilty |= {rank.number for rank in run.ranks if rank.killed} | run.frozen_with_host
    for rank in run.ranks:
        if (found := blamed(rank)) and not guilty & found:
            run.break_invariant(2, f"{rank.who} blames a healthy rank: {rank.errors[0].what}")


def blamed(rank: Rank) -> set[int]:
    """Return the ranks that a verdict begins with."""
    judged = rank.errors and rank.belongs and _judged(rank)
    return set(map(int, re.findall(r"rank (\d+) \(", rank.errors[0].what))) if judged else set()


@dataclass
class Figures:
    """Counts over many runs."""

    named: int = 0
    verdicts: int = 0
    rightly: int = 0
    blames: int = 0
    endings: Counter[str] = field(default_factory=Counter)

    def add(self, run: Run) -> None:
        faults = [fault for _, fault in run.struck if is_fault(fault)]
        if len(faults) == 1:
            found = verdicts(run, faults[0])
            self.verdicts += len(found)
            self.named += sum(names(run, rank, faults[0]) for rank in found)
            blames = [ranks for rank in run.ranks if (ranks := blamed(rank))]
            self.blames += len(blames)
            self.rightly += sum(bool(ranks & affected(run, faults[0])) for ranks in blames)
        codes = {rank.exit_code for rank in run.ranks if rank.belongs and not rank.killed}
        self.endings["all done" if codes == {0} else "ended" if 0 not in codes else "mixed"] += 1

    def __str__(self) -> str:
        endings = ", ".join(f"{what} {count}" for what, count in sorted(self.endings.items()))
        precision = self.rightly / self.blames if self.blames else 1.0
        recall = self.named / self.verdicts if self.verdicts else 1.0
        blames = f"precision {precision:.4f} (of {self.blames} ranks that are blamed)"
        return f"{endings}; after one fault: {blames}, recall {recall:.4f} (of {self.verdicts} verdicts)"
