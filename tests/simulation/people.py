"""What people type: ranks, one after the other or with ``launch``, and lost ranks once more."""

from __future__ import annotations

import asyncio
import dataclasses
import errno
import os
import signal
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_manual import terminal
from ddp_manual.agent import main
from ddp_manual.agent.what_to_run import Task
from ddp_manual.errors import DdpManualError
from ddp_manual.launch import this_host
from ddp_manual.launch.attempts import Failure
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.program import Program as UsersProgram
from ddp_manual.rank_options import WorldSpec
from tests.simulation.network import EMPTY, Host
from tests.simulation.rank import TYPED_AGAIN_WITHIN, Rank
from tests.simulation.virtual_time import Process
from tests.simulation.worker import HeldState, Program, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.run import Run


PORT = 29500
# How often a person types a rank again whose workers die one after the other.
TYPES_DYING_AGAIN = 40
# How often they type a rank again that has not found rank 0, which may be stopped.
MOST_IN_VAIN = 12
PROGRAM = UsersProgram(kind="script", name="train.py")
# The width of the terminals in which ranks are typed.
COLUMNS = 80


class Writer:
    """In place of the thread that writes the output of ``launch``: it writes at once."""

    def submit(self, action: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(action(*arguments))
        return done


class People:
    """The people of a run."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._launches: list[asyncio.Task[None]] = []
        """Kept, also for hosts that lose their power: Python collects a waiting task that nothing refers to."""

    def type_rank(
        self, number: int, host: Host, *, world_size: int | None = None, belongs: bool = True, detail: str = ""
    ) -> None:
        """Start a rank's agent, as a person does in a terminal.

        Args:
            belongs: whether it is one of the ranks that the plan types, or one typed again.
            detail: a further option that is typed, or what is different on its host.
        """
        plan, world_size = self._run.plan, world_size or self._run.plan.ranks
        if host.number in self._run.frozen_hosts:
            self._run.loop.call_later(
                1.0, partial(self.type_rank, number, host, world_size=world_size, belongs=belongs)
            )
            return
        process = Process(self._run.loop, f"rank {number}")
        rank = Rank(number, host, process, self._run, world_size, self._run.loop.now, belongs=belongs, detail=detail)
        self._run.ranks.append(rank)
        if number == 0 and belongs:
            self._run.moments.workers.clear()
        detail = detail if world_size == plan.ranks else f"--world_size {world_size}"
        self._run.see(rank.who, f"*** typed{f' with {detail}' if detail else ''}")
        self._run.loop.call_soon(self._begin, rank, context=process.context)

    def _begin(self, rank: Rank) -> None:
        rank.agent = agent = self._agent(rank)
        task = self._run.loop.create_task(agent.run())
        task.add_done_callback(lambda done: self._ended(rank, done))

    def _spec(self, rank: Rank) -> WorldSpec:
        plan = self._run.plan
        return WorldSpec(
            world_size=rank.world_size,
            rank=min(rank.number, rank.world_size - 1),
            master_addr=self._run.rank_0_address,
            master_port=PORT,
            join_timeout=plan.join_timeout,
            peer_timeout=plan.peer_timeout,
            stall_timeout=plan.stall_timeout,
            on_loss=plan.on_loss,
            rejoin_timeout=plan.rejoin_timeout,
            shrink_after=plan.shrink_after,
            sources={"world_size": "flag", "rank": "flag", "master_addr": "flag", "master_port": "flag"},
        )

    def _agent(self, rank: Rank) -> main.Agent:
        plan, spec = self._run.plan, self._spec(rank)
        command = f"train.py --world_size {plan.ranks} --rank {{rank}}"
        batch_size = (64, "flag") if "batch_size" in rank.detail else (32, "default")
        options = {} if plan.script else {"batch_size": batch_size}
        own = {"name": PROGRAM.name} if plan.script else {"resumes": True}
        task = Task(command=command, run_dir=None, program=PROGRAM, options=options, **own)

        def start_worker(held: HeldState) -> SimulatedWorker:
            return self.start_worker(rank, held)

        def print_error(error: DdpManualError) -> None:
            rank.errors.append(error)
            self._say(rank, error.render(COLUMNS), is_error=True)

        return main.Agent(
            spec, task, start_worker=start_worker, log=lambda line: self._say(rank, line), print_error=print_error
        )

    def start_worker(self, rank: Rank, held: HeldState) -> SimulatedWorker:
        if rank.host.number in self._run.no_process:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        rank.held = held
        worker = SimulatedWorker(Program(self._run, rank, held))
        rank.workers.append(worker)
        self._run.moments.started(rank)
        if (seconds := self._run.dying.get(rank.number)) is not None:
            worker._program.later(seconds, partial(worker._program.die, -signal.SIGKILL))
        return worker

    def launch(self, node: int) -> None:
        """Start all ranks of a host with ``launch``: their agents live in one process."""
        plan, host = self._run.plan, self._run.network.hosts[node]
        process = Process(self._run.loop, f"launch on {host.name}")
        numbers = [number for number, on in enumerate(plan.hosts) if on == node]
        ranks = [Rank(number, host, process, self._run, plan.ranks, self._run.loop.now) for number in numbers]
        self._run.ranks += ranks
        self._run.see(host.name, f"*** launch of ranks {numbers}")
        self._run.loop.call_soon(self._begin_launch, node, ranks, context=process.context)

    def _begin_launch(self, node: int, ranks: list[Rank]) -> None:
        nodes = max(self._run.plan.hosts) + 1
        slots = [sum(on == other for on in self._run.plan.hosts) for other in range(nodes)]
        spec = dataclasses.replace(self._spec(ranks[0]), world_size=1, rank=0)
        hosts = Hosts(slots, node, by_ssh=nodes > 1 and not self._run.plan.on_each_host)
        go_on = "ddp-manual launch train.py"
        launched = this_host.Ranks(
            Job(spec=spec, run_id="run", run_dir=None, go_on=go_on, program=PROGRAM),
            hosts,
            Writer(),  # type: ignore[arg-type]
        )
        by_number = {rank.number: rank for rank in ranks}

        class Starter:
            def start(self, rank: int, world_size: int, held: HeldState, output: Any) -> SimulatedWorker:
                by_number[rank].agent = next(agent for agent in launched.agents if agent.spec.rank == rank)
                return by_number[rank].run.people.start_worker(by_number[rank], held)

        def tell(failure: Failure) -> None:
            by_number[failure[0]].errors.append(failure[1])

        async def attempt() -> None:
            launched.starter = Starter()  # type: ignore[assignment]
            await launched.attempt(0, tell)
            if self._run.over is not None:
                return
            for rank in ranks:
                rank.ended, rank.exit_code = self._run.loop.now, rank.errors[0].exit_code if rank.errors else 0
            self._run.see(ranks[0].host.name, f"*** launch ends: {[rank.exit_code for rank in ranks]}")
            self._run.loop.call_soon(lambda: [self.end_processes(rank) for rank in ranks], context=EMPTY)

        self._launches.append(self._run.loop.create_task(attempt()))

    def _say(self, rank: Rank, line: str, *, is_error: bool = False) -> None:
        if self._run.over is not None:
            return
        if rank.errors and not (is_error and len(rank.errors) == 1):
            self._run.break_invariant(16, f"{rank.who} says after its error: {line!r}")
        rank.lines.append((self._run.loop.now, line))
        self._run.see(rank.who, line if is_error else f"{terminal.tag(rank.number)} {line}")

    def _ended(self, rank: Rank, done: asyncio.Task[Any]) -> None:
        if self._run.over is not None:
            return
        rank.ended = self._run.loop.now
        if done.exception() is not None:
            self._run.break_invariant(19, f"{rank.who} raised {done.exception()!r}")
            rank.exit_code = -1
        else:
            rank.exit_code = done.result().exit_code
        self._run.see(rank.who, f"*** exit code {rank.exit_code}")
        self._run.loop.call_soon(self.end_processes, rank, context=EMPTY)
        self.type_again_later(rank)

    def end_processes(self, rank: Rank) -> None:
        """End what the kernel ends with an agent: its connections and its workers."""
        rank.process.end()
        self._run.network.end_process(rank.process)
        for worker in rank.workers:
            worker._program.die(-signal.SIGKILL)

    def type_again_later(self, rank: Rank) -> None:
        """Have a person type the command of a rank that was lost again, if the others wait for it."""
        plan, rank_0s_host = self._run.plan, self._run.network.hosts[self._run.plan.hosts[0]]
        tries = [other for other in self._run.ranks if other.number == rank.number and other.belongs]
        in_vain = sum(rank_0s_host.up and other.exit_code == 11 for other in tries)  # rank 0 was not to be found
        before = len(tries) - min(in_vain, MOST_IN_VAIN)
        if (
            plan.on_loss == "leave"
            or plan.launched
            or not rank.belongs
            or before
            > (TYPES_DYING_AGAIN if rank.number in self._run.dying and rank.exit_code == 137 else plan.types_again)
            or self._run.asked_to_stop
        ):
            return
        if rank.exit_code == 0 or (rank.exit_code == 13 and "frozen" not in rank.errors[0].why):
            return

        def type_again() -> None:
            seat = [other for other in self._run.ranks if other.number == rank.number and other.runs and other.belongs]
            waits = any(other.runs and other.belongs for other in self._run.ranks)
            waits = waits and not any(other.exit_code == 0 for other in self._run.ranks)
            if waits and not seat and not self._run.asked_to_stop:
                hosts = [
                    host for host in self._run.network.hosts if host.up and (host is not rank.host or not plan.moves)
                ]
                on = rank.host if rank.host.up and not plan.moves else hosts[0] if hosts else None
                if rank.number == 0 and rank.host.up:
                    on = rank.host  # where its address is
                if on is not None:
                    self.type_rank(rank.number, on)

        self._run.loop.call_later(self._run.random.uniform(0.5, TYPED_AGAIN_WITHIN), type_again, context=EMPTY)
