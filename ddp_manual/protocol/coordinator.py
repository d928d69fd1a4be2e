"""The coordinator, a part of rank 0's agent, without its connections: what follows from each message of a rank or an
observer, from the end of a connection, and from the time.

``wait_for_all_ranks.py`` decides who is a rank and when all go on, ``lost_or_to_blame.py`` when one is lost, and
``recovery.py`` how all begin anew after that. ``agent/coordinator.py`` reads and writes.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from msgspec.structs import asdict, replace

from ddp_manual import messages
from ddp_manual.errors import DdpManualError, MasterLost, Stopped, asked_by, traceback_of
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol import how_a_worker_ended, verdict_words
from ddp_manual.protocol.handshakes import CLOSED, Handshakes, Peer
from ddp_manual.protocol.health import Silence
from ddp_manual.protocol.inquiries import STACKS
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.recovery import Recovery
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.run_states import Gathering
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.protocol.wait_for_all_ranks import RUN_IS_OVER, Meeting
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.ranks_and_runs import LastWords, RankInfo, RunInfo, RunSoFar, Verdict, named_from_outside
from ddp_manual.wire import LONGEST_ANSWER, Unreadable, encode, printable
from ddp_manual.wording import as_ranges

# How a connection ends with its process: with a reset, if the process had not read everything.
PROCESS_ENDED = (CLOSED, "Connection reset by peer")
ALIVE = encode(messages.Alive())


class CoordinatorProtocol:
    """What rank 0 decides about all ranks. Each method that takes ``now`` is told the time, in seconds of rank 0's
    monotonic clock; what follows is sent at once, over connections that never wait.

    Args:
        rank_0: what the other ranks are compared with.
        own_nonce: the nonce in the hello of rank 0's own agent; no other process may be rank 0.
        join_timeout: seconds from now until all ranks must have joined; then they have at least 600 s to load torch.
        policy: how the run goes on when a rank is lost.
        own_addresses: the IP addresses of this host.
        folder_of: returns the folder for the files of a run that this rank takes over, and whether it is not the named
            one because another run is in that.
        show: shows the run, with the fields that it is given, to an observer; it limits the time that this takes.
        stopped: returns which signal has stopped the agent with this pid on this host; "" if none has.
    """

    def __init__(
        self,
        run: RunInfo,
        rank_0: RankInfo,
        seal: Seal,
        own_nonce: str,
        join_timeout: float,
        policy: WaitOrShrink,
        now: float,
        *,
        own_addresses: Sequence[str],
        folder_of: Callable[[RunSoFar], tuple[str | None, bool]],
        show: Callable[[Peer, Mapping[str, Any]], None],
        stopped: Callable[[int], str],
    ) -> None:
        self.roll_call = RollCall(run, rank_0, now, join_timeout, stopped)
        self.recovery = Recovery(self.roll_call, policy, now)
        self.handshakes = Handshakes(self.roll_call, seal, own_nonce)
        self.meeting = Meeting(self.roll_call, self.handshakes, self.recovery, own_addresses, folder_of)
        self._policy, self._peers, self._show = policy, self.recovery.peers, show
        self._silence = Silence(self.roll_call.who)
        self._ticked = now
        self._next_beat = 0.0

    @property
    def run(self) -> RunInfo:
        return self.roll_call.run

    @property
    def _watch(self) -> Watch:
        return self.recovery.watch

    @property
    def failure(self) -> Verdict | None:
        """What ends the run."""
        return self._watch.end_of_work.failure

    @property
    def others_still_here(self) -> list[int]:
        """The ranks, without rank 0, that work with it and have not said goodbye."""
        now = self.recovery.now
        silent = self._watch.health.silent(now) if self.failure is not None else {}  # they may never hear it
        return sorted(self.recovery.at_work - silent.keys() - {0})

    def at_work(self, ranks: Sequence[int]) -> list[int]:
        """Return those of these ranks whose work is not done."""
        return sorted({*ranks}.difference(self._watch.health.finished))

    def is_being_read(self, now: float) -> bool:
        """Return whether another rank may still read what was sent: bytes are unsent, or a rank that is not silent has
        not left and is connected."""
        heard = self._peers.keys() - self._watch.health.silent(now).keys() - {0}
        here = [self._peers[rank] for rank in heard if not self._peers[rank].left]
        unsent = any(peer.connection.unsent for peer in self._peers.values())
        return unsent or not all(peer.connection.closed for peer in here)

    def end(self, error: DdpManualError | None, now: float) -> None:
        """Tell the ranks that are still connected that rank 0 leaves; if not all have joined, also why."""
        self.recovery.now = now
        if error is not None and not self.roll_call.works:
            when = "while a lost rank's seat was free" if self._policy.began else "before all ranks had joined"
            left = f"rank 0 ({self.run.host}, pid {self.run.pid}) left {when}"
            again = self.run.start_again if self._policy.began else "start all ranks again"
            own = "" if isinstance(error, Stopped) else verdict_words.without_start_again(error.next)
            next = "\nthen ".join(filter(None, (own, again)))
            stops_all = isinstance(error, Stopped) and not self._policy.adopted
            if not stops_all and self.recovery.is_awaited(self.roll_call.rank_0):
                next = f"start rank 0 again, and this rank: others look for rank 0\n{self.run.command_for(0)}"
                self._leave_to_another_rank_0(error)
            self.meeting.refuse_all(MasterLost(left, why=error.what, next=next))
        self.roll_call.end()
        if error is None and self.failure is None:
            for rank in self.others_still_here:
                self._peers[rank].connection.send(messages.Rank0Leaves())
            for rank in self._peers.keys() - self.roll_call.have_worked:
                self.handshakes.refuse(self._peers[rank], RUN_IS_OVER)

    def _leave_to_another_rank_0(self, error: DdpManualError) -> None:
        """Have the ranks that hold the state of this run look for another rank 0."""
        for rank in self.recovery.survivors:
            self.recovery.vacate_seat(self._peers.pop(rank), f"rank 0 has left: {error.what}")
        for peer in [peer for peer, info in self.handshakes.claims.items() if info.goes_on]:
            self.handshakes.forget(peer)
            peer.connection.send(messages.Later())

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
        self.recovery.now = now
        try:
            if isinstance(message, messages.Hello | messages.Look):
                self._take_from_stranger(peer, message)
            elif (rank := self._rank_of(peer)) is not None:
                self._take_from_rank(peer, rank, message)
                self.recovery.give_up_lost()
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
            self.meeting.take_hello(peer, message)

    def closed(self, peer: Peer, reason: str, now: float) -> None:
        """Handle the end of a connection; ``reason`` says how it ended."""
        self.recovery.now = now
        rank = peer.rank
        if rank is None:
            self.handshakes.forget(peer)
        elif self._peers.get(rank) is peer:
            self._lose_connection(rank, "", printable(reason))

    def _lose_connection(self, rank: int, how: str, reason: str = "") -> None:
        """Lose a rank that says nothing more: it has said ``how`` it leaves, or the connection has ended for this
        ``reason``."""
        has_left = self._peers.pop(rank).left
        self._watch.inquiries.gone(rank)
        if has_left:
            return
        if not self.recovery.works(rank):
            how = how or f"is gone: {'its process has ended' if reason in PROCESS_ENDED else reason}"
            self.recovery.miss_again(rank, how)
        elif not self.roll_call.is_over:
            self._watch.end_because_of_gone(rank, how, reason)
            self.recovery.give_up_lost()

    # -- what ranks say -----------------------------------------------------------------------------------------

    def _take_from_rank(self, peer: Peer, rank: int, message: messages.FromRank) -> None:
        now = self.recovery.now
        if isinstance(message, messages.OfWorker) and message.worker != peer.worker:
            self.roll_call.hear(rank, now)  # the message is about a worker that its agent replaces: it does not count
            return
        match message:
            case messages.Heartbeat():
                self._watch.hear(rank, message.beat, now)
            case messages.WorkerReady():
                for other, error in self.roll_call.get_ready(rank, message.ready):
                    self.meeting.dismiss(other, error, "has left: it was refused")
                self.meeting.advance()
            case messages.Held():
                self._policy.take_held(rank, message.moment, message.steps_done)
                self.recovery.hear_held()
            case messages.Finished():
                self._watch.end_of_work.finish(rank, now)
            case messages.Failed():
                self._take_failure(rank, message)
            case messages.LostRank0(words) if 0 in self.roll_call.members:
                # This rank 0 was stopped for long, and runs again.
                rank_0, about_it = self.roll_call.info(0), replace(words, why=named_from_outside(words.why, rank))
                if not self.recovery.works(rank) or self.run.on_loss != LEAVE:
                    self._lose_connection(rank, f"has given up {rank_0.who}, which was silent for too long")
                else:
                    verdict = verdict_words.verdict_about(rank_0, about_it, is_loss=True)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
            case messages.StacksReply():
                self._watch.inquiries.take_reply(rank, STACKS, message.text, now)
            case messages.RecordsReply():
                self._watch.inquiries.take_reply(rank, message.number, message, now)
            case messages.Probed():
                state = self.roll_call.state
                probes = state.probes if isinstance(state, Gathering) else self._watch.probes
                if probes is not None:
                    probes.take(message.key, message.failures)
                    self.meeting.advance()
            case messages.Stopping(number) if not self.roll_call.is_left_out(rank):  # which asks again once it works
                self._take_stop(rank, number)
            case messages.StepsDone():
                self.recovery.stop_step.take(rank, message.steps)
                self._name_stop_step()
            case messages.Tell(text):
                teller, without = self.roll_call.info(rank), [rank]
                if self.run.launched:  # the ranks of its host share its terminal
                    without = [info.rank for info in self.roll_call.infos() if info.host_id == teller.host_id]
                self._peers.send_to_all(messages.Line(f"{teller.who}: {printable(text)}"), without)
            case messages.Leaves(words, at_work):
                if at_work and self.recovery.works(rank):
                    verdict = verdict_words.verdict_about(self.roll_call.info(rank), words, judged=False)
                    self._watch.take_failure(verdict, None, now, in_a_collective=False)
                else:
                    self._take_goodbye(peer, rank, printable(words.what))
            case messages.Goodbye():
                self._take_goodbye(peer, rank, "")

    def _take_stop(self, rank: int, number: int) -> None:
        """Have all ranks stop after the same step, now or once they have gone on without those that are missing."""
        # A pod may be replaced while it saves: the new one must not be refused.
        self.roll_call.stopping.update({rank} if self.roll_call.works or self._policy.began else ())
        if self.recovery.works(rank):
            self.recovery.stop_step.ask(rank, number)
        if self._policy.adopted and self.roll_call.missing:
            when = "once the others have had time to come, all that are here go on for a step, and stop"
            self._peers.send_to_all(messages.Line(f"{asked_by(number)} on rank {rank}: {when}"))

    def _name_stop_step(self) -> None:
        """Name the step after which all ranks stop, once all ranks whose work is not done have replied."""
        if self.roll_call.works:
            self.recovery.stop_step.name(lambda: self.at_work([*self.recovery.at_work]))

    def _take_goodbye(self, peer: Peer, rank: int, why: str) -> None:
        """Handle a rank that leaves: its work is done, or ``why`` says why it is not."""
        peer.left = True
        if self.recovery.works(rank) and why:
            self._watch.end_because_of_left(rank, why)
            self.recovery.give_up_lost()
        elif self.recovery.works(rank):
            self._watch.health.leave(rank)
        elif why or not self._policy.lost:
            self.recovery.miss_again(rank, f"left again: {why or 'its work is done'}")
        else:  # it has done its work, while the others were to begin anew with it
            lost = next(iter(self._policy.lost.values()))
            left = f"rank {rank} had done its work and has left, so the others cannot begin anew with it"
            self._watch.end_of_work.end_the_run(replace(lost, why=f"{lost.why}\n{left}", next=self.run.start_again))

    def _take_failure(self, rank: int, failed: messages.Failed) -> None:
        """Handle the end of a worker: ``failed`` has its own last words, or what its agent says about it."""
        info, judged, what = self.roll_call.info(rank), failed.judged, printable(failed.words.what)
        verdict = verdict_words.verdict_about(info, failed.words, judged=judged, is_loss=judged)
        if self.recovery.works(rank):
            broken_at = printable(failed.broken_at) if failed.broken_at is not None else None
            crashed = failed.judged and verdict.exit_code - 128 in how_a_worker_ended.CRASHES
            in_a_collective = crashed or failed.in_a_collective
            self._watch.take_failure(verdict, broken_at, self.recovery.now, in_a_collective=in_a_collective)
            return
        if info.starts_again and self._policy.count_try(rank):
            self.recovery.try_again(rank, what)
            return
        _, is_gone, reason = what.partition(" is gone: ")
        self.recovery.lose_again(verdict, f"is gone: {reason}" if is_gone and judged else f"left again: {what}")

    # -- as time goes by ----------------------------------------------------------------------------------------

    def tick(self, now: float) -> None:
        """Do what is due: send heartbeats, and see who is silent, stuck, missing for too long or admitted by now."""
        self.recovery.now = now
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
        self._watch.end_of_work.end_the_run(verdict_words.verdict_about(self.roll_call.rank_0, LastWords.of(broke)))

    def _look_around(self, now: float) -> None:
        passed, self._ticked = now - self._ticked, now
        if passed > self.run.peer_timeout:
            self.recovery.resumed_at = now  # this process was stopped, perhaps with its whole host
            self._watch.health.restart(now)
        self.handshakes.abort_silent(now)
        if now >= self._next_beat:
            self._next_beat = now + self.run.heartbeat_period
            for peer in self._peers.values():
                peer.connection.write(ALIVE)
            if self.failure is None:
                self._watch.check_health(now)
                if passed < 1:
                    self._name_silent(now)
        # A process that wants a taken rank waits until the holder of that rank ends, is heard or is known to be frozen.
        if self.roll_call.admits:
            self.meeting.admit()
        if self.failure is None:
            if passed < 1:
                self.meeting.give_up_silent(now)
            self.meeting.advance_or_wait()
            self._name_stop_step()
        self._watch.check(now)
        self.recovery.give_up_lost()

    def _name_silent(self, now: float) -> None:
        """Say who is silent, and which of them a signal has stopped."""
        line, silent = self._silence.look(self._watch.heard(), self.run, now), self._silence.named
        if line is not None:
            stopped = filter(None, map(self.roll_call.stopped, silent))
            self._peers.send_to_all(messages.Line("; ".join([line, *stopped])), without=silent)

    # -- observers ---------------------------------------------------------------------------------------------

    def _take_look(self, peer: Peer, look: messages.Look) -> None:
        """Show the run to an observer, which joins nothing."""
        question = self.handshakes.read_look(peer, look, self.recovery.now)
        if question is not None:
            if peer.connection.unsent:
                raise Unreadable("it has not read the last answer")
            peer.awaits_answer = True
            done = {"shrunk": self.recovery.shrink()} if question.shrink else {}
            everybody = self.roll_call.have_worked if question.stacks and self.roll_call.works else ()
            show = partial(self._show_with, peer, done, question.stacks)
            self._watch.ask_for_stacks(peer, everybody, show, self.recovery.now)

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
            "lost": self._policy.said_of(self.roll_call.left_out),
            "failure": asdict(self.failure) if self.failure is not None else None,
            "ended": None,
        }
