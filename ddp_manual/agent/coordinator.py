"""The coordinator, a part of rank 0's agent: it holds the roll call, watches the ranks, and tells all why the run ends.

It listens at rank 0's address and has one connection per rank, rank 0's own among them. ``roll_call.py`` decides who is
a rank, ``health.py`` who is silent or stuck; this file reads and writes. Only rank 0's monotonic clock counts, so the
clocks of the hosts need not agree.
"""

from __future__ import annotations

import asyncio
import errno
import os
import socket
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from ddp_manual import messages
from ddp_manual.agent import verdicts
from ddp_manual.agent.compatibility import unlike
from ddp_manual.agent.connection import CLOSED, Connection, Seal
from ddp_manual.agent.handshakes import LONGEST_HELLO, Handshakes, Peer
from ddp_manual.agent.health import heartbeat_period, silent_after
from ddp_manual.agent.reachability import Pair, Probes, unreachable
from ddp_manual.agent.roll_call import RollCall, missing_ranks_error, wait_within
from ddp_manual.agent.seats import Seats
from ddp_manual.agent.watch import BROKEN, NEWCOMER, OWN_CODE, SILENT, STACKS, Loss, Watch
from ddp_manual.errors import DdpManualError, MasterLost, PeerLost, traceback_of
from ddp_manual.messages import LastWords, RankInfo, RunInfo, Verdict, named_from_outside, read_from_stranger
from ddp_manual.on_loss import LEAVE, SHRINK, WAIT
from ddp_manual.run_folder import holds_another_run, own_run_dir
from ddp_manual.terminal import Waiting, as_ranges, in_words
from ddp_manual.wire import LONGEST_ANSWER, Unreadable, encode, printable

TICK = 0.1
# Connections that are accepted before ranks have their turn, and how many may wait for that: as many as the kernel
# lets, which is net.core.somaxconn.
ACCEPTED_AT_ONCE = 16
MOST_WAITING = 65_535
# Of the time of this process, for observers.
LOOKS_SHARE = 0.2
# Seconds that rank 0 keeps torch's store for ranks that are still working.
LEAVE_TIMEOUT = 60.0
# Seconds from the moment a rank knows that rank 0 is lost until it has found another one that was there already.
SURVIVORS_WITHIN = 5.0
# Seconds between two messages of news, for each rank that is here: every rank reads all of them.
NEWS_EACH = 1 / 1000
# In a world of this many ranks heartbeats are gathered for this many seconds: a wake-up for each would cost more than
# to read it.
MANY_RANKS = 256
GATHER = 0.05
# How a connection ends with its process: with a reset, if the process had not read everything.
PROCESS_ENDED = (CLOSED, os.strerror(errno.ECONNRESET))
ALIVE = encode(messages.Alive())
RUN_IS_OVER = MasterLost(
    "the run is over",
    why="its other ranks have finished their work while this rank came back",
    next="nothing: there is no work left",
)


