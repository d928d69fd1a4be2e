"""How the work of all ranks ends: whether the loss of a rank ends the run, or the others begin anew, or nothing follows
from it since the rank has done its work; and when the ranks that have finished close their process groups.

``lost_or_to_blame.py`` decides which rank is lost, ``recovery.py`` how the others begin anew.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from ddp_manual import messages
from ddp_manual.errors import OutOfMemory, TrainingFailed
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol.handshakes import Peers
from ddp_manual.protocol.health import Health
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.ranks_and_runs import Verdict

# Errors of a rank's own code that may not occur again in another try.
MAY_NOT_RECUR = (TrainingFailed.identifier, OutOfMemory.identifier)
# Seconds from the first rank that has finished until all that have are told to close their process groups: a rank that
# is stuck in a collective has to see that. Ranks that did the same work have all finished by then; for a slower rank,
# rank 0 alone waits longer.
FINISH_TOGETHER = 1.0
# How a rank is lost: its process has ended or is stopped; nobody hears from it; its own code has raised; one of its
# collectives has broken, and nobody is to blame; or other ranks wait for it for ever, which ends any run.
GONE, SILENT, OWN_CODE, BROKEN, AWAITED = "gone", "silent", "own code", "broken", "awaited"


@dataclasses.dataclass(frozen=True)
class Loss:
    """A rank that is lost, and how."""

    verdict: Verdict
    kind: str
    spared: Sequence[int] = ()
    """The ranks that have done their work, and leave in order if this ends the run."""
    is_newcomer: bool = False
    """Whether the rank had come, or come back, to a run which had begun, and has not worked in it yet."""


class EndOfWork:
    """The end of the work that all ranks have begun together, from the first rank that is lost or has finished."""

    def __init__(self, roll_call: RollCall, peers: Peers, health: Health) -> None:
        self.failure: Verdict | None = None
        """What ends the run."""
        self.lost: dict[int, Loss] = {}
        """The ranks that were lost, in a run that keeps their seats, until the coordinator takes them."""
        self.newcomers: set[int] = set()
        """The ranks that have come, or come back, to a run which had begun."""
        self._roll_call, self._peers, self._health = roll_call, peers, health
        self._close_at = math.inf
        self._closing: set[int] = set()
        """The ranks that were told to close their process groups."""

    # -- because a rank is lost -----------------------------------------------------------------------------------

    def lose(self, loss: Loss) -> None:
        """End the run because a rank is lost; if the run keeps its seat, leave the loss to the coordinator."""
        verdict, run = loss.verdict, self._roll_call.run
        rank = verdict.rank
        if self.failure is not None:
            pass  # the others have been told why all leave
        elif self._is_done(rank) and loss.kind is not AWAITED:
            self._health.leave(rank)
            if rank in self._peers:
                self._peers[rank].left = True
                # One that was frozen, or cut off, leaves in order too once it hears again.
                told = messages.Close() if loss.kind is SILENT else messages.RunEnds(verdict)
                self._peers[rank].connection.send(told)
        elif loss.kind is AWAITED or run.on_loss == LEAVE:
            self.end_the_run(verdict, loss.spared)
        elif self._closing or self._health.has_finished(and_left=True):
            self.end_the_run(verdict)  # nobody can begin anew with a rank that has left with its work done
        elif rank in self.newcomers and not self._has_worked(rank):  # such as on a host without the data
            self.lost.setdefault(rank, dataclasses.replace(loss, is_newcomer=True))
        elif loss.kind is OWN_CODE and not self._may_not_recur(verdict):
            self.end_the_run(verdict)
        else:
            self.lost.setdefault(rank, loss)

    def _is_done(self, rank: int) -> bool:
        """Return whether a rank's work is done; for rank 0, which has torch's store, whether the work of all is."""
        return self._health.all_finished or rank in {*self._health.finished} - {0}

    def _may_not_recur(self, verdict: Verdict) -> bool:
        return self._roll_call.run.on_loss_of_own_code and verdict.identifier in MAY_NOT_RECUR

    def _has_worked(self, rank: int) -> bool:
        """Return whether a rank has begun to work with the others: if the run resumes from checkpoints, any rank has
        done a step; otherwise the rank has used a process group."""
        if self._roll_call.run.resumes:
            return any(self._health.beat(other.rank).step > 0 for other in self._roll_call.infos())
        return bool(self._health.beat(rank).begun)

    def take_lost(self) -> Mapping[int, Loss]:
        """Return rank -> its loss, for all ranks without which the others begin anew."""
        lost, self.lost = self.lost, {}
        return lost if self.failure is None else {}

    def end_the_run(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """Tell all ranks why, except those ``spared``, which have done their work and leave in order."""
        if self.failure is None:
            self.failure = verdict
            self._peers.send_to_all(messages.RunEnds(verdict), spared)
            if spared:
                self._close_at = -math.inf
                self.close_process_groups(self._close_at)

    # -- because the work is done ---------------------------------------------------------------------------------

    def finish(self, rank: int, now: float) -> None:
        """Note that a rank has done its work."""
        self._health.finish(rank)
        self._close_at = min(self._close_at, now + FINISH_TOGETHER * (not self._health.all_finished))
        self.close_process_groups(now)

    def close_process_groups(self, now: float) -> None:
        """Tell the ranks that have finished, once it is time, to close their process groups."""
        for rank in self._health.finished if now >= self._close_at else ():
            if rank in self._peers and rank not in self._closing:
                self._closing.add(rank)
                self._peers[rank].connection.send(messages.Close())
