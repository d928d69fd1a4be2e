"""With which error a rank ends: that of its own worker, of a signal, of another rank, or what rank 0 has judged.

Whoever knows better is waited for: rank 0, which hears of all ranks, and a worker that may fail as another rank has.
``verdict_words.py`` has most of the words.
"""

from __future__ import annotations

import errno
import signal
from functools import partial

from msgspec.structs import replace

from ddp_manual import from_worker, messages
from ddp_manual.errors import DdpManualError, PeerLost, Stopped
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol import how_a_worker_ended, states, verdict_words
from ddp_manual.protocol.stop_signals import SAVE_WITHIN, StopSignals
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.ranks_and_runs import LastWords, Verdict, more_seconds

# Seconds until the coordinator has told everybody what ends the run.
VERDICT_WITHIN = 2.5
# Seconds in which a worker may find the same error that another rank has failed with, and say so itself.
SAME_WITHIN = 0.5
# What the system answers where it has no room for one more process.
AT_A_LIMIT = (errno.EAGAIN, errno.ENOMEM, errno.EMFILE, errno.ENFILE, errno.ENOSPC)


class Explanation:
    """Finds the error that ends a rank, and has its agent end with it. What a worker has failed with, and another rank
    meanwhile, is in the ``Work`` of that worker."""

    def __init__(self, rank: ThisRank, signals: StopSignals) -> None:
        self._rank, self._shell, self._signals = rank, rank.shell, signals
        self._expired: DdpManualError | None = None
        """Why the run ends after one more step: nobody has taken the seat of a lost rank in time."""

    # -- rank 0 says why, or is lost ----------------------------------------------------------------------------------

    def take_verdict(self, verdict: Verdict, stopped: float) -> None:
        """End with what rank 0 has judged, or a moment after another rank has failed.

        Args:
            stopped: the seconds for which this process was stopped just before; 0 if it was not.
        """
        rank, work = self._rank, self._rank.work
        error = verdict_words.error_for(rank.number, verdict)
        ours, own = verdict.rank == rank.number, work.own_words
        if verdict.judged:
            is_of_this_rank = ours and verdict.is_loss
            was_silent = is_of_this_rank and "has been silent" in error.what
            if is_of_this_rank and self._shell.worker.status is None:
                keeps_seat = rank.run is not None and rank.run.on_loss != LEAVE
                others = "its seat is kept" if keeps_seat else "the others leave too"
                error.why = f"this is rank {rank.number}; {others}\n{error.why}"
            if was_silent and stopped:
                error.why = (
                    f"this rank was itself stopped for {stopped:.0f} s, as by Ctrl-Z, or with its host\n{error.why}"
                )
                error.next = error.next.partition("\nthen ")[2] or rank.again  # without: look at your own process
        elif own is not None:
            own.next = verdict.next if ours else own.next  # the verdict says whether its seat is kept
            error = own if ours or own.identifier == verdict.identifier else error
            if not ours and verdict.identifier == Stopped.identifier:
                error = self._signals.stopped_by(own.exit_code, because_of=own) or error
        elif not ours:
            work.words_of_another = verdict.identifier
            rank.later(SAME_WITHIN, partial(self._lose_peer, error))
            return
        self._shell.fail(error)

    def _lose_peer(self, error: DdpManualError) -> None:
        """Fail because another rank has; if signals have asked both to stop, first give the program time to end. A rank
        that has done its work meanwhile has time to leave in order, but rank 0 ends as the run does."""
        rank = self._rank
        if rank.number and isinstance(rank.state, (states.Closing, states.Alone, states.Leaving, states.Left)):
            rank.later(SAVE_WITHIN, partial(self._shell.fail, error))
            return
        stopped = self._signals.stopped_by(None) if rank.work.own_words is None else None
        if stopped is None or rank.work.words_of_another != Stopped.identifier:
            self._shell.fail(error)
            return
        rank.enter(states.Alone())
        rank.tell(messages.Close())
        rank.later((self._shell.worker.until or 0) - rank.now, partial(self._shell.fail, stopped))

    def rank_0_is_gone(self, reason: str) -> None:
        """End because the connection to rank 0 has ended."""
        rank, work = self._rank, self._rank.work
        assert rank.run is not None
        before = "" if isinstance(rank.state, states.Working) else " before all ranks had joined"
        why = f"its connection to this rank ended{before}: {reason}"
        lost = verdict_words.rank_0_lost(rank.run, self._shell.worker.beat, "is gone without a word", why)
        # If a collective has broken too, that follows from the loss of rank 0.
        self._shell.fail(lost if work.own_words is None or work.has_broken else work.own_words)

    def give_rank_0_up(self, lost: DdpManualError) -> None:
        """End because rank 0 is lost; if rank 0 was only stopped, it reads why once it runs again."""
        self._rank.send(messages.LostRank0(LastWords.of(lost)))
        self._shell.fail(lost)

    # -- all ranks stop after the same step ---------------------------------------------------------------------------

    def run_expires(self, verdict: Verdict) -> None:
        """Note why all ranks stop after one more step: nobody has taken the seat of a lost rank in time."""
        self._expired = verdict_words.error_for(self._rank.number, verdict)
        self._signals.asked = self._signals.asked or signal.SIGTERM
        why = self._expired.why.splitlines()[-1]
        self._shell.log(f"{why}: all that are here go on for a step, save a checkpoint, and stop")

    def stopped_with_all(self, words: LastWords) -> DdpManualError:
        """Return the error for a rank whose program has stopped with all ranks, and has said this."""
        stopped, expired = words.error(), self._expired
        if expired is None:
            return stopped
        expired.why = f"{expired.why}\n{stopped.why}"
        return expired

    # -- the worker fails, or ends without a word ---------------------------------------------------------------------

    def take_failure(self, message: from_worker.Failed) -> None:
        """Pass on the worker's last words: the coordinator may know better what has ended it."""
        work, own, broken_at = self._rank.work, message.words.error(), message.place if message.broken else None
        # A signal is no reason for any other exception.
        by_itself = message.exits or own.identifier == Stopped.identifier
        follows = broken_at is not None and work.words_of_another == Stopped.identifier
        may_be_asked_for = by_itself or follows
        if may_be_asked_for:
            stopped = self._signals.stopped_by(own.exit_code, because_of=None if by_itself else own)
            own = stopped or own  # such as by sys.exit(143), after it has tidied up
        work.own_words, work.has_broken = own, broken_at is not None
        if own.identifier == work.words_of_another:
            self._shell.fail(own)
        elif broken_at is None or work.words_of_another is None:  # otherwise the rank that has failed is known
            self._rank.send_beat()
            self._ask_for_verdict(own, broken_at=broken_at, in_torch=message.in_a_collective)

    def is_stopped_by_signal(self, status: int | None) -> bool:
        """Return whether a signal is why the program ended with this status; if so, end with that."""
        stopped = self._signals.stopped_by(how_a_worker_ended.exit_code(status))
        if stopped is not None:
            self._ask_for_verdict(stopped)
        return stopped is not None

    def worker_is_lost(self) -> None:
        """End because the worker's process has ended without a word."""
        rank, worker = self._rank, self._shell.worker
        info = replace(self._shell.info, pid=worker.pid)
        error = how_a_worker_ended.lost(info, worker, rank.again, replaced=rank.work.is_replaced)
        if rank.work.words_of_another == PeerLost.identifier:  # the other rank has only lost its connection to this one
            self._shell.fail(error)
        else:
            self._ask_for_verdict(error, judged=True)

    def no_worker(self, error: OSError) -> None:
        """End because no worker can be started."""
        info = self._shell.info
        why, next = str(error), "repair what that names"
        if error.errno in AT_A_LIMIT:
            why, next = "a limit of its host is reached", f"look at the limits of {info.host}: ulimit -a, free"
        what = f"cannot start a worker: {error.strerror or error}"
        lost = verdict_words.lost_rank(info, what, why=why, next=f"{next}\nthen {self._rank.again}")
        self._ask_for_verdict(lost, judged=True)

    def _ask_for_verdict(
        self, error: DdpManualError, *, judged: bool = False, broken_at: str | None = None, in_torch: bool = False
    ) -> None:
        """Tell the coordinator why this rank ends, and end with its verdict; with ``error`` if no verdict comes.
        ``messages.Failed`` says what the arguments mean."""
        rank = self._rank
        if not self._shell.is_connected or isinstance(rank.state, (states.Alone, states.Left)):
            self._shell.fail(error)
            return
        assert rank.run is not None
        rank.send(messages.Failed(LastWords.of(error), judged, broken_at, in_torch))
        within = VERDICT_WITHIN + more_seconds(rank.run.world_size)
        if broken_at is not None and rank.may_look_for_rank_0:
            return  # rank 0 says how all go on; if it is silent for too long, this rank keeps its state
        if broken_at is not None:  # only the other ranks can explain a broken collective
            why = f"in this rank {error.what}"
            what = f"has not said within {within:.1f} s which rank is to blame"
            lost = verdict_words.rank_0_lost(rank.run, self._shell.worker.beat, what, why)
            rank.later(within, partial(self.give_rank_0_up, lost))
        else:
            rank.later(within, partial(self._shell.fail, error))
