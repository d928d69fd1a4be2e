"""A simulated worker: it loads torch for a while, opens a process group, takes steps with collectives, holds, finishes.

``SimulatedWorker`` is the agent's own ``Worker`` with what it asks of the kernel replaced; ``Program`` is the process.
"""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_manual import from_agent, from_worker, messages
from ddp_manual.agent.worker_process import Worker
from ddp_manual.errors import PeerLost, Stopped, TrainingFailed
from ddp_manual.messages import Placed
from ddp_manual.ranks_and_runs import LEAVING, Beat, LastWords, Moment, Ready
from ddp_manual.wire import encode_local
from tests.simulation.network import EMPTY

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.run import Run

# Seconds that our training takes after it has left, for example to close its trackers.
UPLOADS = 0.4
LOADING, WAITING, AT_WORK, LEFT = "loading", "waiting", "at work", "left"


class HeldState:
    """The memory of one rank, which outlives its workers."""

    def __init__(self) -> None:
        self.moment: Moment | None = None
        self.steps_done = 0
        self.descriptor, self.closed = -1, 0

    def newest(self) -> HeldState | None:
        return self if self.moment is not None else None

    def close(self) -> None:
        self.closed += 1


class Group:
    """A process group: the programs that have opened it with the same store."""

    def __init__(self, run: Run, store: tuple[str, int], size: int, generation: int) -> None:
        self.run, self.store, self.size, self.generation = run, store, size, generation
        self.members: dict[int, Program] = {}
        self.opened_by: set[Rank] = set()
        """The ranks that have opened it, also those whose process has ended since: their agents hold its state."""
        self.done: set[int] = set()
        """The ranks that have done their work."""
        self._arrived: dict[str, dict[int, tuple[Program, int, Callable[[int], None]]]] = {}
        self.broken = False
        self.newest: Moment | None = None
        """The newest state that any rank held when the state was given to all."""

    def arrive(self, program: Program, what: str, brings: int, go_on: Callable[[int], None]) -> None:
        """Take part in a collective; ``go_on`` is called with the largest number that any rank has brought."""
        program.inside = what
        here = self._arrived.setdefault(what, {})
        here[program.place["rank"]] = program, brings, go_on
        if self.broken:
            self._break(program)
        else:
            self.look()

    def look(self) -> None:
        """Complete each collective in which all ranks are, and whose messages get through."""
        run = self.run
        for what, here in [*self._arrived.items()]:
            hosts = {program.rank.host for program, _, _ in here.values()}
            if len(here) < self.size or not all(run.network.reaches(a, b) for a in hosts for b in hosts):
                continue
            del self._arrived[what]
            if what == "state":
                self.newest = run.newest_moment(self)
            largest = max(brings for _, brings, _ in here.values())
            for program, _, go_on in here.values():
                self._later(program, 0.001, 0.006, partial(program.leave, go_on, largest))

    def lose(self, program: Program) -> None:
        """Break the collectives of the others: a process has ended."""
        self.members = {rank: member for rank, member in self.members.items() if member is not program}
        if not self.broken and any(member.phase == AT_WORK for member in self.members.values()):
            self.broken = True
            for here in self._arrived.values():
                for other, _, _ in here.values():
                    if other is not program and self.run.network.both_ways(other.rank.host, program.rank.host):
                        self._break(other)

    def _break(self, program: Program) -> None:
        self._later(program, 0.0003, 0.32, program.collective_breaks)

    def _later(self, program: Program, least: float, most: float, action: Callable[[], None]) -> None:
        program.later(self.run.random.uniform(least, most), action)


