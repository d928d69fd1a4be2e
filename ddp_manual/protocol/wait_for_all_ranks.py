"""The meeting of all ranks, on rank 0: who gets a seat, how long the others wait, and what each is sent once all are
here, at the start and after each loss.

``roll_call.py`` has the seats, ``recovery.py`` makes them free again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from msgspec.structs import replace

from ddp_manual import messages
from ddp_manual.errors import DdpManualError, MasterLost, PeerLost
from ddp_manual.on_rank_loss import LEAVE, WAIT
from ddp_manual.protocol import verdict_words
from ddp_manual.protocol.compatibility import mismatch
from ddp_manual.protocol.handshakes import Handshakes, Peer
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.missing_ranks import missing_ranks_error
from ddp_manual.protocol.reachability import Pair, unreachable
from ddp_manual.protocol.recovery import Recovery
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.run_states import Gathering, Working
from ddp_manual.protocol.seat_states import Seat
from ddp_manual.ranks_and_runs import LastWords, RankInfo, RunInfo, RunSoFar

# Seconds between two News, for each rank that is here: each News goes to every rank.
NEWS_EACH = 1 / 1000
RUN_IS_OVER = MasterLost(
    "the run is over",
    why="its other ranks have finished their work while this rank came back",
    next="nothing: there is no work left",
)


class Meeting:
    """Admits ranks, and lets all go on together.

    Args:
        own_addresses: the IP addresses of this host.
        folder_of: see ``CoordinatorProtocol``.
    """

    def __init__(
        self,
        roll_call: RollCall,
        handshakes: Handshakes,
        recovery: Recovery,
        own_addresses: Sequence[str],
        folder_of: Callable[[RunSoFar], tuple[str | None, bool]],
    ) -> None:
        self.record: dict[str, Any] | None = None
        """The entry for the run's folder about the last loss, once all ranks have gone on after it."""
        self._roll_call, self._handshakes, self._recovery = roll_call, handshakes, recovery
        self._policy, self._peers = recovery.policy, recovery.peers
        self._own_addresses, self._folder_of = own_addresses, folder_of
        self._next_news = 0.0
        self._line_for_rank_0 = ""
        """The line that rank 0's agent is sent as soon as it is here."""

    @property
    def _run(self) -> RunInfo:
        return self._roll_call.run

    @property
    def _now(self) -> float:
        return self._recovery.now

    @property
    def _watch(self) -> Watch:
        return self._recovery.watch

    def take_hello(self, peer: Peer, hello: messages.Hello) -> None:
        if self._roll_call.admits and self._watch.end_of_work.failure is None:
            info = self._handshakes.read_hello(peer, hello, self._now)
            if info is None:
                return
            # A process that does not belong to this run is refused below, and changes nothing.
            goes_on = info.goes_on and mismatch(info, self._roll_call.rank_0, self._run, peer.wall_clock)[0] is None
            if goes_on and not self._go_on_with(peer, info):
                return
            holder = self._peers.get(info.rank)
            comes_back = holder is None and self._roll_call.is_left_out(info.rank)
            if comes_back and self._watch.health.has_finished():
                self._handshakes.refuse(peer, RUN_IS_OVER)
                return
            is_taken = holder is not None and not holder.left  # perhaps by a process that has died unseen
            if is_taken or comes_back or not self._roll_call.works:
                self._handshakes.claims[peer] = info
                self.admit(peer)
                return
        peer.connection.send(messages.Later())

    def _go_on_with(self, peer: Peer, info: RankInfo) -> bool:
        """Go on with the run in which a rank has lost rank 0; refuse it and return False if that is another run."""
        so_far, run = info.goes_on, self._run
        assert so_far is not None
        if not self._policy.began:
            self._policy.adopt(so_far, self._now)
            run_dir, aside = self._folder_of(so_far)
            on_loss = WAIT if run.on_loss == LEAVE else run.on_loss  # with LEAVE nobody would get the held state
            self._roll_call.run = replace(run, run_id=so_far.run_id, run_dir=run_dir, on_loss=on_loss)
            self._roll_call.wait_anew(self._now, run.rejoin_timeout)
            where = f"; its folder is {run_dir}, since another run is in the one that was named" if aside else ""
            self._line_for_rank_0 = f"going on with run {so_far.run_id}, which {info.who} was in{where}"
        elif so_far.run_id == run.run_id:
            self._policy.generation = max(self._policy.generation, so_far.generation)
        else:
            other = MasterLost(
                f"another run has rank 0's address by now: {run.run_id}, not {so_far.run_id}",
                why=f"its rank 0 is on {run.host} (pid {run.pid})",
                next="start all ranks again",
            )
            self._handshakes.refuse(peer, other)
            return False
        return True

    def admit(self, only: Peer | None = None) -> None:
        """Admit processes that want to be ranks; only a process that has lost its rank 0 may hold a state."""
        for rank, peer in self._handshakes.admit_claims(self._now, only).items():
            self._peers[rank] = peer
            so_far = self._roll_call.info(rank).goes_on
            held = so_far.held if so_far is not None else None
            self._policy.take_held(rank, held, held.step if held is not None else 0)
        if self._line_for_rank_0 and 0 in self._peers:  # whose own hello may come later than that of another rank
            self._peers[0].connection.send(messages.Line(self._line_for_rank_0))
            self._line_for_rank_0 = ""

    def dismiss(self, rank: int, error: DdpManualError, how: str) -> None:
        """Refuse a process that was a rank so far."""
        peer = self._peers.pop(rank)
        peer.rank = None
        self._handshakes.refuse(peer, error)
        self._recovery.miss_again(rank, how)

    def refuse_all(self, error: DdpManualError) -> None:
        """End the wait of every rank, unless the run ends already."""
        if self._watch.end_of_work.failure is not None:
            return
        about = next(iter(self._roll_call.infos()), self._roll_call.rank_0)
        self._watch.end_of_work.failure = verdict_words.verdict_about(about, LastWords.of(error))
        for peer in [*self._peers.values(), *self._handshakes.claims]:
            self._handshakes.refuse(peer, error)
        self._roll_call.end()

    def _refuse_newcomers(self, error: DdpManualError) -> None:
        """End the wait of every rank; in a run that has begun, only that of its newcomers, if it has any."""
        newcomers = self._roll_call.newcomers if self._policy.began else ()
        for rank in newcomers:
            self.dismiss(rank, error, f"was refused: {error.identifier}: {error.what}")
        if not newcomers:
            self.refuse_all(error)

    def _give_up_unreachable(self, failing: Sequence[Pair]) -> None:
        """Give up the ranks on one host that all failed connections have in common, if they have worked before and have
        been cut off since. End their agents once they have tried three times, unless a newcomer's host may be cut off.
        Otherwise, or to keep the only copy of the newest state, refuse the newcomers."""
        involved = [{end.host_id for end in pair[:2] if end is not None} for pair in failing]
        infos, newcomers = self._roll_call.infos(), self._roll_call.newcomers
        new = {info.host_id for info in infos if info.rank in newcomers}
        cut_off = set.intersection(*involved) - new - {self._roll_call.rank_0.host_id}
        held_without = sorted(filter(self._is_held_without, cut_off))
        spare = held_without or ([] if newcomers else sorted(cut_off))
        lost = [info for info in infos if info.host_id in spare[:1]]
        too_often = [info for info in lost if not self._policy.count_try(info.rank)]
        error = unreachable(failing)
        for_good = bool(held_without) and not new.intersection(*involved)
        if not lost or (too_often and not for_good):
            self._refuse_newcomers(error)
            return
        how = f"is cut off: {error.what}"
        for info in lost:
            if info in too_often:
                self._recovery.lose_again(verdict_words.verdict_about(info, LastWords.of(error)), how)
            else:
                self._recovery.vacate_seat(self._peers.pop(info.rank))
                self._recovery.miss_again(info.rank, how)

    def _is_held_without(self, host: str) -> bool:
        """Return whether the newest state, if any, is held by a rank on another host too."""
        elsewhere = [info.rank for info in self._roll_call.infos() if info.host_id != host]
        return self._policy.newest(elsewhere)[0] == self._policy.newest(self._roll_call.members)[0]

    def advance(self) -> None:
        """Go on as far as possible: try the network, then tell the ranks to begin; or begin anew with those that came
        to a world which had shrunk."""
        state = self._roll_call.state
        if self._watch.end_of_work.failure is not None:
            return
        if isinstance(state, Working):
            back = self._roll_call.ranks(Seat.READY_TO_RETURN)
            if back and self._may_begin_anew:
                self._roll_call.take_back(back)
                self._recovery.begin_again({}, back)
        elif isinstance(state, Gathering) and self._roll_call.all_here:
            if state.probes is None:  # while the workers load torch
                state.probes = self._watch.probe_network(self._now)
            failing = state.probes.failing(self._now)
            if failing:
                self._give_up_unreachable(failing)
            elif failing is not None and self._roll_call.all_ready:
                self._complete()

    @property
    def _may_begin_anew(self) -> bool:
        """Whether the ranks at work can begin anew with others: none of them is lost, or has finished."""
        if self._watch.is_undecided or self._watch.health.has_finished():
            return False
        # Otherwise the last messages of a rank may be unread, such as that it has finished.
        heard_since = self._now - self._recovery.resumed_at > 2 * self._run.heartbeat_period
        return heard_since and self._watch.health.late(self._now) is None

    def _complete(self) -> None:
        """Send each rank its place, with which its worker begins: all ranks are here."""
        on_cpu = self._roll_call.leave_gpus()
        places = self._roll_call.places()
        if (error := self._roll_call.shared_gpu()) is not None:
            self._refuse_newcomers(error)
            return
        if self._roll_call.warnings:
            self._send_news()
        now, here = self._now, self._roll_call.members
        ready = here[0].ready
        assert ready is not None and ready.store is not None
        came = self._roll_call.newcomers if self._policy.adopted else here.keys() - self._roll_call.have_worked
        newcomers = places.keys() & came - {0}
        gone_on = self._policy.complete(self._run, {info.rank: info for info in self._roll_call.infos()}, now)
        self._roll_call.complete(now)
        if gone_on is not None:
            line, self.record = gone_on
            self._peers.send_to_all(messages.Line(line))
            self._watch.end_of_work.newcomers = newcomers
        _, source = self._policy.newest(places)
        self._watch.health.restart(now)
        for rank, member in here.items():  # a rank that is silent gets no second time-out
            self._watch.health.hear(rank, None, max(member.heard, self._recovery.resumed_at))
        for rank in self._roll_call.left_out:
            self._watch.health.leave(rank)
        placed = messages.Placed(
            place=places[0],
            store=ready.store,
            generation=self._policy.generation,
            holds=self._run.on_loss != LEAVE,
            state_from=places[source].rank if source is not None else None,
            losses=messages.Losses(self._policy.count, round(self._policy.seconds, 3)),
            run=self._run,
            on_cpu=on_cpu,
        )
        for rank, place in places.items():
            roster = self._roll_call.roster() if rank == 0 else ()
            self._peers[rank].connection.send(replace(placed, place=place, roster=roster))

    def give_up_silent(self, now: float) -> None:
        """Make ranks missing again that were silent for too long; while others work, only those that wait to return."""
        begun, silent = self._roll_call.works, self._roll_call.silent(now)
        for rank in [rank for rank in silent if not begun or self._roll_call.is_left_out(rank)]:
            seconds = f"{now - self._roll_call.members[rank].heard:.0f} s"
            error = PeerLost(  # the rank reads it when it goes on
                f"{self._roll_call.info(rank).who} was silent for {seconds}, and has lost its place",
                why="its agent was stopped or frozen, or the network was cut, while rank 0 waited for other ranks",
                next="start this rank again: the others still wait for it",
            )
            how = f"has been silent for {seconds}: its agent is stopped, or its host is gone"
            if self._roll_call.has_worked_before(rank):  # it may be back before another process has its seat
                self._recovery.vacate_seat(self._peers.pop(rank))
                self._recovery.miss_again(rank, how)
            else:
                self.dismiss(rank, error, how)

    def advance_or_wait(self) -> None:
        """Go on as far as possible; while ranks are missing, tell all which, or end the run once the time is up."""
        self.advance()
        state = self._roll_call.state
        if not isinstance(state, Gathering):
            return
        self._recovery.shrink_if_due(state.tick(self._now, all_here=self._roll_call.all_here))
        waited = state.tick(self._now, all_here=self._roll_call.all_here)
        if waited > state.limit:
            if self._policy.began and self._roll_call.all_here:
                self._give_up_slow(state, waited)
            else:
                self._end_the_wait(waited)
        elif self._roll_call.changed and self._now >= self._next_news:
            self._next_news = self._now + len(self._peers) * NEWS_EACH
            self._send_news()

    def _end_the_wait(self, waited: float) -> None:
        """End the run: ranks have been missing for too long. If the program saves checkpoints and its state is held,
        the ranks that are here first go on for a step and save one."""
        never_taken = self._policy.never_taken(self._run, self._roll_call.missing, waited)
        if never_taken is None:
            self.refuse_all(missing_ranks_error(self._roll_call.news(), self._run, waited, self._own_addresses))
        elif not self._run.resumes:
            self.refuse_all(never_taken.error())
        elif not self._policy.have_said(self._roll_call.have_worked):
            pass  # some ranks, which end their workers, have not said yet what they hold
        elif self._policy.newest(self._roll_call.members)[0] is None:
            self.refuse_all(never_taken.error())
        else:
            self._peers.send_to_all(messages.Expired(never_taken))
            self._roll_call.stopping.update(self._roll_call.members)
            self._recovery.shrink(to_stop=True)

    def _give_up_slow(self, state: Gathering, waited: float) -> None:
        """Replace workers that have not loaded torch in time; end newcomers, and ranks that have tried three times."""
        state.load_again(self._now)
        how = f"has not loaded torch within {waited:.0f} s"
        for rank in self._roll_call.ranks(Seat.LOADING):
            info = self._roll_call.info(rank)
            if self._roll_call.has_worked_before(rank) and self._policy.count_try(rank):
                self._recovery.try_again(rank, f"{info.who} {how}")
            elif not self._roll_call.is_over:  # rank 0, which is the first, may have given itself up
                next = "look at what it says, and whether its disk or file server is slow"
                slow = verdict_words.lost_rank(info, how, why="its worker has not ended", next=next)
                self._recovery.lose_again(verdict_words.verdict_about(info, LastWords.of(slow)), how)

    def _send_news(self) -> None:
        state, for_lost = self._roll_call.state, self._policy.began and not self._policy.adopted
        assert isinstance(state, Gathering)
        self._roll_call.changed = False
        waited, news = self._now - state.since, self._roll_call.news()
        self._peers.send_to_all(replace(news, waited=waited, timeout=state.limit, for_lost=for_lost))