class Coordinator:
    """Accepts connections from ``serve`` until ``close``.

    Args:
        rank_0: what the other ranks are compared with.
        own_nonce: the nonce in the hello of rank 0's own agent; no other process may be rank 0.
        join_timeout: seconds from now until all ranks must have joined; then they have at least 600 s to load torch.
        seats: what happens when a rank is lost.
    """

    def __init__(
        self, run: RunInfo, rank_0: RankInfo, seal: Seal, own_nonce: str, join_timeout: float, seats: Seats
    ) -> None:
        self.roll_call = RollCall(run, rank_0)
        self.seats = seats
        self.record: dict[str, Any] | None = None
        """Of the last loss, once all ranks have gone on after it."""
        self._handshakes = Handshakes(self.roll_call, seal, own_nonce)
        self._peers: dict[int, Peer] = {}
        self._waits_since = self._ticked = self._goes_on_since = time.monotonic()
        self._watch = Watch(self.roll_call, self._peers, self._ticked)
        self._join_timeout = join_timeout
        self._all_were_here = False
        self._missing_for = 0.0
        """Seconds that ranks were missing, before all were here that now load torch."""
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._over = self._expired = False
        self._stopping: set[int] = set()
        """The ranks that were asked to stop the run."""
        self._left_out_to_stop: set[int] = set()
        """The ranks without which the others go on only because the run is about to stop."""
        self._next_news = self._next_beat = 0.0
        self._probes: Probes | None = None
        self._placed: set[int] = set()
        """The ranks that have gone on together, for the last time."""
        self._own_code: set[int] = set()
        self._line_for_rank_0 = ""
        """What its agent is told as soon as it is here."""
        self._gathering = False
        self._looking = asyncio.Lock()
        self._working: set[asyncio.Future[None]] = set()

    @property
    def run(self) -> RunInfo:
        return self.roll_call.run

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(read_from_stranger, self._accept, LONGEST_HELLO, stranger=True),
            sock=listener,
            backlog=ACCEPTED_AT_ONCE,
        )
        listener.listen(MOST_WAITING)  # which asyncio would also accept in one turn
        self._tick()

    @property
    def others_still_here(self) -> list[int]:
        """The ranks, without rank 0, that work with it and have not said goodbye."""
        return sorted(rank for rank in self._at_work if rank)

    @property
    def _at_work(self) -> set[int]:
        """The ranks that have gone on together, and are still here."""
        return {rank for rank, peer in self._peers.items() if rank in self._placed and not peer.left}

    @property
    def is_being_read(self) -> bool:
        """Whether another rank may still read: bytes are unsent, or it has not left, is connected and not silent."""
        silent = self._watch.health.silent(time.monotonic())
        return any(
            peer.connection.unsent or (rank and not (peer.left or peer.connection.closed or rank in silent))
            for rank, peer in self._peers.items()
        )

    async def wait_for_goodbyes(self, log: Callable[[str], None], within: float = LEAVE_TIMEOUT) -> None:
        """Keep torch's store until the other ranks have left, or for so many seconds."""
        waiting = Waiting(within, log)
        while late := self.others_still_here:
            if waiting.over:
                log(f"not waiting longer for {in_words(as_ranges(late))}: no goodbye came")
                return
            if at_work := sorted({*late}.difference(self._watch.health.finished)):
                waiting.about(f"keeping the store for {in_words(as_ranges(at_work))}, still at work")
            await asyncio.sleep(0.02)

    def end(self, error: DdpManualError | None = None) -> None:
        """Tell the ranks that are still connected that rank 0 leaves; if not all have joined, also why."""
        if error is not None and not self.roll_call.complete and self._watch.failure is None:
            when = "while a lost rank's seat was free" if self.seats.began else "before all ranks had joined"
            left = f"rank 0 ({self.run.host}, pid {self.run.pid}) left {when}"
            next = self.run.start_again if self.seats.began else "start all ranks again"
            self._refuse_all(MasterLost(left, why=error.what, next=next))
        self._over = True
        if error is None and self._watch.failure is None:
            for rank in self.others_still_here:
                self._peers[rank].connection.send(messages.Rank0Leaves())
            for peer in [peer for rank, peer in self._peers.items() if rank not in self._placed]:
                self._handshakes.refuse(peer, RUN_IS_OVER)

    def close(self, how_it_ended: Mapping[str, Any] | None = None) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for peer in [*self._peers.values(), *self._handshakes.strangers]:
            if peer.rank is None and peer.nonce and peer not in self._handshakes.claims:
                # An observer, which may look again too late to learn how the run has ended.
                self._handshakes.show(peer, {**self._describe_run(), "ended": how_it_ended})
            peer.connection.close()

    # -- connections --------------------------------------------------------------------------------------------

    def _accept(self, connection: Connection[Any]) -> None:
        peer = self._handshakes.greet(connection)
        if peer is not None:
            connection.handle(partial(self._take, peer), partial(self._closed, peer))

    def _take(self, peer: Peer, message: messages.FromRank | messages.FromStranger) -> None:
        try:
            if isinstance(message, messages.Hello | messages.Look):
                self._take_from_stranger(peer, message)
            elif (rank := self._rank_of(peer)) is not None:
                self._take_from_rank(peer, rank, message)
                self._give_up_lost()
        except Unreadable:
            raise
        except Exception as error:
            if peer.rank is None:  # what a stranger has found ends its own connection, and nothing else
                raise Unreadable(str(error) or type(error).__name__) from error
            self._break(error)

    def _rank_of(self, peer: Peer) -> int | None:
        """Return the rank that has this connection, if it is here: it may have left, or have lost its seat."""
        rank = peer.rank
        return rank if rank in self.roll_call.members and self._peers.get(rank) is peer else None

    def _take_from_stranger(self, peer: Peer, message: messages.FromStranger) -> None:
        if peer.awaits_answer or peer in self._handshakes.claims:
            raise Unreadable("it says more before it is answered")
        if isinstance(message, messages.Look):
            self._take_look(peer, message)
        else:
            self._take_hello(peer, message)

    def _take_hello(self, peer: Peer, hello: messages.Hello) -> None:
        if not (self._over or self._stopping) and self._watch.failure is None:
            info = self._handshakes.read_hello(peer, hello)
            if info is None:
                return
            # One that does not belong here is refused below, and changes nothing.
            goes_on = info.goes_on and unlike(info, self.roll_call.rank_0, self.run, time.time())[0] is None
            if goes_on and not self._go_on_with(peer, info):
                return
            holder = self._peers.get(info.rank)
            comes_back = holder is None and info.rank in self.roll_call.left_out
            if comes_back and self._watch.health.has_finished():
                self._handshakes.refuse(peer, RUN_IS_OVER)
                return
            if not self.roll_call.complete or comes_back or (holder is not None and not holder.left):
                self._handshakes.claims[peer] = info
                self._admit(peer)
                return
        peer.connection.send(messages.Later())

    def _closed(self, peer: Peer, reason: str) -> None:
        rank = peer.rank
        if rank is None:
            self._handshakes.forget(peer)
        elif self._peers.get(rank) is peer:
            del self._peers[rank]
            self._watch.gone(rank)
            reason = printable(reason)
            if peer.left:
                return
            if not self._works(rank):
                how = "is gone: its process has ended" if reason in PROCESS_ENDED else f"is gone: {reason}"
                self._miss_again(rank, how)
            elif not self._over:
                self._watch.end_because_of_gone(rank, reason)
                self._give_up_lost()

    # -- the roll call ------------------------------------------------------------------------------------------

    def _miss_again(self, rank: int, how: str) -> None:
        """Wait again for a rank that had joined, and has left or was refused."""
        if rank not in self.roll_call.members:
            return
        info = self.roll_call.info(rank)
        self.roll_call.leave(rank, how)
        self._watch.health.forget(rank, time.monotonic())
        self._probes = None
        if self.roll_call.complete:  # it was about to come back to a world that has shrunk
            self._watch.health.leave(rank)
        elif self._was_here(info):  # lost while the others begin anew, as where a host with two ranks is gone
            self._placed.discard(rank)
            self.seats.lose_too(info, how)
            self._let_stop(self._stopping - {rank})
            self._shrink_if_due()
            self._hear_held()
        else:
            self._leave_out_again(rank)

    def _let_stop(self, ranks: set[int]) -> None:
        """Let only these ranks ask the run to stop: of one that is lost nobody is left who has asked."""
        self._stopping = ranks
        if not ranks:
            self.roll_call.left_out -= self._left_out_to_stop
            self._left_out_to_stop.clear()

    def _was_here(self, info: RankInfo) -> bool:
        """Return whether a rank has worked in this run before, with this rank 0 or with an earlier one."""
        return info.rank in self._placed or bool(info.goes_on)

    def _leave_out_again(self, rank: int) -> None:
        """Go on without a rank, as before, with which a world that has shrunk was to grow again."""
        if rank in self.seats.back:
            self.roll_call.left_out.add(rank)

    def _dismiss(self, rank: int, error: DdpManualError, how: str) -> None:
        """Refuse a process that was a rank so far."""
        peer = self._peers.pop(rank)
        peer.rank = None
        self._handshakes.refuse(peer, error)
        self._miss_again(rank, how)

    def _go_on_with(self, peer: Peer, info: RankInfo) -> bool:
        """Take the run that a rank was in before it has lost rank 0; return False if that is another run."""
        so_far, run = info.goes_on, self.run
        assert so_far is not None
        if not self.seats.began:
            self.seats.adopt(so_far, time.monotonic())
            run_dir = own_run_dir(so_far.run_dir, self.seats.run_dir) or run.run_dir
            aside = run_dir is not None and holds_another_run(run_dir, so_far.run_id)
            if aside:  # such as on another host
                run_dir = f"{run_dir}-{so_far.run_id}"
            on_loss = WAIT if run.on_loss == LEAVE else run.on_loss  # otherwise nobody would get what is held
            self.roll_call.run = replace(run, run_id=so_far.run_id, run_dir=run_dir, on_loss=on_loss)
            self._join_timeout, self._waits_since = run.rejoin_timeout, time.monotonic()
            where = f"; its folder is {run_dir}, since another run is in the one that was named" if aside else ""
            self._line_for_rank_0 = f"going on with run {so_far.run_id}, which {info.who} was in{where}"
        elif so_far.run_id == run.run_id:
            self.seats.generation = max(self.seats.generation, so_far.generation)
        else:
            other = MasterLost(
                f"another run has rank 0's address by now: {run.run_id}, not {so_far.run_id}",
                why=f"its rank 0 is on {run.host} (pid {run.pid})",
                next="start all ranks again",
            )
            self._handshakes.refuse(peer, other)
            return False
        return True

    def _admit(self, only: Peer | None = None) -> None:
        """Admit processes that want to be ranks; one that goes on holds a state, another one nothing."""
        for rank, peer in self._handshakes.admit_claims(only).items():
            self._peers[rank] = peer
            so_far = self.roll_call.info(rank).goes_on
            held = so_far.held if so_far is not None else None
            self.seats.take_held(rank, held, held[1] if held is not None else 0)
        if self._line_for_rank_0 and 0 in self._peers:  # whose own hello may come later than that of another rank
            self._peers[0].connection.send(messages.Line(self._line_for_rank_0))
            self._line_for_rank_0 = ""

    def _give_up_lost(self) -> None:
        """Begin anew without the processes of ranks that were lost: the other agents replace their workers."""
        lost = self._watch.take_lost()
        if not lost or not self.roll_call.complete:
            return
        alone = {rank for rank, loss in lost.items() if not self._goes_on(rank, loss)}
        self._own_code = {rank for rank, loss in lost.items() if loss.kind == OWN_CODE}
        peers = {rank: self._peers.pop(rank) for rank in alone if rank in self._peers}
        for rank in alone:
            self.roll_call.leave(rank)
            if lost[rank].kind == NEWCOMER:
                self._leave_out_again(rank)
        missing_for = self._missing_for
        self._begin_again({rank: loss.verdict for rank, loss in lost.items()})
        if all(loss.kind == NEWCOMER for loss in lost.values()):  # the others have got no further
            self._waits_since -= missing_for
        for rank, peer in peers.items():
            if lost[rank].kind == SILENT:
                self._take_seat(peer)
            else:
                peer.rank = None
                look = lost[rank].verdict.next.removesuffix(f"\nthen {self.run.start_again}")
                others = "go on without it until then" if rank in self.roll_call.left_out else "wait for it"
                seat = f"then give this rank back, on any host: the others {others}\n{self.run.command_for(rank)}"
                next = "\n".join(filter(None, (look, seat)))
                peer.connection.send(messages.RunEnds(replace(lost[rank].verdict, next=next)))

    @staticmethod
    def _take_seat(peer: Peer) -> None:
        """Let a silent process know, if it is back one day, that it has to ask for its seat again."""
        peer.rank = None
        peer.connection.send(messages.SeatLost())
        peer.connection.close()

    def _goes_on(self, rank: int, loss: Loss) -> bool:
        """Return whether the agent of a lost rank starts another worker by itself."""
        here = rank in self._peers and loss.kind != SILENT
        return here and (self.roll_call.info(rank).starts_again or loss.kind == BROKEN)

    def _begin_again(self, lost: Mapping[int, Verdict], back: Collection[int] = ()) -> None:
        now = time.monotonic()
        self._watch.stop(now)
        self._watch = Watch(self.roll_call, self._peers, now)
        at_work = self._at_work
        self._let_stop(self._stopping & at_work)
        self.roll_call.begin_again(at_work)
        self.seats.begin(lost, now, back, replaced=at_work)
        self._placed, self._probes = at_work, None
        self._join_timeout, self._waits_since = self.run.rejoin_timeout, now
        self._all_were_here, self._missing_for = False, 0.0
        for rank in at_work:
            self._replace_worker(self._peers[rank])
        self._shrink_if_due()
        self._hear_held()

    @staticmethod
    def _replace_worker(peer: Peer) -> None:
        """Have the agent of a rank start another worker: what it says of this one does not count any more."""
        peer.worker += 1
        peer.connection.send(messages.Replace(peer.worker))

    def _shrink_if_due(self, waited: float = 0.0) -> None:
        """Go on without the ranks that are missing, if the run is to; or if it stops, so that all can stop in order.

        Rank 0 does not go on alone, of three or more: it may be its own host that is cut off from the others.
        """
        shrink_after = 0.0 if self.run.on_loss == SHRINK else self.run.shrink_after
        if self.seats.adopted and shrink_after is not None:  # other survivors may be on their way to the new rank 0
            shrink_after = max(shrink_after, silent_after(self.run) + SURVIVORS_WITHIN)
        alone = self.run.world_size > 2 and not self.roll_call.members.keys() - {0}
        missing = self.roll_call.missing
        if shrink_after is not None and waited >= shrink_after and not alone:
            self.shrink()
        elif self._stopping and self.shrink():
            self._left_out_to_stop.update(missing)

    def shrink(self) -> bool:
        """Go on without the ranks that are missing; return whether any is."""
        missing = self.roll_call.missing
        if self.roll_call.complete or not self.seats.began or not missing:
            return False
        self.roll_call.left_out.update(missing)
        self.roll_call.changed = True
        return True

    def _hear_held(self) -> None:
        """Say what is held of a lost rank's work, once all ranks have replied, or end the run."""
        here = self._placed & self.roll_call.members.keys()
        if self._watch.failure is not None:
            return
        restarted = [rank for rank in self.seats.lost if rank in here]
        if (refusal := self.seats.refusal(restarted, self._own_code, here)) is not None:
            self._watch.end_the_run(refusal)
        elif (line := self.seats.kept(self.run, here, self.roll_call.missing, self.roll_call.left_out)) is not None:
            self._watch.send_to_all(messages.Line(line))

    def _refuse_all(self, error: DdpManualError) -> None:
        """End the wait of every rank."""
        about = next(iter(self.roll_call.infos()), self.roll_call.rank_0)
        self._watch.failure = verdicts.verdict_about(about, LastWords.of(error))
        for peer in [*self._peers.values(), *self._handshakes.claims]:
            self._handshakes.refuse(peer, error)
        self._over = True

    def _refuse_newcomers(self, error: DdpManualError) -> None:
        """End the wait because of what ranks have in common; where seats are free, only of those that want one."""
        newcomers = self._newcomers
        if not self.seats.began or not newcomers:
            self._refuse_all(error)
            return
        for rank in newcomers:
            self._dismiss(rank, error, f"was refused: {error.identifier}: {error.what}")

    def _give_up_unreachable(self, failing: Sequence[Pair]) -> None:
        """Give up the host that all connections which cannot be made have in common: that of a rank which was at work,
        and has been cut off since, or that of a newcomer."""
        involved = [{end.host_id for end in pair[:2] if end is not None} for pair in failing]
        infos = self.roll_call.infos()
        others = {info.host_id for info in infos if info.rank == 0 or not self._was_here(info)}
        cut_off = set.intersection(*involved) - others
        lost = [info.rank for info in infos if info.host_id in cut_off]
        error = unreachable(failing)
        if not lost or not all(self.seats.may_try_again(rank) for rank in lost):
            self._refuse_newcomers(error)
            return
        for rank in lost:
            self._take_seat(self._peers.pop(rank))
            self._miss_again(rank, f"is cut off: {error.what}")

    @property
    def _newcomers(self) -> set[int]:
        """The ranks, without rank 0, that have not been in this run before, also not with another rank 0."""
        return {rank for rank, member in self.roll_call.members.items() if rank and not self._was_here(member.info)}

    def _advance(self) -> None:
        """Go on with the roll call as far as possible: try the network, then tell the ranks to begin."""
        if self.roll_call.complete:
            returns = self.roll_call.left_out and not self._watch.health.has_finished() and not self._watch.waiting
            if returns and (back := self.roll_call.take_back()):
                self._begin_again({}, back)
            return
        if self._watch.failure is not None or not self.roll_call.all_here:
            return
        if self._probes is None:  # while the workers load torch
            self._probes = Probes(self.roll_call.infos(), self.roll_call.places(), time.monotonic())
            for rank, request in self._probes.requests():
                self._peers[rank].connection.send(request)
        failing = self._probes.failing(time.monotonic())
        if failing:
            self._give_up_unreachable(failing)
        elif failing is not None and self.roll_call.all_ready:
            self._complete()

    def _complete(self) -> None:
        """Send each rank its place, with which its worker begins: all ranks are here."""
        on_cpu = self.roll_call.leave_gpus()
        places = self.roll_call.places()
        if (error := self.roll_call.shared_gpu()) is not None:
            self._refuse_newcomers(error)
            return
        if self.roll_call.warnings:
            self._send_news()
        self.roll_call.complete = True
        ready = self.roll_call.members[0].ready
        assert ready is not None and ready.store is not None
        now = time.monotonic()
        gone_on = self.seats.complete(self.run, {info.rank: info for info in self.roll_call.infos()}, now)
        if gone_on is not None:
            line, self.record = gone_on
            self._watch.send_to_all(messages.Line(line))
        _, source = self.seats.newest(places)
        self._watch.health.async_collectives = ready.backend == "nccl"
        self._watch.health.restart(now)
        for rank, member in self.roll_call.members.items():  # one that is silent already has no second time-out
            self._watch.health.hear(rank, None, max(member.heard, self._goes_on_since))
        for rank in self.roll_call.left_out:
            self._watch.health.leave(rank)
        if gone_on is not None:
            self._watch.newcomers = places.keys() & self._newcomers
        self._placed = {*places}
        for rank, place in places.items():
            placed = messages.Placed(
                place=place,
                store=ready.store,
                generation=self.seats.generation,
                holds=self.run.on_loss != LEAVE,
                state_from=places[source].rank if source is not None else None,
                losses=messages.Losses(self.seats.count, round(self.seats.seconds, 3)),
                run=self.run,
                on_cpu=on_cpu,
                roster=self.roll_call.roster() if rank == 0 else (),
            )
            self._peers[rank].connection.send(placed)

    def _give_up_silent(self, now: float) -> None:
        """Make the ranks missing again that have been silent for too long; in a run that has begun, the newcomers."""
        begun, newcomers = self.roll_call.complete, self.roll_call.left_out
        for rank in [rank for rank in self.roll_call.silent(now) if not begun or rank in newcomers]:
            seconds = f"{now - self.roll_call.members[rank].heard:.0f} s"
            error = PeerLost(  # the rank reads it when it goes on
                f"{self.roll_call.info(rank).who} was silent for {seconds}, and has lost its place",
                why="its agent was stopped or frozen, or the network was cut, while rank 0 waited for other ranks",
                next="start this rank again: the others still wait for it",
            )
            how = f"has been silent for {seconds}: its agent is stopped, or its host is gone"
            if self._was_here(self.roll_call.info(rank)):  # it may be back before another process has its seat
                self._take_seat(self._peers.pop(rank))
                self._miss_again(rank, how)
            else:
                self._dismiss(rank, error, how)

    def _wait_for_ranks(self, now: float) -> None:
        self._advance()
        if self._all_were_here != self.roll_call.all_here:
            # A rank that comes and is lost again, each time, does not restart the clock of the missing ranks.
            self._all_were_here = self.roll_call.all_here
            so_far = now - self._waits_since
            self._waits_since = now if self._all_were_here else now - self._missing_for
            self._missing_for = so_far if self._all_were_here else 0.0
        waited = now - self._waits_since
        self._shrink_if_due(waited)
        if waited > self._wait_within and not self.roll_call.complete:
            self._end_the_wait(waited)
        elif self.roll_call.changed and now >= self._next_news:
            self._next_news = now + len(self._peers) * NEWS_EACH
            self._send_news()

    def _end_the_wait(self, waited: float) -> None:
        """End the run, since ranks have been missing for so long; where a state of our own training is held, only after
        the ranks that are here have gone on for a step and saved a checkpoint."""
        never_taken = self.seats.never_taken(self.run, self.roll_call.missing, waited)
        if never_taken is None:
            self._refuse_all(missing_ranks_error(self.roll_call.news(), self.run, waited))
        elif self._expired or self.run.script or self.seats.newest(self.roll_call.members)[0] is None:
            self._refuse_all(never_taken.error())
        else:
            self._expired = True
            self._watch.send_to_all(messages.Expired(never_taken))
            self._stopping.update(self.roll_call.members)
            self._shrink_if_due()

    @property
    def _wait_within(self) -> float:
        return wait_within(self._join_timeout, all_here=self._all_were_here)

    def _send_news(self) -> None:
        self.roll_call.changed = False
        waited, for_lost = time.monotonic() - self._waits_since, self.seats.began and not self.seats.adopted
        news = replace(self.roll_call.news(), waited=waited, timeout=self._wait_within, for_lost=for_lost)
        self._watch.send_to_all(news)

    # -- what ranks say -----------------------------------------------------------------------------------------

    def _take_from_rank(self, peer: Peer, rank: int, message: messages.FromRank) -> None:
        now = time.monotonic()
        if isinstance(message, messages.OfWorker) and message.worker != peer.worker:
            self.roll_call.hear(rank, now)  # what it says of the worker that its agent replaces does not count any more
            return
        match message:
            case messages.Heartbeat():
                self._watch.hear(rank, message.beat, now)
                if self.roll_call.complete and self.run.world_size >= MANY_RANKS and not self._gathering:
                    self._gathering = True
                    asyncio.get_running_loop().call_soon(self._gather)
            case messages.WorkerReady():
                for other, error in self.roll_call.get_ready(rank, message.ready):
                    self._dismiss(other, error, "has left: it was refused")
                self._advance()
            case messages.Held():
                self.seats.take_held(rank, message.moment, message.steps_done)
                self._hear_held()
            case messages.Finished():
                self._watch.finish(rank, now)
            case messages.Failed():
                self._take_failure(peer, rank, message)
            case messages.LostRank0(words):  # which was stopped for long, and goes on
                about_rank_0 = replace(words, why=named_from_outside(words.why, rank))
                if self._works(rank):
                    verdict = verdicts.verdict_about(self.roll_call.rank_0, about_rank_0)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
            case messages.StacksReply():
                self._watch.take_reply(rank, STACKS, message.text, now)
            case messages.RecordsReply():
                self._watch.take_reply(rank, message.number, message.reply, now)
            case messages.Probed():
                if self._probes is not None:
                    self._probes.take(message.key, message.failures)
                    self._advance()
            case messages.Stopping():  # a pod may be replaced while it saves: the new one must not be refused
                self._stopping.update({rank} if self.roll_call.complete or self.seats.began else ())
            case messages.Leaves(words, at_work):
                if at_work and self._works(rank):
                    verdict = verdicts.verdict_about(self.roll_call.info(rank), words, judged=False)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
                else:
                    self._take_goodbye(peer, rank, printable(words.what))
            case messages.Goodbye():
                self._take_goodbye(peer, rank, "")

    def _works(self, rank: int) -> bool:
        """Return whether all ranks have gone on together, this one among them."""
        return self.roll_call.complete and rank not in self.roll_call.left_out

    def _take_goodbye(self, peer: Peer, rank: int, why: str) -> None:
        """Take that a rank leaves: its work is done, or ``why`` says why it is not."""
        peer.left = True
        if self._works(rank):
            self._lose_or_let_go(rank, why)
        elif why or not self.seats.lost:
            self._miss_again(rank, f"left again: {why}")
        else:
            self._end_without(rank)

    def _lose_or_let_go(self, rank: int, why: str) -> None:
        """Take that a rank has said goodbye while the ranks work: its work is done, or ``why`` says why it left."""
        if why:
            self._watch.end_because_of_left(rank, why)
            self._give_up_lost()
        else:
            self._watch.health.leave(rank)

    def _end_without(self, rank: int) -> None:
        """End the run: a rank has done its work and has left, while the others were to begin anew with it."""
        lost = next(iter(self.seats.lost.values()))
        left = f"rank {rank} had done its work and has left, so the others cannot begin anew with it"
        self._watch.end_the_run(replace(lost, why=f"{lost.why}\n{left}", next=self.run.start_again))

    def _gather(self) -> None:
        """Let heartbeats pile up, after everything that has come so far was read."""
        self._gathering = False
        time.sleep(GATHER)

    def _take_failure(self, peer: Peer, rank: int, failed: messages.Failed) -> None:
        """Take what has ended a worker: its own last words or what its agent says about it."""
        verdict = verdicts.verdict_about(self.roll_call.info(rank), failed.words, judged=failed.judged)
        if self._works(rank):
            broken_at = printable(failed.broken_at) if failed.broken_at is not None else None
            crashed = failed.judged and verdict.exit_code - 128 in verdicts.CRASHES
            in_a_collective = crashed or failed.in_a_collective
            self._watch.take_failure(verdict, broken_at, time.monotonic(), in_a_collective=in_a_collective)
            return
        if self.roll_call.info(rank).starts_again and self.seats.may_try_again(rank):
            self.roll_call.forget_workers([rank])
            self.seats.held.pop(rank, None)
            self._replace_worker(peer)
            return
        peer.connection.send(messages.RunEnds(verdict))
        what = printable(verdict.what)
        _, is_gone, reason = what.partition(" is gone: ")
        how = f"is gone: {reason}" if is_gone and failed.judged else f"left again: {what}"
        self._miss_again(rank, how)

    # -- as time goes by ----------------------------------------------------------------------------------------

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK, self._tick)
        try:
            self._look_around(time.monotonic())
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """End the run because of a mistake of this package: no rank is to blame."""
        broke = MasterLost(
            "rank 0's coordinator broke",
            why=traceback_of(error),
            next=f"{self.run.start_again}\nthis is a mistake in ddp_manual and worth reporting",
        )
        self._watch.end_the_run(verdicts.verdict_about(self.roll_call.rank_0, LastWords.of(broke)))

    def _look_around(self, now: float) -> None:
        passed, self._ticked = now - self._ticked, now
        if passed > self.run.peer_timeout:
            self._goes_on_since = now  # this process was stopped, perhaps with its whole host
            self._watch.health.restart(now)
        self._handshakes.abort_silent(now)
        if now >= self._next_beat:
            self._next_beat = now + heartbeat_period(self.run)
            for peer in self._peers.values():
                peer.connection.write(ALIVE)
            if self._watch.failure is None:
                self._watch.check_health(now)
        # A process waits for a rank until the process that holds it ends, speaks or is known to be frozen.
        self._admit()
        if self._watch.failure is None and passed < 1:
            self._give_up_silent(now)
        if not self.roll_call.complete and self._watch.failure is None:
            self._wait_for_ranks(now)
        self._watch.check(now)
        if self.roll_call.complete and self._watch.failure is None and not self._over:
            self._advance()
        self._give_up_lost()

    # -- observers ---------------------------------------------------------------------------------------------

    def _take_look(self, peer: Peer, look: messages.Look) -> None:
        """Show the run to an observer, which joins nothing."""
        question = self._handshakes.read_look(peer, look)
        if question is not None:
            if peer.connection.unsent:
                raise Unreadable("it has not read the last answer")
            peer.awaits_answer = True
            done = {"shrunk": self.shrink()} if question.shrink else {}
            everybody = self._placed if question.stacks and self.roll_call.complete else ()
            show = partial(self._show_soon, peer, done, question.stacks)
            self._watch.ask_for_stacks(peer, everybody, show, time.monotonic())

    def _show_soon(self, peer: Peer, done: Mapping[str, Any], wants: bool, stacks: Mapping[int, str], _: float) -> None:
        most = LONGEST_ANSWER // (2 * self.run.world_size)  # the roster takes the rest of what an observer reads
        shown = {"stacks": {str(rank): text[-most:] for rank, text in stacks.items()}} if wants else {}
        self._working.add(work := asyncio.ensure_future(self._show(peer, {**done, **shown})))
        work.add_done_callback(self._working.discard)

    async def _show(self, peer: Peer, more: Mapping[str, Any]) -> None:
        async with self._looking:
            if not peer.connection.closed:
                began = time.monotonic()
                seen = {**self._describe_run(), **more}
                self._handshakes.answer_look(peer, seen)
                await asyncio.sleep((1 / LOOKS_SHARE - 1) * (time.monotonic() - began))

    def _describe_run(self) -> dict[str, Any]:
        """Return the answer to ``status``: the run, its ranks and what each does, who is missing, refused or gone."""
        news = asdict(self.roll_call.news())
        for name in ("named", "waited", "timeout", "for_lost"):
            del news[name]
        return {
            "run": asdict(self.run),
            **news,
            "missing": as_ranges(self.roll_call.missing),
            "ranks": self.roll_call.roster(),
            "progress": self._watch.health.progress(time.monotonic()) if self.roll_call.complete else None,
            "failure": asdict(self._watch.failure) if self._watch.failure is not None else None,
            "ended": None,
        }
