"""What agent, worker and coordinator say to each other: JSON, one object per line, and nothing that is unpickled.

    agent -> coordinator     hello, ready, beat, probed, failed, lost, finished, stacks, bye
    coordinator -> agent     greeting, welcome or refused, news, line, probe, place, beat, stacks, close, verdict, over
    observer -> coordinator  look; the answer is seen
    worker -> agent          born, ready, beat, notes, run_dir, failed, finished, left, done, quiet, may_end
    agent -> worker          start, place, stop, save, close, over, quiet, end
    script -> its agent      attach, signalled and noticed besides
    agent -> its script      verdict and exit besides

A line is bounded in size. What comes from the network is checked before it is used or shown.
"""

from __future__ import annotations

import functools
import ipaddress
import json
import math
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

from ddp_manual.errors import DdpManualError

# Bytes of a line. The longest that a rank sends are last words with a traceback, and the stacks of a process.
LONGEST_LINE = 1 << 18
# Of a line that an observer reads: a run of thousands of ranks, with their stacks.
LONGEST_ANSWER = 1 << 26
# Letters of a name, a version or a digest.
LONGEST_NAME = 255
# Letters of a text that a rank says of itself, such as a traceback.
LONGEST_TEXT = 20_000
LONGEST_PLACE = 200

JOINING = "joining"
RUNNING = "running"
LEAVING = "leaving"
ENDED = "ended"


class Unreadable(Exception):
    """What came is no message, or longer than any message is."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineReader:
    """Turns the bytes of a connection into messages.

    Args:
        longest: bytes that a line may have.
    """

    def __init__(self, longest: int = LONGEST_LINE) -> None:
        self.longest = longest
        self._received = bytearray()

    def feed(self, data: bytes) -> list[dict[str, Any]]:
        """The messages that are complete with this ``data``.

        Raises:
            Unreadable: a line is too long, or no JSON object.
        """
        self._received += data
        *lines, self._received = self._received.split(b"\n")
        if max(map(len, (*lines, self._received))) > self.longest:
            raise Unreadable(f"a message of more than {self.longest} bytes")
        return [_decoded(line) for line in lines]


def _decoded(line: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise Unreadable(f"not a message: {error}") from None
    if not isinstance(message, dict):
        raise Unreadable("not a message")
    return message


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """The end of a text from the network, as it may be shown on a terminal, on one line."""
    text = text[-longest:]
    return text if text.isprintable() else "".join(letter if letter.isprintable() else "?" for letter in text)


# The ranks of a host have one address, and all look at rank 0's.
_ip_address = functools.lru_cache(maxsize=4096)(ipaddress.ip_address)


@dataclass(frozen=True, kw_only=True)
class RankInfo:
    """Who a rank is and what it would run, as its agent says it when it joins."""

    rank: int
    world_size: int
    host: str
    pid: int
    """Of the worker; of its agent, while that is not started yet."""
    world_size_source: str = ""
    host_id: str = ""
    """Differs between hosts, also where their names do not: see ``environment.host_id``."""
    since: float = 0.0
    """Seconds since the epoch, by the rank's own clock."""
    address: str = ""
    """Its IP address on the way to rank 0, which its peers are told to connect to."""
    answer_port: int = 0
    """Where its agent answers the other hosts' probes, at that address."""
    local_rank: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """torch and python, as they are installed."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Part of the program -> digest of its source."""
    allow_mismatch: bool = False
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Option -> [value, source], for all that the ranks must agree on and that is known without torch."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> RankInfo:
        """Check what came from the network.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type.
        """
        info = cls(**message)
        _check_types(info, _RANK_INFO_TYPES)
        if info.local_rank is not None and (type(info.local_rank) is not int or info.local_rank < 0):
            raise TypeError("a local_rank that is no index")
        if not 0 <= info.since < 1e11 or not 0 <= info.answer_port < 65536:
            raise TypeError("a time or a port that cannot be")
        if not 0 <= info.rank < info.world_size:
            raise TypeError("a rank that cannot be")
        _ip_address(info.address)
        versions = [version for version in info.versions.values() if version]
        names = [info.host, info.host_id, info.address, info.world_size_source]
        _check_names([*names, *versions, *info.versions, *info.code, *info.code.values(), *info.options])
        _check_options(info.options)
        return info

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


_RANK_INFO_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **dict.fromkeys(("rank", "world_size", "pid", "answer_port"), int),
    **dict.fromkeys(("world_size_source", "host", "host_id", "address"), str),
    **dict.fromkeys(("versions", "code", "options"), dict),
    "since": (int, float),
    "allow_mismatch": bool,
}


