"""The invariants, by their numbers, that are checked at every moment of a simulated run.

``Moments.look`` is called every half second of a run, ``watched`` looks at each message. They compare what the
kernels, programs and people of the run know with what rank 0's coordinator takes for true.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any
from unittest import mock

from ddp_manual.messages import OfWorker
from ddp_manual.protocol import states
from ddp_manual.protocol.agent import LEAVE_TIMEOUT
from ddp_manual.protocol.coordinator import CoordinatorProtocol
from ddp_manual.protocol.handshakes import Peer
from ddp_manual.protocol.recovery import LOST_ITS_SEAT
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.protocol.wait_or_shrink import SURVIVORS_WITHIN
from tests.simulation.plan import OF_LINKS, SILENT
from tests.simulation.virtual_time import EPOCH
from tests.simulation.worker import AT_WORK, LEFT, Program, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.rank import Rank
    from tests.simulation.run import Run

# Seconds in which rank 0 checks its ranks again, TCP tries again after a cut, and ``look`` is called again.
SLACK = 2.5
# Seconds until rank 0 has heard that a rank which was lost works again.
SAID_WITHIN = 1.0
# Workers that an agent may start before a step is done, or a person starts another rank 0: so often can a rank come
# back and die within a time-out.
MOST_WORKERS = 30
# Seconds within which a rank that has lost rank 0 has found another one, if it is not cut off.
COMES_BACK_WITHIN = 16.0


class Moments:
    """What is remembered of a run from one ``look`` to the next."""

    def __init__(self, run: Run) -> None:
        self.run = run
        self.unheard_since: dict[Rank, float] = {}
        """Rank -> since when rank 0 can hear nothing of its process: it has ended, is frozen, or is cut off."""
        self.heard_since: dict[Rank, float] = {}
        self.shrunk: set[int] = set()
        """The ranks that an order to go on without them has left out, and that have not worked since."""
        self.worked: dict[int, float] = {}
        """Rank -> when it last did a step of which rank 0 has heard."""
        self.workers: Counter[Rank] = Counter()
        """How many workers each agent has started since the run last did a new step."""
        self.done_at: dict[Program, float] = {}
        """When the work of a program was done."""
        self._looked = 0.0
        self.miss_anew()
        self._cut_off: set[Rank] = set()
        self._counts_for: tuple[Rank | None, bool] = None, False

    def look(self) -> None:
        now, run, zero = self.run.loop.now, self.run, self.run.zero
        passed, self._looked = now - self._looked, now
        can_judge = zero is not None and not zero.process.frozen and zero.host.up
        for rank in run.ranks:
            reaches = zero is None or run.network.reaches(rank.host, zero.host)
            if zero is not None and not (rank.runs and run.network.both_ways(rank.host, zero.host)):
                self.heard_since.pop(rank, None)
            if not reaches:
                self._cut_off.add(rank)
            elif rank in self._cut_off:  # messages that were on their way come now
                self._cut_off.remove(rank)
                self.unheard_since.pop(rank, None)
            if rank.runs and not rank.process.frozen and reaches:
                self.unheard_since.pop(rank, None)
                self.heard_since.setdefault(rank, now)
            else:
                self.heard_since.pop(rank, None)
                self.unheard_since[rank] = self.unheard_since.get(rank, now) if can_judge else now
        coordinator = zero.coordinator if zero is not None else None
        counts_for = zero, coordinator is not None and coordinator.recovery.policy.adopted
        if counts_for != self._counts_for or not can_judge:
            self._counts_for = counts_for
            self.miss_anew()  # also as it takes over the run of another rank 0
        if can_judge and zero is not None:
            if coordinator is not None and not zero.errors and coordinator.failure is None:
                self._seats_can_be_taken(coordinator)
            self._the_wait_ends(zero, passed)
        elif zero is None:
            self._store_is_kept()

    def miss_anew(self) -> None:
        """Count anew which ranks are missed, and for how long."""
        self._missed: set[int] = set()
        self._missing_for = 0.0

    def comes_back(self, rank: Rank) -> None:
        """Note that a process which has worked before works again: if it is lost once more, all wait for it anew."""
        if rank.runs and rank.belongs and rank.generation >= 0:
            self._missed.discard(rank.number)

    def hears(self, rank: Rank) -> None:
        """Note that a rank has just been told something: it is heard, if only for a moment."""
        if not rank.process.frozen:
            self.unheard_since.pop(rank, None)

    @property
    def all_are_known_to_be_done(self) -> bool:
        """Whether rank 0 has heard that all have done their work."""
        coordinator = next(filter(None, (one.coordinator for one in reversed(self.run.ranks) if one.runs)), None)
        return coordinator is not None and coordinator.recovery.watch.health.all_finished

    # -- 8, 11, 13: as time goes by -----------------------------------------------------------------------------------

    def _seats_can_be_taken(self, coordinator: CoordinatorProtocol) -> None:
        """8: rank 0 gives up the seat of a process whose connection ends, at once, or that is silent for too long."""
        for number, member in coordinator.roll_call.members.items():
            peer, holder = coordinator.recovery.peers.get(number), self.run.programs.get(member.info.pid)
            work_is_done = number in coordinator.recovery.watch.health.finished
            if number == 0 or holder is None or work_is_done or (peer is not None and peer.left):
                continue
            since = self.unheard_since.get(holder.rank)
            said_so = peer is None and not coordinator.roll_call.is_over
            patience = SLACK if said_so else coordinator.run.silent_after + SLACK
            if since is not None and self.run.loop.now - since > patience:
                self.run.break_invariant(8, f"the seat of rank {number} is kept for a process that is dead or silent")

    def _the_wait_ends(self, zero: Rank, passed: float) -> None:
        """11: a rank that comes and goes does not make the others wait longer for one that is missing."""
        run, plan = self.run, self.run.plan
        heard = {rank.number for rank in run.ranks if rank.has_seat and rank not in self.unheard_since} | self.shrunk
        if run.finished or zero.errors or plan.on_loss == "shrink" or any(rank.signals for rank in run.ranks):
            return
        if any(rank.program is not None and rank.program.stopped for rank in run.ranks):
            return  # if it is loading torch, all ranks wait longer: LOAD_WITHIN
        missing = {*range(plan.ranks)} - heard
        if missing - self._missed:  # the seat of a newly lost rank is kept for the whole time
            self._missed |= missing
            self._missing_for = 0.0
        if missing:
            self._missing_for += passed
        waits = plan.join_timeout if run.began is None else plan.rejoin_timeout
        waits += (plan.peer_timeout + 1) * max(1, sum(fault.kind in SILENT for _, fault in run.struck))
        if self._missing_for > waits + plan.loads[1] + 3 * plan.step_seconds + SLACK:
            run.break_invariant(11, f"{zero.who} waits on for ranks that have been missing for too long")
            self.miss_anew()

    def _store_is_kept(self) -> None:
        """13: once its work is done, rank 0's worker keeps torch's store for the ranks that still work."""
        for program in self.run.programs.values():
            if program.phase != AT_WORK or not program.alive or program.group is None or program.rank.errors:
                continue
            holder = self.run.programs_by_store(program.group.store)
            if holder is None or holder.alive or holder.phase != LEFT or holder.rank.exit_code != 0 or holder.saves:
                continue  # a worker that failed or was told to end need not keep it
            left, limit = holder.rank.ended or 0.0, math.inf if self.run.plan.script else LEAVE_TIMEOUT
            late = self.run.loop.now - left > SLACK and left - self.done_at[holder] < limit
            if late and program.rank not in self.unheard_since:
                self.run.break_invariant(13, f"{program.rank.who} works, and rank 0 has left with torch's store")

    def started(self, rank: Rank) -> None:
        """11: an agent does not start more than MOST_WORKERS workers without a new step or rank 0."""
        self.workers[rank] += 1
        if self.workers[rank] > MOST_WORKERS:
            self.run.break_invariant(11, f"{rank.who} starts {self.workers[rank]} workers without a step in between")

    def stepped(self, program: Program) -> None:
        """Note that a program has done a step with all others."""
        if program.step not in self.run.line:
            self.workers.clear()
        self.miss_anew()
        now = self.run.loop.now
        is_known = program.generation == 0 or now - (program.first_step or now) > SAID_WITHIN
        if is_known and not program.rank.process.frozen:  # the worker of a stopped agent may work on
            self.worked[program.rank.number] = now
            self.shrunk.discard(program.rank.number)  # until rank 0 has heard of it, the others may go on without it

    # -- 6: from where the run goes on --------------------------------------------------------------------------------

    def living_holders(self) -> list[Rank]:
        """Return the ranks that hold a state and that rank 0 could hear long enough for them to have found it."""
        return [
            rank
            for rank, since in self.heard_since.items()
            if rank not in self.unheard_since
            and rank.held is not None
            and rank.runs
            and not rank.errors
            and self._looked - since > COMES_BACK_WITHIN
        ]

    # -- 10: who is left out ------------------------------------------------------------------------------------------

    def grouped(self, here: set[int]) -> None:
        """10: if ranks work without others, those were left out by order or after their time was up, and none of those
        is on its way to a new rank 0."""
        plan, left_out = self.run.plan, set(range(self.run.plan.ranks)) - here - self.shrunk
        if late := left_out & self._on_their_way():
            self.run.break_invariant(10, f"ranks {sorted(late)} are left out, which are on their way to the new rank 0")
        waited = self.run.loop.now - max((self.worked.get(rank, 0.0) for rank in left_out), default=0.0)
        if plan.on_loss == "shrink" or waited >= min(plan.rejoin_timeout, plan.shrink_after or math.inf):
            self.shrunk |= left_out
        elif left_out and not any(rank.signals and self.counts(rank) for rank in self.run.ranks):
            self.run.break_invariant(10, f"ranks {sorted(left_out)} are left out, which nobody has ordered")

    def _on_their_way(self) -> set[int]:
        """Return the ranks that have worked under another rank 0 and that the new rank 0 still has to await, even if
        they are frozen; none once a signal has asked to stop."""
        run, zero = self.run, self.run.zero
        if zero is None or run.began is None or zero.typed < run.began or any(rank.signals for rank in run.ranks):
            return set()
        until = zero.typed + min(run.plan.peer_timeout + 1 + SURVIVORS_WITHIN, run.plan.rejoin_timeout)
        cut = any(fault.kind in OF_LINKS and at + fault.seconds > zero.typed for at, fault in run.struck)
        if run.loop.now > until or cut:
            return set()
        return {
            rank.number
            for rank in run.ranks
            if rank.belongs
            and rank.generation >= 0
            # A rank that ends tells all others, and its new process may be lost too.
            and not (rank.errors or not rank.runs or rank.leaves)
            and rank.agent is not None
            and (state := type(rank.agent.rank.state)) in (states.Looking, states.Working)
            # It was back, and is lost again: the others are told, before the rank itself is.
            and not (self._has_been_with(zero, rank) and (state is states.Working or self._lost_its_seat(rank)))
        }

    @staticmethod
    def _has_been_with(zero: Rank, rank: Rank) -> bool:
        """Return whether this rank 0 has admitted a rank."""
        run = rank.agent.rank.run if rank.agent is not None else None
        return run is not None and run.since >= EPOCH + zero.typed

    @staticmethod
    def _lost_its_seat(rank: Rank) -> bool:
        """Return whether rank 0 has told a rank that looks for it now that it has given the rank up."""
        so_far = rank.agent.rank.so_far if rank.agent is not None else None
        return so_far is not None and so_far.lost == LOST_ITS_SEAT

    def counts(self, rank: Rank) -> bool:
        """Return whether rank 0 still counts on a process, as far as it can know."""
        unheard = self.run.loop.now - self.unheard_since.get(rank, self.run.loop.now)
        said_so = not rank.runs and rank.host.up
        return unheard <= (0.0 if said_so else self.run.plan.peer_timeout + 1) + SLACK


# -- 14, 18: what a message changes -----------------------------------------------------------------------------------


def decided(coordinator: CoordinatorProtocol) -> tuple[Any, ...]:
    """Return what a coordinator has decided, and what it knows of its ranks' work."""
    roll_call, policy, watch = coordinator.roll_call, coordinator.recovery.policy, coordinator.recovery.watch
    members = {rank: (member.info.pid, member.ready is not None) for rank, member in roll_call.members.items()}
    run = roll_call.works, members, {*roll_call.left_out}, {*roll_call.stopping}, roll_call.is_over
    run = *run, policy.generation, {**policy.held}, {*policy.lost}
    return *run, coordinator.failure, {*watch.end_of_work.lost}, {*watch.health.finished}


