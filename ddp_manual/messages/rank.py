"""What a rank says of itself: who it is when it joins, what its worker has found, and how far that has come."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from msgspec import Meta, field

from ddp_manual.messages.checked import Checked, Count, Name, Number, Option, Port, TimeOut, ip_address
from ddp_manual.messages.run import RunSoFar
from ddp_manual.wire import LONGEST_NAME

# Numbers and chains that a heartbeat may say of a group.
LONGEST_CHAINS = 256

JOINING = "joining"
RUNNING = "running"
SAVING = "saving"
LEAVING = "leaving"
ENDED = "ended"


class RankInfo(Checked):
    """Who a rank is and what it is about to run, as its agent says when it joins."""

    rank: Count
    world_size: Count
    host: Name
    pid: Count
    """Of the worker; of its agent until the worker has started."""
    world_size_source: Name = ""
    host_id: Name = ""
    """Differs between hosts even if their names do not: see ``launchers.host_id``."""
    since: Annotated[float, Meta(ge=0, lt=1e11)] = 0.0
    """Seconds since the epoch, by the rank's own clock."""
    address: Annotated[str, Meta(max_length=LONGEST_NAME)] = ""
    """Its IP address on the way to rank 0, which its peers are told to connect to."""
    answer_port: Port = 0
    """The port at that address where its agent answers other hosts' probes."""
    local_rank: Count | None = None
    versions: Mapping[Name, Name | None] = field(default_factory=dict)
    """The installed versions of torch and python, and of the packages that the user's own program imports."""
    code: Mapping[Name, Name] = field(default_factory=dict)
    """Part of the program -> digest of its source code."""
    variables: Mapping[Name, Name] = field(default_factory=dict)
    """The variables that change how ranks talk to one another, as far as they are set."""
    arguments: Mapping[Name, Name] = field(default_factory=dict)
    """Of the user's own program: ``--lr``, or ``argument 1`` for one without a name -> value."""
    may_differ: Sequence[Name] = field(default_factory=list)
    """The arguments that may differ between ranks, as they were typed."""
    allow_mismatch: bool = False
    options: Mapping[Name, Option] = field(default_factory=dict)
    """The options that the ranks must agree on and that are known without torch."""
    starts_again: bool = False
    """Whether its agent starts another worker by itself when one is lost."""
    goes_on: RunSoFar | None = None
    """Of a rank that has lost rank 0: the run that it was in."""

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError("impossible rank")
        if self.address:
            ip_address(self.address)

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


class Ready(Checked):
    """What a rank knows once its worker has loaded torch."""

    pid: Count
    """Of the worker, which ``launch`` forks only once torch is loaded."""
    device: Name
    """``cpu`` or ``cuda``."""
    backend: Name
    """``gloo`` or ``nccl``."""
    gpus: Sequence[Name]
    """The UUIDs of the GPUs it could use, by index."""
    versions: Mapping[Name, Name | None]
    """The versions of torch, python, cuda and nccl, according to torch."""
    options: Mapping[Name, Option]
    """The options that the ranks must agree on and only torch or the user's code can tell."""
    store: tuple[Name, Port] | None = None
    """From rank 0 its IP address and the port where its worker hosts torch's store."""
    may_use_cpu: bool = False
    """Whether it may train on the CPU instead of a GPU, since nobody has chosen a device for it."""
    chooses_device: bool = False
    """Whether its program chooses a device itself, so that nobody knows which GPU it will use."""


@dataclass(kw_only=True)
class Place:
    """A rank's place in the world, and among the hosts of the run."""

    rank: int
    """In torch's process group. In a world that has shrunk the ranks count anew there; otherwise the rank's own."""
    world_size: int
    """The number of ranks that are in the process group."""
    local_rank: int
    """Index of its GPU on the host."""
    local_world_size: int
    node: int
    """The index of its host, counted from 0 in rank order."""
    nodes: int
    host_leader: int
    """The first rank of its host, which downloads for the others."""


class Beat(Checked):
    """What a worker is doing and how far its collectives are; sent with a heartbeat when it has changed."""

    phase: Name = JOINING
    epoch: int = 0
    step: int = 0
    samples_per_second: Number = 0.0
    step_seconds: Number = 0.0
    collectives: Mapping[Name, int] = field(default_factory=dict)
    """Process group -> how many collectives this rank has begun in it."""
    timeouts: Mapping[Name, TimeOut] = field(default_factory=dict)
    """Process group -> the seconds after which torch ends a collective in it; "" -> those of all that are left out: the
    shortest."""
    unfinished: int = 0
    """How many collectives of NCCL this rank has begun and its GPU has not completed."""
    inside: bool = False
    """Whether the training thread is in a collective, or in a backward pass, which may contain one, or waits for a GPU
    that has collectives to complete."""
    place: Name = ""
    """The line of the user's program that is running."""
    debugging: bool = False
    """Whether a debugger waits for input."""
    calls: Mapping[Name, Annotated[Sequence[int], Meta(max_length=LONGEST_CHAINS)]] = field(default_factory=dict)
    """Process group -> number, chain, number, chain, ... of its last collectives, as its agent reads them: see
    ``collectives``."""
    stopped: Name = ""
    """The signal that stopped the worker, such as SIGSTOP, as its agent sees it."""

    def __post_init__(self) -> None:
        if any(len(sent) % 2 for sent in self.calls.values()):
            raise ValueError("chains of collectives are not pairs")

    def timeout_of_wait(self, fewest: Mapping[str, int]) -> float | None:
        """Return the time-out of the process group in which this rank waits if it does; None if that is not known.

        Args:
            fewest: process group -> the fewest collectives that any rank has begun in it. Where this rank has begun
                more, it waits. If there is no such group, or if there are several, the shortest time-out is returned.
        """
        ahead = [group for group, count in self.collectives.items() if count > fewest.get(group, count)]
        found = [self.timeouts.get(group, self.timeouts.get("")) for group in ahead or self.collectives]
        return min((seconds for seconds in found if seconds is not None), default=None)

    def at_step(self) -> str:
        """Return ``training, at step 120 of epoch 2``; the phase alone if steps are not counted."""
        return f"{self.phase}, at step {self.step} of epoch {self.epoch}" if self.step or self.epoch else self.phase

    def last_seen(self) -> str:
        """Return the same, and for a script that does not count steps ``running, on train.py:26 in main``."""
        on_a_line = self.phase == RUNNING and self.place and not (self.step or self.epoch)
        return f"{self.phase}, on {self.place}" if on_a_line else self.at_step()


def named_from_outside(what: str, rank: Any) -> str:
    """Say which rank a text is about that calls it "this rank"."""
    return what.replace("this rank", f"rank {rank}")