@dataclass(frozen=True, kw_only=True)
class Ready:
    """What a rank knows once its worker has torch."""

    pid: int
    """Of the worker, which ``launch`` starts only then."""
    device: str
    """``cpu`` or ``cuda``."""
    backend: str
    """``gloo`` or ``nccl``."""
    gpus: Sequence[str]
    """The UUID of each GPU it could use, by index."""
    versions: Mapping[str, str | None]
    """torch, python, cuda, nccl, as torch itself says them."""
    options: Mapping[str, Sequence[Any]]
    """Option -> [value, source], for what the ranks must agree on and only torch or the user's own code can tell."""
    store: Sequence[Any]
    """Rank 0's IP address and the port where its worker hosts torch's store; of the other ranks empty."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Ready:
        """Check what came from the network.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type.
        """
        ready = cls(**message)
        _check_types(ready, _READY_TYPES)
        versions = [version for version in ready.versions.values() if version]
        _check_names([ready.device, ready.backend, *ready.gpus, *versions, *ready.versions, *ready.options])
        _check_options(ready.options)
        return ready


_READY_TYPES: Mapping[str, type | tuple[type, ...]] = {
    "pid": int,
    **dict.fromkeys(("device", "backend"), str),
    **dict.fromkeys(("versions", "options"), dict),
    **dict.fromkeys(("gpus", "store"), list),
}


def _check_types(message: Any, types: Mapping[str, type | tuple[type, ...]]) -> None:
    for name, kind in types.items():
        value = getattr(message, name)
        # bool is an int to Python, and a rank called True is nobody's.
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise TypeError(f"{name} is {type(value).__name__}")


def _check_names(names: Sequence[str]) -> None:
    if max(map(len, names)) > LONGEST_NAME or not "".join(names).isprintable():
        raise TypeError("names that are not short and printable")


def _check_options(options: Mapping[str, Sequence[Any]]) -> None:
    if not all(isinstance(option, list) and len(option) == 2 for option in options.values()):
        raise TypeError("options that are not pairs of value and source")


@dataclass(frozen=True, kw_only=True)
class RunInfo:
    """What run this is, as rank 0 tells it to whoever joins."""

    run_id: str
    run_dir: str | None
    world_size: int
    host: str
    pid: int
    """Of rank 0's worker."""
    address: str
    """The IP address rank 0 listens on."""
    since: float
    """Seconds since the epoch, by rank 0's clock."""
    command: str
    """The command that starts a rank of this run, with ``{rank}`` in the place of its number."""
    launched: str | None
    """The command of ``launch`` that goes on with the run, if that has started the ranks."""
    peer_timeout: float
    stall_timeout: float
    script: bool
    """Whether ranks run a script of the user's own, whose options are not ours to know."""

    @property
    def beat_every(self) -> float:
        """Seconds between two heartbeats, in both directions: rank 0 reads about 4,000 a second at most."""
        return max(0.5, self.world_size / 4000)

    @property
    def silence(self) -> float:
        """Seconds after which a rank counts as silent: an agent may be held up for peer_timeout just before its next
        heartbeat is due, and another one is on its way."""
        return self.peer_timeout + 2 * self.beat_every

    @property
    def start_again(self) -> str:
        """What to do when the run has ended, as the end of a sentence."""
        if self.run_dir is None or self.script:
            return "start all ranks again"
        if self.launched is not None:
            return f"start all ranks again, from the last checkpoint: {self.launched}"
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
        return _ip_address(self.address).is_loopback


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a rank stands among the others."""

    local_rank: int
    """Index of its GPU on the host."""
    local_world_size: int
    node: int
    """Which of the run's hosts it is on, counted from 0 in rank order."""
    nodes: int
    host_leader: int
    """The first rank of its host, the one that downloads for the others."""


@dataclass
class Progress:
    """What a rank does now. The training loop writes it, the reporter's thread reads it."""

    phase: str = JOINING
    """joining, loading, training, evaluating, saving, leaving or ended; running, in a script that does not say."""
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    """This rank's own work per step, without waiting for the others; 0 where nobody measures it."""
    saving: bool = False
    """Whether it writes files, and is to finish them before its process is ended."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a worker does, and how far its collectives are: in a heartbeat, where it has changed since the last."""

    phase: str = JOINING
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    """By process group: how many collectives this rank has begun."""
    inside: bool = False
    """Whether the thread that trains is inside a collective, or in a backward pass, which may hold one."""
    place: str = ""
    """The line of the user's program it is on."""
    debugging: bool = False
    """Whether it waits for a person in a debugger."""
    stopped: str = ""
    """The signal that has stopped the worker, such as SIGSTOP; its agent sees that."""

    @classmethod
    def of(
        cls, progress: Progress, collectives: Mapping[str, int], *, inside: bool, place: str, debugging: bool = False
    ) -> Beat:
        """Whatever a program has put there, a heartbeat is what ``from_message`` takes."""
        return cls(
            phase=printable(str(progress.phase)),
            epoch=int(_number(progress.epoch)),
            step=int(_number(progress.step)),
            samples_per_second=round(_number(progress.samples_per_second), 1),
            step_seconds=round(_number(progress.step_seconds), 6),
            collectives=collectives,
            inside=inside,
            place=printable(place, LONGEST_PLACE),
            debugging=debugging,
        )

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Beat:
        """Check a beat from the network.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type.
        """
        beat = cls(**message)
        numbers = (beat.epoch, beat.step, beat.samples_per_second, beat.step_seconds, *beat.collectives.values())
        if not {int, float}.issuperset(map(type, numbers)):
            raise TypeError("a beat whose numbers are none")
        words = (beat.phase, beat.place, beat.stopped)
        if max(map(len, words)) > LONGEST_NAME or not "".join(words).isprintable():
            raise ValueError("a beat whose words are too long, or not printable")
        return beat

    def at_step(self) -> str:
        """``training, at step 120 of epoch 2``; where nobody counts steps the phase alone."""
        return f"{self.phase}, at step {self.step} of epoch {self.epoch}" if self.step or self.epoch else self.phase


def _number(value: Any) -> float:
    """What is no finite number is 0. Nor is a tensor one: to read it could wait for a GPU that hangs."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else 0.0


Verdict = dict[str, Any]
"""An error as it travels: identifier, what, why, next; exit_code; rank, host and pid of the rank it is about;
``judged`` where the coordinator says it of that rank, not the rank itself."""


def last_words(error: DdpManualError) -> Verdict:
    """What ends a worker, as it says it to its agent."""
    return {**shortened(error.as_dict()), "exit_code": error.exit_code}


def shortened(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(words[name])[-LONGEST_TEXT:] for name in ("identifier", "what", "why", "next")}
