"""The agent of one rank: join -> start the worker -> watch -> explain -> exit code.

Everything happens in one event loop: messages of the coordinator and of the worker, the worker's end, signals, and a
clock. ``protocol/agent.py`` decides what follows from each of them. A failure of the worker cannot break the agent,
which explains it: the agent shares no lock, no CUDA context and no torch with the worker.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path

from msgspec.structs import replace

from ddp_manual import atomic_files, from_agent, from_worker, messages, orphans, run_folder, signal_handlers
from ddp_manual.agent.coordinator import stopped_agent
from ddp_manual.agent.join import Join
from ddp_manual.agent.leave import Leave
from ddp_manual.agent.network_interface import own_addresses
from ddp_manual.agent.open_files import raise_descriptor_limit
from ddp_manual.agent.rank_result import Ended, Ending
from ddp_manual.agent.start_worker import witness_of
from ddp_manual.agent.what_to_run import Task
from ddp_manual.agent.worker_process import Worker
from ddp_manual.errors import DdpManualError, Stopped
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.join_steps import Steps
from ddp_manual.protocol import states
from ddp_manual.protocol.agent import AgentProtocol
from ddp_manual.protocol.agent_shell import Answered
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import Moment, RankInfo, RunInfo

TICK = 0.25
# Seconds that the ranks have to stop in order once their launcher is gone.
STOP_WITHIN = 3.0


class Agent:
    """The agent of one rank, from ``run`` to the exit code. It does what ``AgentProtocol`` decides, as its ``Shell``.

    Args:
        start_worker: starts a worker, which holds its state in the memory that it is given; or returns the worker that
            runs already.
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
        self.spec, self.task, self.log, self.print_error = spec, task, log, print_error
        self.steps = Steps()
        self._start_worker = start_worker
        self.join = Join(spec, task, steps=self.steps, log=log)
        self.rank = ThisRank(spec, self, time.monotonic(), chose_folder=task.chose_folder)
        self.protocol = AgentProtocol(self.rank, name=task.name, in_one_terminal=task.in_one_terminal)
        self._signals_before: list[int] = []
        """Signals that came before the worker was started."""
        self.worker: Worker
        self.witness: signal_handlers.Witness | None = None
        """Tells whether a signal was sent to the worker too."""
        self._forgetting: asyncio.TimerHandle | None = None
        self.held = HeldMemory.create()
        """The memory with the state of the training, which outlives the worker."""
        self._replacing: asyncio.Task[None] | None = None
        """Ends the worker, and starts another one."""
        self._ending = Ending(self.rank)
        self._leave = Leave(self, self._ending)

    async def run(self) -> Ended:
        """Run the rank from its first line to its exit code. Raises nothing: the result has the error."""
        rank = self.rank
        rank.work.started = time.monotonic()
        with signal_handlers.handle_in_event_loop(self.take_signal) if self.task.launched is None else nullcontext():
            try:
                if self.spec.from_variables:
                    self.log(", ".join(self.spec.from_variables))
                with self.steps.step("open files") as step:
                    step.detail = f"up to {raise_descriptor_limit(self.spec)}"
                self.worker = self._start_worker(self.held)
                if self.task.launched is None and not self.worker.has_started_its_agent:
                    assert self.task.program is not None
                    self.witness = witness_of(self.task.program, own_session=False)
            except Exception as error:
                if isinstance(error, OSError):
                    self.protocol.cannot_start_worker(error, time.monotonic())
                else:
                    self._ending.fail(error)
                ended = await self._ending.wait()
                assert ended.error is not None
                self.print_error(ended.error)
                return ended
            await self._attach()
            self._watch_launcher()
            for number in self._signals_before:
                self.take_signal(number)
            if not isinstance(rank.state, states.Ended):
                self._ending.in_background(self._join_others())
            self._tick()
            ended = await self._ending.wait()
            if ended.error is not None:
                await self._leave.say_goodbye(ended.error)
            await self._leave.end(ended.error)
            self.held.close()
            if self.task.launched is None and self.witness is not None:
                self.witness.close()
        return ended

    async def _attach(self) -> None:
        """Connect to the worker that was started last."""
        worker, work = self.worker, self.rank.work

        def take(message: from_worker.FromWorker) -> None:
            if work is self.rank.work:
                if isinstance(message, from_worker.Loaded):
                    self.steps += message.steps
                if isinstance(message, from_worker.Signalled):
                    self._let_witness_forget()
                self.protocol.take_from_worker(message, time.monotonic())

        def gone(*, later: bool = False) -> None:
            if work is self.rank.work:
                if -(worker.status or 0) in signal_handlers.STOP and not (self.protocol.signals.passed_on or later):
                    # This agent may get the same signal a moment later.
                    asyncio.get_running_loop().call_later(signal_handlers.ONCE_WITHIN, partial(gone, later=True))
                else:
                    self.protocol.worker_gone(time.monotonic())

        worker.log = self.log
        await worker.attach(self._ending.guarded(take), gone)
        self.join.info = replace(self.join.info, pid=worker.pid)

    # -- join and start the worker ------------------------------------------------------------------------------------

    async def _join_others(self) -> None:
        if self.spec.rank != 0:
            self.protocol.begin()
        run, connection = await self.join.join()
        self.protocol.joined(run, time.monotonic())
        connection.handle(
            self._ending.guarded(lambda message: self.protocol.take(message, time.monotonic())),
            lambda reason: self.protocol.coordinator_gone(reason, time.monotonic()),
        )

    def as_seen_here(self, run: RunInfo) -> tuple[RunInfo, bool]:
        """Return the run, with the path of its folder on this rank, and whether this rank writes into that folder."""
        if self.join.coordinator is not None:  # rank 0 trusts its own copy: ``run`` has been on the network
            return self.join.coordinator.protocol.run, True
        own = run_folder.own_run_dir(run.run_dir, self.task.run_dir)
        return (run, False) if own is None else (replace(run, run_dir=own), True)

    def stopped_rank_0(self, run: RunInfo) -> str:
        """Say which signal has stopped rank 0's agent, if it is on this host; "" if none has."""
        is_here = run.only_on_its_host or run.address in own_addresses()
        return stopped_agent(run.agent) if is_here else ""

    def have_it_load(self) -> None:
        """Tell the worker what to load; rank 0's worker hosts torch's store at rank 0's address."""
        spec, task, rank_0 = self.spec, self.task, self.join.coordinator
        here = (sys.path[0], self.rank.work.started, rank_0.protocol.run.address if rank_0 is not None else None)
        self.worker.send(from_agent.Start(spec.values(), dict(spec.sources), *here, task.program, task.restarts))

    def take_place(self, placed: messages.Placed) -> None:
        """Tell the worker its place. After a loss, rank 0 writes an entry about it into the run's folder."""
        self.join.complete(nodes=placed.place.nodes)
        coordinator, run_dir = self.join.coordinator, self.rank.run_dir
        record = coordinator.protocol.meeting.record if coordinator is not None else None
        if record is not None and run_dir is not None:
            with suppress(DdpManualError):  # the run goes on even if the entry cannot be written
                atomic_files.append_json_line(run_folder.RunPaths(Path(run_dir)).losses, record)
        if self.task.name:
            seconds = f"{time.monotonic() - self.rank.work.started:.1f} s"
            place, whole_world = placed.place, self.spec.world_size
            who = f"rank {place.rank} of {place.world_size} on {self.info.host}"
            here = (
                "all ranks are" if place.world_size == whole_world else f"{place.world_size} of {whole_world} ranks are"
            )
            self.log(f"{here} here after {seconds}: starting {self.task.name} as {who}")
            if run_dir is not None and self.rank.is_own_folder:  # our training does so for itself
                run_folder.RunPaths(Path(run_dir)).set_failures_aside(self.spec.rank, None if self.spec.rank else 0)
        own = self.join.own_address
        message = from_agent.TakePlace(placed, self.rank.is_own_folder, own.variables, own.wrong_for_nccl)
        self.worker.send(message)

    # -- what ``AgentProtocol`` asks, and has the agent do ---------------------------------------------------------

    @property
    def info(self) -> RankInfo:
        return self.join.info

    @property
    def here(self) -> int:
        return self.join.news.here if self.join.news else 1

    @property
    def held_steps(self) -> int:
        return self.held.steps_done

    @property
    def is_connected(self) -> bool:
        return self.join.connection is not None and not self.join.connection.closed

    def send(self, message: messages.FromRank) -> None:
        if self.join.connection is not None:
            self.join.connection.send(message)

    def call_at(self, when: float, call: Callable[[float], None]) -> None:
        asyncio.get_running_loop().call_later(when - time.monotonic(), lambda: call(time.monotonic()))

    def fail(self, error: DdpManualError) -> None:
        self._ending.fail(error)

    def finish(self, result: object) -> None:
        self._ending.finish(result)

    def answer(self, message: Answered) -> None:
        match message:
            case messages.News():
                self.join.take_news(message)
            case messages.Refused():
                self.fail(self.join.seal.refusal(message, self.join.nonce))
            case messages.Line():
                if self.task.is_news(message.text):
                    self.log(message.text)
            case messages.AskStacks():
                self._ending.in_background(self._send_stacks())
            case messages.AskRecords():
                self.rank.send(self.worker.records.answer(message))
            case messages.Probe():
                self._ending.in_background(self.join.probe_hosts(message.hosts, message.key))

    async def _send_stacks(self) -> None:
        self.rank.send(messages.StacksReply(await self.worker.stack()))

    def look_around(self, *, waits: bool) -> None:
        if waits:
            self.join.log_missing()
        self.worker.records.read()

    def forget_news(self) -> None:
        self.join.begin_again()

    def replace_worker(self, number: int) -> None:
        """End the worker and start another one, which goes on from a state that this or another rank holds."""
        self._replacing = self._ending.in_background(self._replace_worker(number))

    async def _replace_worker(self, number: int) -> None:
        self.worker.send(from_agent.Over())  # it must not keep torch's store as it ends: nobody needs it any more
        self.worker.children.look_at_all(self.worker.pid)
        await self.worker.silence()
        await self.worker.end(None, own=False)
        self.protocol.worker_ended(number, self._moment())
        try:
            self.worker = self._start_worker(self.held)
        except OSError as error:
            self.protocol.cannot_start_worker(error, time.monotonic())
            return
        await self._attach()
        self.protocol.worker_replaced(time.monotonic())

    def end_worker(self) -> None:
        self._ending.in_background(self.worker.end(None, own=True))

    def _moment(self) -> Moment | None:
        """Return the moment of the newest complete state that this rank holds; None if it holds none."""
        newest = self.held.newest()
        return newest.moment if newest is not None else None

    def search_again(self, lost_at: float, within: float) -> None:
        """Close the connection; once the worker is replaced, look for rank 0 and say hello again."""
        if self.join.connection is not None:
            self.join.connection.close()
        assert self._replacing is not None
        self._ending.in_background(self._search_again(lost_at, within, self._replacing))

    async def _search_again(self, lost_at: float, within: float, replacing: asyncio.Task[None]) -> None:
        so_far = self.rank.so_far
        assert so_far is not None
        await asyncio.wait([replacing])
        self.join.close({})
        spec = dataclasses.replace(self.spec, join_timeout=within)
        so_far = replace(so_far, held=self._moment())
        self.join = Join(spec, self.task, steps=self.steps, log=self.log, so_far=so_far, since=lost_at)
        self.join.info = replace(self.join.info, pid=self.worker.pid)
        await self._join_others()

    def leave_in_order(self, within: float) -> None:
        self._leave.in_order(within)

    def stop_leaving(self) -> None:
        self._leave.stop()

    # -- signals and the clock ----------------------------------------------------------------------------------------

    def take_signal(self, number: int) -> None:
        """Handle a signal that this process has received."""
        if not hasattr(self, "worker"):
            self._signals_before.append(number)
            return
        self._let_witness_forget()
        if isinstance(self.rank.state, states.Ended):  # ``check`` then no longer waits for its worker
            self._leave.hurries = True
        self.protocol.take_signal(number, time.monotonic())

    def _let_witness_forget(self) -> None:
        """Have the witness forget its signals, once ``pass_on`` can no longer ask about one of them."""
        if self.witness is not None:
            if self._forgetting is not None:
                self._forgetting.cancel()
            within = signal_handlers.ONCE_WITHIN + signal_handlers.SENT_TO_ALL_WITHIN
            self._forgetting = asyncio.get_running_loop().call_later(within, self.witness.forget)

    def _watch_launcher(self) -> None:
        """Stop this rank once its launcher is gone: an mpirun that is killed leaves the ranks of its host running."""

        def ended() -> None:
            loop.remove_reader(pidfd)
            self._launcher_gone(f"{self.spec.started_by} (pid {pid}), which started this rank, is gone")

        if pid := self.spec.launcher_pid:
            with suppress(AttributeError, OSError):  # an old system, forbidden in a container, or the launcher is gone
                loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(pid)
                loop.add_reader(pidfd, ended)

    def _launcher_gone(self, why: str) -> None:
        """Stop this rank as SIGHUP does; end it at once if it has not stopped within STOP_WITHIN seconds."""
        self._leave.orphaned = why
        self.log(why)
        if self.worker.has_started_its_agent:
            self.worker.signal(signal.SIGHUP)
        else:
            self.take_signal(signal.SIGHUP)
        stopped = Stopped(signal.SIGHUP, why=why, next=self.rank.again)
        asyncio.get_running_loop().call_later(STOP_WITHIN, self._ending.fail, stopped)

    def pass_on(self, number: int) -> None:
        """Send a signal that came to this agent on to the program, unless the sender has sent it to the program too."""

        def send_on() -> None:
            if self.witness is None or not self.witness.was_sent_to(number, self.worker.pid):
                self.worker.signal_all(number)

        asyncio.get_running_loop().call_later(signal_handlers.SENT_TO_ALL_WITHIN, send_on)

    def _tick(self) -> None:
        if not isinstance(self.rank.state, states.Ended):
            asyncio.get_running_loop().call_later(TICK, self._tick)
            orphans.reap()
            self._ending.guarded(self.protocol.tick)(time.monotonic())