class Program:
    """The process of a worker."""

    def __init__(self, run: Run, rank: Rank, held: HeldState) -> None:
        self.run, self.rank, self.held = run, rank, held
        self.pid = run.new_pid()
        self.phase, self.inside = LOADING, ""
        self.alive, self.stopped, self.hangs, self.failed, self.debugs = True, False, False, False, False
        self.place: dict[str, Any] = {}
        self.step = self.generation = 0
        self.first_step: float | None = None
        """When it had done its first step."""
        self.interrupted = 0
        self.stops_after: messages.StopAfter | None = None
        """The step of its own after which all stop."""
        self._is_asked = self._waits_for_step = self._takes_stops = False
        self.saves = self.closes_with_all = False
        """Whether it saves, since it was told to end; whether it was told to close once all had done their work."""
        self._steps_here = 0
        self._is_on_its_way_out = self._may_go = False
        self.group: Group | None = None
        self.failing: TrainingFailed | None = None
        self._stopped_with: Stopped | None = None
        self._agent: SimulatedWorker | None = None
        self._waiting: list[Callable[[], None]] = []
        run.programs[self.pid] = self
        self._beat()

    @property
    def has_stopped(self) -> bool:
        """Whether it has left in order after a step, since a signal has asked for that."""
        return self.phase == LEFT and self._stopped_with is not None

    @property
    def has_left_by_itself(self) -> bool:
        """Whether it has left because its work is done, and not because something stopped it."""
        return self.phase == LEFT and not self.saves and self._stopped_with is None

    @property
    def waits_for_its_agent(self) -> bool:
        """Whether it is on its way out, and waits until its agent lets it go."""
        return self.run.plan.script and self.alive and self._is_on_its_way_out and not self._may_go

    # -- as its kernel sees it ----------------------------------------------------------------------------------------

    def later(self, seconds: float, action: Callable[[], None]) -> None:
        def act() -> None:
            if self.stopped or self.rank.host_is_frozen:
                self._waiting.append(act)
            elif self.alive and self.rank.host.up:
                action()

        self.run.loop.call_later(seconds, act, context=EMPTY)

    def stop(self) -> None:
        self.stopped = True

    def go_on(self) -> None:
        self.stopped = False
        waiting, self._waiting = self._waiting, []
        for action in waiting:
            self.later(0, action)

    def die(self, status: int, after: float | None = None) -> None:
        """End with an exit code, or by a signal (minus its number); the agent may see that before the last message."""
        if not self.alive:
            return
        self.alive = False
        if self.group is not None:
            self.run.loop.call_later(0.0005, self.group.lose, self, context=EMPTY)
        if (agent := self._agent) is not None:
            seen = self.run.random.uniform(0.0005, 0.02)
            self.run.loop.call_later(seen, agent.process_ended, status, context=self.rank.process.context)

    def send(self, message: from_worker.FromWorker) -> None:
        if self.alive and self._agent is not None:
            context = self.rank.process.context
            self.run.loop.call_later(0.0003, self._agent.hear, encode_local(message), context=context)

    def _beat(self) -> None:
        self.later(0.5, self._beat)
        if self.phase != LOADING:
            self._say_where()

    def _say_where(self) -> None:
        begun = self._steps_here + self.inside.startswith("step")
        beat = Beat(
            phase=LEAVING if self.phase == LEFT else "training" if self.phase == AT_WORK else "joining",
            epoch=1 if self.step else 0,
            step=self.step if self._steps_here else 0,
            collectives={"0": begun} if begun else {},
            inside=bool(self.inside),
            place="train.py:12 in main" if self.inside else "train.py:10 in main",
            debugging=self.debugs,
        )
        self.send(from_worker.Doing(beat))

    # -- what its agent says ------------------------------------------------------------------------------------------

    def take(self, message: from_agent.FromAgent) -> None:
        match message:
            case from_agent.Start():
                self.send(from_worker.Born(self.pid))
                self.later(
                    self.run.random.uniform(*self.run.plan.loads), partial(self._is_ready, message.store_address)
                )
            case from_agent.TakePlace() if self.phase == WAITING:
                self._begin(message.placed)
            case messages.AskStep():
                self._is_asked = True
                self.send(messages.StepsDone(self._steps_here))
            case messages.StopAfter():
                self.stops_after = message
                if self._waits_for_step:
                    self._waits_for_step = False
                    self._after_a_step()
            case messages.Close():
                all_are_done = self.group is not None and len(self.group.done) == self.group.size
                self.closes_with_all = all_are_done and self.run.moments.all_are_known_to_be_done
                if not self.run.plan.script:
                    self.later(self.run.random.uniform(*self.run.plan.closes), self._wait_to_go)
            case from_agent.Over():
                self._may_go = True
                if self._is_on_its_way_out:
                    self._end()
            case from_agent.BeQuiet():
                self.later(0.001, lambda: self.send(from_worker.IsQuiet()))
            case from_agent.BeforeTheEnd():
                self.later(0.02, lambda: self.send(from_worker.MayEnd()))

    def _is_ready(self, store: str | None) -> None:
        self.phase = WAITING
        ready = Ready(
            pid=self.pid,
            device="cpu",
            backend="gloo",
            gpus=[],
            versions={"torch": "2.15"},
            options={},
            store=(store, self.pid) if store is not None else None,
        )
        self.send(from_worker.Loaded(ready))

    def _begin(self, placed: Placed) -> None:
        self.place, self.generation, key = asdict(placed.place), placed.generation, placed.store
        if (group := self.run.groups.get(key)) is None:
            group = self.run.groups[key] = Group(self.run, key, self.place["world_size"], self.generation)
        self.run.check_group(group, self)
        self.group = group
        group.members[self.place["rank"]] = self
        group.opened_by.add(self.rank)
        self.send(from_worker.ProgramBegins())
        if not self.run.plan.script:
            self.send(from_worker.Joins())
        self.phase = AT_WORK
        holder = self.run.programs_by_store(key)
        if holder is None or not holder.alive:  # torch's store is gone
            self.later(0.2, self.collective_breaks)
            return
        own = self.held.moment.step if placed.state_from == self.place["rank"] and self.held.moment is not None else 0
        group.arrive(self, "open", 0, lambda _: group.arrive(self, "state", own, self._go_on_from))

    def _go_on_from(self, step: int) -> None:
        self.run.check_beginning(self, step)
        self.step = step
        if not self.run.plan.script:
            self._takes_stops = True
            self.send(from_worker.HandlesSignals(from_worker.Handling.WITH_ALL))
        self._say_where()
        self._work()

    # -- its work -----------------------------------------------------------------------------------------------------

    def _work(self) -> None:
        if self.step >= self.run.plan.steps:
            works_on = self.run.plan.works_on if self.rank.number else 0.0  # after its last collective, by itself
            self.later(self.run.random.uniform(0, works_on), self._end_work) if works_on else self._finish(None)
        elif not self.hangs:
            self.inside = ""
            self.later(self.run.plan.step_seconds * self.run.random.uniform(0.8, 1.2), self._meet)

    def _meet(self) -> None:
        if self.hangs:
            return
        if self.failing is not None:
            self.fail(self.failing)
            return
        assert self.group is not None
        self.group.arrive(self, f"step {self.step + 1}", 0, self._stepped)

    def leave(self, go_on: Callable[[int], None], brought: int) -> None:
        """Come out of a collective, and react to a signal that has come meanwhile."""
        self.inside = ""
        if self.interrupted:
            self._fail(LastWords.of(Stopped(self.interrupted)), broken=False)
        else:
            go_on(brought)

    def _stepped(self, _: int) -> None:
        self.step += 1
        self._steps_here += 1
        self.first_step = self.run.loop.now if self.first_step is None else self.first_step
        self.run.check_step(self)
        self.held.steps_done = self.step
        if self.run.plan.on_loss != "leave" and self.step % self.run.plan.hold_every == 0:
            self.held.moment = Moment(self.generation, self.step)
        self._after_a_step()

    def _after_a_step(self) -> None:
        """Stop with all ranks if a signal has asked for it; a program asked for its step waits for the answer."""
        stop = self.stops_after
        if stop is None and self._is_asked and not self.run.plan.script:
            self._waits_for_step = True
        elif stop is not None and not self.run.plan.script and self._steps_here >= stop.step:
            self._finish(Stopped(stop.number, f"after step {self.step}", why="rank 0 has saved a checkpoint"))
        else:
            self._work()

    def _end_work(self) -> None:
        if self.failing is not None:
            self.fail(self.failing)
        elif not (self.hangs or self.failed):
            self._finish(None)

    def _finish(self, stopped: Stopped | None) -> None:
        self.phase, self._stopped_with, self.inside = LEFT, stopped, ""
        if self.group is not None and not self.saves:
            self.group.done.add(self.place["rank"])
        self.run.note_finished(self)
        if not self.run.plan.script:
            self.send(from_worker.HandlesSignals(from_worker.Handling.DONE))
        self._say_where()
        self.later(0.01, lambda: self.send(messages.Finished()))
        if self.run.plan.script:
            self.later(0.011, self._wait_to_go) if self.rank.number == 0 else self.later(0.02, partial(self.die, 0))

    def _wait_to_go(self) -> None:
        """Wait on the way out on rank 0 until its agent says that nobody needs torch's store any more."""
        self._is_on_its_way_out = True
        self.send(from_worker.Left())
        if not self.run.plan.script:
            self.send(from_worker.HandlesSignals(from_worker.Handling.BY_ITSELF))
            stopped = self._stopped_with
            self.send(from_worker.Result({}, LastWords.of(stopped) if stopped else None))
        if self._may_go or self.rank.number:
            self._end()

    def _end(self) -> None:
        self.later(0.01 if self.run.plan.script else UPLOADS, partial(self.die, 0))

    def collective_breaks(self) -> None:
        if self.interrupted:
            self.leave(lambda _: None, 0)
        elif self.phase == AT_WORK and not self.saves:
            error = PeerLost(
                f"rank {self.rank.number} lost its connection to another rank",
                why="Connection closed",
                next="look for it",
            )
            self._fail(LastWords.of(error), broken=True)

    def fail(self, error: TrainingFailed) -> None:
        self._fail(LastWords.of(error), broken=False)

    def debug(self) -> None:
        """Come to a breakpoint."""
        self.hangs = self.debugs = True

    def leave_debugger(self) -> None:
        """Go on, as a person has typed ``continue``."""
        self.hangs = self.debugs = False
        if self.phase == AT_WORK and not self.inside:
            self._work()

    def interrupt(self, number: int) -> None:
        """Get a signal that asks to stop: a program without a handler ends, another one saves and leaves in order."""
        if not self.alive:
            return
        if not self.run.plan.script:
            self._interrupt_training(number)
        elif number == signal.SIGINT:
            if self.inside:
                self.interrupted = number
            elif self.phase == AT_WORK:
                self.later(0.01, lambda: self._fail(LastWords.of(Stopped(number)), broken=False))
        elif not self.run.plan.saves or self.phase in (LOADING, WAITING):
            self.die(-number)
        elif self.phase == AT_WORK and not self.saves:
            self.saves = self.hangs = True
            self.later(self.run.plan.saves, partial(self._finish, None))

    def _interrupt_training(self, number: int) -> None:
        """Get a signal as our training does: once it takes stops it tells its agent."""
        if self._takes_stops:
            self.send(from_worker.Signalled(number))
        elif self.phase == AT_WORK and number == signal.SIGINT:
            self.later(0.01, lambda: self._fail(LastWords.of(Stopped(number)), broken=False))
        elif self.phase == AT_WORK:
            self.die(-number)

    def _fail(self, words: LastWords, *, broken: bool) -> None:
        if self.failed:
            return
        self.failed = True
        self.later(0.05, lambda: self.die(1))
        self.hangs, self.inside = True, ""
        self.send(from_worker.Failed(words, broken=broken, in_a_collective=broken, place="train.py:12 in main"))
        if self._takes_stops:
            self._takes_stops = False
            self.send(from_worker.HandlesSignals(from_worker.Handling.BY_ITSELF))


