"""The roll call on rank 0: which ranks are here, were refused, or are missing.

A rank is *here* once rank 0 has admitted its agent, and *ready* once its worker has torch and a device. The roll call
is complete when all ranks are both. A rank is gone when its connection ends. Times are seconds of rank 0's monotonic
clock, which is passed in.

torch's own ``wait_for_workers`` is not used: it counts connections, so a rank that was started twice fills two places.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from msgspec.structs import replace

from ddp_manual.errors import DdpManualError
from ddp_manual.messages import News
from ddp_manual.protocol import admission
from ddp_manual.protocol.compatibility import SAID_ALIKE, mismatch_when_ready
from ddp_manual.protocol.gpus_of_ranks import more_ranks_than_gpus, shared_gpu
from ddp_manual.protocol.places import assign_places
from ddp_manual.protocol.run_states import Gathering, Member, Over, Working
from ddp_manual.protocol.seat_states import BEGUN_ANEW, GIVEN_UP, LEFT_OUT, LOADED, TAKEN, Seat
from ddp_manual.ranks_and_runs import Place, RankInfo, Ready, RunInfo
from ddp_manual.wording import MOST_RANGES, as_ranges, in_words

MOST_NAMED = 16
# Processes whose refusal all ranks are told, within so many seconds: strangers could otherwise fill every terminal.
MOST_REFUSALS = 16
REFUSALS_WITHIN = 60.0


class RollCall:
    """The roll call of one run.

    Args:
        rank_0: what the other ranks are compared with.
        within: seconds from ``now`` until all ranks must have joined.
        stopped: returns which signal has stopped the agent of the worker with this pid on rank 0's host; "" if none.
    """

    def __init__(
        self, run: RunInfo, rank_0: RankInfo, now: float, within: float, stopped: Callable[[int], str] = lambda pid: ""
    ) -> None:
        self.run = run
        self._stopped = stopped
        self.rank_0 = rank_0
        self.state: Gathering | Working | Over = Gathering(now, within)
        self.members: dict[int, Member] = {}
        self.stopping: set[int] = set()
        """The ranks that were asked to stop the run."""
        self.changed = False
        """Whether there is news since the caller last set this to False."""
        self.refused: deque[str] = deque(maxlen=MOST_NAMED)
        self.gone: deque[str] = deque(maxlen=MOST_NAMED)
        self.warnings: deque[str] = deque(maxlen=MOST_NAMED)
        self._seats = [Seat.EMPTY] * run.world_size
        self._counts = Counter(self._seats)
        self._ready_on: dict[str, set[int]] = {}
        """Host -> its ranks that are ready."""
        self._hosts_of_gpu: dict[str, set[str]] = {}
        self._refusals, self._refusals_since = 0, -REFUSALS_WITHIN

    # -- what happens -------------------------------------------------------------------------------------------

    def admit(
        self, info: RankInfo, now: float, since: float, wall_clock: float, *, false_rank_0: bool = False
    ) -> DdpManualError | bool:
        """Admit a process as a rank, or refuse it, or let it wait.

        Args:
            since: when the process came. If another process holds its rank, the decision waits until that process was
                heard from, is gone, or is known to be frozen.
            wall_clock: seconds since the epoch.
            false_rank_0: whether it wants to be rank 0, and is not rank 0's own agent.

        Returns:
            True: it is a rank now. False: undecided; call this again. An error: why it is refused.
        """
        decision, warnings = admission.decide(self, info, now, since, wall_clock, false_rank_0=false_rank_0)
        if isinstance(decision, DdpManualError):
            self.refuse(info.who, decision, now)
        if decision is not True:
            return decision
        self.members[info.rank] = Member(_without_copies(info, self.rank_0), now)
        if info.goes_on and isinstance(self.state, Gathering):  # it may be the only rank with the state
            self._become(info.rank, Seat.LOADING)
        else:
            self._follow(info.rank, TAKEN)
        self.warnings += warnings
        self.changed = True
        return True

    def refuse(self, who: str, error: DdpManualError, now: float) -> None:
        """Note for the news that a process was refused; of very many in a short time only the first are named."""
        if now - self._refusals_since >= REFUSALS_WITHIN:
            self._refusals, self._refusals_since = 0, now
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            return
        more = f"; more that are refused within {REFUSALS_WITHIN:.0f} s are not named"
        also = more if self._refusals == MOST_REFUSALS else ""
        what = error.what.replace(f"{who} ", "it ", 1)
        self.refused.append(f"{who} was refused: {error.identifier}: {what}{also}")
        self.changed = True

    def hear(self, rank: int, now: float) -> None:
        self.members[rank].heard = now

    def get_ready(self, rank: int, ready: Ready) -> list[tuple[int, DdpManualError]]:
        """Note what a rank knows now that it has loaded torch.

        Returns:
            The ranks that are refused, because they do not belong with rank 0 now that both know their devices.
        """
        member = self.members[rank]
        member.ready = ready
        self.changed = True
        self._follow(rank, LOADED)
        if member.info.pid != ready.pid:  # ``launch`` knows a worker's pid only now
            member.info = replace(member.info, pid=ready.pid)
        if rank == 0:
            self.run = replace(self.run, pid=ready.pid)
        refused: list[tuple[int, DdpManualError]] = []
        self._ready_on.setdefault(member.info.host_id, set()).add(rank)
        for uuid in ready.gpus:
            self._hosts_of_gpu.setdefault(uuid, set()).add(member.info.host_id)
        if rank != 0 and (taken := self._shared_with_an_earlier_rank(member)) is not None:
            self.refuse(member.info.who, taken, member.heard)
            return [(rank, taken)]
        first = self.members.get(0)
        if first is None or first.ready is None:
            return []
        for other in self.members.values() if rank == 0 else [member]:
            if other.ready is not None:
                error = mismatch_when_ready(other.info, other.ready, first.info, first.ready, self.run)
                if error is not None:
                    self.refuse(other.info.who, error, member.heard)
                    refused.append((other.info.rank, error))
        return refused

    def leave_gpus(self) -> str | None:
        """Have all ranks, which are ready, train on the CPU if a host has more ranks than GPUs and nobody has chosen
        the GPUs; return why, otherwise None."""
        why = more_ranks_than_gpus(self._pairs())
        for member in [self.members[rank] for rank in self._awaited] if why else ():
            assert member.ready is not None
            member.ready = replace(member.ready, device="cpu", backend="gloo", gpus=[])
        return why

    def complete(self, now: float) -> None:
        """Have all ranks that are not left out go on together."""
        assert isinstance(self.state, Gathering)
        self.state = Working(self.state.missing_for(now))
        self.refused.clear()
        for rank in self.ranks(Seat.READY):
            self._become(rank, Seat.WORKING)
            self.members[rank].has_worked = True

    def begin_again(self, ranks: Collection[int], now: float, within: float) -> None:
        """Begin anew with other workers of ``ranks``, which are here; make the others that have worked missing."""
        self.state = Gathering(now, within)
        self.gone.clear()
        for rank in self.have_worked - {*ranks}:
            self.leave(rank)
        self._await_those_left_out_to_stop()
        self.forget_workers(ranks)

    def wait_anew(self, now: float, within: float) -> None:
        """Give the ranks that are missing so many seconds from now."""
        assert isinstance(self.state, Gathering)
        self.state = Gathering(now, within, probes=self.state.probes)

    def end(self) -> None:
        """Admit nobody any more: rank 0 leaves."""
        if not isinstance(self.state, Over):
            self.state = Over(self.state)

    def leave_out(self, *, to_stop: bool = False) -> bool:
        """Go on without the ranks that are missing; return whether any is.

        Args:
            to_stop: whether to wait for them again if no rank is about to stop the run any more.
        """
        missing = self.missing
        for rank in missing:
            self._become(rank, Seat.LEFT_OUT_TO_STOP if to_stop else Seat.LEFT_OUT)
        self.changed |= bool(missing)
        return bool(missing)

    def _await_those_left_out_to_stop(self) -> None:
        """Wait again for ranks that were left out only to stop the run, if no rank is about to stop it any more."""
        for rank in () if self.stopping else self.ranks(Seat.LEFT_OUT_TO_STOP):
            self._become(rank, Seat.EMPTY)

    def forget_workers(self, ranks: Collection[int]) -> None:
        """Wait until other workers of these ranks are ready."""
        self.changed = True
        for rank in ranks:
            member = self.members[rank]
            member.ready = None
            self._follow(rank, BEGUN_ANEW)
            self._ready_on.get(member.info.host_id, set()).discard(rank)

    def take_back(self, ranks: Collection[int]) -> None:
        """Take back ranks that have come to a world that has shrunk and are ready."""
        for rank in ranks:
            self._become(rank, Seat.READY)

    def _follow(self, rank: int, table: Mapping[Seat, Seat]) -> None:
        self._become(rank, table.get(self._seats[rank], self._seats[rank]))

    def _become(self, rank: int, seat: Seat) -> None:
        self._counts[self._seats[rank]] -= 1
        self._counts[seat] += 1
        self._seats[rank] = seat

    def leave(self, rank: int, how: str = "", *, left_out: bool = False) -> None:
        """Make a rank missing again.

        Args:
            how: what happened to it, such as "is gone: its process has ended"; "" if another line says so.
            left_out: whether the others go on without it, as they did before it came.
        """
        member = self.members.pop(rank)
        self.stopping.discard(rank)
        self._become(rank, Seat.LEFT_OUT if left_out else GIVEN_UP.get(self._seats[rank], Seat.EMPTY))
        self._ready_on.get(member.info.host_id, set()).discard(rank)
        if isinstance(self.state, Gathering):
            self.state.probes = None  # the ranks may be on other hosts when all are here again
            self._await_those_left_out_to_stop()
        if how:
            self.gone.append(f"{member.info.who} {how}")
        self.changed = True

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def works(self) -> bool:
        """Whether all ranks have gone on together, and none has been lost since."""
        state = self.state.was if isinstance(self.state, Over) else self.state
        return isinstance(state, Working)

    @property
    def is_over(self) -> bool:
        return isinstance(self.state, Over)

    @property
    def admits(self) -> bool:
        if self.is_over:
            return False
        return not (self.stopping and self.all_here)

    @property
    def have_worked(self) -> set[int]:
        """The ranks whose processes have gone on with the others before."""
        return {rank for rank, member in self.members.items() if member.has_worked}

    def has_worked_before(self, rank: int) -> bool:
        """Return whether a rank has worked in this run before, with this rank 0 or with an earlier one."""
        return self.members[rank].has_worked or bool(self.info(rank).goes_on)

    @property
    def newcomers(self) -> set[int]:
        """The ranks, without rank 0, that have not been in this run before, also not with another rank 0."""
        return {rank for rank in self.members if rank and not self.has_worked_before(rank)}

    @property
    def missing(self) -> list[int]:
        return self.ranks(Seat.EMPTY)

    @property
    def left_out(self) -> list[int]:
        """The lost ranks without which the run goes on."""
        return self.ranks(*LEFT_OUT)

    def is_left_out(self, rank: int) -> bool:
        return rank < len(self._seats) and self._seats[rank] in LEFT_OUT

    def ranks(self, *seats: Seat) -> list[int]:
        """Return the ranks whose seat is one of ``seats``."""
        if not any(self._counts[seat] for seat in seats):
            return []
        return [rank for rank, seat in enumerate(self._seats) if seat in seats]

    @property
    def all_here(self) -> bool:
        return not self._counts[Seat.EMPTY]

    @property
    def all_ready(self) -> bool:
        return self.all_here and not self._counts[Seat.LOADING]

    def info(self, rank: int) -> RankInfo:
        return self.members[rank].info

    def who(self, ranks: Sequence[int]) -> str:
        """Return words for ranks that are here: for a single rank with its host and pid."""
        return self.info(ranks[0]).who if len(ranks) == 1 else in_words(as_ranges(sorted(ranks)))

    def stopped(self, rank: int) -> str:
        """Say which signal has stopped the agent of a rank, as Ctrl-Z does, if that can be seen on rank 0's host."""
        info = self.info(rank) if rank in self.members else self.rank_0
        return self._stopped(info.agent) if info.host_id == self.rank_0.host_id and info.rank == rank else ""

    def silent(self, now: float) -> list[int]:
        """Return the ranks, without rank 0, that have been silent for too long."""
        latest = now - self.run.silent_after
        return [rank for rank, member in self.members.items() if rank and member.heard < latest]

    def infos(self) -> list[RankInfo]:
        """Return who the ranks are that are here and not left out, in the order of the ranks."""
        return [self.members[rank].info for rank in self._awaited]

    @property
    def _awaited(self) -> list[int]:
        """The ranks that are here, without those that only wait to return."""
        return self.ranks(Seat.LOADING, Seat.READY, Seat.WORKING)

    def places(self) -> dict[int, Place]:
        """Return rank -> its place, once all ranks are here."""
        return assign_places(self.infos(), {info.rank: ready for info, ready in self._pairs()})

    def _shared_with_an_earlier_rank(self, member: Member) -> DdpManualError | None:
        """Return why a rank cannot have the GPU of its --local_rank; for ranks without that, ``shared_gpu`` decides."""
        assert member.ready is not None
        if member.info.local_rank is None or member.ready.may_use_cpu:
            return None
        # Only ranks of these hosts: a look at all ranks for each rank takes most of the time with thousands of ranks.
        hosts = {member.info.host_id}.union(*(self._hosts_of_gpu[uuid] for uuid in member.ready.gpus))
        near = [self.members[rank] for rank in sorted(rank for host in hosts for rank in self._ready_on[host])]
        told = [(one.info, one.ready) for one in near if one.info.local_rank is not None and one.ready is not None]
        told = [(info, ready) for info, ready in told if not ready.may_use_cpu]
        told.sort(key=lambda pair: pair[0] is member.info)
        return shared_gpu(told, assign_places([info for info, _ in told], {info.rank: ready for info, ready in told}))

    def shared_gpu(self) -> DdpManualError | None:
        """Return why the ranks, which are all ready, cannot have the GPUs of their places; None if they can."""
        return shared_gpu(self._pairs(), self.places())

    def _pairs(self) -> list[tuple[RankInfo, Ready]]:
        """Return the ranks that are ready and not left out, in the order of the ranks."""
        members = [self.members[rank] for rank in self._awaited]
        return [(member.info, member.ready) for member in members if member.ready is not None]

    def news(self) -> News:
        """Return what all waiting ranks are told; it is short even if every second of thousands of ranks is missing.

        All of the ranges would be N / 2 ranges, sent to N ranks: 4.7 KB to each of 1,024 ranks. The last range is not
        shown, and says that there are more: see ``in_words``.
        """
        shown = sorted(self.members)[:MOST_NAMED]
        return News(
            here=len(self.members),
            left_out=as_ranges(self.left_out)[: MOST_RANGES + 1],
            named=[f"{rank} ({self.members[rank].info.host})" for rank in shown],
            missing=as_ranges(self.missing)[: MOST_RANGES + 1],
            loading=as_ranges(self.ranks(Seat.LOADING, Seat.LOADING_TO_RETURN))[: MOST_RANGES + 1],
            refused=list(self.refused),
            gone=list(self.gone),
            warnings=list(self.warnings),
            complete=self.works,
        )

    def roster(self) -> list[dict[str, Any]]:
        """Return what a person wants to know of each rank that is here."""
        places = self.places() if self.all_here else {}
        return [
            _describe(member, places[rank].local_rank if rank in places else member.info.local_rank)
            for rank, member in sorted(self.members.items())
        ]


def _without_copies(info: RankInfo, rank_0: RankInfo) -> RankInfo:
    """Return ``info`` with rank 0's objects where they are equal, as on nearly all ranks: copies for thousands of ranks
    are tens of megabytes, which Python's garbage collector would traverse again and again."""
    shared = {name: getattr(rank_0, name) for name in SAID_ALIKE}
    return replace(info, **{name: value for name, value in shared.items() if value == getattr(info, name)})


def _describe(member: Member, gpu: int | None) -> dict[str, Any]:
    info, ready = member.info, member.ready
    seen: Mapping[int | None, str] = dict(enumerate(ready.gpus if ready is not None else ()))
    versions = ready.versions if ready else info.versions
    device = ready.device if ready else None  # unknown until the worker has loaded torch
    shown = ("torch", "python", "cuda", "nccl") if device == "cuda" else ("torch", "python")
    return {
        "rank": info.rank,
        "host": info.host,
        "pid": info.pid,
        "device": f"cuda:{gpu}" if device == "cuda" and gpu is not None else device,
        **({"gpu": seen[gpu]} if gpu in seen else {}),
        "address": info.address,
        "since": round(info.since, 1),
        "versions": " ".join(f"{name} {versions[name]}" for name in shown if versions.get(name)),
    }
