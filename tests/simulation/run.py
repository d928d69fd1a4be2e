"""One simulated run of a plan: what its people see, and which invariants it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import datetime
import errno
import gc
import itertools
import os
import random
import secrets
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

from ddp_manual import launchers, signals, terminal
from ddp_manual.agent import coordinator, ending, join, main, name_lookup, probe, reachability
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.task import Task
from ddp_manual.errors import DdpManualError, MasterUnresolvable, PortInUse, TrainingFailed
from ddp_manual.held_memory import Moment
from ddp_manual.launch import this_host
from ddp_manual.launch.engine import Failure
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.program import Program as UsersProgram
from ddp_manual.protocol import reachability as rounds
from ddp_manual.protocol import roll_call, states
from ddp_manual.protocol.agent import AgentProtocol
from ddp_manual.world_spec import WorldSpec
from ddp_manual.wrapping import wrapped
from tests.simulation.moments import Moments, watched
from tests.simulation.network import EMPTY, Host, Listener, Network
from tests.simulation.plan import FOR_EVER, STATES, THAT, Fault, Plan
from tests.simulation.virtual_time import EPOCH, PROCESS, Process, VirtualLoop
from tests.simulation.worker import Group, HeldState, Program, SimulatedWorker

PORT = 29500
# The faults that need no rank to strike.
OF_NO_RANK = ("garbage", "mute stranger", "type with", "type without the token", "listener", "name")
# The invariants that are checked when the run is over.
AT_THE_END = (1, 2, 3, 7, 9, 12, 15, 16, 17, 19, 20)
# How often a rank is typed again whose workers die one after the other.
TYPES_DYING_AGAIN = 40
PROGRAM = UsersProgram(kind="script", name="train.py")
# Of the terminals in which ranks are typed.
COLUMNS = 80


def on_screen(line: str) -> str:
    """Return a rank's line as a terminal shows it, without the rank in front."""
    return wrapped(line, COLUMNS).partition("] ")[2]


class Writer:
    """The thread that writes the output of ``launch``, at once."""

    def submit(self, action: Callable[..., None], *arguments: Any) -> Future[None]:
        done: Future[None] = Future()
        done.set_result(action(*arguments))
        return done


@dataclass(eq=False)
class Rank:
    """A rank as somebody has typed it: one agent, with its workers."""

    number: int
    host: Host
    process: Process
    run: Run
    world_size: int
    typed: float
    agent: main.Agent | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)
    errors: list[DdpManualError] = field(default_factory=list)
    ended: float | None = None
    exit_code: int | None = None
    generation: int = -1
    """The last one in which a worker of it was placed."""
    killed: bool = False
    """Whether it has ended without a word, with its host or by a signal that nobody handles."""
    belongs: bool = True
    """Whether it is one of the ranks that the plan types, or one of those typed again; not a second or a wrong one."""
    detail: str = ""
    held: HeldState | None = None
    workers: list[SimulatedWorker] = field(default_factory=list)
    signals: list[tuple[float, int]] = field(default_factory=list)
    """When its agent has got a signal, and how far the run was."""
    insists: bool = False
    """Whether a second one has come while it still worked."""

    @property
    def is_script(self) -> bool:
        return self.run.plan.script

    @property
    def has_token(self) -> bool:
        return "token" not in self.detail if self.run.plan.token else True

    @property
    def who(self) -> str:
        return f"rank {self.number} on {self.host.name}"

    @property
    def host_is_frozen(self) -> bool:
        return self.host.number in self.run.frozen_hosts

    @property
    def program(self) -> Program | None:
        return self.workers[-1]._program if self.workers else None

    @property
    def runs(self) -> bool:
        return self.ended is None and not self.killed

    @property
    def leaves(self) -> bool:
        """Whether its agent has its result or its error."""
        return self.agent is not None and isinstance(self.agent.protocol.state, states.Ended)


class Witness:
    """What tells that a signal has come to the program too: as Ctrl-C does from a terminal."""

    pid = 0

    def __init__(self, *, own_session: bool) -> None:
        self._own_session = own_session

    def has_got(self, number: int, program: int) -> bool:
        return number == signal.SIGINT and not self._own_session

    def forget(self) -> None:
        """Do nothing, likewise."""

    def close(self) -> None:
        """Do nothing: there is no process."""


class Calm(random.Random):
    """Draws the mean, so that a transcript changes only with what ranks do and say."""

    def random(self) -> float:
        return 0.5

    def getrandbits(self, k: int) -> int:
        self.drawn = getattr(self, "drawn", 0) + 1
        return self.drawn


