"""Rank 0's part for all: it holds the roll call, watches over the ranks, and tells everybody why the run ends.

It listens at rank 0's address, in rank 0's agent, and has one connection per rank, rank 0's own among them. Who is a
rank, and who is silent or stuck, is decided in ``roll_call.py`` and ``health.py``; here is what is read and written.
Only rank 0's monotonic clock counts, so the clocks of the hosts need not agree.
"""

from __future__ import annotations

import asyncio
import errno
import os
import secrets
import socket
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

from ddp_manual.agent import verdicts
from ddp_manual.agent.connection import CLOSED, Connection, Seal, Unsealed, claimed
from ddp_manual.agent.health import Health, Stall
from ddp_manual.agent.reachability import Probes, unreachable
from ddp_manual.agent.roll_call import RollCall, missing_ranks_error, wait_within
from ddp_manual.errors import DdpManualError, TokenMismatch, VersionMismatch
from ddp_manual.messages import Beat, RankInfo, Ready, RunInfo, Verdict, encode, judged, printable, words_of

PROTOCOL = 1
TICK = 0.1
# Seconds a connection has to say which rank it is, and more for each that has to be read before.
HELLO_WITHIN = 5.0
HELLO_EACH = 0.005
# Connections that are no rank's (yet), besides as many as there are ranks.
MOST_STRANGERS = 64
STRANGERS_LINE = 1 << 16
# Seconds between two lots of news, for each rank that is here: every rank reads each of them.
NEWS_EACH = 1 / 1000
STACKS_WITHIN = 2.0
# Seconds within which ranks that did the same work have all done it. One that takes longer is waited for by rank 0
# alone; one that is stuck in a collective has to see its peers go.
FINISH_TOGETHER = 1.0
# Seconds from a collective that broke until it is known which rank is to blame.
BLAME_WITHIN = 1.5
# Seconds that ranks wait in a collective for ranks that have finished.
IN_VAIN = 2.0
# Once so many ranks have met, their heartbeats are gathered for so many seconds: to be woken by each costs more than to
# read it.
MANY_RANKS = 256
GATHER = 0.05
# How a connection ends with its process: with a reset, if it had not read everything.
PROCESS_ENDED = (CLOSED, os.strerror(errno.ECONNRESET))
BEAT = encode({"beat": True})


@dataclass(eq=False)
class Peer:
    """A connection. ``rank`` is None until it is a rank's."""

    connection: Connection
    challenge: str
    since: float
    rank: int | None = None
    nonce: str = ""
    parted: bool = False
    """Whether it has said goodbye."""


