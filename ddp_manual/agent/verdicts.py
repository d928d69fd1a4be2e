"""The verdict that ends a run, as every rank prints it: which rank is gone, silent or stuck, where, and what next.

``Watch`` decides on rank 0, from heartbeats and last words, when there is one.
"""

from __future__ import annotations

import asyncio
import itertools
import signal
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_manual.agent.collectives import Comparison, rank_words
from ddp_manual.agent.handshakes import Peer
from ddp_manual.agent.health import Health, Stall
from ddp_manual.agent.roll_call import MOST_NAMED, RollCall
from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    MasterLost,
    OutOfMemory,
    PeerFailed,
    PeerLost,
    PeerStalled,
    ReplicasDiffer,
    TrainingFailed,
    from_dict,
    signal_name,
)
from ddp_manual.messages import (
    LEAVE,
    LONGEST_TEXT,
    Beat,
    RankInfo,
    RunInfo,
    Verdict,
    last_words,
    more_seconds,
    shortened,
)
from ddp_manual.terminal import as_ranges, counted, in_words
from ddp_manual.wire import encode

# All ranks find these at the same moment, with the same words.
FOUND_ALIKE = (ConfigMismatch.identifier, ReplicasDiffer.identifier)
# An error of a rank's own code after which another try may go well.
MAY_NOT_RECUR = (TrainingFailed.identifier, OutOfMemory.identifier)
CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
STACKS_WITHIN = 2.0
# Shorter than an agent whose worker has failed waits for a verdict, also if rank 0 has to ask twice.
RECORDS_WITHIN = 0.8
# What the number of any other request is not.
STACKS = 0
# Seconds within which ranks that did the same work have all finished. Rank 0 alone waits longer for a slower rank; a
# rank that is stuck in a collective has to see the other ranks close their process groups.
FINISH_TOGETHER = 1.0
# Seconds from a collective that broke until it is known which rank is to blame.
BLAME_WITHIN = 1.5
# Seconds until a line says that ranks of a program wait for others, long before that ends the run.
STALL_LINE = 300.0
# Ranks that have a line each, of those that are stopped, slow or in a debugger at the same moment.
MOST_LINES = 8
# Seconds that ranks wait in a collective for ranks that have finished.
IN_VAIN = 2.0


def verdict_about(info: RankInfo, words: Mapping[str, Any], *, judged: bool = True) -> Verdict:
    """Make a verdict of ``last_words`` about a rank.

    Args:
        judged: whether the coordinator or the rank's agent says them, not its worker.

    Raises:
        KeyError, TypeError, ValueError: they are not an error.
    """
    about = {"rank": info.rank, "host": info.host, "pid": info.pid, "exit_code": int(words["exit_code"])}
    return {**shortened(words), **about, **({"judged": True} if judged else {})}


def error_for(rank: int, verdict: Mapping[str, Any]) -> DdpManualError:
    """Return the error that ends ``rank``: its own, the coordinator's, or that another rank has failed."""
    if verdict["rank"] == rank:
        return from_dict(shortened(verdict), int(verdict["exit_code"]))
    if verdict.get("judged") or verdict["identifier"] in FOUND_ALIKE:
        error = from_dict(shortened(verdict))
    else:
        who = f"rank {verdict['rank']} ({verdict['host']}, pid {verdict['pid']})"
        error = PeerFailed(
            f"{who} left with error[{verdict['identifier']}]",
            why="\n".join(filter(None, (str(verdict["what"]), str(verdict["why"])))),
            next=str(verdict["next"]),
        )
    error.on_its_rank = str(verdict["identifier"]), int(verdict["exit_code"])
    return error


def _lost(info: RankInfo, what: str, *, why: str, next: str, exit_code: int | None = None) -> Verdict:
    error = (PeerLost if info.rank else MasterLost)(f"{info.who} {what}", why=why, next=next)
    return verdict_about(info, {**last_words(error), "exit_code": exit_code or error.exit_code})


def rank_0_lost(run: RunInfo, beat: Beat, what: str, why: str) -> MasterLost:
    """Return the error for a rank that has lost rank 0; ``beat`` is what that rank was doing."""
    return MasterLost(
        f"rank 0 ({run.host}, pid {run.pid}) {what}",
        why=f"{why}\nthis rank was {beat.last_seen()}",
        next=f"look at rank 0's last lines and at {run.host}, then {run.start_again}",
    )


