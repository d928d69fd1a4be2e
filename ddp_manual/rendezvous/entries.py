"""What the roll call is made of: what a process says of itself, what the run is, where each rank stands."""

from __future__ import annotations

import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual import environment
from ddp_manual.errors import RankMissing
from ddp_manual.rendezvous.judging import Limits

MOST_NAMED = 16
MOST_COMMANDS = 8
LONGEST_WORDS = 255


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a process says of itself when it asks to be a rank."""

    rank: int
    world_size: int
    world_size_source: str
    host: str
    host_id: str
    """Differs between hosts, also where their names do not: see ``environment.host_id``."""
    pid: int
    since: float
    """Seconds since the epoch, by the process's own clock."""
    address: str
    """Its IP address on the way to rank 0, which its peers are told to connect to."""
    probe_port: int
    """Where it answers, at that address, for as long as it waits: see ``reachability.py``."""
    device: str
    local_rank: int | None
    gpus: Sequence[str]
    """The UUID of each GPU it could use, by index."""
    versions: Mapping[str, str | None]
    """torch, python, cuda, nccl."""
    code: Mapping[str, str]
    """Part of the program -> digest of its source."""
    allow_mismatch: bool
    options: Mapping[str, Sequence[Any]]
    """Option -> [value, source], for all that the ranks must agree on."""

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> Entry:
        """An entry from the network.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type.
        """
        entry = cls(**request)
        for name, kind in _FIELD_TYPES.items():
            value = getattr(entry, name)
            # bool is an int to Python, and a rank called True is nobody's.
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"an entry whose {name} is {type(value).__name__}")
        if entry.local_rank is not None and (type(entry.local_rank) is not int or entry.local_rank < 0):
            raise TypeError("an entry whose local_rank is no index")
        if not 0 <= entry.since < 1e11 or not 0 <= entry.probe_port < 65536:
            raise TypeError("an entry with a time or a port that cannot be")
        if not 0 <= entry.rank < entry.world_size:
            raise TypeError("an entry that cannot be a rank's")
        ipaddress.ip_address(entry.address)
        versions = [version for version in entry.versions.values() if version]
        texts = [entry.host, entry.host_id, entry.address, entry.device, entry.world_size_source, *entry.gpus]
        texts += [*versions, *entry.versions, *entry.code, *entry.code.values(), *entry.options]
        if max(map(len, texts)) > LONGEST_WORDS or not "".join(texts).isprintable():
            raise TypeError("an entry whose words are not short and printable")
        if not all(isinstance(option, list) and len(option) == 2 for option in entry.options.values()):
            raise TypeError("an entry whose options are not pairs of value and source")
        return entry

    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


_FIELD_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("rank", "world_size", "pid", "probe_port"), int),
    **dict.fromkeys(("world_size_source", "host", "host_id", "address", "device"), str),
    **dict.fromkeys(("versions", "code", "options"), dict),
    "since": (int, float),
    "gpus": list,
    "allow_mismatch": bool,
}


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
    address: str
    """The IP address rank 0 listens on."""
    since: float
    """Seconds since the epoch, by rank 0's clock."""
    challenge: str | None
    """What a process has to sign to be believed; None if this run has no token."""
    command: str
    """The command that starts a rank of this run, with ``{rank}`` in the place of its number."""
    lifeline: tuple[str, int]
    """The IP address and the port where rank 0 keeps a connection to every rank: see ``lifeline.py``."""
    peer_timeout: float
    stall_timeout: float

    script: bool
    """Whether ranks run a script of the user's own, whose options are not ours to know."""

    @property
    def limits(self) -> Limits:
        return Limits.of_a_world(self.world_size, self.peer_timeout, self.stall_timeout)

    @property
    def start_again(self) -> str:
        """What to do when the run has ended, as the end of a sentence."""
        if self.run_dir is None or self.script:
            return "start all ranks again"
        launched = environment.launch_command()
        if launched is not None:
            return f"start all ranks again, from the last checkpoint: {launched}"
        resume = "" if "--resume " in self.command else " --resume auto"
        return (
            "start all ranks again, from the last checkpoint; rank 0 with:\n"
            f"{self.command_for(0)} --run_dir {shlex.quote(self.run_dir)}{resume}"
        )

    def command_for(self, rank: int) -> str:
        return self.command.replace("{rank}", str(rank))

    @property
    def only_on_its_host(self) -> bool:
        """Whether rank 0 listens on loopback, which no other host reaches."""
        return ipaddress.ip_address(self.address).is_loopback


def printable(text: str) -> str:
    """What may come to people's terminals of a text from the network."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:LONGEST_WORDS])


def assign_places(entries: Sequence[Entry]) -> dict[int, Place]:
    """local_rank is the position among the ranks of the same host, unless the rank was told another one."""
    hosts: dict[str, dict[int, int]] = {}
    for entry in entries:
        positions = hosts.setdefault(entry.host_id, {})
        positions[entry.rank] = len(positions)
    nodes = {host: node for node, host in enumerate(hosts)}
    return {
        entry.rank: Place(
            local_rank=hosts[entry.host_id][entry.rank] if entry.local_rank is None else entry.local_rank,
            local_world_size=len(hosts[entry.host_id]),
            node=nodes[entry.host_id],
            nodes=len(nodes),
            host_leader=next(iter(hosts[entry.host_id])),
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
    """One line for everybody who waits: who is here, and who is missing."""
    ranges = news["missing"]
    parts = [f"waiting for {in_words(ranges)}" if ranges else "all ranks are here"]
    named = ", ".join(news["named"]) + (", ..." if news["here"] > len(news["named"]) else "")
    parts.append(f"{news['here']} of {world_size} here: {named}")
    return "; ".join(parts)


def advice_for(ranges: Sequence[Sequence[int]], run: Hello) -> list[str]:
    """A command for each missing rank, up to as many as a person would type, and what else may keep them away."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    commands = [run.command_for(rank) for rank in missing[:MOST_COMMANDS]]
    if run.only_on_its_host:
        commands.append(
            f"(only {run.host} itself reaches {run.address}: for ranks elsewhere give all its real --master_addr)"
        )
    return commands


def missing_ranks_error(news: Mapping[str, Any], run: Hello, waited: float) -> RankMissing:
    ranges = news["missing"]
    missing = sum(last - first + 1 for first, last in ranges)
    one = news["here"] == 1
    here = f"{'rank' if one else 'ranks'} {', '.join(news['named'])} {'is' if one else 'are'} here"
    tried = [*news["refused"], *news["gone"]]
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(ranges)}",
        why="\n".join([here, *tried] if tried else [f"{here}; nothing has tried to join as {in_words(ranges)}"]),
        next="\n".join([*advice_for(ranges, run), "and start the others again: they have left too"]),
    )
