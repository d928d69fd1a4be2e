"""The decisions of one rank's agent: what follows from each message, from each signal and from the worker's end.

This module has no connections, no processes and no clock. ``agent/main.py`` reads and writes, starts and ends the
worker, and prints.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Callable
from functools import partial
from typing import Protocol

from msgspec.structs import replace

from ddp_manual import from_agent, from_worker, messages, signal_handlers
from ddp_manual.errors import CollectiveMismatch, DdpManualError, PeerLost, PeerStalled, Stopped
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol import states, verdicts
from ddp_manual.protocol.health import Silence
from ddp_manual.protocol.heartbeat_times import heartbeat_period, silent_after
from ddp_manual.protocol.stop_signals import Handling, StopSignals
from ddp_manual.ranks_and_runs import Beat, LastWords, Moment, RankInfo, RunInfo, RunSoFar, Verdict, more_seconds
from ddp_manual.wire import printable
from ddp_manual.world_options import WorldSpec

# Seconds until the coordinator has told everybody what ends the run.
VERDICT_WITHIN = 2.5
# Seconds in which a worker may find the same error that another rank has failed with, and say so itself.
SAME_WITHIN = 0.5
# Seconds that rank 0 keeps torch's store for ranks that are still working.
LEAVE_TIMEOUT = 60.0
# Seconds that a worker has, when the run ends, to finish its checkpoint, or to do what its program does about a signal
# that has asked it to stop, on this host or another one. torchrun gives as long.
SAVE_WITHIN = 30.0
# Seconds. A process that has not run for this long was stopped, and was not just slow.
A_PAUSE = 5.0
Answered = messages.AskStacks | messages.AskRecords | messages.Probe | messages.News | messages.Refused | messages.Line
# Before this many collectives, a program that holds its state has held it once, or has asked for the held state.
HOLDS_BEFORE = 20


class WorkerSeen(Protocol):
    """What the agent knows and asks of its worker: see ``agent/worker_process.py``. ``until`` is set here too."""

    beat: Beat
    ended: bool
    has_started_its_agent: bool
    hears: bool
    pid: int
    said: set[type[from_worker.FromWorker]]
    status: int | None
    until: float | None

    @property
    def crash_stack(self) -> str: ...
    @property
    def is_gone(self) -> bool: ...
    @property
    def ran_out_of_memory(self) -> bool: ...
    def heartbeat(self) -> Beat: ...
    def send(self, message: from_agent.FromAgent) -> None: ...


class Shell(Protocol):
    """What ``AgentProtocol`` has its agent do. No method waits: work that takes time is done in the background."""

    @property
    def worker(self) -> WorkerSeen: ...
    @property
    def info(self) -> RankInfo: ...
    @property
    def here(self) -> int:
        """How many ranks are here, as far as this rank knows."""

    @property
    def is_connected(self) -> bool: ...
    @property
    def held_steps(self) -> int:
        """How many steps the worker has done, as it has noted in the memory that holds its state."""

    def log(self, line: str, /) -> None: ...
    def send(self, message: messages.FromRank) -> None: ...
    def fail(self, error: DdpManualError) -> None: ...
    def finish(self, result: object) -> None: ...
    def call_at(self, when: float, call: Callable[[float], None]) -> None:
        """Call ``call`` with the time once it is ``when``; the call cannot be cancelled."""

    def as_seen_here(self, run: RunInfo) -> tuple[RunInfo, bool]:
        """Return the run, with the path of its folder on this rank, and whether this rank writes into that folder."""

    def stopped_rank_0(self, run: RunInfo) -> str:
        """Return which signal has stopped rank 0's agent, as Ctrl-Z does, if it is on this host; "" if none has."""

    def have_it_load(self) -> None:
        """Tell the worker what to load."""

    def take_place(self, placed: messages.Placed) -> None:
        """Have the worker begin, at its place among all ranks."""

    def answer(self, message: Answered) -> None:
        """Do what a message asks for, where there is nothing to decide."""

    def look_around(self, *, waits: bool) -> None:
        """Read the worker's records of collectives; say which ranks are missing, if this rank ``waits`` for others."""

    def forget_news(self) -> None:
        """Forget which ranks rank 0 has called missing: the ranks begin anew."""

    def pass_on(self, number: int) -> None:
        """Send a signal to the program, unless its sender has sent it to the program too."""

    def replace_worker(self, number: int) -> None:
        """End the worker, call ``worker_ended``, and start another one; then call ``worker_replaced``, or
        ``cannot_replace_worker``."""

    def end_worker(self) -> None:
        """End the worker, and start no other one yet."""

    def search_again(self, lost_at: float) -> None:
        """Close the connection; look for rank 0 once the worker is replaced, and call ``joined`` if it is found."""

    def leave_in_order(self, within: float) -> None:
        """Call ``others_have_left``; on rank 0 only when the other ranks have left, or after ``within`` seconds."""

    def stop_leaving(self) -> None: ...