class SimulatedWorker(Worker):
    """What the agent knows of a worker, without a kernel."""

    def __init__(self, program: Program) -> None:
        self._program = program
        super().__init__(program.pid, None, -1)  # type: ignore[arg-type]

    async def attach(self, take: Callable[[from_worker.FromWorker], None], gone: Callable[[], None]) -> None:
        self._take_message, self._gone = take, gone
        self._program._agent = self

    def hear(self, line: bytes) -> None:
        if not self.closed:
            self._take(from_worker.read(line.decode()), self._take_message)

    def process_ended(self, status: int) -> None:
        self.status, self.ended = status, True
        if not self.closed:
            self._gone()

    @property
    def is_gone(self) -> bool:
        return self.ended

    def send(self, message: from_agent.FromAgent) -> None:
        program, line = self._program, encode_local(message)
        if isinstance(message, from_agent.TakePlace):
            program.rank.worked_since = min(program.rank.worked_since, program.run.loop.now)
        if program.alive:
            program.later(0.0003, lambda: program.take(from_agent.read(line.decode())))

    def signal(self, number: int) -> None:
        if self.ended or not self._program.alive:
            return
        if number == signal.SIGKILL:
            self._program.run.check_kill(self._program)
            self._program.die(-signal.SIGKILL)
        elif number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
            self._program.later(0.001, lambda: self._program.interrupt(number))

    def stopped_by(self) -> str:
        return "SIGSTOP" if self._program.stopped else ""

    async def stack(self) -> str:
        if self.stopped_by():
            return "its worker is stopped: SIGSTOP"
        await asyncio.sleep(0.15)
        return 'File "train.py", line 10, in main'

    def close(self) -> None:
        self.closed = True
