"""How ranks begin anew after a loss, on rank 0: whose seat is free, whose worker is replaced, and when the others go on
without a rank.

``lost_or_to_blame.py`` decides who is lost, ``wait_or_shrink.py`` whether the others wait for it, and from which state
they go on.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from msgspec.structs import replace

from ddp_manual import messages
from ddp_manual.protocol.end_or_begin_anew import BROKEN, SILENT, Loss
from ddp_manual.protocol.handshakes import Peer, Peers
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.run_states import Working
from ddp_manual.protocol.stop_step import StopStep
from ddp_manual.protocol.verdict_words import without_start_again
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.ranks_and_runs import RankInfo, RunInfo, Verdict

# Why a rank that was silent, such as while it was stopped, asks for its seat again.
LOST_ITS_SEAT = "rank 0 has not heard of this rank for too long, and has given it up"


class Recovery:
    """Lets the ranks begin anew.

    Args:
        policy: how the run goes on when a rank is lost.
        now: rank 0's monotonic clock, in seconds.
    """

    def __init__(self, roll_call: RollCall, policy: WaitOrShrink, now: float) -> None:
        self.policy = policy
        self.peers = Peers()
        self.now = now
        """When what is being handled came, or was due."""
        self.resumed_at = -math.inf
        """When this process last ran again after it was stopped for long: the other ranks may have given it up."""
        self.watch = Watch(roll_call, self.peers, now)
        """Who watches the ranks: another one each time that all begin anew."""
        self.stop_step = StopStep(self.peers)
        self._roll_call = roll_call

    @property
    def _run(self) -> RunInfo:
        return self._roll_call.run

    @property
    def at_work(self) -> set[int]:
        """The ranks that have gone on together, and are still here."""
        return {rank for rank in self.peers.keys() & self._roll_call.have_worked if not self.peers[rank].left}

    def works(self, rank: int) -> bool:
        """Return whether all ranks have gone on together, this one among them."""
        return self._roll_call.works and not self._roll_call.is_left_out(rank)

    def miss_again(self, rank: int, how: str) -> None:
        """Wait again for a rank that had joined, and has left or was refused."""
        if rank not in self._roll_call.members:
            return
        info, has_worked_before = self._roll_call.info(rank), self._roll_call.has_worked_before(rank)
        self._roll_call.leave(rank, how, left_out=not has_worked_before and rank in self.policy.back)
        self.watch.health.forget(rank, self.now)
        if self._roll_call.works:  # it was about to come back to a world that has shrunk
            self.watch.health.leave(rank)
        elif has_worked_before and not self._roll_call.is_over:  # lost too, as when a host with two ranks is gone
            self.policy.lose_too(info, how)
            self.shrink_if_due()
            self.hear_held()

    def try_again(self, rank: int, what: str) -> None:
        """Have the agent of a rank replace a worker that has not come to work; ``what`` says what became of it."""
        self.peers.send_to_all(messages.Line(f"{what}; another worker is started"))
        self._roll_call.forget_workers([rank])
        self.policy.held.pop(rank, None)
        self.replace_worker(self.peers[rank])

    def lose_again(self, verdict: Verdict, how: str) -> None:
        """End the agent of a rank whose worker has not come to work, and wait again for that rank."""
        rank = verdict.rank
        info, peer = self._roll_call.info(rank), self.peers.pop(rank)
        if rank == 0:  # it leaves: a rank that says hello now goes on looking for another rank 0
            self._roll_call.end()
        self.miss_again(rank, how)
        of_this_rank = verdict.judged or self.policy.began  # else its code may raise in every rank
        if of_this_rank and self.is_awaited(info):
            self.end_process(peer, verdict)
        else:
            peer.connection.send(messages.RunEnds(verdict))

    def is_awaited(self, info: RankInfo) -> bool:
        """Return whether the others wait until somebody starts a rank again whose process has ended, or look for it."""
        if self.watch.end_of_work.failure is not None:
            return False
        if info.rank and self.policy.began:  # another rank 0 will be asked to stop too
            return not self._roll_call.stopping and "{rank}" in self._run.command  # as with ``launch``, but not srun
        if info.rank == 0 and not self._is_looked_for:
            return False
        return not info.has_launcher  # which ends the others too, or starts all again

    @property
    def _is_looked_for(self) -> bool:
        """Whether another rank looks for another rank 0 if this one leaves; before the run has begun, those that are
        here leave with it."""
        return bool(self.survivors) if self.policy.began else not self.peers and self._run.world_size > 1

    @property
    def survivors(self) -> list[int]:
        """The ranks, without rank 0, that are here and have been in the run: they look for rank 0 when it is lost."""
        return sorted(self._roll_call.members.keys() & self.peers.keys() - {0} - self._roll_call.newcomers)

    def give_up_lost(self) -> None:
        """Begin anew without the processes of ranks that were lost: the other agents replace their workers."""
        lost, state = self.watch.take_lost(), self._roll_call.state
        if not lost or not isinstance(state, Working):
            return
        alone = {rank for rank, loss in lost.items() if not self._is_restarted(rank, loss)}
        peers = {rank: self.peers.pop(rank) for rank in alone if rank in self.peers}
        for rank in alone:
            self._roll_call.leave(rank, left_out=lost[rank].is_newcomer and rank in self.policy.back)
        no_further = all(loss.is_newcomer for loss in lost.values())
        self.begin_again(lost, missing_for=state.missing_for if no_further else 0.0)
        for rank, peer in peers.items():
            if lost[rank].kind == SILENT:
                self.vacate_seat(peer)
            else:
                self.end_process(peer, lost[rank].verdict)

    def end_process(self, peer: Peer, verdict: Verdict) -> None:
        """Tell a process whose seat is free again why it ends, and that the others wait, or look, for another one."""
        peer.rank = None
        look, where = without_start_again(verdict.next), self._run.where_to_type
        others = "go on without it until then" if self._roll_call.is_left_out(verdict.rank) else "wait for it"
        if not verdict.rank:
            where = where if self._run.only_on_its_host else f"at {self._run.address}"
            others = "look for it there"
        seat = f"then start this rank again, {where}: the others {others}"
        next = "\n".join(filter(None, (look, seat, self._run.command_for(verdict.rank))))
        peer.connection.send(messages.RunEnds(replace(verdict, next=next)))

    @staticmethod
    def vacate_seat(peer: Peer, why: str = LOST_ITS_SEAT) -> None:
        """Tell a process, which may be silent and run again one day, that it has to ask for its seat again."""
        peer.rank = None
        peer.connection.send(messages.SeatLost(why))
        peer.connection.close()

    def _is_restarted(self, rank: int, loss: Loss) -> bool:
        """Return whether the agent of a lost rank starts another worker by itself."""
        if rank not in self.peers or loss.kind == SILENT:
            return False
        return self._roll_call.info(rank).starts_again or loss.kind == BROKEN

    def begin_again(self, lost: Mapping[int, Loss], back: Collection[int] = (), missing_for: float = 0.0) -> None:
        """Begin anew without the ranks that are ``lost``, or with those ``back``.

        Args:
            missing_for: seconds for which the lost ranks have been missing already.
        """
        now, at_work = self.now, self.at_work
        self.watch.stop(now)
        self.watch = Watch(self._roll_call, self.peers, now)
        self.stop_step = StopStep(self.peers)
        self._roll_call.begin_again(at_work, now - missing_for, self._run.rejoin_timeout)
        self.policy.begin(lost, now, back, at_work, self._roll_call.missing)
        for rank in at_work:
            self.replace_worker(self.peers[rank])
        self.shrink_if_due()
        self.hear_held()

    @staticmethod
    def replace_worker(peer: Peer) -> None:
        """Have the agent of a rank start another worker; messages about the present one count no longer."""
        peer.worker += 1
        peer.connection.send(messages.Replace(peer.worker))

    def shrink_if_due(self, waited: float = 0.0) -> None:
        """Go on without the missing ranks if the run may shrink by now; or if it stops, so that the others can stop."""
        here, stops = self._roll_call.members, bool(self._roll_call.stopping)
        if self.policy.shrinks(self._run, here, waited, since_a_stop=self.now - self.resumed_at, stops=stops):
            self.shrink(to_stop=stops)

    def shrink(self, *, to_stop: bool = False) -> bool:
        """Go on without the ranks that are missing; return whether any is.

        Args:
            to_stop: whether to wait for them again if no rank is about to stop the run any more.
        """
        return self.policy.paused and self._roll_call.leave_out(to_stop=to_stop)

    def hear_held(self) -> None:
        """Once all ranks have said what they hold, tell all what was lost and is held, or end the run."""
        if self.watch.end_of_work.failure is not None or not self.policy.is_unsaid:
            return
        here = self._roll_call.have_worked
        if (refusal := self.policy.refusal(here)) is not None:
            self.watch.end_of_work.end_the_run(refusal)
        elif (line := self.policy.kept(self._roll_call)) is not None:
            self.peers.send_to_all(messages.Line(line))
