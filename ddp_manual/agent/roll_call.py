"""The roll call on rank 0, without any I/O: which ranks are here, were refused, or are missing.

A rank is *here* once rank 0 has admitted its agent, and *ready* once its worker has torch and a device. The roll call
is complete when all ranks are both. A rank is gone when its connection ends. Times are seconds of rank 0's monotonic
clock, which is passed in.

torch's own ``wait_for_workers`` is not used: it counts connections, so a rank that was started twice fills two places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddp_manual.agent.compatibility import shared_gpu, unlike, unlike_when_ready
from ddp_manual.agent.health import heartbeat_period, silent_after
from ddp_manual.errors import DdpManualError, RankMissing, RankTaken
from ddp_manual.messages import Place, RankInfo, Ready, RunInfo

MOST_NAMED = 16
MOST_COMMANDS = 8
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
        self._rank_0 = rank_0
        self.members: dict[int, Member] = {}
        self.complete = False
        """Whether all ranks have joined; a process that comes later is too late."""
        self.changed = False
        """Whether there is news since the caller last set this to False."""
        self.refused: deque[str] = deque(maxlen=MOST_NAMED)
        self.gone: deque[str] = deque(maxlen=MOST_NAMED)
        self.warnings: deque[str] = deque(maxlen=MOST_NAMED)
        self._loading: set[int] = set()

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
        refusal, warnings = unlike(info, self._rank_0, self.run, wall_clock)
        if false_rank_0:
            refusal = self._taken(info, self._rank_0, frozen=False)
        holder = self.members.get(info.rank)
        if refusal is None and holder is not None:
            frozen = now - holder.heard > FROZEN_AFTER_BEATS * heartbeat_period(self.run)
            if not frozen and holder.heard <= since:
                return False
            refusal = self._taken(info, holder.info, frozen=frozen)
        if refusal is not None:
            self.refuse(info.who, refusal)
            return refusal
        self.members[info.rank] = Member(_without_copies(info, self._rank_0), now)
        self._loading.add(info.rank)
        self.warnings += warnings
        self.changed = True
        return True

    def refuse(self, who: str, error: DdpManualError) -> None:
        self.refused.append(f"{who} was refused: {error.identifier}: {error.what}")
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
        if rank != 0 and (taken := self._shared_with_an_earlier_rank(member)) is not None:
            self.refuse(member.info.who, taken)
            return [(rank, taken)]
        first = self.members.get(0)
        if first is None or first.ready is None:
            return []
        for other in self.members.values() if rank == 0 else [member]:
            if other.ready is not None:
                error = unlike_when_ready(other.info, other.ready, first.info, first.ready, self.run)
                if error is not None:
                    self.refuse(other.info.who, error)
                    refused.append((other.info.rank, error))
        return refused

    def leave(self, rank: int, how: str) -> None:
        """Make a rank missing again.

        Args:
            how: what happened to it, such as "is gone: its process has ended".
        """
        member = self.members.pop(rank)
        self._loading.discard(rank)
        self.gone.append(f"{member.info.who} {how}")
        self.changed = True

    def _taken(self, info: RankInfo, holder: RankInfo, *, frozen: bool) -> RankTaken:
        since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
        odd = "; the process that holds it is frozen: its connection is open, and it does not answer" if frozen else ""
        missing = self.missing
        if frozen:
            next = f"on {holder.host}: kill -9 {holder.pid}\nthen start this rank again"
        elif missing:
            next = self.run.command_for(missing[0])
        else:
            next = f"all ranks are here; to replace rank {info.rank}, end that process and start all ranks again"
        return RankTaken(
            f"rank {info.rank} is taken by {holder.host} (pid {holder.pid})",
            why=f"that process has held it since {since}; this one is {info.host} (pid {info.pid}){odd}",
            next=next,
        )

    # -- what is known ------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.run.world_size) if rank not in self.members]

    @property
    def all_here(self) -> bool:
        return len(self.members) == self.run.world_size

    @property
    def all_ready(self) -> bool:
        return self.all_here and not self._loading

    def info(self, rank: int) -> RankInfo:
        return self.members[rank].info

    def silent(self, now: float) -> list[int]:
        """The ranks, without rank 0, that have been silent for too long."""
        return [rank for rank, member in self.members.items() if rank and now - member.heard > silent_after(self.run)]

    def infos(self) -> list[RankInfo]:
        """In the order of the ranks."""
        return [self.members[rank].info for rank in sorted(self.members)]

    def places(self) -> dict[int, Place]:
        """The place of each rank, once all are here."""
        return assign_places(self.infos())

    def _shared_with_an_earlier_rank(self, member: Member) -> DdpManualError | None:
        """Return why a rank cannot have the GPU of its --local_rank; of ranks without one, ``shared_gpu`` decides."""
        told = [other for other in self.members.values() if other is not member and other.info.local_rank is not None]
        told += [member] if member.info.local_rank is not None else []
        pairs = [(one.info, one.ready) for one in told if one.ready is not None]
        return shared_gpu(pairs, assign_places([info for info, _ in pairs])) if member in told else None

    def shared_gpu(self) -> DdpManualError | None:
        """Return why the ranks, which are all ready, cannot have the GPUs of their places; None if they can."""
        ranks = [(member.info, member.ready) for _, member in sorted(self.members.items())]
        return shared_gpu([(info, ready) for info, ready in ranks if ready is not None], self.places())

    def news(self) -> dict[str, Any]:
        """What all waiting ranks are told; short even if thousands are missing."""
        shown = sorted(self.members)[:MOST_NAMED]
        return {
            "here": len(self.members),
            "named": [f"{rank} ({self.members[rank].info.host})" for rank in shown],
            "missing": as_ranges(self.missing),
            "loading": as_ranges(sorted(self._loading)),
            "refused": list(self.refused),
            "gone": list(self.gone),
            "warnings": list(self.warnings),
            "complete": self.complete,
        }

    def roster(self) -> list[dict[str, Any]]:
        """What a person wants to know of each rank that is here."""
        places = self.places() if self.all_here else {}
        return [
            _describe(member, places[rank].local_rank if places else member.info.local_rank)
            for rank, member in sorted(self.members.items())
        ]


def _without_copies(info: RankInfo, rank_0: RankInfo) -> RankInfo:
    """Keep once what nearly all ranks say alike: for thousands of ranks it is tens of megabytes, which Python's garbage
    collector would traverse again and again."""
    shared = {name: getattr(rank_0, name) for name in ("versions", "code", "options")}
    return replace(info, **{name: value for name, value in shared.items() if value == getattr(info, name)})


def _describe(member: Member, gpu: int | None) -> dict[str, Any]:
    info, ready = member.info, member.ready
    versions = ready.versions if ready else info.versions
    device = ready.device if ready else "loading torch"
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


def assign_places(infos: Sequence[RankInfo]) -> dict[int, Place]:
    """Give each rank its place; its local_rank is its position among its host's ranks, unless it was given another."""
    hosts: dict[str, dict[int, int]] = {}
    for info in infos:
        positions = hosts.setdefault(info.host_id, {})
        positions[info.rank] = len(positions)
    nodes = {host: node for node, host in enumerate(hosts)}
    return {
        info.rank: Place(
            local_rank=hosts[info.host_id][info.rank] if info.local_rank is None else info.local_rank,
            local_world_size=len(hosts[info.host_id]),
            node=nodes[info.host_id],
            nodes=len(nodes),
            host_leader=next(iter(hosts[info.host_id])),
        )
        for info in infos
    }


