"""What the roll call is made of: what a process says of itself, what the run is, where each rank stands."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.errors import RankMissing

MOST_NAMED = 16
MOST_COMMANDS = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a process says of itself when it asks to be a rank."""

    rank: int
    world_size: int
    host: str
    host_id: str
    """Differs between hosts, also where their names do not: see ``environment.host_id``."""
    pid: int
    since: float
    """Seconds since the epoch, by the process's own clock."""
    device: str
    local_rank: int | None
    options: Mapping[str, Sequence[Any]]
    """Option -> [value, source], for all that the ranks must agree on."""

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> Entry:
        """An entry from the network.

        Raises:
            TypeError: fields are missing, unknown or of the wrong type.
        """
        entry = cls(**request)
        numbers = [entry.rank, entry.world_size, entry.pid, *([] if entry.local_rank is None else [entry.local_rank])]
        names = [entry.host, entry.host_id, entry.device]
        if not all(type(number) is int for number in numbers) or not all(type(name) is str for name in names):
            raise TypeError("an entry with a field of the wrong type")
        if type(entry.since) not in (int, float) or not 0 <= entry.since < 1e11:
            raise TypeError("an entry without a time")
        if not 0 <= entry.rank < entry.world_size:
            raise TypeError("an entry that cannot be a rank's")
        if not isinstance(entry.options, dict) or not all(
            isinstance(option, list) and len(option) == 2 for option in entry.options.values()
        ):
            raise TypeError("an entry whose options are not pairs of value and source")
        return entry

    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an admitted rank stands among the others."""

    local_rank: int
    """Index of its GPU on the host."""
    local_world_size: int
    node: int
    nodes: int
    host_leader: int
    """The first rank of its host, the one that downloads for the others."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What run this is, as rank 0 opens the roll call."""

    run_id: str
    run_dir: str | None
    world_size: int
    host: str
    pid: int
    command: str
    """The command that starts a rank of this run, with ``{rank}`` in the place of its number."""

    def command_for(self, rank: int) -> str:
        return self.command.replace("{rank}", str(rank))


def assign_places(entries: Sequence[Entry]) -> dict[int, Place]:
    """local_rank is the position among the ranks of the same host, unless the rank was told another one."""
    hosts: dict[str, list[int]] = {}
    for entry in entries:
        hosts.setdefault(entry.host_id, []).append(entry.rank)
    nodes = {host: node for node, host in enumerate(hosts)}
    return {
        entry.rank: Place(
            local_rank=hosts[entry.host_id].index(entry.rank) if entry.local_rank is None else entry.local_rank,
            local_world_size=len(hosts[entry.host_id]),
            node=nodes[entry.host_id],
            nodes=len(nodes),
            host_leader=hosts[entry.host_id][0],
        )
        for entry in entries
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
    """One line for everybody who waits: who is here, who is missing, who was refused or left."""
    ranges = news["missing"]
    parts = [f"waiting for {in_words(ranges)}" if ranges else "all ranks are here"]
    named = ", ".join(news["named"]) + (", ..." if news["here"] > len(news["named"]) else "")
    parts.append(f"{news['here']} of {world_size} here: {named}")
    parts += news["gone"][-1:] + news["refused"][-1:]
    return "; ".join(parts)


def commands_for(ranges: Sequence[Sequence[int]], run: Hello) -> list[str]:
    """A command for each missing rank, up to as many as a person would type."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    return [run.command_for(rank) for rank in missing[:MOST_COMMANDS]]


def missing_ranks_error(news: Mapping[str, Any], run: Hello, waited: float) -> RankMissing:
    ranges = news["missing"]
    missing = sum(last - first + 1 for first, last in ranges)
    tried = [*news["refused"], *news["gone"]]
    here = "rank" if news["here"] == 1 else "ranks"
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(ranges)}",
        why="\n".join(
            [f"{here} {', '.join(news['named'])} {'is' if news['here'] == 1 else 'are'} here", *tried]
            if tried
            else [
                f"{here} {', '.join(news['named'])} {'is' if news['here'] == 1 else 'are'} here; "
                f"nothing has tried to join as {in_words(ranges)}"
            ]
        ),
        next="\n".join([*commands_for(ranges, run), "and start the others again: they have left too"]),
    )
