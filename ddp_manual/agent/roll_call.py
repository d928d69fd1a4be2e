"""The roll call on rank 0, without any I/O: which ranks are here, were refused, or are missing.

A rank is *here* once rank 0 has admitted its agent, and *ready* once its worker has torch and a device. The roll call
is complete when all ranks are both. A rank is gone when its connection ends. Times are seconds of rank 0's monotonic
clock, which is passed in.

torch's own ``wait_for_workers`` is not used: it counts connections, so a rank that was started twice fills two places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from msgspec.structs import replace

from ddp_manual.agent.compatibility import SAID_ALIKE, more_ranks_than_gpus, shared_gpu, unlike, unlike_when_ready
from ddp_manual.agent.health import heartbeat_period, silent_after
from ddp_manual.agent.network_interface import own_addresses
from ddp_manual.errors import DdpManualError, RankMissing, RankTaken
from ddp_manual.messages import News, Place, RankInfo, Ready, RunInfo
from ddp_manual.on_loss import LEAVE
from ddp_manual.terminal import MOST_RANGES, as_ranges, in_words

MOST_NAMED = 16
MOST_COMMANDS = 8
MOST_ADDRESSES = 3
# Processes whose refusal all ranks are told, within so many seconds: strangers could otherwise fill every terminal.
MOST_REFUSALS = 16
REFUSALS_WITHIN = 60.0
# Seconds for ranks that are here to load torch, even from a slow file server.
LOAD_WITHIN = 600.0
# A process that has sent nothing for as long as this many heartbeats is frozen.
FROZEN_AFTER_BEATS = 2.4


@dataclass
class Member:
    """A rank that is here."""

    info: RankInfo
    heard: float
    ready: Ready | None = None


class RollCall:
    """The roll call of one run.

    Args:
        rank_0: what the other ranks are compared with.
    """

    def __init__(self, run: RunInfo, rank_0: RankInfo) -> None:
        self.run = run
        self.rank_0 = rank_0
        self.members: dict[int, Member] = {}
        self.complete = False
        """Whether all ranks have joined; a process that comes later is too late."""
        self.changed = False
        """Whether there is news since the caller last set this to False."""
        self.refused: deque[str] = deque(maxlen=MOST_NAMED)
        self.gone: deque[str] = deque(maxlen=MOST_NAMED)
        self.warnings: deque[str] = deque(maxlen=MOST_NAMED)
        self.left_out: set[int] = set()
        """The lost ranks without which the run goes on."""
        self._loading: set[int] = set()
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
        refusal, warnings = unlike(info, self.rank_0, self.run, wall_clock)
        if false_rank_0:
            refusal = self._taken(info, self.rank_0, frozen=False)
        holder = self.members.get(info.rank)
        if refusal is None and holder is not None:
            frozen = now - holder.heard > FROZEN_AFTER_BEATS * heartbeat_period(self.run)
            if not frozen and holder.heard <= since:
                return False
            refusal = self._taken(info, holder.info, frozen=frozen)
        if refusal is not None:
            self.refuse(info.who, refusal, now)
            return refusal
        self.members[info.rank] = Member(_without_copies(info, self.rank_0), now)
        self._loading.add(info.rank)
        self.warnings += warnings
        self.changed = True
        return True

    def refuse(self, who: str, error: DdpManualError, now: float) -> None:
        """Take that a process was refused, for the news; of very many in a short time only the first are named."""
        if now - self._refusals_since >= REFUSALS_WITHIN:
            self._refusals, self._refusals_since = 0, now
        self._refusals += 1
        if self._refusals > MOST_REFUSALS:
            return
        more = f"; more that are refused within {REFUSALS_WITHIN:.0f} s are not named"
        also = more if self._refusals == MOST_REFUSALS else ""
        self.refused.append(f"{who} was refused: {error.identifier}: {error.what}{also}")
        self.changed = True

    def hear(self, rank: int, now: float) -> None:
        self.members[rank].heard = now

    def get_ready(self, rank: int, ready: Ready) -> list[tuple[int, DdpManualError]]:
        """Take what a rank knows now that it has loaded torch.

        Returns:
            The ranks that are refused, because they do not belong with rank 0 now that both know their devices.
        """
        member = self.members[rank]
        member.ready = ready
        self.changed = True
        self._loading.discard(rank)
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
                error = unlike_when_ready(other.info, other.ready, first.info, first.ready, self.run)
                if error is not None:
                    self.refuse(other.info.who, error, member.heard)
                    refused.append((other.info.rank, error))
        return refused

    def leave_gpus(self) -> str | None:
        """Have all ranks, which are ready, train on the CPU if a host has more ranks than GPUs and nobody has chosen
        the GPUs; return why, otherwise None."""
        why = more_ranks_than_gpus(self._pairs())
        for member in self.members.values() if why else ():
            assert member.ready is not None
            member.ready = replace(member.ready, device="cpu", backend="gloo", gpus=[])
        return why

    def begin_again(self, ranks: Collection[int]) -> None:
        """Begin anew, with other workers of these ranks, which are here."""
        self.complete = False
        self.gone.clear()
        self.forget_workers(ranks)

    def forget_workers(self, ranks: Collection[int]) -> None:
        """Wait until other workers of these ranks are ready."""
        self.changed = True
        for rank in ranks:
            member = self.members[rank]
            member.ready = None
            self._loading.add(rank)
            self._ready_on.get(member.info.host_id, set()).discard(rank)

    def take_back(self) -> set[int]:
        """Take back, and return, the ranks that have come to a world that has shrunk and are ready."""
        back = {rank for rank in self.left_out & self.members.keys() if self.members[rank].ready is not None}
        self.left_out -= back
        return back

    def leave(self, rank: int, how: str = "") -> None:
        """Make a rank missing again.

        Args:
            how: what happened to it, such as "is gone: its process has ended"; "" if another line says so.
        """
        member = self.members.pop(rank)
        self._loading.discard(rank)
        self._ready_on.get(member.info.host_id, set()).discard(rank)
        if how:
            self.gone.append(f"{member.info.who} {how}")
        self.changed = True

    def _taken(self, info: RankInfo, holder: RankInfo, *, frozen: bool) -> RankTaken:
        since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
        odd = "; the process that holds it is frozen: its connection is open, and it does not answer" if frozen else ""
        if info.goes_on:
            odd += "\nit was given to that process while this one was cut off or frozen"
            next = "nothing: the run goes on without this process"
        elif frozen:
            next = f"on {holder.host}: kill -9 {holder.pid}\nthen start this rank again"
        elif not self.all_here:
            next = self.run.command_for(self.first_missing)
        else:
            then = "start all ranks again" if self.run.on_loss == LEAVE else "start this rank again"
            next = f"all ranks are here; to replace rank {info.rank}, end that process and {then}"
        return RankTaken(
            f"rank {info.rank} is taken by {holder.host} (pid {holder.pid})",
            why=f"that process has held it since {since}; this one is {info.host} (pid {info.pid}){odd}",
            next=next,
        )

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        known = self.members.keys() | self.left_out
        return [rank for rank in range(self.run.world_size) if rank not in known]

    @property
    def first_missing(self) -> int:
        return next(rank for rank in range(self.run.world_size) if rank not in self.members)

    @property
    def all_here(self) -> bool:
        return len(self.members.keys() | self.left_out) == self.run.world_size

    @property
    def all_ready(self) -> bool:
        return self.all_here and not self._loading - self.left_out

    def info(self, rank: int) -> RankInfo:
        return self.members[rank].info

    def silent(self, now: float) -> list[int]:
        """The ranks, without rank 0, that have been silent for too long."""
        return [rank for rank, member in self.members.items() if rank and now - member.heard > silent_after(self.run)]

    def infos(self) -> list[RankInfo]:
        """In the order of the ranks."""
        return [self.members[rank].info for rank in sorted(self.members.keys() - self.left_out)]

    def places(self) -> dict[int, Place]:
        """The place of each rank, once all are here."""
        return assign_places(self.infos(), {info.rank: ready.gpus for info, ready in self._pairs()})

    def _shared_with_an_earlier_rank(self, member: Member) -> DdpManualError | None:
        """Return why a rank cannot have the GPU of its --local_rank; of ranks without one, ``shared_gpu`` decides."""
        assert member.ready is not None
        if member.info.local_rank is None or member.ready.may_use_cpu:
            return None
        # Of all ranks only those of its hosts: a look at every rank for each rank is most of a roll call of thousands.
        hosts = {member.info.host_id}.union(*(self._hosts_of_gpu[uuid] for uuid in member.ready.gpus))
        near = [self.members[rank] for rank in sorted(rank for host in hosts for rank in self._ready_on[host])]
        told = [(one.info, one.ready) for one in near if one.info.local_rank is not None and one.ready is not None]
        told = [(info, ready) for info, ready in told if not ready.may_use_cpu]
        told.sort(key=lambda pair: pair[0] is member.info)
        return shared_gpu(
            told, assign_places([info for info, _ in told], {info.rank: ready.gpus for info, ready in told})
        )

    def shared_gpu(self) -> DdpManualError | None:
        """Return why the ranks, which are all ready, cannot have the GPUs of their places; None if they can."""
        return shared_gpu(self._pairs(), self.places())

    def _pairs(self) -> list[tuple[RankInfo, Ready]]:
        """The ranks that are ready, in their order."""
        members = [self.members[rank] for rank in sorted(self.members.keys() - self.left_out)]
        return [(member.info, member.ready) for member in members if member.ready is not None]

    def news(self) -> News:
        """What all waiting ranks are told; short even if every second of thousands is missing.

        All ranges would be N / 2 of them for each of N ranks, 4.7 KB each for 1,024 ranks. The last one is not shown,
        and says that there are more: see ``in_words``.
        """
        shown = sorted(self.members)[:MOST_NAMED]
        return News(
            here=len(self.members),
            left_out=as_ranges(sorted(self.left_out))[: MOST_RANGES + 1],
            named=[f"{rank} ({self.members[rank].info.host})" for rank in shown],
            missing=as_ranges(self.missing)[: MOST_RANGES + 1],
            loading=as_ranges(sorted(self._loading))[: MOST_RANGES + 1],
            refused=list(self.refused),
            gone=list(self.gone),
            warnings=list(self.warnings),
            complete=self.complete,
        )

    def roster(self) -> list[dict[str, Any]]:
        """What a person wants to know of each rank that is here."""
        places = self.places() if self.all_here else {}
        return [
            _describe(member, places[rank].local_rank if rank in places else member.info.local_rank)
            for rank, member in sorted(self.members.items())
        ]


def _without_copies(info: RankInfo, rank_0: RankInfo) -> RankInfo:
    """Keep once what nearly all ranks say alike: for thousands of ranks it is tens of megabytes, which Python's garbage
    collector would traverse again and again."""
    shared = {name: getattr(rank_0, name) for name in SAID_ALIKE}
    return replace(info, **{name: value for name, value in shared.items() if value == getattr(info, name)})


def _describe(member: Member, gpu: int | None) -> dict[str, Any]:
    info, ready = member.info, member.ready
    versions = ready.versions if ready else info.versions
    device = ready.device if ready else None  # unknown until the worker has loaded torch
    shown = ("torch", "python", "cuda", "nccl") if device == "cuda" else ("torch", "python")
    return {
        "rank": info.rank,
        "host": info.host,
        "pid": info.pid,
        "device": f"cuda:{gpu}" if device == "cuda" and gpu is not None else device,
        **({"gpu": ready.gpus[gpu]} if ready is not None and gpu is not None and gpu < len(ready.gpus) else {}),
        "address": info.address,
        "since": round(info.since, 1),
        "versions": " ".join(f"{name} {versions[name]}" for name in shown if versions.get(name)),
    }


def assign_places(infos: Sequence[RankInfo], gpus: Mapping[int, Sequence[str]] | None = None) -> dict[int, Place]:
    """Give each rank its place. Its local_rank is its position among its host's ranks, unless it was given another; or
    0, where each rank of the host sees one GPU and no two ranks see the same, as with ``srun --gpus-per-task=1``.

    Args:
        gpus: rank -> the UUIDs of the GPUs it could use, as far as they are known.
    """
    seen = gpus or {}
    numbers = {info.rank: number for number, info in enumerate(infos)}
    hosts: dict[str, dict[int, int]] = {}
    for info in infos:
        positions = hosts.setdefault(info.host_id, {})
        positions[info.rank] = len(positions)
    nodes = {host: node for node, host in enumerate(hosts)}
    one_each = {
        host
        for host, positions in hosts.items()
        if all(len(seen.get(rank, ())) == 1 for rank in positions)
        and len({seen[rank][0] for rank in positions}) == len(positions)
    }

    def local_rank(info: RankInfo) -> int:
        if info.host_id in one_each:
            return 0
        return hosts[info.host_id][info.rank] if info.local_rank is None else info.local_rank

    return {
        info.rank: Place(
            rank=numbers[info.rank],
            world_size=len(numbers),
            local_rank=local_rank(info),
            local_world_size=len(hosts[info.host_id]),
            node=nodes[info.host_id],
            nodes=len(nodes),
            host_leader=numbers[next(iter(hosts[info.host_id]))],
        )
        for info in infos
    }


def situation(news: News, world_size: int) -> str:
    """Say in one line which ranks are here, which are missing, and which still load torch."""
    if not news.missing and news.loading:
        return f"{all_here(world_size)}; loading torch: {in_words(news.loading)}"
    state = f"waiting for {in_words(news.missing)}" if news.missing else "all ranks are here"
    named = ", ".join(news.named) + (", ..." if news.here > len(news.named) else "")
    return f"{state}; {news.here} of {world_size} here: {named}"


def all_here(world_size: int) -> str:
    return "the only rank is here" if world_size == 1 else f"all {world_size} ranks are here"


def advice_for(ranges: Sequence[Sequence[int]], run: RunInfo) -> list[str]:
    """Return a command for each missing rank, as many as a person would type, and what else may keep ranks away."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    # A launcher starts all its ranks with the same command.
    commands = list(dict.fromkeys(run.command_for(rank) for rank in missing[:MOST_COMMANDS]))
    if run.only_on_its_host and missing:  # then this process is on that host too
        addresses = own_addresses()[:MOST_ADDRESSES] or ["an address of its network"]
        spelled = "master_addr=" if run.script and "--world_size" not in run.command else "--master_addr "
        commands.append(
            f"(only {run.host} itself reaches {run.address}: for ranks on other hosts, start rank 0 again with "
            f"{spelled}{f' or {spelled}'.join(addresses)})"
        )
    elif missing and run.command:
        commands.append(f"(ranks that run, and get no answer: does a firewall close a TCP port of {run.host}?)")
    return commands


def wait_within(join_timeout: float, *, all_here: bool) -> float:
    """Return the seconds that ranks may take to join, or to load torch once all are here."""
    return max(join_timeout, LOAD_WITHIN) if all_here else join_timeout


def missing_ranks_error(news: News, run: RunInfo, waited: float) -> RankMissing:
    one = news.here == 1
    here = f"{'rank' if one else 'ranks'} {', '.join(news.named)} {'is' if one else 'are'} here"
    tried = [*news.refused, *news.gone]
    if not news.missing:
        slow = in_words(news.loading)
        return RankMissing(
            f"all {run.world_size} ranks joined, but within {waited:.0f} s not all could load torch: {slow}",
            why="\n".join([here, f"still loading torch: {slow}", *tried]),
            next="look at what they say, and whether their disk or file server is slow; then start all ranks again, "
            "with a larger --join_timeout",
        )
    missing = run.world_size - news.here
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(news.missing)}",
        why="\n".join([here, *tried] if tried else [f"{here}; nothing has tried to join as {in_words(news.missing)}"]),
        next="\n".join(
            [
                *(["mend what the refused rank was told in its own terminal, then:"] if news.refused else []),
                *advice_for(news.missing, run),
                "and start the others again: they have left too",
            ]
        ),
    )