class AgentProtocol:
    """What the agent of one rank decides. ``now`` is the time on its monotonic clock, in seconds.

    Args:
        name: the name of what the worker runs, for lines that are printed.
        chose_folder: whether somebody has named the run's folder.
        in_one_terminal: whether all ranks share one terminal.
    """

    def __init__(
        self,
        spec: WorldSpec,
        shell: Shell,
        now: float,
        *,
        name: str,
        chose_folder: bool,
        in_one_terminal: bool,
    ) -> None:
        self._spec, self._shell, self._name = spec, shell, name
        self.state: states.State = states.Searching()
        self.work = states.Work(started=now)
        self.signals = StopSignals(spec, shell.log, self._pass_on, self._ask_all)
        self.run: RunInfo | None = None
        self.run_dir: str | None = None
        self.run_id = ""
        self.is_own_folder = False
        """Whether this rank writes into ``run_dir``: see ``run_folder.own_run_dir``."""
        self.chose_folder = chose_folder
        self._in_one_terminal = in_one_terminal
        self.so_far: RunSoFar | None = None
        """What this rank tells a new rank 0, once it has been in the run."""
        self.has_trained = False
        """Whether any worker of this rank has taken a step."""
        self._has_warned = False
        """Whether a line has said that the program does not hold its state."""
        self._expired: DdpManualError | None = None
        """Why the run ends after one more step: nobody has taken the seat of a lost rank in time."""
        self._now = self._heard = self._ticked = now
        self._paused = 0.0
        """Seconds for which this process did not run when it was last stopped, less the seconds that it has run since:
        once these are as many, that stop is no reason for a verdict any more."""
        self._silence = Silence(lambda _: "rank 0")
        self._next_beat = 0.0
        self._worker_number = 0
        """The number of the worker that messages are about: how many others rank 0 has asked for on this connection."""

    def enter(self, state: states.State) -> None:
        """Be in this state from now on, unless the rank has ended."""
        if not isinstance(self.state, states.Ended):
            self.state = state

    @property
    def again(self) -> str:
        """What to do after the run has ended."""
        return self.run.start_again if self.run else "start this rank again"

    # -- join and start the worker ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the worker load torch, once, while this rank looks for rank 0 or waits for the other ranks."""
        if not self.work.is_begun:
            self.work.is_begun = True
            self._shell.have_it_load()

    def joined(self, run: RunInfo, now: float) -> None:
        """Note that rank 0 has admitted this rank."""
        self._now = self._heard = now
        self._worker_number = 0
        self.enter(states.Waiting(lost_at=self._lost_rank_0_at))
        self._take_run(run)
        self.begin()
        if self._lost_rank_0_at is not None and self._shell.worker.is_gone:
            self._begin_anew()
        if self.work.ready is not None:
            self.send(messages.WorkerReady(self.work.ready))

    def _take_run(self, run: RunInfo) -> None:
        """Note which run this is, and where its files go."""
        self.run, self.is_own_folder = self._shell.as_seen_here(run)
        self.run_dir, self.run_id = self.run.run_dir, self.run.run_id

    # -- messages of the coordinator ----------------------------------------------------------------------------------

    def take(self, message: messages.FromRank0, now: float) -> None:
        """Handle a message of the coordinator."""
        self._now = self._heard = now
        match message:
            case messages.AskStacks() | messages.AskRecords():
                self._shell.answer(message)
            case _ if isinstance(self.state, states.Ended):
                pass  # this rank has told the others why it ends, or has learnt that from them
            case messages.News():
                if isinstance(self.state, states.Waiting):
                    self._shell.answer(message)
            case messages.Probe() | messages.Refused() | messages.Line():
                self._shell.answer(message)
            case messages.Placed():
                self._take_place(message)
            case messages.RunEnds():
                self._take_verdict(message.verdict)
            case messages.Replace() if not isinstance(self.state, states.Left):
                self._shell.forget_news()
                self._begin_anew(message.worker)
            case messages.SeatLost() if not isinstance(self.state, states.Looking):
                self._look_for_rank_0("rank 0 has not heard of this rank for too long, and has given it up")
            case messages.Expired():
                self._expired = verdicts.error_for(self._spec.rank, message.verdict)
                self.signals.asked = self.signals.asked or signal.SIGTERM
                why = self._expired.why.splitlines()[-1]
                self._shell.log(f"{why}: all that are here go on for a step, save a checkpoint, and stop")
            case messages.AskStep() if isinstance(self.state, states.Placed):
                self._ask_step()
            case messages.StopAfter() if isinstance(self.state, states.Placed):
                self._tell(from_agent.StopAfter(message.step, message.number, message.ranks))
            case messages.Close():
                if isinstance(self.state, states.Working):
                    self.enter(states.Closing())
                self._tell(from_agent.Close())
            case messages.Rank0Leaves() if isinstance(self.state, (states.Working, states.Closing)):
                self.enter(states.Alone())
                self._shell.log("rank 0 has finished and left; this rank goes on alone, and nobody watches over it")
                self._tell(from_agent.Close())

    def _take_place(self, placed: messages.Placed) -> None:
        """Tell the worker its place, with which it begins to work: all ranks have joined."""
        self.enter(states.Working())
        self._take_run(placed.run)
        assert self.run is not None
        if self.run.on_loss != LEAVE:  # a new rank 0 needs this
            self.so_far = RunSoFar(
                run_id=self.run.run_id,
                run_dir=self.run.run_dir,
                generation=placed.generation,
                losses=placed.losses.count,
                lost_seconds=placed.losses.seconds,
                host=self.run.host,
                pid=self.run.pid,
                address=self.run.address,
            )
        self._shell.take_place(replace(placed, run=self.run))

    def _take_verdict(self, verdict: Verdict) -> None:
        error = verdicts.error_for(self._spec.rank, verdict)
        ours, own = verdict.rank == self._spec.rank, self.work.own_words
        if verdict.judged:
            is_of_this_rank = ours and not isinstance(error, (CollectiveMismatch, PeerStalled))
            was_silent = is_of_this_rank and "has been silent" in error.what
            if is_of_this_rank and self._shell.worker.status is None:
                keeps_seat = self.run is not None and self.run.on_loss != LEAVE
                others = "its seat is kept" if keeps_seat else "the others have not waited for it"
                error.why = f"this is rank {self._spec.rank}; {others}\n{error.why}"
            stopped = max(self._paused, self._now - self._ticked)
            if was_silent and stopped >= A_PAUSE:
                error.why = (
                    f"this rank was itself stopped for {stopped:.0f} s, as by Ctrl-Z, or with its host\n{error.why}"
                )
                error.next = error.next.partition("\nthen ")[2] or self.again  # without: look at your own process
        elif own is not None:
            own.next = verdict.next if ours else own.next  # the verdict says whether its seat is kept
            error = own if ours or own.identifier == verdict.identifier else error
            if not ours and verdict.identifier == Stopped.identifier:
                error = self.signals.stopped_by(own.exit_code, self.again, because_of=own) or error
        elif not ours:
            self.work.words_of_another = verdict.identifier
            self._later(SAME_WITHIN, partial(self._lose_peer, error))
            return
        self._shell.fail(error)

    def _lose_peer(self, error: DdpManualError) -> None:
        """Fail because another rank has; if signals have asked both to stop, first give the program time to end."""
        stopped = self.signals.stopped_by(None, self.again) if self.work.own_words is None else None
        if stopped is None or self.work.words_of_another != Stopped.identifier:
            self._shell.fail(error)
            return
        self.enter(states.Alone())
        self._tell(from_agent.Close())
        self._later((self._shell.worker.until or 0) - self._now, partial(self._shell.fail, stopped))

    def coordinator_gone(self, reason: str, now: float) -> None:
        """Note that the connection to the coordinator has ended."""
        self._now = now
        if isinstance(self.state, states.Closing):  # its work is done, and it needs nobody any more
            self.enter(states.Alone())
        if not isinstance(self.state, (states.Waiting, states.Working)) or self.work.words_of_another is not None:
            return
        assert self.run is not None
        if self._may_look_for_rank_0:
            self._look_for_rank_0(f"rank 0 ({self.run.host}, pid {self.run.pid}) is gone without a word: {reason}")
            return
        before = "" if isinstance(self.state, states.Working) else " before all ranks had joined"
        why = f"its connection to this rank ended{before}: {reason}"
        lost = verdicts.rank_0_lost(self.run, self._shell.worker.beat, "is gone without a word", why)
        # If a collective has broken too, that follows from the loss of rank 0.
        self._shell.fail(lost if self.work.own_words is None or self.work.has_broken else self.work.own_words)

    # -- messages of the worker, and its end --------------------------------------------------------------------------

    def take_from_worker(self, message: from_worker.FromWorker, now: float) -> None:
        """Handle a message of the worker, unless the worker was replaced since."""
        self._now = now
        match message:
            case from_worker.Doing():
                if self._shell.worker.beat.phase != self.work.sent_beat.phase:
                    self._send_beat()
                self.has_trained |= self._shell.worker.beat.step > 0
                self._say_what_a_loss_repeats()
            case from_worker.Loaded():
                self.work.ready = message.ready
                self.send(messages.WorkerReady(message.ready))
            case from_worker.NotCompared():
                why = f"the collectives of this rank are not compared with those of others: {message.why}"
                self._shell.log(why)
            case from_worker.StartsProcesses(count):
                how = f"starts processes of its own ({count}, torch.multiprocessing): they are no ranks"
                self._shell.log(f"{self._name} {how}, and nothing watches over them; ddp_manual.spawn starts ranks")
            case from_worker.Replaced() if self._spec.rank == 0 and self._spec.world_size > 1:
                self.work.is_replaced = True
                self._shell.log(f"{verdicts.STORE_REPLACED}; {verdicts.WITHOUT_PYTHON}")
            case from_worker.ProgramBegins():
                self.signals.worker_handles(Handling.BY_ITSELF)
                if self.signals.passed_on:
                    self._pass_on(self.signals.passed_on)
            case from_worker.TakesStops():
                self.signals.worker_handles(Handling.WITH_ALL)
                if self.signals.asked:  # all were asked to stop while an earlier worker ran
                    self._ask_all(self.signals.asked)
            case from_worker.TakesNoStops():
                self.signals.worker_handles(Handling.DONE)
            case from_worker.TakesSignals():
                self.signals.worker_handles(Handling.BY_ITSELF)
            case from_worker.StepsDone():
                self.send(messages.StepsDone(message.steps))
            case from_worker.Signalled() if not isinstance(self.state, states.Ended):
                self.take_signal(message.number, now, seen_by="script")
            case from_worker.RunFolder():
                self.run_dir, self.is_own_folder, self.chose_folder = message.run_dir, message.own, message.chosen
            case from_worker.Left() if isinstance(self.state, states.Ended):
                self._shell.leave_in_order(math.inf)  # rank 0's worker has torch's store, which others may need
            case _ if isinstance(self.state, states.Ended):
                pass  # the end of this rank is explained already
            case from_worker.Finished():
                if isinstance(self.state, states.Alone):
                    self._tell(from_agent.Close())
                else:
                    self._send_beat()
                    self.send(messages.Finished())
            case from_worker.Failed():
                self._take_failure(message)
            case from_worker.Left():
                self._begin_leaving()
            case from_worker.Result():
                self._take_result(message)

    def _take_result(self, message: from_worker.Result) -> None:
        self.work.result = {} if message.result is None else message.result
        if message.stopped is not None:
            stopped = message.stopped.error()
            if (expired := self._expired) is not None:
                expired.why, stopped = f"{expired.why}\n{stopped.why}", expired
            self.work.result = stopped
        self.work.process_continues = message.process_continues
        if message.process_continues and isinstance(self.state, (states.Left, states.Alone)):
            self._shell.finish(self.work.result)

    def _say_what_a_loss_repeats(self) -> None:
        """Say once on rank 0, before any loss, if the program does not hold its state, and so begins anew after one."""
        worker = self._shell.worker
        if self._has_warned or self._spec.rank:
            return
        if self.so_far is None or not self._name:
            return
        holds = from_worker.Holds in worker.said or self._shell.held_steps > 0
        if not holds and sum(worker.beat.collectives.values()) >= HOLDS_BEFORE:
            self._has_warned, again = True, "after a loss all ranks start it again from its beginning"
            self._shell.log(f"{self._name} does not call hold(): {again}")

    def _take_failure(self, message: from_worker.Failed) -> None:
        """Pass on the worker's last words: the coordinator may know better what has ended it."""
        if isinstance(self.state, states.Looking):  # another worker is started once rank 0 is found
            self._shell.end_worker()
            return
        work, own, broken_at = self.work, message.words.error(), message.place if message.broken else None
        # A signal is no reason for any other exception.
        by_itself = message.exits or own.identifier == Stopped.identifier
        follows = broken_at is not None and work.words_of_another == Stopped.identifier
        may_be_asked_for = by_itself or follows
        if may_be_asked_for:
            stopped = self.signals.stopped_by(own.exit_code, self.again, because_of=None if by_itself else own)
            own = stopped or own  # such as by sys.exit(143), after it has tidied up
        work.own_words, work.has_broken = own, broken_at is not None
        if own.identifier == work.words_of_another:
            self._shell.fail(own)
        elif broken_at is None or work.words_of_another is None:  # otherwise the rank that has failed is known
            self._send_beat()
            words, in_torch = LastWords.of(own), message.in_a_collective
            self._ask_for_verdict(messages.Failed(words, broken_at=broken_at, in_a_collective=in_torch), own)

    def worker_gone(self, now: float) -> None:
        """Note that the worker's process has ended, unless it was replaced since."""
        self._now = now
        if self.work.own_words is not None:
            return  # its last words were read
        if isinstance(self.state, (states.Looking, states.Ended)):
            return  # Looking: another worker is started once rank 0 is found. Ended: no other one is started
        worker = self._shell.worker
        is_done = self.work.result is not None or not worker.status
        if isinstance(self.state, states.Left) and is_done:
            self._shell.finish(self.work.result)
            return
        if isinstance(self.state, states.Placed) and self._program_ended(worker.status):
            return
        info = replace(self._shell.info, pid=worker.pid)
        oom, stack = worker.ran_out_of_memory, worker.crash_stack
        verdict = verdicts.lost(
            info, worker.beat, self.again, status=worker.status, oom=oom, stack=stack, replaced=self.work.is_replaced
        )
        error = verdicts.error_for(self._spec.rank, verdict)
        if self.work.words_of_another == PeerLost.identifier:  # the other rank has only lost its connection to this one
            self._shell.fail(error)
        else:
            self._ask_for_verdict(messages.Failed(verdict.words, judged=True), error)

    def _program_ended(self, status: int | None) -> bool:
        """Handle the end of a program that has not failed by itself: it is done, or a signal has stopped it."""
        said = self._shell.worker.said
        has_no_result = from_worker.Joins in said and self.work.result is None  # a program that joins leaves in order
        is_done = status == 0 and not has_no_result
        if is_done or self.work.result is not None:
            if from_worker.Finished not in said:  # its process has ended without Python's exit, as by os._exit
                self._send_beat()
                self.send(messages.Finished())
                if self._spec.rank == 0 and self._spec.world_size > 1:
                    ended = "rank 0's process has ended, and torch's store with it: other ranks may still need that"
                    self._shell.log(ended)
            self.work.result = {} if self.work.result is None else self.work.result
            self._begin_leaving()
            return True
        code = 1 if status is None else 128 - status if status < 0 else status
        stopped = self.signals.stopped_by(code, self.again)
        if stopped is not None:
            self._ask_for_verdict(messages.Failed(LastWords.of(stopped)), stopped)
        return stopped is not None

    def _ask_for_verdict(self, failed: messages.Failed, error: DdpManualError) -> None:
        """Tell the coordinator why this rank ends, and end with its verdict; with ``error`` if no verdict comes."""
        if not self._shell.is_connected or isinstance(self.state, (states.Alone, states.Left)):
            self._shell.fail(error)
            return
        assert self.run is not None
        self.send(failed)
        within = VERDICT_WITHIN + more_seconds(self.run.world_size)
        if failed.broken_at is not None and self._may_look_for_rank_0:
            return  # rank 0 says how all go on; if it is silent for too long, this rank keeps its state
        if failed.broken_at is not None:  # only the other ranks can explain a broken collective
            why = f"in this rank {error.what}"
            what = f"has not said within {within:.1f} s which rank is to blame"
            lost = verdicts.rank_0_lost(self.run, self._shell.worker.beat, what, why)
            self._later(within, partial(self._give_rank_0_up, lost))
        else:
            self._later(within, partial(self._shell.fail, error))

    def _give_rank_0_up(self, lost: DdpManualError) -> None:
        """End because rank 0 is lost; if rank 0 was only stopped, it reads why once it runs again."""
        self.send(messages.LostRank0(LastWords.of(lost)))
        self._shell.fail(lost)

    def _later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` after so many seconds, unless the worker was replaced by then."""
        work = self.work

        def due(now: float) -> None:
            self._now = now
            if work is self.work:
                call()

        self._shell.call_at(self._now + seconds, due)

    # -- another worker, or another rank 0 ----------------------------------------------------------------------------

    def _begin_anew(self, number: int = 0) -> None:
        """Replace the worker by the one with this number; rank 0 waits for it."""
        self._forget_worker(number)
        self.enter(states.Replacing(lost_at=self._lost_rank_0_at))

    def _forget_worker(self, number: int = 0) -> None:
        """End the worker and start another one. What the old worker has said counts no longer."""
        if isinstance(self.state, states.Leaving):  # its work was done, and is begun anew
            self._shell.stop_leaving()
        self.work = states.Work(started=self._now)
        self.signals.worker_handles(Handling.LOADING)
        self._shell.replace_worker(number)

    def worker_ended(self, number: int, held: Moment | None) -> None:
        """Tell rank 0 that the old worker has ended, and which state is held; the next worker has this number."""
        self._worker_number = number
        self.send(messages.Held(held, self._shell.held_steps))

    def worker_replaced(self) -> None:
        """Note that another worker runs."""
        self.begin()
        if isinstance(self.state, states.Replacing):
            self.enter(states.Waiting(lost_at=self.state.lost_at))

    def cannot_replace_worker(self, error: OSError, now: float) -> None:
        """Note that no other worker can be started, such as because of EMFILE."""
        self._now, info = now, self._shell.info
        what = f"cannot start another worker: {error.strerror}"
        next = f"look at the limits of {info.host}: ulimit -a, free\nthen {self.again}"
        verdict = verdicts.lost_rank(info, what, why="its worker was to be replaced", next=next)
        failed = messages.Failed(verdict.words, judged=True)
        self._ask_for_verdict(failed, verdicts.error_for(self._spec.rank, verdict))

    @property
    def _may_look_for_rank_0(self) -> bool:
        """Whether this rank, when it loses rank 0, keeps its state and looks for another rank 0."""
        return self.so_far is not None and self._spec.rank != 0

    @property
    def _lost_rank_0_at(self) -> float | None:
        """When rank 0 was lost, if the ranks have not gone on since."""
        return self.state.lost_at if isinstance(self.state, (states.Looking, states.Waiting)) else None

    def _look_for_rank_0(self, why: str) -> None:
        """Keep the state, and say hello again where rank 0 is expected."""
        assert self.run is not None and self.so_far is not None
        losses = self.so_far.losses + (self._lost_rank_0_at is not None)  # + 1: lost again before the ranks could go on
        lost_at = self._lost_rank_0_at or self._now
        self.so_far = replace(self.so_far, lost=printable(why), losses=losses)
        looks = f"this rank keeps its state, and looks for rank 0 for {self.run.rejoin_timeout:.0f} s"
        self._shell.log(f"{why}; {looks}")
        if not isinstance(self.state, states.Replacing):
            self._forget_worker()
        self.enter(states.Looking(lost_at=lost_at))
        self._shell.search_again(lost_at)

    def _begin_leaving(self) -> None:
        """Leave, because the worker has done its work and has left."""
        if isinstance(self.state, states.Leaving):
            return  # it leaves already: this is the end of its process
        # Another rank may work for as long as it likes after the last collective, unless all leave join() together.
        together = from_worker.Joins in self._shell.worker.said
        works_on = not together and not isinstance(self.state, states.Alone)
        self.enter(states.Leaving())
        self._shell.leave_in_order(math.inf if works_on else LEAVE_TIMEOUT)

    def others_have_left(self) -> None:
        """Say goodbye: nobody needs this rank any more, nor, if it is rank 0, torch's store."""
        self.enter(states.Left())
        self.send(messages.Goodbye())
        self._tell(from_agent.Over())
        needs_nothing = self.work.process_continues or self._shell.worker.ended
        if needs_nothing and self.work.result is not None:
            self._shell.finish(self.work.result)

    # -- signals and the clock ----------------------------------------------------------------------------------------

    def take_signal(self, number: int, now: float, seen_by: str = "agent") -> None:
        """Handle a signal that the agent has received, or that its script reports.

        Args:
            seen_by: ``agent`` or ``script``. A terminal sends Ctrl-C to both; that counts once.
        """
        self._now, worker = now, self._shell.worker
        needs_no_signal = any((worker.ended, worker.has_started_its_agent, self.signals.are_taken))
        if needs_no_signal and isinstance(self.state, states.Ended):
            return
        if number == signal.SIGINT and worker.beat.debugging:
            return  # Ctrl-C is for the debugger
        # If rank 0 stops, the run is over; if any other rank stops, the others wait for it.
        leads = self.so_far is not None and self._spec.rank == 0
        again = self.again if leads or isinstance(self.state, states.Placed) else ""
        restarts = self.so_far is not None and isinstance(self.state, states.Waiting)
        if worker.has_started_its_agent and not self.signals.are_taken:  # the script gets each signal itself
            if number == signal.SIGTERM:
                self.signals.passed_on = self.signals.passed_on or number
                worker.until = now + SAVE_WITHIN if worker.until is None else worker.until
        elif error := self.signals.take(number, seen_by, self._shell.here, again, now, restarts=restarts):
            self._end_at_once(error)

    def _end_at_once(self, error: Stopped) -> None:
        """End this rank, and give its worker no time."""
        self._shell.worker.until = 0
        self._shell.fail(error)

    def _ask_all(self, number: int) -> None:
        """Have all ranks stop after the same step; for SIGUSR1, have the worker save a checkpoint."""
        if number == signal_handlers.SAVE:
            if isinstance(self.state, states.Placed):
                self._tell(from_agent.Save())
        elif isinstance(self.state, states.Alone):  # nobody else names a step
            self._tell(from_agent.AskStep())
            self._tell(from_agent.StopAfter(0, number, [self._spec.rank]))
        else:
            self.send(messages.Stopping(number))

    def _pass_on(self, number: int) -> None:
        """Let the program handle a signal; one that asks it to stop only if nothing has asked it to stop before."""
        worker = self._shell.worker
        has_been_asked = worker.until is not None
        if number != signal_handlers.SAVE:
            worker.until = self._now + SAVE_WITHIN
        if number == signal_handlers.SAVE or not has_been_asked:
            self._shell.pass_on(number)

    def _ask_step(self) -> None:
        """Ask the worker how many steps it has done; reply 0 for one that hears nothing, and handles signals itself."""
        if self._shell.worker.hears:
            self._tell(from_agent.AskStep())
        else:
            self.send(messages.StepsDone(0))

    def tick(self, now: float) -> None:
        """Do what is due: handle Ctrl-C that does not reach the program, send a heartbeat, see if rank 0 is silent."""
        self._now = now
        passed, self._ticked = now - self._ticked, now
        self._paused = passed if passed >= A_PAUSE else max(0.0, self._paused - passed)
        match self.signals.look(self._shell.worker.beat, now):
            case str(unreached):
                self._shell.log(unreached)
                if self.run is not None and not self._in_one_terminal:  # in one terminal the line of each rank is seen
                    self.send(messages.Tell(unreached))
            case Stopped() as error:
                error.next = self.again
                self._end_at_once(error)
        if self.run is None or isinstance(self.state, (states.Looking, states.Alone, states.Left, states.Ended)):
            return  # there is no rank 0 to send heartbeats to, or to hear
        self._shell.look_around(waits=isinstance(self.state, states.Waiting))
        if passed > self.run.peer_timeout:  # this process was stopped, perhaps with its whole host
            self._heard = now
        if now >= self._next_beat:
            self._next_beat = max(self._next_beat + heartbeat_period(self.run), now)
            self._send_beat()
            line = self._silence.look({0: self._heard}, self.run, now) if passed < 1 else None
            if line is not None:
                self._shell.log("; ".join(filter(None, (line, self._shell.stopped_rank_0(self.run)))))
        if now - self._heard > silent_after(self.run) and passed < 1:
            if isinstance(self.state, states.Closing):  # its work is done, and it needs nobody any more
                self.enter(states.Alone())
                self._shell.log("rank 0 is silent; this rank has done its work, and leaves")
                return
            what = f"has been silent for {now - self._heard:.0f} s"
            why = self._shell.stopped_rank_0(self.run) or (
                "its agent is stopped or frozen, its host is down, or the network between the hosts is cut"
            )
            lost = verdicts.rank_0_lost(self.run, self._shell.worker.beat, what, why)
            if self._may_look_for_rank_0:
                self._look_for_rank_0(lost.what)
            else:
                self._give_rank_0_up(lost)

    def _send_beat(self) -> None:
        beat = self._shell.worker.heartbeat()
        self.send(messages.Heartbeat(beat if beat != self.work.sent_beat else None))
        self.work.sent_beat = beat

    def give_up(self, error: DdpManualError) -> None:
        """End this rank with ``error``, unless all ranks have joined: then the others say why, or wait for a rank."""
        if not isinstance(self.state, states.Placed) and self.so_far is None:
            self._shell.fail(error)

    def send(self, message: messages.FromRank) -> None:
        """Send a message to rank 0; a message about the worker carries the worker's number."""
        if isinstance(message, messages.OfWorker) and message.worker != self._worker_number:
            message = replace(message, worker=self._worker_number)
        self._shell.send(message)

    def _tell(self, message: from_agent.FromAgent) -> None:
        self._shell.worker.send(message)
