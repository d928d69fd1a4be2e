"""One rank's life seen from outside: join -> start the worker -> watch -> explain -> exit code.

Everything happens in one event loop: messages of the coordinator and of the worker, the worker's end, signals, and a
clock. What explains a failure never breaks with it: this process shares no lock, no CUDA context and no torch with the
worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ddp_manual import from_agent, from_worker, messages, orphans, run_folder, signals
from ddp_manual.agent import ending, states
from ddp_manual.agent.address import raise_descriptor_limit
from ddp_manual.agent.coordinator import LEAVE_TIMEOUT
from ddp_manual.agent.ending import Ending, ProgramSignals, StopSignals, how_it_ended, leave_failure
from ddp_manual.agent.join import Join, Task
from ddp_manual.agent.worker_process import SAVE_WITHIN, TERM_GRACE, Worker, wait_until
from ddp_manual.errors import (
    CollectiveMismatch,
    DdpManualError,
    PeerGone,
    PeerLost,
    RanksDoNotBelongTogether,
    RankTaken,
    Stopped,
)
from ddp_manual.held_memory import HeldMemory
from ddp_manual.messages import SAVING, LastWords, Place, RunInfo, RunSoFar, Verdict, more_seconds
from ddp_manual.on_loss import LEAVE
from ddp_manual.protocol import verdicts
from ddp_manual.protocol.health import heartbeat_period, silent_after
from ddp_manual.steps import Steps
from ddp_manual.wire import printable
from ddp_manual.world_spec import WorldSpec

TICK = 0.1
# Seconds until the coordinator has told everybody what ends the run.
VERDICT_WITHIN = 2.5
# Seconds in which a worker may find the same error that another rank has failed with, and say so itself.
SAME_WITHIN = 0.5
# Seconds in which the other ranks read what was sent to them last.
LAST_WORD_WITHIN = 1.5
# Seconds in which the ranks stop in order once their launcher is gone.
STOP_WITHIN = 3.0
# Seconds for a worker to load torch, where its rank is only checked and the other ranks are missing.
READY_WITHIN = 20.0
# Collectives, before which a program that holds its state has held it once, or has asked for what is held.
HOLDS_BEFORE = 20


class Agent:
    """The agent of one rank, from ``run`` to the exit code.

    Args:
        start_worker: starts a worker's process, which holds its state in that memory, or returns the one that runs
            already.
        log: prints a line for the person at this rank's terminal.
        print_error: prints the error that ends this rank, after everything else.
    """

    def __init__(
        self,
        spec: WorldSpec,
        task: Task,
        *,
        start_worker: Callable[[HeldMemory], Worker],
        log: Callable[[str], None],
        print_error: Callable[[DdpManualError], None],
    ) -> None:
        self.spec, self.task, self.log = spec, task, log
        self.steps = Steps()
        self._print_error = print_error
        self._start_worker = start_worker
        self._join = Join(spec, task, steps=self.steps, log=log)
        kind, ask = (StopSignals, self._ask_worker) if task.program is None else (ProgramSignals, self._pass_on)
        self._signals = kind(spec, task.is_script, log, ask)
        self._signal_before = 0
        """What has come before this rank ran."""
        self.worker: Worker
        self.witness: signals.Witness | None = None
        """What tells which signals have been sent to a user's own program too."""
        self._forgetting: asyncio.TimerHandle | None = None
        self.held = HeldMemory.create()
        """The state of the training, which outlives the worker."""
        self._so_far: RunSoFar | None = None
        """What this rank tells a new rank 0, once it has been in the run."""
        self._has_warned = False
        """Whether it was said that the program does not hold its state."""
        self._run: RunInfo | None = None
        self._run_dir: str | None = None
        self._is_own_folder = False
        """Whether this rank writes there: see ``run_folder.own_run_dir``."""
        self._chose_folder = task.chose_folder
        self._run_id = self._orphaned = ""
        self._heard = self._ticked = time.monotonic()
        self._next_beat = 0.0
        self._worker_number = 0
        """Of the worker that this agent speaks of, as rank 0 counts them on this connection."""
        self.state: states.State = states.Searching()
        self.has_trained = False
        """Whether any worker of this rank has taken a step."""
        self._expired: DdpManualError | None = None
        """Why the run ends after a last step, for which a rank is missing."""

    async def run(self) -> ending.Ended:
        """Run the rank from its first line to its exit code. Raises nothing: the result has the error."""
        self._ending = Ending(self.spec.rank, lambda: self._enter(states.Ended(was=self.state)))
        self._work = states.Work(started=time.monotonic())
        with signals.handle_in_event_loop(self.take_signal) if self.task.launched is None else nullcontext():
            try:
                if self.spec.from_variables:
                    self.log(", ".join(self.spec.from_variables))
                with self.steps.step("open files") as step:
                    step.detail = f"up to {raise_descriptor_limit(self.spec)}"
                self.worker = self._start_worker(self.held)
                if self.task.launched is None and self.task.program is not None:
                    self.witness = signals.Witness(own_session=False)
            except Exception as error:
                self._ending.fail(error)
                ended = await self._ending.wait()
                assert ended.error is not None
                self._print_error(ended.error)
                return ended
            await self._attach()
            self._watch_launcher()
            if self._signal_before:
                self.take_signal(self._signal_before)
            if not isinstance(self.state, states.Ended):
                is_alone = self.task.training is not None and self.task.training.alone
                self._ending.in_background(self._work_alone() if is_alone else self._work_with_others())
            self._tick()
            ended = await self._ending.wait()
            assert isinstance(self.state, states.Ended)
            await self._leave(ended.error, self.state.was)
            self.held.close()
            if self.task.launched is None and self.witness is not None:
                self.witness.close()
        return ended

    def _enter(self, state: states.State) -> None:
        """Be in this state from now on, unless the rank has ended."""
        if not isinstance(self.state, states.Ended):
            self.state = state

    async def _attach(self) -> None:
        """Connect to the worker that was started last."""
        worker, work = self.worker, self._work

        def take(message: from_worker.FromWorker) -> None:
            if work is self._work:
                self._take_from_worker(message)

        def gone(*, later: bool = False) -> None:
            if work is self._work:
                if -(worker.status or 0) in signals.STOP and not (self._signals.stop or later):
                    # Its agent may get the same signal a moment later.
                    asyncio.get_running_loop().call_later(signals.ONCE_WITHIN, partial(gone, later=True))
                else:
                    self._worker_gone()

        await worker.attach(self._ending.guarded(take), gone)
        self._join.info = replace(self._join.info, pid=worker.pid)

    # -- join and start the worker ------------------------------------------------------------------------------------

    async def _work_alone(self) -> None:
        run_id = self._run_id = self.spec.run_id or run_folder.new_run_id()
        self._run_dir = self.task.run_dir and self.task.run_dir.replace("{run_id}", run_id)
        self._is_own_folder = True
        self._begin()
        await self._work.ready
        local_rank = self.spec.local_rank or 0
        place = Place(rank=0, world_size=1, local_rank=local_rank, local_world_size=1, node=0, nodes=1, host_leader=0)
        self._enter(states.Alone())
        self.worker.send(from_agent.WorkAlone(place, run_id, self._run_dir))

    async def _work_with_others(self) -> None:
        if self.spec.rank != 0:
            self._begin()
        run, connection = await self._join.join()
        self._heard, self._worker_number = time.monotonic(), 0
        self._enter(states.Waiting(lost_at=self._lost_rank_0_at))
        self._take_run(run)
        self._begin()
        if self._lost_rank_0_at is not None and self.worker.is_gone:
            self._begin_anew()
        if self._work.ready.done():
            self._send(messages.WorkerReady(self._work.ready.result()))
        connection.handle(self._ending.guarded(self._take), self._coordinator_gone)

    def _take_run(self, run: RunInfo) -> None:
        """Take what run this is, and where its files go."""
        self._is_own_folder = False
        if self._join.coordinator is not None:  # what it says has been on the network
            run, self._is_own_folder = self._join.coordinator.run, True
        elif (own := run_folder.own_run_dir(run.run_dir, self.task.run_dir)) is not None:
            run, self._is_own_folder = replace(run, run_dir=own), True
        self._run, self._run_dir, self._run_id = run, run.run_dir, run.run_id

    def _begin(self) -> None:
        """Start the worker, which loads torch while this rank looks for the others or waits for them. That of rank 0
        hosts torch's store at rank 0's address."""
        if not self._work.is_begun:
            self._work.is_begun = True
            spec, task, rank_0 = self.spec, self.task, self._join.coordinator
            here = (sys.path[0], self._work.started, rank_0.run.address if rank_0 is not None else None)
            work = from_agent.OwnProgram(task.program, task.restarts) if task.program is not None else task.training
            self.worker.send(from_agent.Start(spec.values(), dict(spec.sources), *here, work))

    # -- messages of the coordinator ----------------------------------------------------------------------------------

    def _take(self, message: messages.FromRank0) -> None:
        self._heard = time.monotonic()
        match message:
            case messages.AskStacks():
                self._ending.in_background(self._send_stacks())
            case messages.AskRecords():
                self._send(messages.RecordsReply(self.worker.records.answer(message.request), message.number))
            case _ if isinstance(self.state, states.Ended):
                pass  # it has told the others why, or has learnt that from them
            case messages.News():
                if isinstance(self.state, states.Waiting):
                    self._join.take_news(message)
            case messages.Probe():
                self._ending.in_background(self._join.probe_hosts(message.hosts, message.key))
            case messages.Refused():
                raise self._join.refusal(message)
            case messages.Placed():
                self._take_place(message)
            case messages.Line():
                self.log(message.text)
            case messages.RunEnds():
                self._take_verdict(message.verdict)
            case messages.Replace() if not isinstance(self.state, states.Left):
                self._join.begin_again()
                self._begin_anew(message.worker)
            case messages.SeatLost() if not isinstance(self.state, states.Looking):
                self._look_for_rank_0("rank 0 has not heard of this rank for too long, and has given it up")
            case messages.Expired():
                self._expired = verdicts.error_for(self.spec.rank, message.verdict)
                self._signals.asked = self._signals.asked or signal.SIGTERM
                why = self._expired.why.splitlines()[-1]
                self.log(f"{why}: all that are here go on for a step, save a checkpoint, and stop")
            case messages.Close():
                if isinstance(self.state, states.Working):
                    self._enter(states.Closing())
                self.worker.send(from_agent.Close())
            case messages.Rank0Leaves() if isinstance(self.state, (states.Working, states.Closing)):
                self._enter(states.Alone())
                self.log("rank 0 has finished and left; this rank goes on alone, and nobody watches over it")
                self.worker.send(from_agent.Close())

    async def _send_stacks(self) -> None:
        self._send(messages.StacksReply(await self.worker.stack()))

    def _take_place(self, placed: messages.Placed) -> None:
        """Tell the worker its place, with which it begins to work: all ranks have joined."""
        self._enter(states.Working())
        self._take_run(placed.run)
        assert self._run is not None
        self._join.complete(nodes=placed.place.nodes, forever=self._run.on_loss == LEAVE)
        if self._run.on_loss != LEAVE:
            self._remember(placed)
        if self.task.program is not None:
            seconds, name = f"{time.monotonic() - self._work.started:.1f} s", self.task.program.name
            who = f"rank {self.spec.rank} of {self.spec.world_size} on {self._join.info.host}"
            self.log(f"all ranks are here after {seconds}: starting {name} as {who}")
        placed, own = replace(placed, run=self._run), self._join.own_address
        self.worker.send(from_agent.TakePlace(placed, self._is_own_folder, own.variables, own.wrong_for_nccl))

    def _take_verdict(self, verdict: Verdict) -> None:
        error = verdicts.error_for(self.spec.rank, verdict)
        ours, own = verdict.rank == self.spec.rank, self._work.own_words
        if verdict.judged:
            if ours and self.worker.status is None and not isinstance(error, CollectiveMismatch):
                keeps_seat = self._run is not None and self._run.on_loss != LEAVE
                others = "its seat is kept" if keeps_seat else "the others have not waited for it"
                error.why = f"that is this rank; {others}\n{error.why}"
        elif own is not None:
            own.next = verdict.next if ours else own.next  # which says whether its seat is kept
            error = own if ours or own.identifier == verdict.identifier else error
            if not ours and verdict.identifier == Stopped.identifier:
                error = self._signals.stopped_by(own.exit_code, self._again, because_of=own) or error
        elif not ours:
            self._work.words_of_another = verdict.identifier
            self._work.call_later(SAME_WITHIN, self._lose_peer, error)
            return
        self._ending.fail(error)

    def _lose_peer(self, error: DdpManualError) -> None:
        """Fail with a peer; if signals have asked both to stop, only once the program had the time to end by itself."""
        stopped = self._signals.stopped_by(None, self._again)
        if stopped is None or self._work.words_of_another != Stopped.identifier:
            self._ending.fail(error)
            return
        self._enter(states.Alone())
        self.worker.send(from_agent.Close())
        self._work.call_later((self.worker.until or 0) - time.monotonic(), self._ending.fail, stopped)

    def _coordinator_gone(self, reason: str) -> None:
        if isinstance(self.state, states.Closing):  # its work is done, and it needs nobody any more
            self._enter(states.Alone())
        if not isinstance(self.state, (states.Waiting, states.Working)) or self._work.words_of_another is not None:
            return
        assert self._run is not None
        if self._may_look_for_rank_0:
            self._look_for_rank_0(f"rank 0 ({self._run.host}, pid {self._run.pid}) is gone without a word: {reason}")
            return
        before = "" if isinstance(self.state, states.Working) else " before all ranks had joined"
        why = f"its connection to this rank ended{before}: {reason}"
        lost = verdicts.rank_0_lost(self._run, self.worker.beat, "is gone without a word", why)
        # That a collective has broken follows from the loss of rank 0.
        self._ending.fail(lost if self._work.own_words is None or self._work.has_broken else self._work.own_words)

    # -- messages of the worker, and its end --------------------------------------------------------------------------

    def _take_from_worker(self, message: from_worker.FromWorker) -> None:
        match message:
            case from_worker.Doing():
                if self.worker.beat.phase != self._work.sent_beat.phase:
                    self._send_beat()
                self.has_trained |= self.worker.beat.step > 0
                self._say_what_a_loss_repeats()
            case from_worker.Loaded():
                self.steps += message.steps
                if not self._work.ready.done():
                    self._work.ready.set_result(message.ready)
                self._send(messages.WorkerReady(message.ready))
            case from_worker.NotCompared():
                self.log(f"the collectives of this rank are not compared with those of others: {message.why}")
            case from_worker.TakesRequests():
                self._signals.noted = self._signals.heeded = True
                if self._signals.asked:  # of an earlier worker
                    self.worker.send(from_agent.Stop(self._signals.asked))
            case from_worker.ProgramBegins():
                self._signals.noted = True
                if self._signals.stop:
                    self._pass_on(self._signals.stop)
            case from_worker.TakesNoRequests() | from_worker.TakesSignals():
                self._signals.noted, self._signals.heeded = isinstance(message, from_worker.TakesNoRequests), False
            case from_worker.Signalled():
                self.take_signal(message.number, seen_by="script")
            case from_worker.RunFolder():
                self._run_dir, self._is_own_folder, self._chose_folder = message.run_dir, message.own, message.chosen
            case from_worker.Left() if isinstance(self.state, states.Ended):
                self._ending.in_background(self._leave_in_order(math.inf))  # torch's store ends with it
            case _ if not isinstance(self.state, states.Ended):  # otherwise its end is explained already
                self._take_end_of_work(message)

    def _take_end_of_work(self, message: from_worker.FromWorker) -> None:
        match message:
            case from_worker.Finished():
                if isinstance(self.state, states.Alone):
                    self.worker.send(from_agent.Close())
                else:
                    self._send_beat()
                    self._send(messages.Finished())
            case from_worker.Failed():
                self._take_failure(message)
            case from_worker.Left():
                self._begin_leaving()
            case from_worker.Result():
                self._take_result(message.result)
            case from_worker.StoppedInOrder():
                stopped = message.words.error()
                if (expired := self._expired) is not None:
                    expired.why, stopped = f"{expired.why}\n{stopped.why}", expired
                self._take_result(stopped)

    def _take_result(self, result: object) -> None:
        self._work.result = result
        if isinstance(self.state, (states.Left, states.Alone)):
            self._ending.finish(result)

    def _say_what_a_loss_repeats(self) -> None:
        """Say once on rank 0, before any loss, if the program does not hold its state, and so begins anew after one."""
        program, begun = self.task.program, sum(self.worker.beat.collectives.values())
        holds = from_worker.Holds in self.worker.said or self.held.steps_done > 0
        if program and self._so_far and not (self.spec.rank or holds or self._has_warned) and begun >= HOLDS_BEFORE:
            self._has_warned, again = True, "after a loss all ranks start it again from its beginning"
            self.log(f"{program.name} does not call hold(): {again}")

    def _take_failure(self, message: from_worker.Failed) -> None:
        """Pass on the worker's last words: the coordinator may know better what has ended it."""
        if isinstance(self.state, states.Looking):  # before it has worked: another one is started once rank 0 is found
            self._ending.in_background(self.worker.end(None, own=True))
            return
        work, own, broken_at = self._work, message.words.error(), message.place if message.broken else None
        # Not an exception of another kind, which the signal is no reason for.
        by_itself = message.exits or own.identifier == Stopped.identifier
        follows = broken_at is not None and work.words_of_another == Stopped.identifier
        if self.task.program is not None and (by_itself or follows):
            stopped = self._signals.stopped_by(own.exit_code, self._again, because_of=None if by_itself else own)
            own = stopped or own  # such as by sys.exit(143), after it has tidied up
        work.own_words, work.has_broken = own, broken_at is not None
        if own.identifier == work.words_of_another:
            self._ending.fail(own)
        elif broken_at is None or work.words_of_another is None:  # otherwise the rank that has failed is known
            self._send_beat()
            words, in_torch = LastWords.of(own), message.in_a_collective
            self._ask_for_verdict(messages.Failed(words, broken_at=broken_at, in_a_collective=in_torch), own)

    def _worker_gone(self) -> None:
        if self._work.result is not None or self._work.own_words is not None:
            return  # its last words were read
        if isinstance(self.state, (states.Looking, states.Ended)):
            return  # another one is started once rank 0 is found, or none
        worker = self.worker
        if isinstance(self.state, states.Left) and not worker.status:
            self._ending.finish(None)
            return
        if isinstance(self.state, states.Placed) and self._program_ended(worker.status):
            return
        info = replace(self._join.info, pid=worker.pid)
        oom, stack = worker.ran_out_of_memory, worker.crash_stack
        verdict = verdicts.lost(info, self.worker.beat, self._again, status=worker.status, oom=oom, stack=stack)
        error = verdicts.error_for(self.spec.rank, verdict)
        if self._work.words_of_another == PeerLost.identifier:  # that rank has lost its connection to this one
            self._ending.fail(error)
        else:
            self._ask_for_verdict(messages.Failed(verdict.words, judged=True), error)

    def _program_ended(self, status: int | None) -> bool:
        """Handle the end of a program that has not failed by itself: it is done, or a signal has stopped it."""
        if status == 0 and self.task.program is not None:
            if from_worker.Finished not in self.worker.said:  # it has ended its process without Python's way out
                self._send(messages.Finished())
                if self.spec.rank == 0 and self.spec.world_size > 1:
                    self.log("rank 0's process has ended, and torch's store with it: other ranks may still need that")
            self._work.result = {}
            self._begin_leaving()
            return True
        code = 1 if status is None else 128 - status if status < 0 else status
        stopped = self._signals.stopped_by(code, self._again)
        if stopped is not None:
            self._ask_for_verdict(messages.Failed(LastWords.of(stopped)), stopped)
        return stopped is not None

    def _ask_for_verdict(self, failed: messages.Failed, error: DdpManualError) -> None:
        """Tell the coordinator why this rank ends, and end with its verdict; with ``error`` if no verdict comes."""
        connection = self._join.connection
        if connection is None or connection.closed or isinstance(self.state, (states.Alone, states.Left)):
            self._ending.fail(error)
            return
        assert self._run is not None
        self._send(failed)
        within = VERDICT_WITHIN + more_seconds(self._run.world_size)
        if failed.broken_at is not None and self._may_look_for_rank_0:
            return  # rank 0 says how all go on; if it is silent for too long, this rank keeps its state
        if failed.broken_at is not None:  # only the other ranks can explain a broken collective
            why = f"in this rank {error.what}"
            what = f"has not said within {within:.1f} s which rank is to blame"
            error = verdicts.rank_0_lost(self._run, self.worker.beat, what, why)
            self._work.call_later(within, self._give_rank_0_up, error)
        else:
            self._work.call_later(within, self._ending.fail, error)

    def _give_rank_0_up(self, lost: DdpManualError) -> None:
        """End because rank 0 is lost; it reads why if it was only stopped, and goes on."""
        self._send(messages.LostRank0(LastWords.of(lost)))
        self._ending.fail(lost)

    # -- another worker, or another rank 0 ----------------------------------------------------------------------------

    def _begin_anew(self, number: int = 0) -> None:
        """Replace the worker by one of this number, while rank 0 waits for that."""
        replacement = self._forget_worker(number)
        self._enter(states.Replacing(lost_at=self._lost_rank_0_at, replacement=replacement))

    def _forget_worker(self, number: int = 0) -> asyncio.Task[None]:
        """Let nothing count any more that the worker has said; return what ends it, and starts another one."""
        if isinstance(self.state, states.Leaving):  # its work was done, and is begun anew
            self.state.goodbyes.cancel()
        self._work.drop()
        self._work = states.Work(started=time.monotonic())
        self._signals.noted = False
        return self._ending.in_background(self._replace_worker(number))

    async def _replace_worker(self, number: int) -> None:
        """End the worker and start another one, which goes on from a state that this rank or another one holds."""
        if self.task.program is not None:
            await self.worker.silence()
        self.worker.children.look_at_all(self.worker.pid)
        saves = self.worker.beat.phase == SAVING  # a checkpoint, which is finished first
        await self.worker.end(Stopped(signal.SIGTERM) if saves else None, own=False)
        self._worker_number = number
        self._send(messages.Held(self._moment(), self.held.steps_done))
        try:
            self.worker = self._start_worker(self.held)
        except OSError as error:  # such as EMFILE
            what = f"cannot start another worker: {error.strerror}"
            next = f"look at the limits of {self._join.info.host}: ulimit -a, free\nthen {self._again}"
            verdict = verdicts.lost_rank(self._join.info, what, why="its worker was to be replaced", next=next)
            failed = messages.Failed(verdict.words, judged=True)
            self._ask_for_verdict(failed, verdicts.error_for(self.spec.rank, verdict))
            return
        await self._attach()
        self._begin()
        if isinstance(self.state, states.Replacing):
            self._enter(states.Waiting(lost_at=self.state.lost_at))

    def _moment(self) -> messages.Moment | None:
        """Return the moment of the newest state that is whole, if there is one."""
        newest = self.held.newest()
        return (newest.moment.generation, newest.moment.step) if newest is not None else None

    def _remember(self, placed: messages.Placed) -> None:
        """Remember the run, for a new rank 0; rank 0 itself writes down what was lost."""
        assert self._run is not None
        self._so_far = RunSoFar(
            run_id=self._run.run_id,
            run_dir=self._run.run_dir,
            generation=placed.generation,
            losses=placed.losses.count,
            lost_seconds=placed.losses.seconds,
            host=self._run.host,
            pid=self._run.pid,
            address=self._run.address,
        )
        coordinator = self._join.coordinator
        if coordinator is not None and coordinator.protocol.record is not None and self._run_dir is not None:
            with suppress(DdpManualError):  # without that line the run goes on too
                run_folder.append_json_line(
                    run_folder.RunPaths(Path(self._run_dir)).losses, coordinator.protocol.record
                )

    @property
    def _may_look_for_rank_0(self) -> bool:
        """Whether this rank, which has lost rank 0, keeps its state for another one."""
        return self._so_far is not None and self.spec.rank != 0

    @property
    def _lost_rank_0_at(self) -> float | None:
        """When rank 0 was lost, if the ranks have not gone on since."""
        return self.state.lost_at if isinstance(self.state, (states.Looking, states.Waiting)) else None

    def _look_for_rank_0(self, why: str) -> None:
        """Keep the state, and say hello again where rank 0 is expected."""
        assert self._run is not None and self._so_far is not None and self._join.connection is not None
        losses = self._so_far.losses + (self._lost_rank_0_at is not None)  # once more before the ranks could go on
        lost_at = self._lost_rank_0_at or time.monotonic()
        self._so_far = replace(self._so_far, lost=printable(why), losses=losses)
        self.log(f"{why}; this rank keeps its state, and looks for rank 0 for {self._run.rejoin_timeout:.0f} s")
        self._join.connection.close()
        replacement = self.state.replacement if isinstance(self.state, states.Replacing) else self._forget_worker()
        self._enter(states.Looking(lost_at=lost_at))
        self._ending.in_background(self._join_again(lost_at, replacement))

    async def _join_again(self, since: float, replacement: asyncio.Task[None]) -> None:
        assert self._run is not None and self._so_far is not None
        await asyncio.wait([replacement])
        self._join.close({})
        spec = dataclasses.replace(self.spec, join_timeout=self._run.rejoin_timeout)
        so_far = replace(self._so_far, held=self._moment())
        self._join = Join(spec, self.task, steps=self.steps, log=self.log, so_far=so_far, since=since)
        self._join.info = replace(self._join.info, pid=self.worker.pid)
        await self._work_with_others()

    def _begin_leaving(self) -> None:
        """Leave, because the worker has done its work and has left."""
        if isinstance(self.state, states.Leaving):
            return  # and its process has ended meanwhile
        # After its last collective another rank of a program may work on for as long as it likes.
        works_on = self.task.program is not None and not isinstance(self.state, states.Alone)
        goodbyes = self._leave_in_order(math.inf if works_on else LEAVE_TIMEOUT)
        self._enter(states.Leaving(goodbyes=self._ending.in_background(goodbyes)))

    async def _leave_in_order(self, within: float) -> None:
        """Say goodbye after the worker has left. Rank 0 leaves last, because its worker has torch's store."""
        coordinator = self._join.coordinator
        if coordinator is not None:
            await coordinator.wait_for_goodbyes(self.log, within)
        self._enter(states.Left())
        if coordinator is not None:
            coordinator.end()
        self._send(messages.Goodbye())
        self.worker.send(from_agent.Over())
        if self._work.result is not None:
            self._ending.finish(self._work.result)

    @property
    def _again(self) -> str:
        """What to do after the run has ended."""
        return self._run.start_again if self._run else ending.start_alone_again(self._run_dir)

    # -- signals and the clock ----------------------------------------------------------------------------------------

    def take_signal(self, number: int, seen_by: str = "agent") -> None:
        """Handle a signal that this process has received, or that its script reports.

        Args:
            seen_by: ``agent`` or ``script``. A terminal sends Ctrl-C to both; that counts once.
        """
        if not hasattr(self, "worker"):
            self._signal_before = number
            return
        self._let_witness_forget()
        if isinstance(self.state, states.Ended):  # this rank is leaving, now without what a check might still find out
            self._work.ready.cancel()
            if self.task.program is None or self.worker.ended:
                return
        if number == signal.SIGINT and self.task.program is not None and self.worker.beat.debugging:
            return  # it is the debugger's
        # Without rank 0 the run is over; the others wait for any other rank.
        is_over = isinstance(self.state, states.Placed) or (self._so_far is not None and self.spec.rank == 0)
        again = self._again if is_over else ""
        goes_on = self._so_far is not None and isinstance(self.state, states.Waiting)
        if error := self._signals.take(number, seen_by, self._join.here, again, goes_on=goes_on):
            self.worker.until = 0
            self._ending.fail(error)
        elif self._signals.stop and self.task.is_script and self.worker.until is None:
            self.worker.until = time.monotonic() + SAVE_WITHIN

    def _let_witness_forget(self) -> None:
        """Let the witness forget a signal that nobody has asked about, once no question can come any more."""
        if self.witness is not None:
            if self._forgetting is not None:
                self._forgetting.cancel()
            within = signals.ONCE_WITHIN + signals.SENT_TO_ALL_WITHIN
            self._forgetting = asyncio.get_running_loop().call_later(within, self.witness.forget)

    def _watch_launcher(self) -> None:
        """Stop this rank when its launcher is gone: mpirun that is killed leaves the ranks of its host running."""
        if pid := self.spec.launcher_pid:
            with suppress(AttributeError, OSError):  # an old system, forbidden in a container, or gone already
                pidfd = os.pidfd_open(pid)
                asyncio.get_running_loop().add_reader(pidfd, self._launcher_gone, pid, pidfd)

    def _launcher_gone(self, pid: int, pidfd: int) -> None:
        """Stop this rank as where its terminal is gone, and soon at once."""
        loop = asyncio.get_running_loop()
        loop.remove_reader(pidfd)
        self._orphaned = why = f"{self.spec.started_by} (pid {pid}), which started this rank, is gone"
        self.log(why)
        if self.task.is_script:
            self.worker.signal(signal.SIGHUP)
        else:
            self.take_signal(signal.SIGHUP)
        loop.call_later(STOP_WITHIN, self._ending.fail, Stopped(signal.SIGHUP, why=why, next=self._again))

    def _ask_worker(self, number: int) -> None:
        """Tell the worker what a signal asks for, as soon as it works, and rank 0 that the run is about to end."""
        if isinstance(self.state, states.Placed):
            self.worker.send(from_agent.Save() if number == signals.SAVE else from_agent.Stop(number))
        if number != signals.SAVE:
            self._send(messages.Stopping())

    def _pass_on(self, number: int) -> None:
        """Let the program handle a signal. One that asks it to stop is its first SIGTERM, or the same as ours."""
        has_been_asked = self.worker.until is not None
        if number != signals.SAVE:
            self.worker.until = time.monotonic() + SAVE_WITHIN
        if number == signals.SAVE or not has_been_asked:
            asyncio.get_running_loop().call_later(signals.SENT_TO_ALL_WITHIN, self._send_on, number)

    def _send_on(self, number: int) -> None:
        """Send a signal to the program, unless whoever has sent it here has sent it there too."""
        if self.witness is None or not self.witness.has_got(number, self.worker.pid):
            self.worker.signal_all(number)

    def _tick(self) -> None:
        if not isinstance(self.state, states.Ended):
            asyncio.get_running_loop().call_later(TICK, self._tick)
            orphans.reap()
            self._ending.guarded(self._look_around)(time.monotonic())

    def _look_around(self, now: float) -> None:
        passed, self._ticked = now - self._ticked, now
        if isinstance(self.state, (states.Searching, states.Looking, states.Alone, states.Left, states.Ended)):
            return
        assert self._run is not None
        if passed > self._run.peer_timeout:  # this process was stopped, perhaps with its whole host
            self._heard = now
        if isinstance(self.state, states.Waiting):
            self._join.log_missing()
        self.worker.records.read()
        if now >= self._next_beat:
            self._next_beat = now + heartbeat_period(self._run)
            self._send_beat()
        if now - self._heard > silent_after(self._run) and passed < 1:
            what = f"has been silent for {now - self._heard:.0f} s"
            why = "its agent is stopped or frozen, its host is down, or the network between the hosts is cut"
            lost = verdicts.rank_0_lost(self._run, self.worker.beat, what, why)
            if self._may_look_for_rank_0:
                self._look_for_rank_0(lost.what)
            else:
                self._give_rank_0_up(lost)

    def _send_beat(self) -> None:
        beat = self.worker.heartbeat()
        self._send(messages.Heartbeat(beat if beat != self._work.sent_beat else None))
        self._work.sent_beat = beat

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _leave(self, error: DdpManualError | None, last: states.State) -> None:
        """Say why, then end the worker; rank 0 gives the other ranks the time to read why."""
        is_default = not self._chose_folder and run_folder.is_default_name(str(self._run_dir), self._run_id)
        leaves_no_folder = is_default and not self.has_trained
        if error is not None:
            await self._say_goodbye(error, last)
        self._ending.cancel_background()
        if error is not None:
            await self._explain(error, last, in_folder=not leaves_no_folder)
        own = error is not None and error is self._work.own_words
        # The workers of the other ranks may learn the same from torch's store, if rank 0 keeps it for a moment.
        keeps_store = own and self.spec.rank == 0 and not (self.task.is_script or self.task.program)
        if keeps_store:
            await self._let_others_read()
        await self.worker.end(error, own=own)
        if error is None and (left := self.worker.children.ended):
            self.log(f"ended what was left running: {', '.join(left)}")
        if not keeps_store:
            await self._let_others_read()
        if error is not None and self.spec.rank == 0 and leaves_no_folder:
            run_folder.RunPaths(Path(str(self._run_dir))).remove_start()
        self._join.close(how_it_ended(error, self._work.result))
        await asyncio.sleep(0)

    async def _say_goodbye(self, error: DdpManualError, last: states.State) -> None:
        """Tell the other ranks why this rank ends, unless they know; then let ``check`` find out what it still can."""
        if self._join.coordinator is not None and not isinstance(last, states.Left):
            self._join.coordinator.end(error)
        if not isinstance(last, states.Placed):
            self._send(messages.Leaves(LastWords.of(error)))
        elif not isinstance(error, PeerGone) and self._work.own_words is None and not isinstance(last, states.Left):
            self._send(messages.Leaves(LastWords.of(error), at_work=True))
        failed = self._work.own_words is not None or self.worker.ended
        if self.task.wait_until_ready and not failed and not isinstance(error, Stopped):
            self._begin()
            await asyncio.wait([self._work.ready], timeout=READY_WITHIN)

    async def _explain(self, error: DdpManualError, last: states.State, *, in_folder: bool) -> None:
        """Print the error, after the worker's last line, and leave it in the run's folder if that stays."""
        if isinstance(error, Stopped):
            error.why = error.why or self._orphaned
        ending.add_own_command(error, self.task.go_on, self._run_dir, self.spec.world_size)
        if not isinstance(last, states.Placed):
            self._join.fail(error)
        if self.task.program is not None and not self.worker.is_gone:  # which may take seconds
            self.log(f"{self.task.program.name} is ending: {error.what}")
        stops = Stopped.identifier in (error.identifier, (error.on_its_rank or ("",))[0])
        await self.worker.silence(grace=SAVE_WITHIN if stops else TERM_GRACE)
        never_a_rank = isinstance(error, (RankTaken, RanksDoNotBelongTogether)) and not isinstance(last, states.Placed)
        if self._run_dir and self._is_own_folder and not never_a_rank and in_folder:
            leave_failure(self._run_dir, self.spec.rank, self.worker.pid, error, self._run)
        self._print_error(error)

    async def _let_others_read(self) -> None:
        """Wait until the other ranks have read what was sent last, at most for a moment."""
        coordinator, connection = self._join.coordinator, self._join.connection
        await wait_until(
            lambda: not (coordinator and coordinator.is_being_read) and not (connection and connection.unsent),
            LAST_WORD_WITHIN,
        )

    def give_up(self, error: DdpManualError) -> None:
        """End this rank for this reason, unless all ranks have joined: then the others say why, or wait for a rank."""
        if not isinstance(self.state, states.Placed) and self._so_far is None:
            self._ending.fail(error)

    def _send(self, message: messages.FromRank) -> None:
        if self._join.connection is not None:
            is_of_another = isinstance(message, messages.OfWorker) and message.worker != self._worker_number
            self._join.connection.send(replace(message, worker=self._worker_number) if is_of_another else message)
