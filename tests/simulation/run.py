"""One simulated run of a plan: what its people see, and which invariants it breaks."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import random
import signal
from functools import partial

from ddp_manual.protocol import states
from ddp_manual.ranks_and_runs import Moment
from ddp_manual.text_wrapping import wrapped
from tests.simulation.faults import Faults
from tests.simulation.moments import Moments
from tests.simulation.network import EMPTY, Network
from tests.simulation.operating_system import patched
from tests.simulation.people import COLUMNS, People
from tests.simulation.plan import FOR_EVER, Fault, Plan
from tests.simulation.rank import Rank
from tests.simulation.virtual_time import VirtualLoop
from tests.simulation.worker import Group, Program

# The invariants that are checked when the run is over.
AT_THE_END = (1, 2, 3, 7, 9, 12, 15, 16, 17, 19, 20)


def on_screen(line: str) -> str:
    """Return a rank's line as a terminal shows it, without the rank in front."""
    return wrapped(line, COLUMNS).partition("] ")[2]


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
        self.people, self.faults = People(self), Faults(self)
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
        self.began: float | None = None
        """When the first rank began to work."""
        self.finished: dict[int, float] = {}
        """Rank -> when its work was done for the first time."""
        self.line: dict[int, int] = {}
        """Step -> the generation that was the last to do it."""
        self.moments = Moments(self)
        self.dying: dict[int, float | None] = {}
        """Rank -> how many seconds after its start each of its workers dies; None: as soon as it begins to work."""
        self._pids = itertools.count(1000)
        self.asked_to_stop: set[int] = set()

    def new_pid(self) -> int:
        return next(self._pids)

    @property
    def rank_0_address(self) -> str:
        """What is typed as --master_addr."""
        host = self.network.hosts[self.plan.hosts[0]]
        if self.plan.by_name:
            return host.name
        return host.address if len(set(self.plan.hosts)) > 1 or self.plan.moves else "127.0.0.1"

    @property
    def zero(self) -> Rank | None:
        """The process that is rank 0, if it runs."""
        return next((one for one in reversed(self.ranks) if one.number == 0 and one.belongs and one.runs), None)

    def of_process(self, rank: Rank) -> list[Rank]:
        """Return the ranks whose agents live in one process with that of this rank, as under ``launch``."""
        return [one for one in self.ranks if one.process is rank.process]

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
            self.moments.miss_anew()
        if group.generation != program.generation or group.size != program.place["world_size"]:
            self.break_invariant(5, f"{program.rank.who} joins a group of another generation")
        here = {member.rank.number for member in group.members.values()}
        if not here:  # steps of a generation are done again if no rank that has been in it lives, or was done
            alive = [rank for rank in self.ranks if (rank.runs and self.moments.counts(rank)) or rank.exit_code == 0]
            known = max((rank.generation for rank in alive), default=-1)
            self.line = {step: generation for step, generation in self.line.items() if generation <= known}
        if program.generation <= program.rank.generation:
            self.break_invariant(5, f"{program.rank.who} begins generation {program.generation} once more")
        all_are_back = not here and group.size == self.plan.ranks and self._is_newest(group)
        for rank in self.ranks if all_are_back else [program.rank]:
            self.moments.comes_back(rank)
        program.rank.generation = program.generation
        if program.rank.number in here:
            self.break_invariant(4, f"{program.rank.who} works beside another process of the same seat")
        if len(here) + 1 == group.size:
            self.moments.grouped({*here, program.rank.number})
        if program.rank.number in self.dying and self.dying[program.rank.number] is None:
            program.later(0.0, partial(program.die, -signal.SIGKILL))

    def _is_newest(self, group: Group) -> bool:
        return all(other.generation <= group.generation for other in self.groups.values())

    def newest_moment(self, group: Group) -> Moment | None:
        """Return the newest moment that a living rank holds; while all stop, only ranks of this group count."""
        ranks = {rank for rank in group.opened_by if rank.runs}
        if not any(rank.signals for rank in self.ranks):
            ranks |= {*self.moments.living_holders()}
        return max((rank.held.moment for rank in ranks if rank.held and rank.held.moment), default=None)

    def check_beginning(self, program: Program, step: int) -> None:
        """Check that the run goes on from the newest moment that a living holder had when the state was given out."""
        group = program.group
        assert group is not None
        newest = group.newest
        if step != (newest.step if newest else 0) and self._is_newest(group):  # a cut may have held an older one up
            self.break_invariant(6, f"{program.rank.who} goes on from step {step}, {newest} is held")

    def check_kill(self, program: Program) -> None:
        """Check that a program which waits on its way out is told to go, and not killed, if its rank goes on or no
        other rank is left."""
        rank = program.rank
        others = [other for other in self.ranks if other is not rank and other.belongs]
        is_last = all(other.ended is not None for other in others) and self.network.all_has_come
        goes_on = rank.agent is not None and not isinstance(rank.agent.rank.state, states.Ended)
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
        if alive:  # otherwise this program is behind
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
        shown = ((at, who, on_screen(line) if line.startswith("[rank ") else line) for at, who, line in self.said)
        lines = ((f"{at:8.{digits}f}", who, line.replace("\n", f"\n{'':9}")) for at, who, line in shown)
        return "\n".join(f"{at} {who}: {line}" if who else f"{at} {line}" for at, who, line in lines)

    def carry_out(self) -> None:
        """Run until all agents have ended, or the plan's limit has passed."""
        with patched(self), contextlib.closing(self.loop):
            for number, at in enumerate(self.plan.typed):
                if at >= FOR_EVER:
                    continue
                node = self.plan.hosts[number]
                if not self.plan.launched:
                    self.loop.call_at(at, self.people.type_rank, number, self.network.hosts[node], context=EMPTY)
                elif node not in self.plan.hosts[:number]:
                    self.loop.call_at(at, self.people.launch, node, context=EMPTY)
            for number, fault in enumerate(self.plan.faults):
                if not fault.after:
                    self.loop.call_at(fault.at, self.faults.take_turn, number, context=EMPTY)
                elif number == 0:
                    self.faults.wait_for(number)
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
        for_ever = [fault for _, fault in self.struck if fault.seconds == FOR_EVER]
        beside = {one.number for one in self.of_process(rank)}
        stopped = any(fault.kind == "freeze agent" and fault.rank in beside for fault in for_ever)
        frozen = rank.host_is_frozen and any(fault.kind == "freeze host" for fault in for_ever)
        return rank.process.frozen and (stopped or frozen)
