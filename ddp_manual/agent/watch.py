"""Rank 0 watches the ranks that have joined: from heartbeats and last words it decides when a rank is lost or to blame.

``verdicts.py`` has the words.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Collection, Coroutine, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ddp_manual.agent.collectives import Comparison
from ddp_manual.agent.handshakes import Peer
from ddp_manual.agent.health import Health, Stall
from ddp_manual.agent.roll_call import MOST_NAMED, RollCall
from ddp_manual.agent.verdicts import lost_rank, one_per_place, stalled, verdict_about, with_last_collectives
from ddp_manual.errors import OutOfMemory, PeerLost, TrainingFailed
from ddp_manual.messages import Beat, RankInfo, Verdict, last_words, more_seconds
from ddp_manual.on_loss import LEAVE
from ddp_manual.terminal import as_ranges, in_words
from ddp_manual.wire import encode

# An error of a rank's own code after which another try may go well.
MAY_NOT_RECUR = (TrainingFailed.identifier, OutOfMemory.identifier)
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
# How a rank is lost: its process has ended or is stopped; nobody hears from it; its own code has raised; one of its
# collectives has broken, and nobody is to blame; or it had come to a run which had begun, and has not worked there yet.
GONE, SILENT, OWN_CODE, BROKEN, NEWCOMER = "gone", "silent", "own code", "broken", "newcomer"


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
        self.newcomers: set[int] = set()
        """The ranks that have come to a run which had begun."""
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
            if (late := self.health.late(now)) is not None:
                self._lose_silent(*late, why=[f"a collective of rank {rank} has broken meanwhile"])
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
            limit = f"the run ends after {stall.longest.seconds:.0f} s ({stall.longest.reason})"
            self.send_to_all({"line": f"{line}; {limit}"})
        self._said_stall = stall is not None

    def take_failure(self, rank: int, verdict: Verdict, broken_at: str | None, *, in_a_collective: bool) -> None:
        """End the run because of a rank's last words.

        Args:
            broken_at: the line of the collective if that broke; which rank is to blame will be known in a moment.
            in_a_collective: whether torch itself failed, maybe because other ranks called something else.
        """
        loss = Loss(verdict, GONE if verdict.get("judged") else OWN_CODE)
        if broken_at is not None:
            self._broken.append((time.monotonic() + BLAME_WITHIN, rank, verdict, broken_at))
        elif in_a_collective:
            self._lose_unless_mismatch(loss)
        else:
            self._lose(loss)

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
        # Nobody can begin anew with a rank that has left with its work done.
        keeps_seat = keeps_seat and not self.health.has_finished(and_left=True)
        if keeps_seat and rank in self.newcomers and not self._has_worked(rank):
            loss = replace(loss, kind=NEWCOMER)  # such as on a host without the data
        elif keeps_seat and loss.kind is OWN_CODE:
            keeps_seat = run.on_loss_of_own_code and verdict["identifier"] in MAY_NOT_RECUR
        if not keeps_seat:
            self.end_the_run(verdict)
        else:
            self.lost.setdefault(rank, loss)

    def _has_worked(self, rank: int) -> bool:
        """Return whether a rank has begun to work with the others: our training, with its first step."""
        beat = self.health.beat(rank)
        return bool(beat.collectives) if self._roll_call.run.script else beat.step > 0

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

    def end_because_of_left(self, rank: int, why: str) -> None:
        """End the run because a rank has left at the moment when all had joined."""
        beat = f"it was {self.health.beat(rank).last_seen()}, and had not heard yet that all ranks are here"
        self._end_because_of(self._info(rank), f"left: {why}", why=beat, next="look at its last lines")

    def _end_because_of_silent(self, now: float) -> bool:
        """End the run because of the rank that has been silent for too long; the others soon will be."""
        found, world_size = self.health.silent(now), self._roll_call.run.world_size
        if not found:
            return False
        (rank, seconds), infos = next(iter(found.items())), [self._info(rank) for rank in found]
        why = []
        if len(found) > 1:
            others = ", ".join(other.who for other in infos[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
            why.append(f"as silent: {others}")
        if world_size > 2 and len(found) == world_size - 1:
            why.append("rank 0 hears nobody any more: it may be rank 0's own host that is cut off")
        else:
            why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
        self._lose_silent(rank, seconds, why)
        return True

    def _lose_silent(self, rank: int, seconds: float, why: Sequence[str]) -> None:
        """End the run because of a rank that has said nothing for these seconds."""
        info = self._info(rank)
        process = f"whether its process runs: ps -o stat= -p {info.pid}"
        last_seen = f"it was {self.health.beat(rank).last_seen()}, when it was last heard"
        self._end_because_of(
            info,
            f"has been silent for {seconds:.0f} s",
            why="\n".join([last_seen, *why]),
            next=f"look whether {info.host} can be reached, and {process}",
            kind=SILENT,
        )

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
        verdict = lost_rank(info, what, why=why, next=f"{next}\nthen {self._roll_call.run.start_again}")
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
        now = time.monotonic()
        self._naming_stalled, now_stalled = False, self.health.find_stall(now)
        # What was heard last may be from before the ranks went on.
        is_other = now_stalled is not None and set(now_stalled.behind) - set(stall.behind)
        if now_stalled is not None and not is_other and not self._end_because_of_stopped(now, 0):
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
            elif (waiting := self._unless_mismatch) is not None:
                self._unless_mismatch = None
                if isinstance(waiting, Loss):
                    self._lose(replace(waiting, verdict=with_last_collectives(waiting.verdict, last)))
                else:
                    verdict, spared = waiting
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
