"""Rank 0's watch over the ranks: from their heartbeats and last words it decides why the run ends, and tells them."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from ddp_manual.agent import verdicts
from ddp_manual.agent.handshakes import Peer
from ddp_manual.agent.health import Health, Stall
from ddp_manual.agent.roll_call import RollCall
from ddp_manual.messages import Beat, RunInfo, Verdict, encode, printable

STACKS_WITHIN = 2.0
# Seconds within which ranks that did the same work have all finished. Rank 0 alone waits longer for a slower rank; a
# rank that is stuck in a collective has to see the other ranks close their process groups.
FINISH_TOGETHER = 1.0
# Seconds from a collective that broke until it is known which rank is to blame.
BLAME_WITHIN = 1.5
# Seconds that ranks wait in a collective for ranks that have finished.
IN_VAIN = 2.0


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
        self._roll_call = roll_call
        self._info = roll_call.info
        self._peers = peers
        self._close_together: bool | None = None
        self._first_finished: float | None = None
        self._broken: list[tuple[float, int, Verdict, str]] = []
        # Of ranks that were asked for their stacks and have not replied yet.
        self._stacks: dict[int, asyncio.Future[str]] = {}
        self._naming_stalled = False
        self._working: set[asyncio.Task[None]] = set()

    @property
    def _run(self) -> RunInfo:
        return self._roll_call.run

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        self._roll_call.hear(rank, now)
        self.health.hear(rank, beat, now)

    def check(self, now: float) -> None:
        """Decide what only time shows, once all ranks have joined."""
        self._blame(now)
        waiting_since = self._first_finished if self._close_together is None else None
        if waiting_since is not None and now - waiting_since > FINISH_TOGETHER:
            self._close_process_groups(together=False)

    def check_health(self, now: float) -> None:
        """Log what is odd about ranks, and end the run because of a rank that is silent, stopped, or stuck."""
        health = self.health
        for rank, name in health.newly_stopped():
            if rank in self._peers:
                self.send_to_all({"line": verdicts.is_stopped(self._info(rank), name)})
        if not self._roll_call.complete:
            return
        silent = [(self._info(rank), health.beat(rank), health.silence(rank, now)) for rank in health.silent(now)]
        if silent:
            self.end_the_run(verdicts.silent(silent, self._run.world_size, self._run.start_again))
            return
        if self._end_because_of_stopped(now, self._run.peer_timeout):
            return
        for rank in health.newly_debugging():
            self.send_to_all({"line": verdicts.is_debugging(self._info(rank), health.beat(rank))}, without=rank)
        for rank, seconds, median in health.newly_slow(now):
            self._peers[0].connection.send({"line": verdicts.slow(self._info(rank), seconds, median)})
        if vain := health.waiting_in_vain(now, IN_VAIN):
            self._end_because_of_finished(vain[0], health.beat(vain[0]).place)
        elif not self._naming_stalled and (stall := health.find_stall(now)) is not None:
            self.in_background(self._name_stalled(stall))

    def take_failure(self, rank: int, message: Mapping[str, Any]) -> Verdict | None:
        """Take the last words of a rank; None: which rank is to blame will be known in a moment."""
        verdict = verdicts.verdict_by(self._info(rank), message["failed"])
        if not (self._roll_call.complete and message.get("broken") and self.failure is None):
            return verdict
        until = time.monotonic() + BLAME_WITHIN
        self._broken.append((until, rank, verdict, str(message.get("place", ""))))
        return None

    def _blame(self, now: float) -> None:
        """Decide who is to blame for a collective that broke: ranks that finished early, a stopped rank, or itself."""
        for until, rank, verdict, place in self._broken:
            if (
                now >= until
                and not self._end_because_of_finished(rank, printable(place))
                and not self._end_because_of_stopped(now, 0)
            ):
                self.end_the_run(verdict)

    def _end_because_of_finished(self, rank: int, place: str) -> bool:
        """End the run if ``rank`` is in a collective, at this place, which other ranks do not take part in any more."""
        if early := self.health.finished_before(rank):
            spared = self.health.finished
            self.end_the_run(verdicts.finished_early(self._info(rank), place, early), spared=spared)
        return bool(early)

    def _end_because_of_stopped(self, now: float, longer_than: float) -> bool:
        """End the run if a signal has stopped a worker for longer than these seconds."""
        found = self.health.stopped(now, longer_than)
        if found is not None:
            rank, seconds = found
            beat = self.health.beat(rank)
            self.end_the_run(verdicts.stopped(self._info(rank), beat, seconds, self._run.start_again))
        return found is not None

    async def _name_stalled(self, stall: Stall) -> None:
        """End the run with the stacks of the ranks that are stuck, unless they have gone on in the meantime."""
        self._naming_stalled = True
        beats = {rank: self.health.beat(rank) for rank in stall.waiting}
        stacks = await self.stacks_of(stall.behind or verdicts.one_per_place(stall, beats))
        self._naming_stalled, now_stalled = False, self.health.find_stall(time.monotonic())
        if now_stalled is not None:
            beats = {rank: self.health.beat(rank) for rank in (*now_stalled.waiting, *now_stalled.behind)}
            infos, again = self._roll_call.infos(), self._run.start_again
            self.end_the_run(verdicts.stalled(infos, now_stalled, beats, stacks, again))

    def end_the_run(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """Tell all ranks why, except those ``spared``, which have done their work and leave in order."""
        if self.failure is None:
            self.failure = verdict
            for rank, peer in self._peers.items():
                if rank not in spared:
                    peer.connection.send({"verdict": verdict})
            if spared and self._close_together is None:
                self._close_process_groups(together=False)

    def send_to_all(self, message: Mapping[str, Any], without: int | None = None) -> None:
        line = encode(message)
        for rank, peer in self._peers.items():
            if rank != without:
                peer.connection.write(line)

    # -- the end of the work -------------------------------------------------------------------------------------

    def finish(self, rank: int) -> None:
        self.health.finish(rank)
        if self._first_finished is None:
            self._first_finished = time.monotonic()
        if self._close_together is not None:
            self._peers[rank].connection.send({"close": self._close_together})
        elif len(self.health.finished) == self._run.world_size:
            self._close_process_groups(together=True)

    def _close_process_groups(self, *, together: bool) -> None:
        """Tell the ranks that have finished to close their process groups: all at once, or each by itself."""
        self._close_together = together
        for rank in self.health.finished:
            if rank in self._peers:
                self._peers[rank].connection.send({"close": together})

    # -- stacks ----------------------------------------------------------------------------------------------------

    async def stacks_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the stacks of those of these ranks whose agents reply in time."""
        asked = [rank for rank in ranks if rank in self._peers]
        for rank in asked:
            if rank not in self._stacks:
                self._stacks[rank] = asyncio.get_running_loop().create_future()
                self._peers[rank].connection.send({"stacks": True})
        replies = {rank: self._stacks[rank] for rank in asked}
        if replies:
            await asyncio.wait(replies.values(), timeout=STACKS_WITHIN)
        return {rank: reply.result() for rank, reply in replies.items() if reply.done()}

    def take_stacks(self, rank: int, text: str) -> None:
        if asked := self._stacks.pop(rank, None):
            asked.set_result(text)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