class Coordinator:
    """Accepts connections from when ``serve`` is called until ``close``.

    Args:
        rank_0: what the others are compared with.
        own_nonce: what rank 0's own agent says in its hello; nobody else may be rank 0.
        join_timeout: seconds from now until all ranks have to be here; then they have 600 s at least to load torch.
    """

    def __init__(self, run: RunInfo, rank_0: RankInfo, seal: Seal, own_nonce: str, join_timeout: float) -> None:
        self.roll_call = RollCall(run, rank_0)
        self._seal = seal
        self._own_nonce = own_nonce
        self._started = self._waits_since = time.monotonic()
        self._join_timeout = join_timeout
        self._all_were_here = False
        self._peers: dict[int, Peer] = {}
        # Connections that are no rank's, in the order in which they came, as a dict keeps it.
        self._strangers: dict[Peer, None] = {}
        # Of them those that say they are a rank which another process holds.
        self._claiming: dict[Peer, RankInfo] = {}
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._health = Health(run, self._started)
        self._over = False
        self._failure: Verdict | None = None
        self._next_news = 0.0
        self._untold = False
        self._next_beat = 0.0
        self._ticked = self._started
        self._probes: Probes | None = None
        self._close_together: bool | None = None
        self._first_finished: float | None = None
        self._broken: list[tuple[float, int, Verdict, str]] = []
        # Of ranks that were asked for their stacks, and have not answered yet.
        self._stacks: dict[int, asyncio.Future[str]] = {}
        self._naming = False
        self._gathering = False
        self._working: set[asyncio.Task[None]] = set()

    @property
    def run(self) -> RunInfo:
        return self.roll_call.run

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(self._accept, STRANGERS_LINE), sock=listener, backlog=4096
        )
        self._tick()

    @property
    def ranks_left(self) -> list[int]:
        """The ranks that still have to leave, without rank 0."""
        return sorted(rank for rank, peer in self._peers.items() if rank and not peer.parted)

    @property
    def unsent(self) -> int:
        """Bytes that ranks have not taken yet."""
        return sum(peer.connection.unsent for peer in self._peers.values())

    @property
    def open_to_others(self) -> bool:
        """Whether another rank that has not said goodbye is still connected, and not silent: that one reads nothing."""
        peers = [peer for peer in self._peers.values() if not peer.parted and not peer.connection.closed]
        silent = self._health.silent(time.monotonic())
        return any(peer.rank and peer.rank not in silent for peer in peers)

    def end(self, error: DdpManualError | None = None) -> None:
        """Tell whoever is still there that rank 0 leaves, and why if all ranks had not met."""
        if error is not None and not self.roll_call.complete and self._failure is None:
            self._refuse_all(error)
        self._over = True
        for rank in self.ranks_left if error is None and self._failure is None else []:
            self._peers[rank].connection.send({"over": True})

    def close(self) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for peer in [*self._peers.values(), *self._strangers]:
            if self._failure and peer.rank is None and peer.nonce and peer not in self._claiming:
                # It has looked at the run, and may look again too late to learn why the run has ended.
                peer.connection.send({"seen": self._sealed(peer, "seen", self.seen())})
            peer.connection.close()

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, connection: Connection) -> None:
        peer = Peer(connection, secrets.token_hex(16), time.monotonic())
        connection.handle(partial(self._take, peer), partial(self._closed, peer))
        if len(self._strangers) >= self.run.world_size + MOST_STRANGERS:
            # The one that has been silent for longest makes room: a rank says who it is at once.
            silent = next((one for one in self._strangers if one not in self._claiming), None)
            if silent is None:
                connection.abort("too many strangers")
                return
            del self._strangers[silent]
            silent.connection.abort("too many strangers")
        self._strangers[peer] = None
        who = {"host": self.run.host, "pid": self.run.pid, "token": bool(self._seal)}
        over = self._over or self._failure is not None
        connection.send({"ddp_manual": PROTOCOL, "challenge": peer.challenge, "over": over, **who})

    def _take(self, peer: Peer, message: dict[str, Any]) -> None:
        if peer.rank is not None:
            if self._peers.get(peer.rank) is peer:  # not one that has left, and whose rank another process has now
                self._take_from_rank(peer, peer.rank, message)
        elif "look" in message:
            self._look(peer, message["look"])
        elif peer not in self._claiming:
            self._greet(peer, message["hello"])

    def _closed(self, peer: Peer, reason: str) -> None:
        if peer.rank is None:
            self._strangers.pop(peer, None)
            self._claiming.pop(peer, None)
            return
        if self._peers.get(peer.rank) is peer:
            del self._peers[peer.rank]
            if not peer.parted:
                self._lose(peer.rank, printable(reason))

    def _lose(self, rank: int, reason: str) -> None:
        """The connection of a rank has ended without a goodbye: so has the rank."""
        if not self.roll_call.complete:
            how = "is gone: its process has ended" if reason in PROCESS_ENDED else f"is gone: {reason}"
            self._missing_again(rank, how)
        elif not self._over:
            self._end_the_run(verdicts.gone(self._who(rank), self._health.beat(rank), reason, self.run.start_again))

    def _missing_again(self, rank: int, how: str) -> None:
        if rank not in self.roll_call.members:
            return
        self.roll_call.leave(rank, how)
        self._health.forget(rank, time.monotonic())
        self._probes = None
        self._untold = True
        self._judge_claims()

    # -- the roll call ------------------------------------------------------------------------------------------

    def _greet(self, peer: Peer, sealed: Mapping[str, Any]) -> None:
        says = claimed(sealed)
        who = f"a process that says it is rank {says.get('rank')!r:.20} on {says.get('host')!r:.60}"
        opened = self._opened(peer, "hello", sealed, who, "give every rank the same DDP_MANUAL_TOKEN or --token_file")
        if isinstance(opened, TokenMismatch):
            self.roll_call.refuse(who, opened)
            return
        hello = dict(opened)
        nonce = hello.pop("nonce")
        try:
            info = RankInfo.from_message(hello)
        except (TypeError, ValueError) as reason:
            who = f"a process on {says.get('host')!r:.60}"
            other_version = VersionMismatch(
                f"{who} was started with another version of ddp_manual than rank 0",
                why=f"rank 0 on {self.run.host} cannot read what it says of itself: {reason}",
                next="install the same version on every host",
            )
            self.roll_call.refuse(who, other_version)
            self._refuse(peer, other_version)
            return
        holder = self._peers.get(info.rank)
        parted = self.roll_call.complete and (holder is None or holder.parted)
        if self._over or self._failure is not None or parted:
            # It comes too early for the next run, and asks again.
            peer.connection.send({"over": True})
            return
        if info.rank == 0 and nonce != self._own_nonce:
            self._refuse(peer, self.roll_call.taken_rank_0(info))
            return
        self._judge_claim(peer, info)

    def _judge_claims(self) -> None:
        for peer, info in list(self._claiming.items()):
            self._judge_claim(peer, info)

    def _judge_claim(self, peer: Peer, info: RankInfo) -> None:
        answer = self.roll_call.admit(info, time.monotonic(), peer.since, time.time())
        if answer is False:
            self._claiming[peer] = info
            return
        if isinstance(answer, DdpManualError):
            self._refuse(peer, answer)
            return
        peer.rank = info.rank
        self._strangers.pop(peer, None)
        self._claiming.pop(peer, None)
        self._peers[info.rank] = peer
        peer.connection.reader.longest = 1 << 18
        peer.connection.send({"welcome": self._sealed(peer, "welcome", {"run": vars(self.run)})})
        self._untold = True

    def _opened(self, peer: Peer, kind: str, sealed: Mapping[str, Any], who: str, next: str) -> Any:
        """What a connection asks for; or why it is refused, which it has been told."""
        peer.nonce = printable(str(claimed(sealed).get("nonce", "")))
        try:
            return self._seal.open(f"{kind} {peer.challenge}", sealed)
        except Unsealed as reason:
            error = TokenMismatch(
                f"{who} does not have rank 0's token",
                why=f"rank 0 on {self.run.host} (pid {self.run.pid}) says of its request: {reason}",
                next=next,
            )
            # Whoever has no token reads it as it is; whoever has another one sees that it is signed with another.
            self._refuse(peer, error, sealed="sealed" in sealed)
            return error

    def _sealed(self, peer: Peer, kind: str, content: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._seal.close(f"{kind} {peer.nonce}", content)

    def _refuse(self, peer: Peer, error: DdpManualError, *, sealed: bool = True) -> None:
        content = error.as_dict()
        peer.connection.send({"refused": self._sealed(peer, "refused", content) if sealed else content})
        self._claiming.pop(peer, None)
        self._untold = True
        if peer.rank is None:
            self._strangers.pop(peer, None)
            peer.connection.close()

    def _dismiss(self, rank: int, error: DdpManualError) -> None:
        """Refuse what was a rank so far."""
        peer = self._peers.pop(rank)
        peer.rank = None
        self._refuse(peer, error)

    def _refuse_all(self, error: DdpManualError) -> None:
        """End the wait of every rank."""
        self._failure = judged(self.roll_call.infos()[0], error) if self.roll_call.members else {}
        for peer in [*self._peers.values(), *self._claiming]:
            self._refuse(peer, error)
        self._over = True

    def _advance(self) -> None:
        """Whatever the roll call waits for has come."""
        if self.roll_call.complete or self._failure is not None:
            return
        for rank, error in list(self.roll_call.unfit()):
            self.roll_call.refuse(self._who(rank).who, error)
            self._dismiss(rank, error)
            self._missing_again(rank, "has left: it was refused")
        if not self.roll_call.all_here:
            return
        if self._probes is None:  # while the workers load torch
            self._probes = Probes(self.roll_call.infos(), self.roll_call.places(), time.monotonic())
            for rank, request in self._probes.requests():
                self._peers[rank].connection.send(request)
        if not self._probes.over(time.monotonic()):
            return
        if failing := self._probes.failing:
            self._refuse_all(unreachable(failing))
        elif self.roll_call.all_ready:
            self._complete()

    def _complete(self) -> None:
        places = self.roll_call.places()
        error = self.roll_call.shared_gpus(places)
        if error is not None:
            self._refuse_all(error)
            return
        if self.roll_call.warnings:
            self._tell_news()
        self.roll_call.complete = True
        ready = self.roll_call.members[0].ready
        assert ready is not None
        self._health.async_collectives = ready.backend == "nccl"
        self._health.restart(time.monotonic())
        for rank, peer in self._peers.items():
            roster = {"roster": self.roll_call.roster()} if rank == 0 else {}
            place = {"place": vars(places[rank]), "store": list(ready.store), "rank_0_pid": ready.pid}
            peer.connection.send({**place, **roster})
        self._judge_claims()

    # -- what ranks say -----------------------------------------------------------------------------------------

    def _take_from_rank(self, peer: Peer, rank: int, message: dict[str, Any]) -> None:
        if "beat" in message:
            now = time.monotonic()
            beat = None if message["beat"] is None else Beat.from_message(message["beat"])
            self.roll_call.hear(rank, now)
            self._health.hear(rank, beat, now)
            self._judge_claims()
            if self.roll_call.complete and self.run.world_size >= MANY_RANKS and not self._gathering:
                self._gathering = True
                asyncio.get_running_loop().call_soon(self._gather)
        elif "ready" in message:
            self.roll_call.get_ready(rank, Ready.from_message(message["ready"]))
            self._untold = True
            self._advance()
        elif "probed" in message:
            if self._probes is not None:
                self._probes.take(message["for"], message["probed"])
                self._advance()
        elif "finished" in message:
            self._finish(rank)
        elif "failed" in message:
            self._take_failure(rank, message)
        elif "lost" in message:
            self._take_end(rank, {**words_of(self._who(rank), message["lost"]), "judged": True})
        elif "stacks" in message:
            if asked := self._stacks.pop(rank, None):
                asked.set_result(str(message["stacks"]))
        elif "bye" in message:
            peer.parted = True
            if self.roll_call.complete:
                self._health.part_with(rank)
            else:
                self._missing_again(rank, f"left again: {printable(str(message['bye']))}")

    def _gather(self) -> None:
        """After all that has come so far has been read."""
        self._gathering = False
        time.sleep(GATHER)

    def _take_failure(self, rank: int, message: Mapping[str, Any]) -> None:
        words = words_of(self._who(rank), message["failed"])
        if self.roll_call.complete and message.get("broken") and self._failure is None:
            # Which rank is to blame is known in a moment.
            self._broken.append((time.monotonic() + BLAME_WITHIN, rank, words, str(message.get("place", ""))))
        else:
            self._take_end(rank, words)

    def _take_end(self, rank: int, verdict: Verdict) -> None:
        """What has ended a worker, as it said itself, or as its agent says of one that could not."""
        if self.roll_call.complete:
            self._end_the_run(verdict)
            return
        self._peers[rank].connection.send({"verdict": verdict})
        what = printable(verdict["what"])
        how = f"is gone: {what.partition(' is gone: ')[2]}" if "judged" in verdict else f"left again: {what}"
        self._missing_again(rank, how)

    def _blame(self, now: float) -> None:
        """Of a collective that broke in ``rank``: ranks that finished early, or else it speaks for itself."""
        for until, rank, words, place in self._broken:
            if now < until:
                continue
            if early := self._health.finished_before(rank):
                verdict = verdicts.finished_early(self._who(rank), printable(place), early)
                self._end_the_run(verdict, spared=self._health.finished)
            elif not self._blame_stopped(now, 0):
                self._end_the_run(words)

    def _finish(self, rank: int) -> None:
        self._health.finish(rank)
        if self._first_finished is None:
            self._first_finished = time.monotonic()
        if self._close_together is not None:
            self._peers[rank].connection.send({"close": self._close_together})
        elif len(self._health.finished) == self.run.world_size:
            self._decide_close(together=True)

    def _decide_close(self, *, together: bool) -> None:
        """Say to those that have finished whether all close their process groups at once."""
        self._close_together = together
        for rank in self._health.finished:
            if rank in self._peers:
                self._peers[rank].connection.send({"close": together})

    def _who(self, rank: int) -> RankInfo:
        return self.roll_call.members[rank].info

    # -- as time goes by ----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK, self._tick)
        now = time.monotonic()
        passed, self._ticked = now - self._ticked, now
        if passed > self.run.peer_timeout:
            self._health.restart(now)  # this process was stopped, perhaps with all its host
        patience = HELLO_WITHIN + len(self._strangers) * HELLO_EACH
        for stranger in [one for one in self._strangers if now - one.since > patience]:
            if stranger not in self._claiming:
                stranger.connection.abort("it did not say which rank it is")
        if now >= self._next_beat:
            self._next_beat = now + self.run.beat_every
            for peer in self._peers.values():
                peer.connection.write(BEAT)
            if self._failure is None:
                self._judge(now)
        self._judge_claims()  # of a rank whose process may be frozen
        if not self.roll_call.complete and self._failure is None:
            self._wait_for_ranks(now, late=passed > 1)
        if self.roll_call.complete and self._failure is None:
            self._blame(now)
            waiting_since = self._first_finished if self._close_together is None else None
            if waiting_since is not None and now - waiting_since > FINISH_TOGETHER:
                self._decide_close(together=False)

    def _wait_for_ranks(self, now: float, *, late: bool) -> None:
        silent = [
            rank for rank, member in self.roll_call.members.items() if rank and now - member.heard > self.run.silence
        ]
        for rank in silent if not late else []:
            seconds = now - self.roll_call.members[rank].heard
            self._dismiss(rank, verdicts.lost_its_place(self._who(rank), seconds))
            self._missing_again(rank, f"has been silent for {seconds:.0f} s: its agent is stopped, or its host is gone")
        self._advance()
        if self._all_were_here != self.roll_call.all_here:
            self._all_were_here, self._waits_since = self.roll_call.all_here, now
        waited = now - self._waits_since
        if waited > wait_within(self._join_timeout, all_here=self._all_were_here) and not self.roll_call.complete:
            self._refuse_all(missing_ranks_error(self.roll_call.news(), self.run, waited))
        elif self._untold and now >= self._next_news:
            self._next_news = now + len(self._peers) * NEWS_EACH
            self._tell_news()

    def _tell_news(self) -> None:
        self._untold = False
        line = encode({"news": self.roll_call.news()})
        for peer in self._peers.values():
            peer.connection.write(line)

    def _judge(self, now: float) -> None:
        health = self._health
        for rank, name in health.newly_stopped():
            if rank in self._peers:
                self._tell_all(verdicts.is_stopped(self._who(rank), name))
        if not self.roll_call.complete:
            return
        silent = health.silent(now)
        if silent:
            found = [(self._who(rank), health.beat(rank), health.silence(rank, now)) for rank in silent]
            self._end_the_run(verdicts.silent(found, self.run.world_size, self.run.start_again))
            return
        if self._blame_stopped(now, self.run.peer_timeout):
            return
        for rank in health.newly_debugging():
            self._tell_all(verdicts.is_debugging(self._who(rank), health.beat(rank)), but=rank)
        for rank, seconds, median in health.newly_slow(now):
            self._peers[0].connection.send({"line": verdicts.slow(self._who(rank), seconds, median)})
        if vain := health.waiting_in_vain(now, IN_VAIN):
            rank, early = vain[0], health.finished_before(vain[0])
            verdict = verdicts.finished_early(self._who(rank), health.beat(rank).place, early)
            self._end_the_run(verdict, spared=health.finished)
            return
        if not self._naming and (stall := health.stall(now)) is not None:
            self._do(self._name_the_stalled(stall))

    def _blame_stopped(self, now: float, longer_than: float) -> bool:
        """Whether a worker that a signal has stopped, for longer than these seconds, ends the run."""
        found = self._health.stopped(now, longer_than)
        if found is not None:
            rank, seconds = found
            beat = self._health.beat(rank)
            self._end_the_run(verdicts.stopped(self._who(rank), beat, seconds, self.run.start_again))
        return found is not None

    async def _name_the_stalled(self, stall: Stall) -> None:
        """With their stacks. Unless they have gone on meanwhile, at the last moment."""
        self._naming = True
        beats = {rank: self._health.beat(rank) for rank in stall.waiting}
        stacks = await self._stacks_of(stall.behind or verdicts.one_per_place(stall, beats))
        self._naming, now_stalled = False, self._health.stall(time.monotonic())
        if now_stalled is not None:
            beats = {rank: self._health.beat(rank) for rank in (*now_stalled.waiting, *now_stalled.behind)}
            infos, again = self.roll_call.infos(), self.run.start_again
            self._end_the_run(verdicts.stalled(infos, now_stalled, beats, stacks, again))

    def _tell_all(self, line: str, but: int | None = None) -> None:
        for rank, peer in self._peers.items():
            if rank != but:
                peer.connection.send({"line": line})

    def _end_the_run(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """Tell all ranks why, except those ``spared``, which have done their work and leave in order."""
        if self._failure is None:
            self._failure = verdict
            for rank, peer in self._peers.items():
                if rank not in spared:
                    peer.connection.send({"verdict": verdict})
            if spared and self._close_together is None:
                self._decide_close(together=False)

    # -- stacks, and who only looks -----------------------------------------------------------------------------

    async def _stacks_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """The stacks of those of these ranks whose agents answer in time; who asks meanwhile gets the same."""
        asked = [rank for rank in ranks if rank in self._peers]
        for rank in asked:
            if rank not in self._stacks:
                self._stacks[rank] = asyncio.get_running_loop().create_future()
                self._peers[rank].connection.send({"stacks": True})
        answers = {rank: self._stacks[rank] for rank in asked}
        if answers:
            await asyncio.wait(answers.values(), timeout=STACKS_WITHIN)
        return {rank: answer.result() for rank, answer in answers.items() if answer.done()}

    def _look(self, peer: Peer, sealed: Mapping[str, Any]) -> None:
        """Somebody who joins nothing wants to see the run."""
        look = self._opened(peer, "look", sealed, "this process", "give the run's DDP_MANUAL_TOKEN or --token_file")
        if not isinstance(look, TokenMismatch):
            peer.since = time.monotonic()  # it may look again
            self._do(self._show(peer, stacks=bool(look.get("stacks"))))

    async def _show(self, peer: Peer, *, stacks: bool) -> None:
        ranks = range(self.run.world_size) if stacks and self.roll_call.complete else ()
        found = {str(rank): text for rank, text in (await self._stacks_of(ranks)).items()}
        seen = {**self.seen(), **({"stacks": found} if stacks else {})}
        peer.connection.send({"seen": self._sealed(peer, "seen", seen)})

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def seen(self) -> dict[str, Any]:
        """The run at this moment, for whoever looks on."""
        news = self.roll_call.news()
        del news["named"]
        return {
            "run": asdict(self.run),
            **news,
            "ranks": self.roll_call.roster(),
            "progress": self._health.progress(time.monotonic()) if self.roll_call.complete else None,
            "failure": self._failure,
        }