class Run:
    """A plan that is carried out."""

    def __init__(self, plan: Plan) -> None:
        self.plan = plan
        self.random = Calm() if plan.seed is None else random.Random(plan.seed ^ 0x5EED)
        self.loop = VirtualLoop()
        self.network = Network(self.loop, max(plan.hosts) + 2, self.random)
        self.ranks: list[Rank] = []
        self._launches: list[asyncio.Task[None]] = []
        """Kept, also of hosts that lose their power: a task that nobody has is collected where it waits."""
        self.struck: list[tuple[float, Fault]] = []
        """The faults that struck something, and when."""
        self.broken: list[str] = []
        """The invariants that did not hold, in words."""
        self.over: float | None = None
        self.said: list[tuple[float, str, str]] = []
        self.groups: dict[tuple[str, int], Group] = {}
        self.programs: dict[int, Program] = {}
        self.resolves = not plan.by_name
        """Whether rank 0's name has its address."""
        self.frozen_with_host: set[int] = set()
        """The ranks that were on a host when it froze, perhaps since they were typed there again."""
        self.frozen_hosts: set[int] = set()
        self.no_process: set[int] = set()
        """The hosts on which no process can be started."""
        self.frozen_until: dict[int, float] = {}
        self.began: float | None = None
        """When the first rank began to work."""
        self.finished: dict[int, float] = {}
        """Rank -> when its work was done for the first time."""
        self.line: dict[int, int] = {}
        """Step -> the generation that was the last to do it."""
        self.moments = Moments(self)
        self.dying: dict[int, float | None] = {}
        """The ranks whose workers die one after the other: so many seconds after each has started; None: at work."""
        self.have_given_up: set[int] = set()
        """The ranks that have looked for another rank 0."""
        self._awaited: set[int] = set()
        """The faults that strike once a rank comes to what they wait for."""
        self._pids = itertools.count(1000)
        self._asked_to_stop: set[int] = set()

    def new_pid(self) -> int:
        return next(self._pids)

    # -- what people do -----------------------------------------------------------------------------------------------

    def type_rank(
        self, number: int, host: Host, *, world_size: int | None = None, belongs: bool = True, detail: str = ""
    ) -> None:
        """Start a rank's agent, as a person does in a terminal.

        Args:
            belongs: whether it is one of the ranks that the plan types, or one typed again.
            detail: what is typed besides, or is different on its host.
        """
        plan, world_size = self.plan, world_size or self.plan.ranks
        if host.number in self.frozen_hosts:
            self.loop.call_later(1.0, partial(self.type_rank, number, host, world_size=world_size, belongs=belongs))
            return
        process = Process(self.loop, f"rank {number}")
        rank = Rank(number, host, process, self, world_size, self.loop.now, belongs=belongs, detail=detail)
        self.ranks.append(rank)
        detail = detail if world_size == plan.ranks else f"--world_size {world_size}"
        self.see(rank.who, f"*** typed{f' with {detail}' if detail else ''}")
        self.loop.call_soon(self._begin, rank, context=process.context)

    def _begin(self, rank: Rank) -> None:
        rank.agent = agent = self._agent(rank)
        task = self.loop.create_task(agent.run())
        task.add_done_callback(lambda done: self._ended(rank, done))

    def _spec(self, rank: Rank) -> WorldSpec:
        plan = self.plan
        return WorldSpec(
            world_size=rank.world_size,
            rank=min(rank.number, rank.world_size - 1),
            master_addr=self.rank_0_address,
            master_port=PORT,
            join_timeout=plan.join_timeout,
            peer_timeout=plan.peer_timeout,
            stall_timeout=plan.stall_timeout,
            on_loss=plan.on_loss,
            rejoin_timeout=plan.rejoin_timeout,
            shrink_after=plan.shrink_after,
            sources={"world_size": "flag", "rank": "flag", "master_addr": "flag", "master_port": "flag"},
        )

    @property
    def rank_0_address(self) -> str:
        """What is typed as --master_addr."""
        host = self.network.hosts[self.plan.hosts[0]]
        if self.plan.by_name:
            return host.name
        return host.address if len(set(self.plan.hosts)) > 1 or self.plan.moves else "127.0.0.1"

    def _agent(self, rank: Rank) -> main.Agent:
        plan, spec = self.plan, self._spec(rank)
        command = f"train.py --world_size {plan.ranks} --rank {{rank}}"
        batch_size = (64, "flag") if "batch_size" in rank.detail else (32, "default")
        options = {} if plan.script else {"batch_size": batch_size}
        own = {"name": PROGRAM.name} if plan.script else {"prepare": "training:prepare"}
        task = Task(command=command, run_dir=None, program=PROGRAM, options=options, **own)

        def start_worker(held: HeldState) -> SimulatedWorker:
            return self._start_worker(rank, held)

        def print_error(error: DdpManualError) -> None:
            rank.errors.append(error)
            self._say(rank, error.render(COLUMNS), is_error=True)

        return main.Agent(
            spec, task, start_worker=start_worker, log=lambda line: self._say(rank, line), print_error=print_error
        )

    def _start_worker(self, rank: Rank, held: HeldState) -> SimulatedWorker:
        if rank.host.number in self.no_process:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
        rank.held = held
        worker = SimulatedWorker(Program(self, rank, held))
        rank.workers.append(worker)
        self.moments.started(rank)
        if (seconds := self.dying.get(rank.number)) is not None:
            worker._program.later(seconds, partial(worker._program.die, -signal.SIGKILL))
        return worker

    def launch(self, node: int) -> None:
        """Start all ranks of a host with ``launch``: their agents live in one process."""
        plan, host = self.plan, self.network.hosts[node]
        process = Process(self.loop, f"launch on {host.name}")
        numbers = [number for number, on in enumerate(plan.hosts) if on == node]
        ranks = [Rank(number, host, process, self, plan.ranks, self.loop.now) for number in numbers]
        self.ranks += ranks
        self.see(host.name, f"*** launch of ranks {numbers}")
        self.loop.call_soon(self._begin_launch, node, ranks, context=process.context)

    def _begin_launch(self, node: int, ranks: list[Rank]) -> None:
        nodes = max(self.plan.hosts) + 1
        slots = [sum(on == other for on in self.plan.hosts) for other in range(nodes)]
        spec = dataclasses.replace(self._spec(ranks[0]), world_size=1, rank=0)
        hosts = Hosts.of_slots(slots, node) if nodes > 1 else Hosts(nproc=slots[0])
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
                return by_number[rank].run._start_worker(by_number[rank], held)

        def tell(failure: Failure) -> None:
            by_number[failure[0]].errors.append(failure[1])

        async def attempt() -> None:
            launched.starter = Starter()  # type: ignore[assignment]
            await launched.attempt(0, tell)
            if self.over is not None:
                return
            for rank in ranks:
                rank.ended, rank.exit_code = self.loop.now, rank.errors[0].exit_code if rank.errors else 0
            self.see(ranks[0].host.name, f"*** launch ends: {[rank.exit_code for rank in ranks]}")
            self.loop.call_soon(lambda: [self._end_processes(rank) for rank in ranks], context=EMPTY)

        self._launches.append(self.loop.create_task(attempt()))

    def _say(self, rank: Rank, line: str, *, is_error: bool = False) -> None:
        if self.over is not None:
            return
        if rank.errors and not (is_error and len(rank.errors) == 1):
            self.break_invariant(16, f"{rank.who} says after its error: {line!r}")
        rank.lines.append((self.loop.now, line))
        self.see(rank.who, line if is_error else on_screen(f"{terminal.tag(rank.number)} {line}"))

    def _ended(self, rank: Rank, done: asyncio.Task[Any]) -> None:
        if self.over is not None:
            return
        rank.ended = self.loop.now
        if done.exception() is not None:
            self.break_invariant(19, f"{rank.who} raised {done.exception()!r}")
            rank.exit_code = -1
        else:
            rank.exit_code = done.result().exit_code
        self.see(rank.who, f"*** exit code {rank.exit_code}")
        self.loop.call_soon(self._end_processes, rank, context=EMPTY)
        self._type_again_later(rank)

    def _end_processes(self, rank: Rank) -> None:
        """End what the kernel ends with an agent: its connections and its workers."""
        rank.process.end()
        self.network.end_process(rank.process)
        for worker in rank.workers:
            worker._program.die(-signal.SIGKILL)

    def _type_again_later(self, rank: Rank) -> None:
        """Have a person type the command of a rank that was lost again, where the others wait for it."""
        plan = self.plan
        tries = [other for other in self.ranks if other.number == rank.number and other.belongs]
        in_vain = sum(other.exit_code == 11 for other in tries)  # rank 0 was not to be found
        before = len(tries) - min(in_vain, 3)
        if (
            plan.on_loss == "leave"
            or plan.launched
            or not rank.belongs
            or before > (TYPES_DYING_AGAIN if rank.number in self.dying and rank.exit_code == 137 else plan.types_again)
            or self._asked_to_stop
        ):
            return
        if rank.exit_code == 0 or (rank.exit_code == 13 and "frozen" not in rank.errors[0].why):
            return

        def type_again() -> None:
            seat = [other for other in self.ranks if other.number == rank.number and other.runs and other.belongs]
            waits = any(other.runs and other.belongs for other in self.ranks)
            waits = waits and not any(other.exit_code == 0 for other in self.ranks)
            if waits and not seat and not self._asked_to_stop:
                hosts = [host for host in self.network.hosts if host.up and (host is not rank.host or not plan.moves)]
                on = rank.host if rank.host.up and not plan.moves else hosts[0] if hosts else None
                if rank.number == 0 and rank.host.up:
                    on = rank.host  # where its address is
                if on is not None:
                    self.type_rank(rank.number, on)

        self.loop.call_later(self.random.uniform(0.5, 6), type_again, context=EMPTY)

    # -- faults -------------------------------------------------------------------------------------------------------

    def _await(self, number: int) -> None:
        """Let a fault strike at its time; or, now that the fault before has had its turn, after what it waits for."""
        fault = self.plan.faults[number]
        if not fault.after:
            return
        is_at = not fault.after.endswith("again") and any(self._is_at(rank, fault) for rank in self.ranks)
        if fault.after == THAT or is_at:
            self.loop.call_later(fault.at, self._take_turn, number, context=EMPTY)
        else:
            self._awaited.add(number)

    def _is_at(self, rank: Rank, fault: Fault) -> bool:
        """Return whether a rank is at what a fault waits for."""
        is_that_rank = rank.number == fault.of and rank.belongs and rank.runs and rank.agent is not None
        return is_that_rank and type(rank.agent.protocol.state).__name__ == STATES.get(fault.after)

    def comes_to_another_state(self, agent: AgentProtocol) -> None:
        """Let the faults strike that wait for this."""
        rank = next((rank for rank in self.ranks if rank.agent is not None and rank.agent.protocol is agent), None)
        if rank is None:
            return  # it is being made
        self.moments.hears(rank)
        if isinstance(agent.state, states.Looking):
            self.have_given_up.add(rank.number)
        for number in [*self._awaited]:
            fault = self.plan.faults[number]
            if self._is_at(rank, fault):
                self._awaited.remove(number)
                self.loop.call_later(fault.at, self._take_turn, number, context=EMPTY)

    def _take_turn(self, number: int) -> None:
        self._strike(self.plan.faults[number])
        if number + 1 < len(self.plan.faults):
            self._await(number + 1)

    def _strike(self, fault: Fault) -> None:
        rank = next((one for one in reversed(self.ranks) if one.number == fault.rank and one.belongs), None)
        strikes = rank is not None and rank.runs and rank.host.up and rank.agent is not None
        if not strikes and fault.kind not in OF_NO_RANK:
            return
        struck = getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, rank)
        if struck is not False:
            self.struck.append((self.loop.now, fault))
            self.see("", f"*** {fault}")

    def _to_program(self, rank: Rank, act: Callable[[Program], None]) -> bool:
        program = rank.program
        if program is None or not program.alive:
            return False
        act(program)
        return True

    def _kill(self, fault: Fault, rank: Rank) -> bool:
        return self._to_program(rank, lambda program: program.die(-signal.SIGKILL))

    def _abort(self, fault: Fault, rank: Rank) -> bool:
        return self._to_program(rank, lambda program: program.die(-signal.SIGABRT))

    def _exit(self, fault: Fault, rank: Rank) -> bool:
        return self._to_program(rank, lambda program: program.die(3))

    def _raise(self, fault: Fault, rank: Rank) -> bool:
        def fail(program: Program) -> None:
            what = f"rank {rank.number} on {rank.host.name}: ValueError: told to fail"
            error = TrainingFailed(what, why='File "train.py", line 10', next="fix the code")
            if program.inside or program.phase == "at work":
                program.failing = error  # before its next collective
            else:
                program.fail(error)

        program = rank.program
        if program is None or program.phase in ("left",) or program.stopped:
            return False
        return self._to_program(rank, fail)

    def _hang(self, fault: Fault, rank: Rank) -> bool:
        program = rank.program
        if program is None or program.phase != "at work" or program.inside or program.step >= self.plan.steps:
            return False  # after its last collective a program may take as long as it likes
        return self._to_program(rank, lambda program: setattr(program, "hangs", True))

    def _stop(self, fault: Fault, rank: Rank) -> bool:
        program = rank.program
        if program is None or program.phase == "left":
            return False
        if fault.seconds < FOR_EVER:
            self.loop.call_later(fault.seconds, program.go_on, context=EMPTY)
        return self._to_program(rank, Program.stop)

    def _kill_agent(self, fault: Fault, rank: Rank) -> None:
        self._end_abruptly(rank)
        self._type_again_later(rank)

    def _end_abruptly(self, rank: Rank) -> None:
        for one in self.of_process(rank):
            one.killed = True
            self._asked_to_stop.discard(one.number)  # the run need not stop any more
            self._end_processes(one)
            self.see(one.who, "*** killed")

    def stopped_agent(self, worker: int) -> str:
        """Say which signal has stopped the agent of a worker, as /proc does."""
        is_stopped = self.programs[worker].rank.process.frozen
        return "SIGSTOP has stopped its agent; kill -CONT lets it go on" if is_stopped else ""

    def of_process(self, rank: Rank) -> list[Rank]:
        """Return the ranks whose agents live in one process with that of this rank, as under ``launch``."""
        return [one for one in self.ranks if one.process is rank.process]

    def _freeze_agent(self, fault: Fault, rank: Rank) -> None:
        rank.process.freeze()
        self._thaw_later(fault, [rank])

    def _thaw_later(self, fault: Fault, ranks: list[Rank]) -> None:
        def thaw() -> None:
            self.frozen_hosts -= {rank.host.number for rank in ranks} if "host" in fault.kind else set()
            for rank in ranks:
                if rank.host_is_frozen:  # meanwhile
                    continue
                rank.process.go_on()
                if rank.program is not None and "host" in fault.kind:
                    rank.program.go_on()

        if fault.seconds < FOR_EVER:
            self.loop.call_later(fault.seconds, thaw, context=EMPTY)

    def _host_vanishes(self, fault: Fault, rank: Rank) -> None:
        rank.host.up = False
        for one in self.ranks:
            if one.host is rank.host and one.runs:
                one.killed = True
                one.process.end()
                self.see(one.who, "*** is gone with its host")
                self._type_again_later(one)

    def _freeze_host(self, fault: Fault, rank: Rank) -> None:
        frozen = [one for one in self.ranks if one.host is rank.host and one.runs]
        self.frozen_with_host.update(one.number for one in frozen)
        self.frozen_hosts.add(rank.host.number)
        for one in frozen:
            one.process.freeze()
        self._thaw_later(fault, frozen)

    def _cut(self, fault: Fault, rank: Rank, *, one_way: bool = False) -> bool:
        other = next((one for one in reversed(self.ranks) if one.number == fault.other), None)
        if other is None or other.host is rank.host:
            return False
        cuts = {(rank.host.number, other.host.number)}
        if not one_way:
            cuts.add((other.host.number, rank.host.number))
        self.network.cuts |= cuts
        if fault.seconds < FOR_EVER:

            def heal() -> None:
                self.network.heal(cuts)
                for group in self.groups.values():
                    group.look()

            self.loop.call_later(fault.seconds, heal, context=EMPTY)
        return True

    def _cut_one_way(self, fault: Fault, rank: Rank) -> bool:
        return self._cut(fault, rank, one_way=True)

    def _ctrl_c(self, fault: Fault, rank: Rank) -> None:
        """Send SIGINT as a terminal does: to the agent, and to a program that is in its process group; under ``launch``
        to all agents of the process, which pass it on."""
        self._asked_to_stop.add(rank.number)
        for one in self.ranks if self.plan.launched else [rank]:
            if one.process is rank.process and one.agent is not None:
                take = partial(self._take_signal, one)
                self.loop.call_soon(take, context=rank.process.context)
                if one.program is not None and not self.plan.launched:
                    one.program.later(0, partial(one.program.interrupt, signal.SIGINT))

    def _take_signal(self, rank: Rank, number: int = signal.SIGINT) -> None:
        if rank.runs and rank.agent is not None and hasattr(rank.agent, "_ending"):
            again = bool(rank.signals) and self.loop.now - rank.signals[0][0] > signals.ONCE_WITHIN
            protocol = rank.agent.protocol
            rank.insists |= again and isinstance(protocol.state, states.Working) and protocol.signals.has_begun
            rank.signals.append((self.loop.now, max(self.line, default=0)))
            rank.agent.take_signal(number)

    def _ctrl_c_twice(self, fault: Fault, rank: Rank) -> None:
        self._ctrl_c(fault, rank)
        self.loop.call_later(fault.seconds, lambda: rank.runs and self._ctrl_c(fault, rank), context=EMPTY)

    def _type_twice(self, fault: Fault, rank: Rank) -> None:
        self.type_rank(fault.rank, rank.host, belongs=False)

    def _wrong_world_size(self, fault: Fault, rank: Rank) -> None:
        self.type_rank(fault.rank, rank.host, world_size=self.plan.ranks + 1, belongs=False)

    def _type_with(self, fault: Fault, rank: Rank | None) -> None:
        host = self.network.hosts[self.plan.hosts[fault.rank]]
        self.type_rank(fault.rank, host, belongs=False, detail=fault.detail)

    def _sigterm(self, fault: Fault, rank: Rank) -> None:
        self._asked_to_stop.add(rank.number)
        take = partial(self._take_signal, rank, signal.SIGTERM)
        self.loop.call_soon(take, context=rank.process.context)

    def _debugger(self, fault: Fault, rank: Rank) -> bool:
        return self._to_program(rank, Program.debug)

    def _no_process(self, fault: Fault, rank: Rank) -> None:
        self.no_process.add(rank.host.number)

    def _name(self, fault: Fault, rank: Rank | None) -> None:
        self.resolves = True

    def _listener(self, fault: Fault, rank: Rank | None) -> None:
        """Have another program listen at rank 0's port."""
        here = self.network.hosts[self.plan.hosts[0]]
        found = self.network.listen(here, here.address, PORT, None)
        assert found is not None

        class Server(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                self.transport = transport
                if "ssh" in fault.detail:
                    transport.write(b"SSH-2.0-OpenSSH_9.2\r\n")  # type: ignore[attr-defined]

            def data_received(self, data: bytes) -> None:
                if "http" in fault.detail:
                    self.transport.write(b"HTTP/1.0 400 Bad request\r\n\r\n")  # type: ignore[attr-defined]
                    self.transport.close()  # type: ignore[attr-defined]

        found.factory = Server

    def _shrink(self, fault: Fault, rank: Rank) -> bool:
        zero = next((one for one in reversed(self.ranks) if one.number == 0 and one.runs and one.agent), None)
        shell = zero.agent._join.coordinator if zero is not None and zero.agent is not None else None
        if zero is None or shell is None or zero.process.frozen:
            return False
        coordinator = shell.protocol
        self.loop.call_soon(coordinator.shrink, context=zero.process.context)
        if not coordinator.seats.began or coordinator.roll_call.works:
            return False
        self.moments.shrunk |= {*coordinator.roll_call.missing}
        return True

    def _keep_dying(self, fault: Fault, rank: Rank) -> bool:
        self.dying[rank.number] = fault.seconds
        self._kill(fault, rank)
        return True  # if there is no worker at the moment, the next one dies

    def _keep_dying_at_work(self, fault: Fault, rank: Rank) -> bool:
        self.dying[rank.number] = None
        self._kill(fault, rank)
        return True

    def _type_without_the_token(self, fault: Fault, rank: Rank | None) -> None:
        host = self.network.hosts[self.plan.hosts[fault.rank]]
        self.type_rank(fault.rank, host, belongs=False, detail=self.random.choice(("no token", "another token")))

    def _garbage(self, fault: Fault, rank: Rank | None) -> None:
        self._stranger(b"GET / HTTP/1.1\r\n\r\n" if self.random.random() < 0.5 else b"\xff{}[]\n" * 9)

    def _mute_stranger(self, fault: Fault, rank: Rank | None) -> None:
        self._stranger(b"")

    def _stranger(self, sends: bytes) -> None:
        host = self.network.hosts[self.plan.hosts[0]]
        several = self.rank_0_address != "127.0.0.1"

        async def knock() -> None:
            with contextlib.suppress(OSError):
                address = host.address if several else "127.0.0.1"
                transport, _ = await self.network.connect(asyncio.Protocol, host, address, PORT)
                transport.write(sends)

        self.loop.call_soon(lambda: self.loop.create_task(knock()), context=EMPTY)

    # -- invariants that hold at every moment -------------------------------------------------------------------------

    def break_invariant(self, number: int, what: str) -> None:
        if self.loop.winding_up and number not in AT_THE_END:
            return
        words = f"invariant {number} at {self.over or self.loop.now:.2f} s: {what}"
        if words not in self.broken:
            self.broken.append(words)

    def programs_by_store(self, key: tuple[str, int]) -> Program | None:
        return self.programs.get(key[1])

    def check_group(self, group: Group, program: Program) -> None:
        if self.began is None:
            self.began = self.loop.now
            self.moments.begin()
        if group.generation != program.generation or group.size != program.place["world_size"]:
            self.break_invariant(5, f"{program.rank.who} joins a group of another generation")
        here = {member.rank.number for member in group.members.values()}
        if not here and not any(rank.runs and rank.generation >= 0 for rank in self.ranks):
            self.line.clear()  # nobody knows of a run that was before
        if program.generation <= program.rank.generation:
            self.break_invariant(5, f"{program.rank.who} begins generation {program.generation} once more")
        program.rank.generation = program.generation
        if program.rank.number in here:
            self.break_invariant(4, f"{program.rank.who} works beside another process of the same seat")
        if len(here) + 1 == group.size:
            self.moments.grouped({*here, program.rank.number})
        if program.rank.number in self.dying and self.dying[program.rank.number] is None:
            program.later(0.0, partial(program.die, -signal.SIGKILL))

    def newest_moment(self, group: Group) -> Moment | None:
        """Return the newest moment that a living holder has."""
        ranks = {rank for rank in group.opened_by if rank.runs} | {*self.moments.living_holders()}
        return max((rank.held.moment for rank in ranks if rank.held and rank.held.moment), default=None)

    def check_beginning(self, program: Program, step: int) -> None:
        """Check that the run goes on from the newest moment that a living holder had when the state was given out."""
        newest = program.group.newest if program.group is not None else None
        if step != (newest.step if newest else 0):
            self.break_invariant(6, f"{program.rank.who} goes on from step {step}, {newest} is held")

    def check_kill(self, program: Program) -> None:
        """Check that a program which waits on its way out is let go, in place of killed, where its rank goes on or no
        other one is left."""
        rank = program.rank
        others = [other for other in self.ranks if other is not rank and other.belongs]
        is_last = all(other.ended is not None for other in others) and not self.network.cuts
        goes_on = rank.agent is not None and not isinstance(rank.agent.protocol.state, states.Ended)
        frozen = {fault.rank for _, fault in self.struck if fault.kind.startswith("freeze")} | self.frozen_with_host
        is_known = rank.number not in frozen  # otherwise its time may be up before its agent hears of it
        if program.waits_for_its_agent and len(rank.signals) < 2 and is_known and (goes_on or is_last):
            self.break_invariant(12, f"the program of {program.rank.who} is killed while it waits on its way out")

    def check_step(self, program: Program) -> None:
        """Check that one line of steps is committed: no older generation does a step again."""
        before = self.line.get(program.step, -1)
        alive = program.group is not None and len(program.group.members) == program.group.size
        if before > program.generation and alive:
            self.break_invariant(5, f"{program.rank.who} does step {program.step} in generation {program.generation}")
        if alive:  # otherwise this one is behind
            self.moments.stepped(program)
        self.line[program.step] = max(before, program.generation)

    def note_finished(self, program: Program) -> None:
        self.moments.done_at[program] = self.loop.now
        if not program.saves:
            self.finished.setdefault(program.rank.number, self.loop.now)

    # -- the run ------------------------------------------------------------------------------------------------------

    def see(self, who: str, line: str) -> None:
        if self.over is None:
            self.said.append((self.loop.now, who, line))

    @property
    def transcript(self) -> str:
        """What people see; times in seconds, those of a calm run to a tenth."""
        digits = 1 if self.plan.seed is None else 3
        lines = ((f"{at:8.{digits}f}", who, line.replace("\n", f"\n{'':9}")) for at, who, line in self.said)
        return "\n".join(f"{at} {who}: {line}" if who else f"{at} {line}" for at, who, line in lines)

    def carry_out(self) -> None:
        """Run until all agents have ended, or the plan's limit has passed."""
        with patched(self), contextlib.closing(self.loop):
            for number, at in enumerate(self.plan.typed):
                if at >= FOR_EVER:
                    continue
                node = self.plan.hosts[number]
                if not self.plan.launched:
                    self.loop.call_at(at, self.type_rank, number, self.network.hosts[node], context=EMPTY)
                elif node not in self.plan.hosts[:number]:
                    self.loop.call_at(at, self.launch, node, context=EMPTY)
            for number, fault in enumerate(self.plan.faults):
                if not fault.after:
                    self.loop.call_at(fault.at, self._take_turn, number, context=EMPTY)
                elif number == 0:
                    self._await(number)
            self.loop.run_until_complete(self._wait())
            self.over = self.loop.now
            self.loop.wind_up()

    async def _wait(self) -> None:
        typed, quiet = 0, 0
        while self.loop.now < self.plan.limit and quiet < 15:  # somebody may type a rank again
            await asyncio.sleep(0.5)
            self.moments.look()
            goes_on = self.loop.now < max(self.plan.times) + 1 or len(self.ranks) > typed
            goes_on = goes_on or any(rank.runs and not self._stuck_for_ever(rank) for rank in self.ranks)
            typed, quiet = len(self.ranks), 0 if goes_on else quiet + 1

    def _stuck_for_ever(self, rank: Rank) -> bool:
        """Return whether a rank cannot end: its agent is stopped and nobody lets it go on."""
        return rank.process.frozen and any(
            fault.seconds == FOR_EVER and fault.kind in ("freeze agent", "freeze host") for _, fault in self.struck
        )


# -- the seam: what an agent asks of the operating system -------------------------------------------------------------


@contextlib.contextmanager
def patched(run: Run) -> Iterator[None]:
    """Replace the clock, the network, the names and the descriptors that agents use."""
    network, loop = run.network, run.loop

    class Output:
        """What takes the lines of a rank under ``launch``."""

        def __init__(self, log: Any, rank: int, writer: Any) -> None:
            self._rank = rank

        def print(self, line: str, *, shown: bool = True) -> None:
            if shown:
                run.see(self._who, on_screen(line))

        def print_error(self, error: DdpManualError, *, shown: bool) -> None:
            if shown:
                run.see(self._who, error.render(COLUMNS - len(terminal.tag(self._rank)) - 1))

        @property
        def _who(self) -> str:
            process = PROCESS.get()
            return next(one.who for one in run.ranks if one.process is process and one.number == self._rank)

    def here() -> Host:
        process = PROCESS.get()
        return next(rank.host for rank in run.ranks if rank.process is process)

    def detail(begins: str, usual: str) -> str:
        """Return what is different about the rank that is at work, if that begins so."""
        process = PROCESS.get()
        rank = next(rank for rank in run.ranks if rank.process is process)
        return rank.detail.removeprefix(begins) if begins and rank.detail.startswith(begins) else usual or rank.detail

    def token(detail: str) -> bytes | None:
        if run.plan.token:
            return {"": b"secret", "no token": None}.get(detail, b"another")
        return b"secret" if "token" in detail else None

    async def listen(spec: WorldSpec, addresses: list[str], port: int) -> Listener:
        found = network.listen(here(), addresses[0], port, PROCESS.get())
        if found is None:
            raise PortInUse(f"port {port} of {here().name} is in use", why="by another rank 0", next="end it")
        return found

    async def create_connection(factory: Callable[[], Any], host: str, port: int, **options: Any) -> Any:
        return await network.connect(factory, here(), host, port)

    async def create_server(
        factory: Callable[[], Any], host: str = "", port: int = 0, *, sock: Listener | None = None, **options: Any
    ) -> Listener:
        found = sock or network.listen(here(), host, port, PROCESS.get())
        assert found is not None
        found.factory = factory
        return found

    async def answer_at(address: str) -> Listener:
        found = network.listen(here(), address, 0, PROCESS.get())
        assert found is not None
        found.factory = asyncio.Protocol
        return found

    async def try_to_reach(address: str, port: int) -> str | None:
        own, there = here(), network.host_of(address, here())
        for _ in range(round(reachability.CONNECT_TIMEOUT)):
            await asyncio.sleep(run.random.uniform(0.001, 0.02))
            if there is not None and network.both_ways(own, there):
                return None if (there.number, port) in network.listeners else "connection refused"
            await asyncio.sleep(1.0)  # SYN is sent again
        return f"no answer within {reachability.CONNECT_TIMEOUT:.0f} s: dropped"

    def resolve_in_thread(host: str, option: str = "master_addr") -> asyncio.Future[Any]:
        """Look a name up: those of hosts have an address once the plan says so, an address is its own."""
        named = next((one.address for one in network.hosts if one.name == host), host)
        unknown = MasterUnresolvable(
            f"rank 0's address {host!r} has no IP address",
            why=f"looking it up on {here().name} gave: Name or service not known",
            next=f"check with: getent hosts {host}",
        )
        future, answer = loop.create_future(), [named] if named == host or run.resolves else unknown
        loop.call_later(run.random.uniform(0, 0.02), future.set_result, answer, context=PROCESS.get().context)  # type: ignore[union-attr]
        return future

    loop.create_connection = create_connection  # type: ignore[method-assign,assignment]
    loop.create_server = create_server  # type: ignore[method-assign,assignment]
    token_hex = lambda size=16: f"{run.random.getrandbits(8 * size):0{2 * size}x}"  # noqa: E731
    utc = type("utc", (datetime.datetime,), {"fromtimestamp": classmethod(lambda cls, at: _at(at))})
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (time, {"monotonic": lambda: loop.now, "time": lambda: EPOCH + loop.now}),
        (secrets, {"token_hex": token_hex}),
        (roll_call, {"datetime": utc}),
        (join, {"own_addresses": lambda: [here().address]}),
        (coordinator, {"own_addresses": lambda: [here().address], "stopped_agent": run.stopped_agent}),
        (probe, {"resolve_in_thread": resolve_in_thread}),
        (name_lookup, {"own_address": lambda: here().address, "resolve_in_thread": resolve_in_thread}),
        (reachability, {"answer_at": answer_at, "try_to_reach": try_to_reach}),
        (rounds, {"_rounds": itertools.count()}),
        (ending, {"host_name": lambda: here().name}),
        (
            signals,
            {
                "handle_in_event_loop": lambda handle: contextlib.nullcontext(),
                "Witness": Witness,
                "is_caught": lambda pid, number: run.plan.saves > 0,
            },
        ),
        (this_host, {"RankOutput": Output}),
        (main, {"raise_descriptor_limit": lambda spec: "any", "HeldMemory": SimpleNamespace(create=HeldState)}),
        (
            launchers,
            {
                "host_name": lambda: here().name,
                "host_id": lambda: here().name,
                "token": lambda file: token(detail("", "")),
                "likely_backend": lambda device, backend: "gloo",
                "launcher_hosts": lambda world_size: None,
                "typed_command": lambda: (["ddp-manual"], ["train"]),
                "torchrun_store_at": lambda address, port: False,
                "restart_count": lambda: 0,
            },
        ),
        (
            join,
            {
                "listen": listen,
                "OwnAddress": lambda rank_0, backend: _own_address(here(), rank_0),
                "route_to": lambda address: (here().address, "eth0"),
                "own_address": lambda: here().address,
                "installed_versions": lambda: {"torch": detail("torch ", "2.15"), "python": "3.11"},
                "code_digests": lambda: {"ddp_manual/agent": detail("other ", "4f2a")},
                "collective_variables": dict,
                "source_once": lambda program: join.ProgramSource(),
            },
        ),
    ]
    with contextlib.ExitStack() as stack:
        for module, names in replaced:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(Connection, "unacknowledged", property(_unacknowledged)))
        stack.enter_context(watched(run))
        gc.collect(0)
        yield


def _at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _unacknowledged(connection: Connection) -> int:
    transport: Any = connection._transport
    return 0 if transport is None or connection.closed else int(transport.unacknowledged)


def _own_address(host: Host, rank_0: str) -> Any:
    address = "127.0.0.1" if rank_0.startswith("127.") else host.address
    return SimpleNamespace(
        address=address, interface="eth0", source="eth0", family="IPv4", variables={}, wrong_for_nccl=None
    )