def as_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """[1, 2, 3, 7] -> [[1, 3], [7, 7]]: short even for thousands of missing ranks."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def in_words(ranges: Sequence[Sequence[int]]) -> str:
    """[[1, 3], [7, 7]] -> ``ranks 1-3, 7``"""
    alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ("rank " if alone else "ranks ") + ", ".join(shown)


def situation(news: Mapping[str, Any], world_size: int) -> str:
    """Say in one line which ranks are here, which are missing, and which still load torch."""
    if not news["missing"] and news["loading"]:
        return f"{all_here(world_size)}; loading torch: {in_words(news['loading'])}"
    state = f"waiting for {in_words(news['missing'])}" if news["missing"] else "all ranks are here"
    named = ", ".join(news["named"]) + (", ..." if news["here"] > len(news["named"]) else "")
    return f"{state}; {news['here']} of {world_size} here: {named}"


def all_here(world_size: int) -> str:
    return "the only rank is here" if world_size == 1 else f"all {world_size} ranks are here"


def advice_for(ranges: Sequence[Sequence[int]], run: RunInfo) -> list[str]:
    """Return a command for each missing rank, as many as a person would type, and what else may keep ranks away."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    commands = [run.command_for(rank) for rank in missing[:MOST_COMMANDS]]
    if run.only_on_its_host and missing:
        commands.append(
            f"(only {run.host} itself reaches {run.address}: "
            f"with other hosts, give every rank {run.host}'s network address as --master_addr)"
        )
    return commands


def wait_within(join_timeout: float, *, all_here: bool) -> float:
    """Return the seconds that ranks may take to join, or to load torch once all are here."""
    return max(join_timeout, LOAD_WITHIN) if all_here else join_timeout


def missing_ranks_error(news: Mapping[str, Any], run: RunInfo, waited: float) -> RankMissing:
    one = news["here"] == 1
    here = f"{'rank' if one else 'ranks'} {', '.join(news['named'])} {'is' if one else 'are'} here"
    tried = [*news["refused"], *news["gone"]]
    if not news["missing"]:
        slow = in_words(news["loading"])
        return RankMissing(
            f"all {run.world_size} ranks joined, but within {waited:.0f} s not all could load torch: {slow}",
            why="\n".join([here, f"still loading torch: {slow}", *tried]),
            next="look at what they say, and whether their disk or file server is slow; then start all ranks again, "
            "with a larger --join_timeout",
        )
    missing = sum(last - first + 1 for first, last in news["missing"])
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(news['missing'])}",
        why="\n".join(
            [here, *tried] if tried else [f"{here}; nothing has tried to join as {in_words(news['missing'])}"]
        ),
        next="\n".join([*advice_for(news["missing"], run), "and start the others again: they have left too"]),
    )