def believed(agent: Any) -> tuple[Any, ...]:
    """Return what an agent has taken from its worker."""
    work, has_begun = agent.rank.work, agent.protocol.signals.has_begun
    return work.own_words, work.result, work.ready, has_begun, type(agent.rank.state)


@contextmanager
def watched(run: Run) -> Iterator[None]:
    """Check that messages of old workers, and messages without the token, change nothing."""
    take, hear, enter = CoordinatorProtocol.take, SimulatedWorker.hear, ThisRank.enter
    works: dict[SimulatedWorker, Any] = {}
    """Worker -> the record of its work that its agent had when the worker was first heard."""

    def unchanged(number: int, what: str, now: Callable[[], Any], act: Callable[[], None]) -> None:
        before = now()
        act()
        if now() != before:
            run.break_invariant(number, f"{what} changes something: {before} is {now()} now")

    def take_watched(coordinator: CoordinatorProtocol, peer: Peer, message: Any, now: float) -> None:
        def act() -> None:
            take(coordinator, peer, message, now)

        sender = _sender(peer) if peer.rank is None else None
        if sender is not None and not sender.has_token:
            unchanged(18, f"a message of {sender.who} without the token", lambda: decided(coordinator), act)
        elif isinstance(message, OfWorker) and (peer.rank is None or message.worker != peer.worker):
            what = f"a message of rank {peer.rank}'s old worker, {message},"
            unchanged(14, what, lambda: decided(coordinator), act)
        else:
            act()

    def hear_watched(worker: SimulatedWorker, message: Any) -> None:
        agent = worker._program.rank.agent
        work = agent.rank.work if agent is not None and not worker.closed else None
        if work is not works.setdefault(worker, work):
            what = f"what an old worker of {worker._program.rank.who} says"
            unchanged(14, what, lambda: believed(agent), lambda: hear(worker, message))
        else:
            hear(worker, message)

    def enter_watched(own: ThisRank, state: states.State) -> None:
        enter(own, state)
        run.faults.comes_to_another_state(own)

    def _sender(peer: Peer) -> Rank | None:
        transport: Any = peer.connection._transport
        process = transport.out.receiver.process
        return next((rank for rank in run.ranks if rank.process is process), None)

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(CoordinatorProtocol, "take", take_watched))
        stack.enter_context(mock.patch.object(SimulatedWorker, "hear", hear_watched))
        stack.enter_context(mock.patch.object(ThisRank, "enter", enter_watched))
        yield
