"""Who is here, who was refused, who is missing: rank 0's side of the roll call, without any I/O.

A rank is *here* once its agent's hello was taken, and *ready* once its worker has torch and a device. All ranks have to
be both. A rank is gone when its connection ends. Times are seconds of rank 0's monotonic clock, which is passed in.

torch's own ``wait_for_workers`` is not used: it counts connections, and a rank that was started twice fills two places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from ddp_manual.agent.compatibility import named_gpu, shared_gpu, unlike, unlike_when_ready
from ddp_manual.errors import DdpManualError, RankMissing, RankTaken
from ddp_manual.messages import Place, RankInfo, Ready, RunInfo

MOST_NAMED = 16
MOST_COMMANDS = 8
# Seconds for ranks that are here to load torch, be it from a slow file server.
LOAD_WITHIN = 600.0
# Heartbeats after which a process that has said nothing is frozen.
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
        """Whether all ranks have met; who comes later is too late."""
        self.refused: deque[str] = deque(maxlen=MOST_NAMED)
        self.gone: deque[str] = deque(maxlen=MOST_NAMED)
        self.warnings: deque[str] = deque(maxlen=MOST_NAMED)
        self._gpus: dict[str, int] = {}
        self._loading: set[int] = set()
        # Ranks that are ready, and are still to be compared with rank 0: in the order in which they got ready.
        self._not_compared: dict[int, None] = {}

    # -- what happens -------------------------------------------------------------------------------------------

    def admit(self, info: RankInfo, now: float, since: float, wall_clock: float) -> DdpManualError | bool:
        """Take a process as a rank, refuse it, or neither yet.

        Args:
            since: when it came. One that asks for a rank which another process holds is answered once that process was
                heard from, is gone, or is known to be frozen; until then the result is False, and this is to be called
                again.
            wall_clock: seconds since the epoch.

        Returns:
            Why it is refused; True: it is a rank now.
        """
        refusal, warnings = unlike(info, self._rank_0, self.run, wall_clock)
        holder = self.members.get(info.rank)
        if refusal is None and holder is not None:
            frozen = now - holder.heard > FROZEN_AFTER_BEATS * self.run.beat_every
            if not frozen and holder.heard <= since:
                return False
            refusal = self._taken(info, holder.info, frozen=frozen)
        if refusal is not None:
            self.refuse(info.who, refusal)
            return refusal
        self.members[info.rank] = Member(_without_copies(info, self._rank_0), now)
        self._loading.add(info.rank)
        self.warnings += warnings
        return True

    def refuse(self, who: str, error: DdpManualError) -> None:
        self.refused.append(f"{who} was refused: {error.identifier}: {error.what}")

    def hear(self, rank: int, now: float) -> None:
        self.members[rank].heard = now

    def get_ready(self, rank: int, ready: Ready) -> None:
        member = self.members[rank]
        member.ready = ready
        self._loading.discard(rank)
        self._not_compared[rank] = None
        if member.info.pid != ready.pid:  # as where ``launch`` has it only now
            member.info = replace(member.info, pid=ready.pid)
        if rank == 0:
            self.run = replace(self.run, pid=ready.pid)

    def leave(self, rank: int, how: str) -> None:
        """It is missing again.

        Args:
            how: what became of it, such as "is gone: its process has ended".
        """
        member = self.members.pop(rank)
        self._loading.discard(rank)
        self._not_compared.pop(rank, None)
        self._gpus = {gpu: user for gpu, user in self._gpus.items() if user != rank}
        self.gone.append(f"{member.info.who} {how}")

    def unfit(self) -> Iterable[tuple[int, DdpManualError]]:
        """Ranks that are ready and do not go with rank 0, now that both know their device; they are to be refused."""
        first = self.members.get(0)
        if first is None or first.ready is None:
            return
        while self._not_compared:
            rank = next(iter(self._not_compared))
            del self._not_compared[rank]
            member = self.members[rank]
            assert member.ready is not None
            error = unlike_when_ready(member.info, member.ready, first.info, first.ready, self.run)
            if error is None:
                gpu = named_gpu(member.info, member.ready)
                user = rank if gpu is None else self._gpus.setdefault(gpu, rank)
                error = self._shared_gpu(dict.fromkeys((user, rank)))
            if error is not None:
                yield rank, error

    def taken_rank_0(self, info: RankInfo) -> RankTaken:
        """Why no other process can be rank 0."""
        error = self._taken(info, self._rank_0, frozen=False)
        self.refuse(info.who, error)
        return error

    def _taken(self, info: RankInfo, holder: RankInfo, *, frozen: bool) -> RankTaken:
        since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
        odd = "; it does not answer, though its connection is open: it is frozen" if frozen else ""
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

    # -- how it stands ------------------------------------------------------------------------------------------

    @property
    def missing(self) -> list[int]:
        return [rank for rank in range(self.run.world_size) if rank not in self.members]

    @property
    def all_here(self) -> bool:
        return len(self.members) == self.run.world_size

    @property
    def all_ready(self) -> bool:
        return self.all_here and not self._loading

    def infos(self) -> list[RankInfo]:
        """In the order of the ranks."""
        return [self.members[rank].info for rank in sorted(self.members)]

    def places(self) -> dict[int, Place]:
        """Where each rank stands, once all are here."""
        return assign_places(self.infos())

    def shared_gpus(self, places: Mapping[int, Place]) -> DdpManualError | None:
        """Whether two ranks would share a GPU, or one has none, at these places."""
        return self._shared_gpu(sorted(self.members), places)

    def _shared_gpu(self, ranks: Iterable[int], places: Mapping[int, Place] | None = None) -> DdpManualError | None:
        pairs = [(self.members[rank].info, self.members[rank].ready) for rank in ranks]
        return shared_gpu([(info, ready) for info, ready in pairs if ready is not None], places)

    def news(self) -> dict[str, Any]:
        """What those who wait are told: short also where thousands are missing."""
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
        """All that is known of each rank that is here, for people."""
        places = self.places() if self.all_here else {}
        lines = []
        for rank in sorted(self.members):
            member = self.members[rank]
            lines.append(_line(member, places[rank].local_rank if places else member.info.local_rank))
        return lines


def _without_copies(info: RankInfo, rank_0: RankInfo) -> RankInfo:
    """What nearly all ranks say alike is kept once: of thousands it is tens of megabytes, which Python's garbage
    collector would go through again and again."""
    shared = {name: getattr(rank_0, name) for name in ("versions", "code", "options")}
    return replace(info, **{name: value for name, value in shared.items() if value == getattr(info, name)})


def _line(member: Member, gpu: int | None) -> dict[str, Any]:
    info, ready = member.info, member.ready
    versions = ready.versions if ready else info.versions
    device = ready.device if ready else "loading torch"
    telling = ("torch", "python", "cuda", "nccl") if device == "cuda" else ("torch", "python")
    known = ready is not None and gpu is not None and gpu < len(ready.gpus)
    return {
        "rank": info.rank,
        "host": info.host,
        "pid": info.pid,
        "device": f"cuda:{gpu}" if device == "cuda" and gpu is not None else device,
        **({"gpu": ready.gpus[gpu]} if known and ready is not None and gpu is not None else {}),
        "address": info.address,
        "since": round(info.since, 1),
        "versions": " ".join(f"{name} {versions[name]}" for name in telling if versions.get(name)),
    }


def assign_places(infos: Sequence[RankInfo]) -> dict[int, Place]:
    """local_rank is the position among the ranks of the same host, unless the rank was told another one."""
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
    """[1, 2, 3, 7] -> [[1, 3], [7, 7]]: short also for thousands of missing ranks."""
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
    """One line for everybody who waits: who is here, who is missing, and who still loads torch."""
    if not news["missing"] and news["loading"]:
        return f"all {world_size} ranks are here; loading torch: {in_words(news['loading'])}"
    parts = [f"waiting for {in_words(news['missing'])}" if news["missing"] else "all ranks are here"]
    named = ", ".join(news["named"]) + (", ..." if news["here"] > len(news["named"]) else "")
    parts.append(f"{news['here']} of {world_size} here: {named}")
    return "; ".join(parts)


def advice_for(ranges: Sequence[Sequence[int]], run: RunInfo) -> list[str]:
    """A command for each missing rank, up to as many as a person would type, and what else may keep them away."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    commands = [run.command_for(rank) for rank in missing[:MOST_COMMANDS]]
    if run.only_on_its_host and missing:
        commands.append(
            f"(only {run.host} itself reaches {run.address}: for ranks elsewhere give all its real --master_addr)"
        )
    return commands


def wait_within(join_timeout: float, *, all_here: bool) -> float:
    """Seconds that ranks may take to come, or to load torch once all are here."""
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