def lost(info: RankInfo, beat: Beat, again: str, *, status: int | None, oom: bool, stack: str) -> Verdict:
    """Make the verdict that an agent sends whose worker has ended without a word.

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
    return _lost(
        info,
        f"is gone: {what}",
        why="\n".join(filter(None, (why, where, stack and f"its Python stack:\n{stack[-LONGEST_TEXT:]}"))),
        next=f"{next}\nthen {again}",
        exit_code=1 if status is None else 128 - status if status < 0 else status,
    )


def stalled(
    members: Mapping[int, RankInfo], stall: Stall, beats: Mapping[int, Beat], stacks: Mapping[int, str], again: str
) -> Verdict:
    """Make the verdict about ranks that are alive, and do not come to the collective in which the others wait."""
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
        what = f"{info.who}{also} is stuck while others wait: {waiting} for {stall.seconds:.0f} s"
        next = "repair what the stack shows; work that takes this long while others wait needs a larger --stall_timeout"
    else:
        info = members[stall.waiting[0]]
        what = f"all ranks have waited in a collective for {stall.seconds:.0f} s, and none is behind"
        next = (
            "a connection between two of them may be cut: ddp-manual check tries them all\n"
            "or a step takes longer than that, and needs a larger --stall_timeout"
        )
        if any(beats[rank].unfinished for rank in ranks):
            next = f"{next}\nor one of their GPUs hangs: nvidia-smi on each host, and dmesg for Xid"
        if len(shown) > 1:
            next = (
                "look at their lines: a collective is for all ranks, so no collective, and no call that contains one "
                f"(a step, train()), may be below a line such as `if rank == 0`\nor {next}"
            )
    return verdict_about(info, last_words(PeerStalled(what, why="\n".join(why), next=f"{next}\nthen {again}")))


def with_last_collectives(verdict: Verdict, last: Mapping[int, str]) -> Verdict:
    """Add to the verdict about ranks that wait for each other what each of them has called last, ranks together that
    called the same."""
    together: dict[str, list[int]] = {}
    for rank, words in last.items():
        together.setdefault(words, []).append(rank)
    lines = [f"{rank_words(ranks)} began last {words}" for words, ranks in [*together.items()][:MOST_NAMED]]
    return {**verdict, "why": "\n".join([verdict["why"], *lines, *["..."] * (len(together) > MOST_NAMED)])}


def one_per_place(stall: Stall, beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks whose stacks to show: one for each line of the program on which ranks wait, two at most."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(beats[rank].place, rank)
    return sorted([*first.values()][:2])


# How a rank is lost: its process has ended or is stopped; nobody hears from it; its own code has raised; or one of its
# collectives has broken, and nobody is to blame.
GONE, SILENT, OWN_CODE, BROKEN = "gone", "silent", "own code", "broken"


@dataclass(frozen=True)
class Loss:
    """A rank that is lost, and how."""

    verdict: Verdict
    kind: str


class Watch:
    """Watches the ranks that have joined.

    Args:
        peers: the connections of the ranks, as the coordinator keeps them.
        now: rank 0's monotonic clock.
    """

    def __init__(self, roll_call: RollCall, peers: Mapping[int, Peer], now: float) -> None:
        self.health = Health(roll_call.run, now)
        self.failure: Verdict | None = None
        """What ends the run."""
        self.lost: dict[int, Loss] = {}
        """The ranks that were lost, in a run that keeps their seats, until the coordinator has heard of them."""
        self._roll_call = roll_call
        self._info = roll_call.info
        self._peers = peers
        self._closing = False
        self._first_finished: float | None = None
        self._broken: list[tuple[float, int, Verdict, str]] = []
        # Rank and number of a request that it has not replied to yet.
        self._asked: dict[tuple[int, int], asyncio.Future[Any]] = {}
        self._requests = itertools.count(STACKS + 1)
        self._comparison = Comparison()
        self._looking = False
        self._unless_mismatch: tuple[Verdict, Sequence[int]] | Loss | None = None
        self._naming_stalled = False
        self._said_stall = self._stopped = False
        self._working: set[asyncio.Task[None]] = set()

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        self._roll_call.hear(rank, now)
        self.health.hear(rank, beat, now)
        if beat is not None and beat.calls and self._comparison.hear(rank, beat.calls, now):
            self._look_at_records()

    def check(self, now: float) -> None:
        """Decide what only time shows, once all ranks have joined."""
        for until, rank, verdict, place in self._broken:
            # To blame for a collective that broke are ranks that finished early, a stopped rank, or this rank itself.
            if now < until or self._end_because_of_finished(rank, place) or self._end_because_of_stopped(now, 0):
                continue
            self._lose_unless_mismatch(Loss(verdict, BROKEN))
        waiting_since = None if self._closing else self._first_finished
        if waiting_since is not None and now - waiting_since > FINISH_TOGETHER:
            self._close_process_groups()

    def check_health(self, now: float) -> None:
        """Log what is odd about ranks, and end the run because of a rank that is silent, stopped, or stuck."""
        health = self.health
        stopped = [rank for rank in health.newly("stopped") if rank in self._peers]
        for rank in self._first_of(stopped, "stopped"):
            info = self._info(rank)
            go_on = f"on {info.host}, kill -CONT {info.pid} lets it go on"
            self.send_to_all({"line": f"{info.who} is stopped: {health.beat(rank).stopped}; {go_on}"})
        if not self._roll_call.complete:
            return
        if self._end_because_of_silent(now) or self._end_because_of_stopped(now, self._roll_call.run.peer_timeout):
            return
        for rank in self._first_of(health.newly("debugging"), "in a debugger"):
            where = health.beat(rank).place or "a line of its own"
            line = f"{self._info(rank).who} is in a debugger, on {where}: the other ranks wait for it"
            self.send_to_all({"line": line}, without=[rank])
        slow = {rank: (seconds, median) for rank, seconds, median in health.newly_slow(now)}
        for rank in self._first_of([*slow], "slow", only=0):
            seconds, median = slow[rank]
            takes = f"its own part of a step takes {1e3 * seconds:.1f} ms, {seconds / median:.1f} times the median"
            line = f"{self._info(rank).who} is slow: {takes} of all ranks, and all wait for it (named once)"
            self._peers[0].connection.send({"line": line})
        if not self._looking and (lagging := self._comparison.lagging(now)) is not None:
            self._look_at_records(lagging)
        if vain := health.waiting_in_vain(now, IN_VAIN):
            self._end_because_of_finished(vain[0], health.beat(vain[0]).place)
        elif not self._naming_stalled and (stall := health.find_stall(now)) is not None:
            self.in_background(self._name_stalled(stall))
        elif self._roll_call.run.script:
            self._say_that_ranks_wait(health.find_stall(now, STALL_LINE))

    def _first_of(self, ranks: Sequence[int], state: str, only: int | None = None) -> Sequence[int]:
        """Return the ranks that have a line each, after one line for the others: a line about each of N ranks, sent to
        N ranks, would be a million for 1,024.

        Args:
            only: the rank that prints that line; all do without it.
        """
        if others := ranks[MOST_LINES:]:
            line = {"line": f"{in_words(as_ranges(others))} are {state}, as are others"}
            self.send_to_all(line, without=() if only is None else {*self._peers} - {only})
        return ranks[:MOST_LINES]

    def _say_that_ranks_wait(self, stall: Stall | None) -> None:
        """Log once that ranks of a program wait for others, which may be what the program means them to do."""
        if stall is not None and not self._said_stall:
            busy = in_words(as_ranges(sorted(stall.behind))) if stall.behind else "each other"
            line = f"{in_words(as_ranges(sorted(stall.waiting)))} wait for {busy}, for {STALL_LINE:.0f} s so far"
            limit = f"the run ends after {self._roll_call.run.stall_timeout:.0f} s (--stall_timeout)"
            self.send_to_all({"line": f"{line}; {limit}"})
        self._said_stall = stall is not None

    def take_failure(self, rank: int, verdict: Verdict, broken_at: str | None, *, in_a_collective: bool) -> None:
        """End the run because of a rank's last words.

        Args:
            broken_at: the line of the collective if that broke; which rank is to blame will be known in a moment.
            in_a_collective: whether torch itself failed, maybe because other ranks called something else.
        """
        if broken_at is None and not in_a_collective:
            self._lose(Loss(verdict, GONE if verdict.get("judged") else OWN_CODE))
        elif broken_at is None:
            self._lose_unless_mismatch(Loss(verdict, GONE if verdict.get("judged") else OWN_CODE))
        else:
            self._broken.append((time.monotonic() + BLAME_WITHIN, rank, verdict, broken_at))

    def _lose(self, loss: Loss) -> None:
        """End the run because a rank is lost; if the run keeps its seat, leave it to the coordinator."""
        verdict, run = loss.verdict, self._roll_call.run
        rank = int(verdict["rank"])
        if run.on_loss != LEAVE and self.health.all_finished and self.failure is None:
            self.health.leave(rank)  # its work is done, and that of all others
            if rank in self._peers:
                self._peers[rank].left = True
                self._peers[rank].connection.send({"verdict": verdict})
            return
        keeps_seat = run.on_loss != LEAVE and not self._closing and self.failure is None
        if keeps_seat and loss.kind is OWN_CODE:
            keeps_seat = run.on_loss_of_own_code and verdict["identifier"] in MAY_NOT_RECUR
        if not keeps_seat:
            self.end_the_run(verdict)
        else:
            self.lost.setdefault(rank, loss)

    def stop(self) -> None:
        """Decide nothing any more: the ranks begin anew, with another watch."""
        self._stopped = True
        for task in self._working:
            task.cancel()

    def end_because_of_gone(self, rank: int, reason: str) -> None:
        """End the run because the connection to a rank's agent has ended: so has the agent, or its host."""
        info = self._info(rank)
        self._end_because_of(
            info,
            "is gone without a word",
            why=f"its connection to rank 0 ended: {reason}; agent and worker of that rank have both ended, or its host "
            f"has\nit was {self.health.beat(rank).last_seen()}, when it was last heard",
            next=f"look at its last lines; if there are none its agent was killed, or {info.host} is down",
        )

    def _end_because_of_silent(self, now: float) -> bool:
        """End the run because of the rank that has been silent for too long; the others soon will be."""
        found, world_size = self.health.silent(now), self._roll_call.run.world_size
        if not found:
            return False
        (rank, seconds), infos = next(iter(found.items())), [self._info(rank) for rank in found]
        why = [f"it was {self.health.beat(rank).last_seen()}, when it was last heard"]
        if len(found) > 1:
            others = ", ".join(other.who for other in infos[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
            why.append(f"as silent: {others}")
        if world_size > 2 and len(found) == world_size - 1:
            why.append("rank 0 hears nobody any more: it may be rank 0's own host that is cut off")
        else:
            why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
        process = f"whether its process runs: ps -o stat= -p {infos[0].pid}"
        look = f"look whether {infos[0].host} can be reached, and {process}"
        silent_for = f"has been silent for {seconds:.0f} s"
        self._end_because_of(infos[0], silent_for, why="\n".join(why), next=look, kind=SILENT)
        return True

    def _end_because_of_stopped(self, now: float, longer_than: float) -> bool:
        """End the run if a signal has stopped a worker for longer than these seconds."""
        found = self.health.stopped(now, longer_than)
        if found is not None:
            rank, seconds = found
            beat = self.health.beat(rank)
            self._end_because_of(
                self._info(rank),
                f"has been stopped by {beat.stopped} for {seconds:.0f} s",
                why=f"it was {beat.last_seen()}; its agent runs, and sees its worker stopped",
                next="let nobody stop it (Ctrl-Z, a batch system), or give a larger --peer_timeout",
            )
        return found is not None

    def _end_because_of(self, info: RankInfo, what: str, *, why: str, next: str, kind: str = GONE) -> None:
        verdict = _lost(info, what, why=why, next=f"{next}\nthen {self._roll_call.run.start_again}")
        self._lose(Loss(verdict, kind))

    def _end_because_of_finished(self, rank: int, place: str) -> bool:
        """End the run if ``rank`` is in a collective, at this place, which other ranks do not take part in any more."""
        if early := self.health.finished_before(rank):
            error = PeerLost(
                f"{in_words(as_ranges(early))} had finished while rank {rank} was still in a collective",
                why="a collective needs every rank, and they did not make the same number of calls\n"
                f"this one was on {place or 'no line of Python'}",
                next="give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for "
                "less\nand call no collective, nor what contains one (a step, train()), on one rank alone, as below "
                "`if rank == 0`",
            )
            verdict = verdict_about(self._info(rank), last_words(error))
            self._end_unless_mismatch(verdict, spared=self.health.finished)
        return bool(early)

    async def _name_stalled(self, stall: Stall) -> None:
        """End the run with the stacks of the ranks that are stuck, unless they have gone on in the meantime."""
        self._naming_stalled = True
        beats = {rank: self.health.beat(rank) for rank in stall.waiting}
        stacks = await self.stacks_of(stall.behind[:MOST_NAMED] or one_per_place(stall, beats))
        self._naming_stalled, now_stalled = False, self.health.find_stall(time.monotonic())
        if now_stalled is not None:
            beats = {rank: self.health.beat(rank) for rank in (*now_stalled.waiting, *now_stalled.behind)}
            infos = {info.rank: info for info in self._roll_call.infos()}
            again = self._roll_call.run.start_again
            self._end_unless_mismatch(stalled(infos, now_stalled, beats, stacks, again))

    def end_the_run(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """Tell all ranks why, except those ``spared``, which have done their work and leave in order."""
        if self.failure is None:
            self.failure = verdict
            self.send_to_all({"verdict": verdict}, without=spared)
            if spared and not self._closing:
                self._close_process_groups()

    def send_to_all(self, message: Mapping[str, Any], without: Collection[int] = ()) -> None:
        line, without = encode(message), frozenset(without)
        for rank, peer in self._peers.items():
            if rank not in without:
                peer.connection.write(line)

    # -- whether the ranks call the same collectives ---------------------------------------------------------------

    def _end_unless_mismatch(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """End the run with this verdict, unless the ranks called different collectives: that explains it better."""
        if not self._comparison:
            self.end_the_run(verdict, spared)
        elif self._unless_mismatch is None:
            self._unless_mismatch = verdict, spared
            self._look_at_records()

    def _lose_unless_mismatch(self, loss: Loss) -> None:
        """Lose a rank, unless the ranks called different collectives: that explains it better, and ends the run."""
        if not self._comparison:
            self._lose(loss)
        elif self._unless_mismatch is None:
            self._unless_mismatch = loss
            self._look_at_records()

    def _look_at_records(self, first: Sequence[int] = ()) -> None:
        """Ask all ranks for their records: if some are to be asked ``first``, only if these differ."""
        if not self._looking and self.failure is None:
            self._looking = True
            self.in_background(self._name_mismatch(first))

    async def _name_mismatch(self, first: Sequence[int]) -> None:
        """End the run if the ranks called different collectives, otherwise with the verdict that waits for this."""
        run, mismatch, last = self._roll_call.run, None, dict[int, str]()
        try:
            if first:
                mismatch, _ = await self._comparison.look(self._records_of, first, run.start_again)
            if not first or mismatch is not None or self._unless_mismatch is not None:
                ranks = [info.rank for info in self._roll_call.infos()]
                seen, last = await self._comparison.look(self._records_of, ranks, run.start_again)
                mismatch = seen or mismatch
        finally:  # whatever the replies say, the verdict that waits for them ends the run
            self._looking = False
            if self._stopped:
                pass
            elif mismatch is not None:
                self.end_the_run(verdict_about(self._info(mismatch.rank), last_words(mismatch.error)))
            elif self._unless_mismatch is not None:
                if isinstance(self._unless_mismatch, Loss):
                    loss = self._unless_mismatch
                    self._lose(replace(loss, verdict=with_last_collectives(loss.verdict, last)))
                else:
                    verdict, spared = self._unless_mismatch
                    self.end_the_run(with_last_collectives(verdict, last), spared)

    # -- the end of the work -------------------------------------------------------------------------------------

    def finish(self, rank: int) -> None:
        self.health.finish(rank)
        if self._first_finished is None:
            self._first_finished = time.monotonic()
        if self._closing:
            self._peers[rank].connection.send({"close": True})
        elif self.health.all_finished:
            self._close_process_groups()

    def _close_process_groups(self) -> None:
        """Tell the ranks that have finished, and each that will, to close their process groups."""
        self._closing = True
        for rank in self.health.finished:
            if rank in self._peers:
                self._peers[rank].connection.send({"close": True})

    # -- stacks ----------------------------------------------------------------------------------------------------

    async def stacks_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the stacks of those of these ranks whose agents reply in time."""
        return await self._ask(ranks, STACKS, {"stacks": True}, STACKS_WITHIN)

    async def _records_of(self, ranks: Iterable[int], request: Mapping[str, Any]) -> dict[int, Any]:
        """Return what those of these ranks reply whose agents do so in time: see ``Records.answer``."""
        number = next(self._requests)
        try:
            within = RECORDS_WITHIN + more_seconds(self._roll_call.run.world_size) / 2
            return await self._ask(ranks, number, {"records": request, "of": number}, within)
        finally:
            for rank in ranks:  # a reply that comes later is of no use
                self._asked.pop((rank, number), None)

    async def _ask(
        self, ranks: Iterable[int], number: int, request: Mapping[str, Any], within: float
    ) -> dict[int, Any]:
        asked = [rank for rank in ranks if rank in self._peers]
        for rank in asked:
            if (rank, number) not in self._asked:
                self._asked[rank, number] = asyncio.get_running_loop().create_future()
                self._peers[rank].connection.send(request)
        replies = {rank: self._asked[rank, number] for rank in asked}
        if replies:
            await asyncio.wait(replies.values(), timeout=within)
        return {rank: reply.result() for rank, reply in replies.items() if reply.done()}

    def take_reply(self, rank: int, number: int, reply: Any) -> None:
        if asked := self._asked.pop((rank, number), None):
            asked.set_result(reply)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
