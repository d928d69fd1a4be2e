"""The coordinator, a part of rank 0's agent, without its connections: it holds the roll call, watches the ranks, and
tells all why the run ends.

``roll_call.py`` decides who is a rank, ``lost_or_to_blame.py`` when one is lost, ``recovery.py`` how the run goes on
without it; this file has what they do together. ``agent/coordinator.py`` reads and writes.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from ddp_manual import messages
from ddp_manual.errors import DdpManualError, MasterLost, PeerLost, Stopped, traceback_of
from ddp_manual.on_rank_loss import LEAVE, WAIT
from ddp_manual.protocol import verdicts
from ddp_manual.protocol.compatibility import mismatch
from ddp_manual.protocol.end_or_begin_anew import BROKEN, OWN_CODE, SILENT, Loss
from ddp_manual.protocol.handshakes import CLOSED, Handshakes, Peer
from ddp_manual.protocol.health import Silence
from ddp_manual.protocol.heartbeat_times import heartbeat_period
from ddp_manual.protocol.inquiries import STACKS
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.missing_ranks import missing_ranks_error
from ddp_manual.protocol.reachability import Pair, unreachable
from ddp_manual.protocol.recovery import Recovery
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.roll_call_states import Gathering, Working
from ddp_manual.protocol.seat_states import Seat
from ddp_manual.protocol.stop_step import StopStep
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.ranks_and_runs import LastWords, RankInfo, RunInfo, RunSoFar, Verdict, named_from_outside
from ddp_manual.wire import LONGEST_ANSWER, Unreadable, encode, printable
from ddp_manual.wording import as_ranges

# Seconds between two News, for each rank that is here: each News goes to every rank.
NEWS_EACH = 1 / 1000
# How a connection ends with its process: with a reset, if the process had not read everything.
PROCESS_ENDED = (CLOSED, "Connection reset by peer")
ALIVE = encode(messages.Alive())
RUN_IS_OVER = MasterLost(
    "the run is over",
    why="its other ranks have finished their work while this rank came back",
    next="nothing: there is no work left",
)


class CoordinatorProtocol:
    """What rank 0 decides about all ranks. Each method that takes ``now`` is told the time, in seconds of rank 0's
    monotonic clock; what follows is sent at once, over connections that never wait.

    Args:
        rank_0: what the other ranks are compared with.
        own_nonce: the nonce in the hello of rank 0's own agent; no other process may be rank 0.
        join_timeout: seconds from now until all ranks must have joined; then they have at least 600 s to load torch.
        recovery: how the run goes on when a rank is lost.
        own_addresses: the IP addresses of this host.
        folder_of: returns the folder for the files of a run that this rank takes over, and whether it is not the named
            one because another run is in that.
        show: shows the run, with the fields that it is given, to an observer; it limits the time that this takes.
        stopped: returns which signal has stopped the agent of the worker with this pid on this host; "" if none has.
    """

    def __init__(
        self,
        run: RunInfo,
        rank_0: RankInfo,
        seal: Seal,
        own_nonce: str,
        join_timeout: float,
        recovery: Recovery,
        now: float,
        *,
        own_addresses: Sequence[str],
        folder_of: Callable[[RunSoFar], tuple[str | None, bool]],
        show: Callable[[Peer, Mapping[str, Any]], None],
        stopped: Callable[[int], str],
    ) -> None:
        self.roll_call = RollCall(run, rank_0, now, join_timeout, stopped)
        self.recovery = recovery
        self.record: dict[str, Any] | None = None
        """The entry for the run's folder about the last loss, once all ranks have gone on after it."""
        self.handshakes = Handshakes(self.roll_call, seal, own_nonce)
        self._own_addresses, self._folder_of, self._show = own_addresses, folder_of, show
        self._peers: dict[int, Peer] = {}
        self._now = self._ticked = now
        self._resumed_at = -math.inf
        """When this process last ran again after it was stopped for long: the other ranks may have given it up."""
        self._watch = Watch(self.roll_call, self._peers, now)
        self._silence = Silence(self.roll_call.who)
        self._stop_step = StopStep(self._watch.send_to_all)
        self._next_news = self._next_beat = 0.0
        self._line_for_rank_0 = ""
        """The line that rank 0's agent is sent as soon as it is here."""

    @property
    def run(self) -> RunInfo:
        return self.roll_call.run

    @property
    def failure(self) -> Verdict | None:
        """What ends the run."""
        return self._watch.end_of_work.failure

    @property
    def others_still_here(self) -> list[int]:
        """The ranks, without rank 0, that work with it and have not said goodbye."""
        silent = self._watch.health.silent(self._now) if self.failure is not None else {}  # they may never hear it
        return sorted(self._at_work - silent.keys() - {0})

    def at_work(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks whose work is not done."""
        return sorted({*ranks}.difference(self._watch.health.finished))

    @property
    def _at_work(self) -> set[int]:
        """The ranks that have gone on together, and are still here."""
        return {rank for rank, peer in self._peers.items() if self.roll_call.has_worked(rank) and not peer.left}

    def is_being_read(self, now: float) -> bool:
        """Return whether another rank may still read what was sent: bytes are unsent, or a rank that is not silent has
        not left and is connected."""
        heard = self._peers.keys() - self._watch.health.silent(now).keys() - {0}
        here = [self._peers[rank] for rank in heard if not self._peers[rank].left]
        unsent = any(peer.connection.unsent for peer in self._peers.values())
        return unsent or not all(peer.connection.closed for peer in here)

    def end(self, error: DdpManualError | None, now: float) -> None:
        """Tell the ranks that are still connected that rank 0 leaves; if not all have joined, also why."""
        self._now = now
        if error is not None and not self.roll_call.works:
            when = "while a lost rank's seat was free" if self.recovery.began else "before all ranks had joined"
            left = f"rank 0 ({self.run.host}, pid {self.run.pid}) left {when}"
            again = self.run.start_again if self.recovery.began else "start all ranks again"
            own = "" if isinstance(error, Stopped) else re.sub(r"(\W+then |^)start all ranks again$", "", error.next)
            self._refuse_all(MasterLost(left, why=error.what, next="\nthen ".join(filter(None, (own, again)))))
        self.roll_call.end()
        if error is None and self.failure is None:
            for rank in self.others_still_here:
                self._peers[rank].connection.send(messages.Rank0Leaves())
            for peer in [peer for rank, peer in self._peers.items() if not self.roll_call.has_worked(rank)]:
                self.handshakes.refuse(peer, RUN_IS_OVER)

    def observers(self) -> list[Peer]:
        """Return the connections that have asked to see the run."""
        claims = self.handshakes.claims
        return [peer for peer in self.handshakes.strangers if peer.nonce and peer not in claims]

    def connections(self) -> list[Peer]:
        return [*self._peers.values(), *self.handshakes.strangers]

    # -- connections --------------------------------------------------------------------------------------------

    def take(self, peer: Peer, message: messages.FromRank | messages.FromStranger, now: float) -> None:
        """Handle a message that has come over a connection.

        Raises:
            Unreadable: the other side must not send this now; its connection is to be ended.
        """
        self._now = now
        try:
            if isinstance(message, messages.Hello | messages.Look):
                self._take_from_stranger(peer, message)
            elif (rank := self._rank_of(peer)) is not None:
                self._take_from_rank(peer, rank, message)
                self._give_up_lost()
        except Unreadable:
            raise
        except Exception as error:
            if peer.rank is None:  # a mistake that a stranger has found ends only its connection
                raise Unreadable(str(error) or type(error).__name__) from error
            self._break(error)

    def _rank_of(self, peer: Peer) -> int | None:
        """Return the rank that has this connection, if it is here: it may have left, or have lost its seat."""
        rank = peer.rank
        return rank if rank in self.roll_call.members and self._peers.get(rank) is peer else None

    def _take_from_stranger(self, peer: Peer, message: messages.FromStranger) -> None:
        if peer.awaits_answer or peer in self.handshakes.claims:
            raise Unreadable("it says more before it is answered")
        if isinstance(message, messages.Look):
            self._take_look(peer, message)
        else:
            self._take_hello(peer, message)

    def _take_hello(self, peer: Peer, hello: messages.Hello) -> None:
        if self.roll_call.admits and self.failure is None:
            info = self.handshakes.read_hello(peer, hello, self._now)
            if info is None:
                return
            # A process that does not belong to this run is refused below, and changes nothing.
            goes_on = info.goes_on and mismatch(info, self.roll_call.rank_0, self.run, peer.wall_clock)[0] is None
            if goes_on and not self._go_on_with(peer, info):
                return
            holder = self._peers.get(info.rank)
            comes_back = holder is None and self.roll_call.is_left_out(info.rank)
            if comes_back and self._watch.health.has_finished():
                self.handshakes.refuse(peer, RUN_IS_OVER)
                return
            is_taken = holder is not None and not holder.left  # perhaps by a process that has died unseen
            if is_taken or comes_back or not self.roll_call.works:
                self.handshakes.claims[peer] = info
                self._admit(peer)
                return
        peer.connection.send(messages.Later())

    def closed(self, peer: Peer, reason: str, now: float) -> None:
        """Handle the end of a connection; ``reason`` says how it ended."""
        self._now = now
        rank = peer.rank
        if rank is None:
            self.handshakes.forget(peer)
        elif self._peers.get(rank) is peer:
            del self._peers[rank]
            self._watch.gone(rank)
            reason = printable(reason)
            if peer.left:
                return
            if not self._works(rank):
                how = "is gone: its process has ended" if reason in PROCESS_ENDED else f"is gone: {reason}"
                self._miss_again(rank, how)
            elif not self.roll_call.is_over:
                self._watch.end_because_of_gone(rank, reason)
                self._give_up_lost()

    # -- the roll call ------------------------------------------------------------------------------------------

    def _miss_again(self, rank: int, how: str) -> None:
        """Wait again for a rank that had joined, and has left or was refused."""
        if rank not in self.roll_call.members:
            return
        info, has_worked_before = self.roll_call.info(rank), self.roll_call.has_worked_before(rank)
        self.roll_call.leave(rank, how, left_out=not has_worked_before and rank in self.recovery.back)
        self._watch.health.forget(rank, self._now)
        if self.roll_call.works:  # it was about to come back to a world that has shrunk
            self._watch.health.leave(rank)
        elif has_worked_before:  # lost while the others begin anew, as when a host with two ranks is gone
            self.recovery.lose_too(info, how)
            self._shrink_if_due()
            self._hear_held()

    def _dismiss(self, rank: int, error: DdpManualError, how: str) -> None:
        """Refuse a process that was a rank so far."""
        peer = self._peers.pop(rank)
        peer.rank = None
        self.handshakes.refuse(peer, error)
        self._miss_again(rank, how)

    def _go_on_with(self, peer: Peer, info: RankInfo) -> bool:
        """Go on with the run in which a rank has lost rank 0; refuse it and return False if that is another run."""
        so_far, run = info.goes_on, self.run
        assert so_far is not None
        if not self.recovery.began:
            self.recovery.adopt(so_far, self._now)
            run_dir, aside = self._folder_of(so_far)
            on_loss = WAIT if run.on_loss == LEAVE else run.on_loss  # with LEAVE nobody would get the held state
            self.roll_call.run = replace(run, run_id=so_far.run_id, run_dir=run_dir, on_loss=on_loss)
            self.roll_call.wait_anew(self._now, run.rejoin_timeout)
            where = f"; its folder is {run_dir}, since another run is in the one that was named" if aside else ""
            self._line_for_rank_0 = f"going on with run {so_far.run_id}, which {info.who} was in{where}"
        elif so_far.run_id == run.run_id:
            self.recovery.generation = max(self.recovery.generation, so_far.generation)
        else:
            other = MasterLost(
                f"another run has rank 0's address by now: {run.run_id}, not {so_far.run_id}",
                why=f"its rank 0 is on {run.host} (pid {run.pid})",
                next="start all ranks again",
            )
            self.handshakes.refuse(peer, other)
            return False
        return True

    def _admit(self, only: Peer | None = None) -> None:
        """Admit processes that want to be ranks; only a process that has lost its rank 0 may hold a state."""
        for rank, peer in self.handshakes.admit_claims(self._now, only).items():
            self._peers[rank] = peer
            so_far = self.roll_call.info(rank).goes_on
            held = so_far.held if so_far is not None else None
            self.recovery.take_held(rank, held, held[1] if held is not None else 0)
        if self._line_for_rank_0 and 0 in self._peers:  # whose own hello may come later than that of another rank
            self._peers[0].connection.send(messages.Line(self._line_for_rank_0))
            self._line_for_rank_0 = ""

    def _give_up_lost(self) -> None:
        """Begin anew without the processes of ranks that were lost: the other agents replace their workers."""
        lost, state = self._watch.take_lost(), self.roll_call.state
        if not lost or not isinstance(state, Working):
            return
        alone = {rank for rank, loss in lost.items() if not self._is_restarted(rank, loss)}
        peers = {rank: self._peers.pop(rank) for rank in alone if rank in self._peers}
        for rank in alone:
            self.roll_call.leave(rank, left_out=lost[rank].is_newcomer and rank in self.recovery.back)
        no_further = all(loss.is_newcomer for loss in lost.values())
        own_code = {rank for rank, loss in lost.items() if loss.kind == OWN_CODE and not loss.is_newcomer}
        lost_ranks = {rank: loss.verdict for rank, loss in lost.items()}
        self._begin_again(lost_ranks, own_code=own_code, missing_for=state.missing_for if no_further else 0.0)
        for rank, peer in peers.items():
            if lost[rank].kind == SILENT:
                self._vacate_seat(peer)
            else:
                peer.rank = None
                look = lost[rank].verdict.next.removesuffix(f"\nthen {self.run.start_again}")
                others = "go on without it until then" if self.roll_call.is_left_out(rank) else "wait for it"
                seat = f"then start this rank again, {self.run.where_to_type}: the others {others}"
                next = "\n".join(filter(None, (look, seat, self.run.command_for(rank))))
                peer.connection.send(messages.RunEnds(replace(lost[rank].verdict, next=next)))

    @staticmethod
    def _vacate_seat(peer: Peer) -> None:
        """Tell a silent process, which may run again one day, that it has to ask for its seat again."""
        peer.rank = None
        peer.connection.send(messages.SeatLost())
        peer.connection.close()

    def _is_restarted(self, rank: int, loss: Loss) -> bool:
        """Return whether the agent of a lost rank starts another worker by itself."""
        if rank not in self._peers or loss.kind == SILENT:
            return False
        return self.roll_call.info(rank).starts_again or loss.kind == BROKEN

    def _begin_again(
        self,
        lost: Mapping[int, Verdict],
        back: Collection[int] = (),
        own_code: Collection[int] = (),
        missing_for: float = 0.0,
    ) -> None:
        """Begin anew without the ranks that are ``lost``, some of them by their ``own_code``, or with those ``back``.

        Args:
            missing_for: seconds for which the lost ranks have been missing already.
        """
        now, at_work = self._now, self._at_work
        self._watch.stop(now)
        self._watch = Watch(self.roll_call, self._peers, now)
        self._stop_step = StopStep(self._watch.send_to_all)
        self.roll_call.begin_again(at_work, now - missing_for, self.run.rejoin_timeout)
        self.recovery.begin(lost, now, back, replaced=at_work, own_code=own_code)
        for rank in at_work:
            self._replace_worker(self._peers[rank])
        self._shrink_if_due()
        self._hear_held()

    @staticmethod
    def _replace_worker(peer: Peer) -> None:
        """Have the agent of a rank start another worker; messages about the present one count no longer."""
        peer.worker += 1
        peer.connection.send(messages.Replace(peer.worker))

    def _shrink_if_due(self, waited: float = 0.0) -> None:
        """Go on without the missing ranks if the run may shrink by now; or if it stops, so that the others can stop."""
        here = self.roll_call.members
        if self.recovery.shrinks(self.run, here, waited, since_a_stop=self._now - self._resumed_at):
            self.shrink()
        elif self.roll_call.stopping:
            self.shrink(to_stop=True)

    def shrink(self, *, to_stop: bool = False) -> bool:
        """Go on without the ranks that are missing; return whether any is.

        Args:
            to_stop: whether to wait for them again if no rank is about to stop the run any more.
        """
        return self.recovery.paused and self.roll_call.leave_out(to_stop=to_stop)

    def _hear_held(self) -> None:
        """Once all ranks have said what they hold, tell all what was lost and is held, or end the run."""
        if self.failure is not None or not self.recovery.is_unsaid:
            return
        here = self.roll_call.have_worked
        restarted = [rank for rank in self.recovery.lost if rank in here]
        if (refusal := self.recovery.refusal(restarted, here)) is not None:
            self._watch.end_of_work.end_the_run(refusal)
        elif (line := self.recovery.kept(self.run, here, self.roll_call.missing, self.roll_call.left_out)) is not None:
            self._watch.send_to_all(messages.Line(line))

    def _refuse_all(self, error: DdpManualError) -> None:
        """End the wait of every rank, unless the run ends already."""
        if self.failure is not None:
            return
        about = next(iter(self.roll_call.infos()), self.roll_call.rank_0)
        self._watch.end_of_work.failure = verdicts.verdict_about(about, LastWords.of(error))
        for peer in [*self._peers.values(), *self.handshakes.claims]:
            self.handshakes.refuse(peer, error)
        self.roll_call.end()

    def _refuse_newcomers(self, error: DdpManualError) -> None:
        """End the wait of every rank; in a run that has begun, only that of its newcomers, if it has any."""
        newcomers = self._newcomers
        if not self.recovery.began or not newcomers:
            self._refuse_all(error)
            return
        for rank in newcomers:
            self._dismiss(rank, error, f"was refused: {error.identifier}: {error.what}")

    def _give_up_unreachable(self, failing: Sequence[Pair]) -> None:
        """Give up the ranks on the one host that all failed connections have in common, if they have worked before and
        have been cut off since; otherwise refuse the newcomers."""
        involved = [{end.host_id for end in pair[:2] if end is not None} for pair in failing]
        infos = self.roll_call.infos()
        others = {info.host_id for info in infos if info.rank == 0 or not self.roll_call.has_worked_before(info.rank)}
        cut_off = set.intersection(*involved) - others
        lost = [info.rank for info in infos if info.host_id in cut_off]
        error = unreachable(failing)
        if not lost or not all(self.recovery.count_try(rank) for rank in lost):
            self._refuse_newcomers(error)
            return
        for rank in lost:
            self._vacate_seat(self._peers.pop(rank))
            self._miss_again(rank, f"is cut off: {error.what}")

    @property
    def _newcomers(self) -> set[int]:
        """The ranks, without rank 0, that have not been in this run before, also not with another rank 0."""
        return {rank for rank in self.roll_call.members if rank and not self.roll_call.has_worked_before(rank)}

    def _advance(self) -> None:
        """Go on as far as possible: try the network, then tell the ranks to begin; or begin anew with those that came
        to a world which had shrunk."""
        state = self.roll_call.state
        if self.failure is not None:
            return
        if isinstance(state, Working):
            back = self.roll_call.ranks(Seat.READY_TO_RETURN)
            if back and self._may_begin_anew:
                self.roll_call.take_back(back)
                self._begin_again({}, back)
        elif isinstance(state, Gathering) and self.roll_call.all_here:
            if state.probes is None:  # while the workers load torch
                state.probes = self._watch.probe_network(self._now)
            failing = state.probes.failing(self._now)
            if failing:
                self._give_up_unreachable(failing)
            elif failing is not None and self.roll_call.all_ready:
                self._complete()

    @property
    def _may_begin_anew(self) -> bool:
        """Whether the ranks at work can begin anew with others: none of them is lost, or has finished."""
        if self._watch.is_undecided or self._watch.health.has_finished():
            return False
        # Otherwise the last messages of a rank may be unread, such as that it has finished.
        heard_since = self._now - self._resumed_at > 2 * heartbeat_period(self.run)
        return heard_since and self._watch.health.late(self._now) is None

    def _complete(self) -> None:
        """Send each rank its place, with which its worker begins: all ranks are here."""
        on_cpu = self.roll_call.leave_gpus()
        places = self.roll_call.places()
        if (error := self.roll_call.shared_gpu()) is not None:
            self._refuse_newcomers(error)
            return
        if self.roll_call.warnings:
            self._send_news()
        now, ready = self._now, self.roll_call.members[0].ready
        assert ready is not None and ready.store is not None
        came = self._newcomers if self.recovery.adopted else self.roll_call.members.keys() - self.roll_call.have_worked
        newcomers = places.keys() & came - {0}
        gone_on = self.recovery.complete(self.run, {info.rank: info for info in self.roll_call.infos()}, now)
        self.roll_call.complete(now)
        if gone_on is not None:
            line, self.record = gone_on
            self._watch.send_to_all(messages.Line(line))
            self._watch.end_of_work.newcomers = newcomers
        _, source = self.recovery.newest(places)
        self._watch.health.restart(now)
        for rank, member in self.roll_call.members.items():  # a rank that is silent gets no second time-out
            self._watch.health.hear(rank, None, max(member.heard, self._resumed_at))
        for rank in self.roll_call.left_out:
            self._watch.health.leave(rank)
        placed = messages.Placed(
            place=places[0],
            store=ready.store,
            generation=self.recovery.generation,
            holds=self.run.on_loss != LEAVE,
            state_from=places[source].rank if source is not None else None,
            losses=messages.Losses(self.recovery.count, round(self.recovery.seconds, 3)),
            run=self.run,
            on_cpu=on_cpu,
        )
        for rank, place in places.items():
            roster = self.roll_call.roster() if rank == 0 else ()
            self._peers[rank].connection.send(replace(placed, place=place, roster=roster))

    def _give_up_silent(self, now: float) -> None:
        """Make ranks missing again that were silent for too long; while others work, only those that wait to return."""
        begun, silent = self.roll_call.works, self.roll_call.silent(now)
        for rank in [rank for rank in silent if not begun or self.roll_call.is_left_out(rank)]:
            seconds = f"{now - self.roll_call.members[rank].heard:.0f} s"
            error = PeerLost(  # the rank reads it when it goes on
                f"{self.roll_call.info(rank).who} was silent for {seconds}, and has lost its place",
                why="its agent was stopped or frozen, or the network was cut, while rank 0 waited for other ranks",
                next="start this rank again: the others still wait for it",
            )
            how = f"has been silent for {seconds}: its agent is stopped, or its host is gone"
            if self.roll_call.has_worked_before(rank):  # it may be back before another process has its seat
                self._vacate_seat(self._peers.pop(rank))
                self._miss_again(rank, how)
            else:
                self._dismiss(rank, error, how)

    def _advance_or_wait(self) -> None:
        """Go on as far as possible; while ranks are missing, tell all which, or end the run once the time is up."""
        self._advance()
        state = self.roll_call.state
        if not isinstance(state, Gathering):
            return
        self._shrink_if_due(state.tick(self._now, all_here=self.roll_call.all_here))
        waited = state.tick(self._now, all_here=self.roll_call.all_here)
        if waited > state.limit:
            self._end_the_wait(waited)
        elif self.roll_call.changed and self._now >= self._next_news:
            self._next_news = self._now + len(self._peers) * NEWS_EACH
            self._send_news()

    def _end_the_wait(self, waited: float) -> None:
        """End the run: ranks have been missing for too long. If the program saves checkpoints and its state is held,
        the ranks that are here first go on for a step and save one."""
        never_taken = self.recovery.never_taken(self.run, self.roll_call.missing, waited)
        if never_taken is None:
            self._refuse_all(missing_ranks_error(self.roll_call.news(), self.run, waited, self._own_addresses))
        elif not self.run.resumes:
            self._refuse_all(never_taken.error())
        elif not self.recovery.have_said(self.roll_call.have_worked):
            pass  # some ranks, which end their workers, have not said yet what they hold
        elif self.recovery.newest(self.roll_call.members)[0] is None:
            self._refuse_all(never_taken.error())
        else:
            self._watch.send_to_all(messages.Expired(never_taken))
            self.roll_call.stopping.update(self.roll_call.members)
            self._shrink_if_due()

    def _send_news(self) -> None:
        state, for_lost = self.roll_call.state, self.recovery.began and not self.recovery.adopted
        assert isinstance(state, Gathering)
        self.roll_call.changed = False
        waited, news = self._now - state.since, self.roll_call.news()
        self._watch.send_to_all(replace(news, waited=waited, timeout=state.limit, for_lost=for_lost))

    # -- what ranks say -----------------------------------------------------------------------------------------

    def _take_from_rank(self, peer: Peer, rank: int, message: messages.FromRank) -> None:
        now = self._now
        if isinstance(message, messages.OfWorker) and message.worker != peer.worker:
            self.roll_call.hear(rank, now)  # the message is about a worker that its agent replaces: it does not count
            return
        match message:
            case messages.Heartbeat():
                self._watch.hear(rank, message.beat, now)
            case messages.WorkerReady():
                for other, error in self.roll_call.get_ready(rank, message.ready):
                    self._dismiss(other, error, "has left: it was refused")
                self._advance()
            case messages.Held():
                self.recovery.take_held(rank, message.moment, message.steps_done)
                self._hear_held()
            case messages.Finished():
                self._watch.end_of_work.finish(rank, now)
            case messages.Failed():
                self._take_failure(peer, rank, message)
            case messages.LostRank0(words):  # this rank 0 was stopped for long, and runs again
                about_rank_0 = replace(words, why=named_from_outside(words.why, rank))
                if self._works(rank):
                    verdict = verdicts.verdict_about(self.roll_call.rank_0, about_rank_0)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
            case messages.StacksReply():
                self._watch.take_reply(rank, STACKS, message.text, now)
            case messages.RecordsReply():
                self._watch.take_reply(rank, message.number, message, now)
            case messages.Probed():
                if isinstance(state := self.roll_call.state, Gathering) and state.probes is not None:
                    state.probes.take(message.key, message.failures)
                    self._advance()
                elif self._watch.probes is not None:
                    self._watch.probes.take(message.key, message.failures)
            case messages.Stopping():  # a pod may be replaced while it saves: the new one must not be refused
                self.roll_call.stopping.update({rank} if self.roll_call.works or self.recovery.began else ())
                if self._works(rank):
                    self._stop_step.ask(rank, message.number)
            case messages.StepsDone():
                self._stop_step.take(rank, message.steps)
                self._name_stop_step()
            case messages.Tell(text):
                teller, without = self.roll_call.info(rank), [rank]
                if self.run.launched:  # the ranks of its host share its terminal
                    without = [info.rank for info in self.roll_call.infos() if info.host_id == teller.host_id]
                self._watch.send_to_all(messages.Line(f"{teller.who}: {printable(text)}"), without)
            case messages.Leaves(words, at_work):
                if at_work and self._works(rank):
                    verdict = verdicts.verdict_about(self.roll_call.info(rank), words, judged=False)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
                else:
                    self._take_goodbye(peer, rank, printable(words.what))
            case messages.Goodbye():
                self._take_goodbye(peer, rank, "")

    def _name_stop_step(self) -> None:
        """Name the step after which all ranks stop, once all ranks whose work is not done have replied."""
        if self.roll_call.works:
            self._stop_step.name(self.at_work([*self._at_work]))

    def _works(self, rank: int) -> bool:
        """Return whether all ranks have gone on together, this one among them."""
        return self.roll_call.works and not self.roll_call.is_left_out(rank)

    def _take_goodbye(self, peer: Peer, rank: int, why: str) -> None:
        """Handle a rank that leaves: its work is done, or ``why`` says why it is not."""
        peer.left = True
        if self._works(rank) and why:
            self._watch.end_because_of_left(rank, why)
            self._give_up_lost()
        elif self._works(rank):
            self._watch.health.leave(rank)
        elif why or not self.recovery.lost:
            self._miss_again(rank, f"left again: {why or 'its work is done'}")
        else:  # it has done its work, while the others were to begin anew with it
            lost = next(iter(self.recovery.lost.values()))
            left = f"rank {rank} had done its work and has left, so the others cannot begin anew with it"
            self._watch.end_of_work.end_the_run(replace(lost, why=f"{lost.why}\n{left}", next=self.run.start_again))

    def _take_failure(self, peer: Peer, rank: int, failed: messages.Failed) -> None:
        """Handle the end of a worker: ``failed`` has its own last words, or what its agent says about it."""
        verdict = verdicts.verdict_about(self.roll_call.info(rank), failed.words, judged=failed.judged)
        if self._works(rank):
            broken_at = printable(failed.broken_at) if failed.broken_at is not None else None
            crashed = failed.judged and verdict.exit_code - 128 in verdicts.CRASHES
            in_a_collective = crashed or failed.in_a_collective
            self._watch.take_failure(verdict, broken_at, self._now, in_a_collective=in_a_collective)
            return
        if self.roll_call.info(rank).starts_again and self.recovery.count_try(rank):
            self.roll_call.forget_workers([rank])
            self.recovery.held.pop(rank, None)
            self._replace_worker(peer)
            return
        peer.connection.send(messages.RunEnds(verdict))
        what = printable(verdict.what)
        _, is_gone, reason = what.partition(" is gone: ")
        how = f"is gone: {reason}" if is_gone and failed.judged else f"left again: {what}"
        self._miss_again(rank, how)

    # -- as time goes by ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due: send heartbeats, and see who is silent, stuck, missing for too long or admitted by now."""
        self._now = now
        try:
            self._look_around(now)
        except Exception as error:
            self._break(error)

    def _break(self, error: Exception) -> None:
        """End the run because of a mistake of this package: no rank is to blame."""
        broke = MasterLost(
            "rank 0's coordinator broke",
            why=traceback_of(error),
            next=f"{self.run.start_again}\nthis is a mistake in ddp_manual and worth reporting",
        )
        self._watch.end_of_work.end_the_run(verdicts.verdict_about(self.roll_call.rank_0, LastWords.of(broke)))

    def _look_around(self, now: float) -> None:
        passed, self._ticked = now - self._ticked, now
        if passed > self.run.peer_timeout:
            self._resumed_at = now  # this process was stopped, perhaps with its whole host
            self._watch.health.restart(now)
        self.handshakes.abort_silent(now)
        if now >= self._next_beat:
            self._next_beat = now + heartbeat_period(self.run)
            for peer in self._peers.values():
                peer.connection.write(ALIVE)
            if self.failure is None:
                self._watch.check_health(now)
                if passed < 1:
                    self._name_silent(now)
        # A process that wants a taken rank waits until the holder of that rank ends, is heard or is known to be frozen.
        if self.roll_call.admits:
            self._admit()
        if self.failure is None and passed < 1:
            self._give_up_silent(now)
        if self.failure is None:
            self._advance_or_wait()
            self._name_stop_step()
        self._watch.check(now)
        self._give_up_lost()

    def _name_silent(self, now: float) -> None:
        """Say who is silent, and which of them a signal has stopped."""
        line, silent = self._silence.look(self._watch.heard(), self.run, now), self._silence.named
        if line is not None:
            stopped = filter(None, map(self.roll_call.stopped, silent))
            self._watch.send_to_all(messages.Line("; ".join([line, *stopped])), without=silent)

    # -- observers ---------------------------------------------------------------------------------------------

    def _take_look(self, peer: Peer, look: messages.Look) -> None:
        """Show the run to an observer, which joins nothing."""
        question = self.handshakes.read_look(peer, look, self._now)
        if question is not None:
            if peer.connection.unsent:
                raise Unreadable("it has not read the last answer")
            peer.awaits_answer = True
            done = {"shrunk": self.shrink()} if question.shrink else {}
            everybody = self.roll_call.have_worked if question.stacks and self.roll_call.works else ()
            show = partial(self._show_with, peer, done, question.stacks)
            self._watch.ask_for_stacks(peer, everybody, show, self._now)

    def _show_with(self, peer: Peer, done: Mapping[str, Any], wants: bool, stacks: Mapping[int, str], _: float) -> None:
        most = LONGEST_ANSWER // (2 * self.run.world_size)  # the roster takes the rest of what an observer reads
        shown = {"stacks": {str(rank): text[-most:] for rank, text in stacks.items()}} if wants else {}
        self._show(peer, {**done, **shown})

    def describe(self, now: float) -> dict[str, Any]:
        """Return the answer to ``status``: the run, its ranks and what each does, who is missing, refused or gone."""
        news, silent = asdict(self.roll_call.news()), self._silence.named
        for name in ("named", "waited", "timeout", "for_lost"):
            del news[name]
        return {
            "run": asdict(self.run),
            **news,
            "missing": as_ranges(self.roll_call.missing),
            "ranks": self.roll_call.roster(),
            "progress": self._watch.health.progress(now) if self.roll_call.works else None,
            "waiting": self._watch.waiting_line(now),
            "stopped": [f"rank {rank} is silent: {how}" for rank in silent if (how := self.roll_call.stopped(rank))],
            "lost": self.recovery.said_of(self.roll_call.left_out),
            "failure": asdict(self.failure) if self.failure is not None else None,
            "ended": None,
        }
