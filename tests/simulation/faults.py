"""What strikes a run: each kind of fault in a plan, and when its turn comes."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

from ddp_manual import signal_handlers
from ddp_manual.errors import TrainingFailed
from ddp_manual.protocol import states
from ddp_manual.protocol.this_rank import ThisRank
from tests.simulation.network import EMPTY
from tests.simulation.people import PORT
from tests.simulation.plan import FOR_EVER, STATES, THAT, Fault
from tests.simulation.rank import Rank
from tests.simulation.worker import Program

if TYPE_CHECKING:
    from tests.simulation.run import Run


# The pid of the first agent that is typed; launches have one each.
FIRST_AGENT = 101
# The faults that strike even if their rank does not run.
OF_NO_RANK = ("garbage", "mute stranger", "type with", "type without the token", "listener", "name")


class Faults:
    """The faults of a plan, in their order."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._awaited: set[int] = set()
        """The numbers of the faults that strike once a rank comes to the state that they wait for."""

    def wait_for(self, number: int) -> None:
        """Let a fault wait for what it comes ``after``. A fault without that is scheduled already, by its time."""
        fault = self._run.plan.faults[number]
        if not fault.after:
            return
        is_at = not fault.after.endswith("again") and any(self._is_at(rank, fault) for rank in self._run.ranks)
        if fault.after == THAT or is_at:
            self._run.loop.call_later(fault.at, self.take_turn, number, context=EMPTY)
        else:
            self._awaited.add(number)

    def _is_at(self, rank: Rank, fault: Fault) -> bool:
        """Return whether this is the rank that a fault waits for, in the state that the fault waits for."""
        is_that_rank = rank.number == fault.of and rank.belongs and rank.runs and rank.agent is not None
        return is_that_rank and type(rank.agent.rank.state).__name__ == STATES.get(fault.after)

    def comes_to_another_state(self, own: ThisRank) -> None:
        """Let the faults strike that wait for the new state of this agent's rank."""
        rank = next((rank for rank in self._run.ranks if rank.agent is not None and rank.agent.rank is own), None)
        if rank is None:
            return  # this agent is still being made
        self._run.moments.hears(rank)
        for number in [*self._awaited]:
            fault = self._run.plan.faults[number]
            if self._is_at(rank, fault):
                self._awaited.remove(number)
                self._run.loop.call_later(fault.at, self.take_turn, number, context=EMPTY)

    def take_turn(self, number: int) -> None:
        self._strike(self._run.plan.faults[number])
        if number + 1 < len(self._run.plan.faults):
            self.wait_for(number + 1)

    def _strike(self, fault: Fault) -> None:
        rank = next((one for one in reversed(self._run.ranks) if one.number == fault.rank and one.belongs), None)
        strikes = rank is not None and rank.runs and rank.host.up and rank.agent is not None
        if not strikes and fault.kind not in OF_NO_RANK:
            return
        struck = getattr(self, "_" + fault.kind.replace(" ", "_").replace("-", "_"))(fault, rank)
        if struck is not False:
            self._run.struck.append((self._run.loop.now, fault))
            self._run.see("", f"*** {fault}")

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
        # While a worker waits for its place, it runs no program that could end itself as if it were done.
        is_idle = rank.program is not None and rank.program.phase == "waiting"
        return not (is_idle and fault.detail == "0") and self._to_program(rank, lambda one: one.die(int(fault.detail)))

    def _raise(self, fault: Fault, rank: Rank) -> bool:
        def fail(program: Program) -> None:
            what = f"rank {rank.number} on {rank.host.name}: ValueError: told to fail"
            error = TrainingFailed(what, why='File "train.py", line 10', next="fix the code")
            if is_at_work:
                program.failing = error  # before its next collective
            else:
                program.fail(error)

        program = rank.program
        if program is None or program.phase in ("left",) or program.stopped:
            return False
        is_last = program.step + bool(program.inside) >= self._run.plan.steps
        is_at_work = bool(program.inside) or (program.phase == "at work" and not is_last)
        if program.inside and is_last:
            return False
        return self._to_program(rank, fail)

    def _hang(self, fault: Fault, rank: Rank) -> bool:
        program = rank.program
        if program is None or program.phase != "at work" or program.inside or program.step >= self._run.plan.steps:
            return False  # after its last collective a program may take as long as it likes
        return self._to_program(rank, lambda program: setattr(program, "hangs", True))

    def _stop(self, fault: Fault, rank: Rank) -> bool:
        program = rank.program
        if program is None or program.phase == "left":
            return False
        if fault.seconds < FOR_EVER:
            self._run.loop.call_later(fault.seconds, program.go_on, context=EMPTY)
        return self._to_program(rank, Program.stop)

    def _kill_agent(self, fault: Fault, rank: Rank) -> None:
        self._end_abruptly(rank)
        self._run.people.type_again_later(rank)

    def _end_abruptly(self, rank: Rank) -> None:
        for one in self._run.of_process(rank):
            one.killed = True
            self._run.asked_to_stop.discard(one.number)  # the run need not stop any more
            self._run.people.end_processes(one)
            self._run.see(one.who, "*** killed")

    def stopped_agent(self, pid: int) -> str:
        """Say which signal has stopped an agent, as /proc does."""
        is_stopped = self._run.ranks[pid - FIRST_AGENT].process.frozen
        return "SIGSTOP has stopped its agent; kill -CONT lets it go on" if is_stopped else ""

    def _freeze_agent(self, fault: Fault, rank: Rank) -> None:
        rank.process.freeze()
        self._thaw_later(fault, [rank])

    def _thaw_later(self, fault: Fault, ranks: list[Rank]) -> None:
        def thaw() -> None:
            self._run.frozen_hosts -= {rank.host.number for rank in ranks} if "host" in fault.kind else set()
            for rank in ranks:
                if rank.host_is_frozen:  # its host has been frozen meanwhile
                    continue
                rank.process.go_on()
                if rank.program is not None and "host" in fault.kind:
                    rank.program.go_on()
                self._run.moments.hears(rank)

        if fault.seconds < FOR_EVER:
            self._run.loop.call_later(fault.seconds, thaw, context=EMPTY)

    def _host_vanishes(self, fault: Fault, rank: Rank) -> None:
        rank.host.up = False
        for one in self._run.ranks:
            if one.host is rank.host and one.runs:
                one.killed = True
                one.process.end()
                self._run.see(one.who, "*** is gone with its host")
                self._run.people.type_again_later(one)

    def _freeze_host(self, fault: Fault, rank: Rank) -> None:
        frozen = [one for one in self._run.ranks if one.host is rank.host and one.runs]
        self._run.frozen_with_host.update(one.number for one in frozen)
        self._run.frozen_hosts.add(rank.host.number)
        for one in frozen:
            one.process.freeze()
        self._thaw_later(fault, frozen)

    def _cut(self, fault: Fault, rank: Rank, *, one_way: bool = False) -> bool:
        other = next((one for one in reversed(self._run.ranks) if one.number == fault.other), None)
        if other is None or other.host is rank.host:
            return False
        cuts = {(rank.host.number, other.host.number)}
        if not one_way:
            cuts.add((other.host.number, rank.host.number))
        self._run.network.cuts |= cuts
        self._run.network.were_cut |= cuts
        if fault.seconds < FOR_EVER:

            def heal() -> None:
                self._run.network.heal(cuts)
                self._run.moments.look()  # see who is reached again, before the next cut
                for group in self._run.groups.values():
                    group.look()

            self._run.loop.call_later(fault.seconds, heal, context=EMPTY)
        return True

    def _cut_one_way(self, fault: Fault, rank: Rank) -> bool:
        return self._cut(fault, rank, one_way=True)

    def _ctrl_c(self, fault: Fault, rank: Rank) -> None:
        """Send SIGINT as a terminal does: to the agent, and to a program that is in its process group; under ``launch``
        to all agents of the process, which pass it on."""
        self._run.asked_to_stop.add(rank.number)
        for one in self._run.ranks if self._run.plan.launched else [rank]:
            if one.process is rank.process and one.agent is not None:
                take = partial(self._take_signal, one)
                self._run.loop.call_soon(take, context=rank.process.context)
                if one.program is not None and not self._run.plan.launched:
                    one.program.later(0, partial(one.program.interrupt, signal.SIGINT))

    def _take_signal(self, rank: Rank, number: int = signal.SIGINT) -> None:
        if rank.runs and rank.agent is not None and hasattr(rank.agent, "_ending"):
            again = bool(rank.signals) and self._run.loop.now - rank.signals[0][0] > signal_handlers.ONCE_WITHIN
            has_begun = rank.agent.protocol.signals.has_begun
            rank.insists |= again and isinstance(rank.agent.rank.state, states.Working) and has_begun
            rank.signals.append((self._run.loop.now, max(self._run.line, default=0)))
            rank.agent.take_signal(number)

    def _ctrl_c_twice(self, fault: Fault, rank: Rank) -> None:
        self._ctrl_c(fault, rank)
        self._run.loop.call_later(fault.seconds, lambda: rank.runs and self._ctrl_c(fault, rank), context=EMPTY)

    def _type_twice(self, fault: Fault, rank: Rank) -> None:
        self._run.people.type_rank(fault.rank, rank.host, belongs=False)

    def _wrong_world_size(self, fault: Fault, rank: Rank) -> None:
        self._run.people.type_rank(fault.rank, rank.host, world_size=self._run.plan.ranks + 1, belongs=False)

    def _type_with(self, fault: Fault, rank: Rank | None) -> None:
        host = self._run.network.hosts[self._run.plan.hosts[fault.rank]]
        self._run.people.type_rank(fault.rank, host, belongs=False, detail=fault.detail)

    def _sigterm(self, fault: Fault, rank: Rank) -> None:
        self._run.asked_to_stop.add(rank.number)
        take = partial(self._take_signal, rank, signal.SIGTERM)
        self._run.loop.call_soon(take, context=rank.process.context)

    def _debugger(self, fault: Fault, rank: Rank) -> bool:
        program = rank.program
        if program is not None and fault.seconds < FOR_EVER:
            self._run.loop.call_later(fault.seconds, program.leave_debugger, context=EMPTY)
        return self._to_program(rank, Program.debug)

    def _no_process(self, fault: Fault, rank: Rank) -> None:
        self._run.no_process.add(rank.host.number)

    def _name(self, fault: Fault, rank: Rank | None) -> None:
        self._run.resolves = True

    def _listener(self, fault: Fault, rank: Rank | None) -> None:
        """Have another program listen at rank 0's port."""
        here = self._run.network.hosts[self._run.plan.hosts[0]]
        found = self._run.network.listen(here, here.address, PORT, None)
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
        zero = self._run.zero
        if zero is None or (coordinator := zero.coordinator) is None or zero.process.frozen:
            return False
        self._run.loop.call_soon(coordinator.recovery.shrink, context=zero.process.context)
        if not coordinator.recovery.policy.began or coordinator.roll_call.works:
            return False
        self._run.moments.shrunk |= {*coordinator.roll_call.missing}
        return True

    def _keep_dying(self, fault: Fault, rank: Rank) -> bool:
        self._run.dying[rank.number] = None if fault.kind.endswith("at work") else fault.seconds
        self._kill(fault, rank)
        return True  # if there is no worker at the moment, the next one dies

    _keep_dying_at_work = _keep_dying

    def _type_without_the_token(self, fault: Fault, rank: Rank | None) -> None:
        host = self._run.network.hosts[self._run.plan.hosts[fault.rank]]
        self._run.people.type_rank(
            fault.rank, host, belongs=False, detail=self._run.random.choice(("no token", "another token"))
        )

    def _garbage(self, fault: Fault, rank: Rank | None) -> None:
        self._stranger(b"GET / HTTP/1.1\r\n\r\n" if self._run.random.random() < 0.5 else b"\xff{}[]\n" * 9)

    def _mute_stranger(self, fault: Fault, rank: Rank | None) -> None:
        self._stranger(b"")

    def _stranger(self, sends: bytes) -> None:
        host = self._run.network.hosts[self._run.plan.hosts[0]]
        several = self._run.rank_0_address != "127.0.0.1"

        async def knock() -> None:
            with contextlib.suppress(OSError):
                address = host.address if several else "127.0.0.1"
                transport, _ = await self._run.network.connect(asyncio.Protocol, host, address, PORT)
                transport.write(sends)

        self._run.loop.call_soon(lambda: self._run.loop.create_task(knock()), context=EMPTY)
