"""What messages are about: a rank, its worker, the run, why it ends. Each is checked as it is read."""

from __future__ import annotations

import functools
import ipaddress
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, field

from ddp_manual.errors import DdpManualError, from_dict
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.text_wrapping import whole
from ddp_manual.wire import LONGEST_NAME

LONGEST_TEXT = 20_000  # characters of an error's text, such as a traceback
LONGEST_CHAINS = 256  # numbers and chains of a group in a heartbeat

# The end of a process group's key in a heartbeat if its collectives are counted by records, and not by torch.
BY_RECORDS = "/recorded"
# In ``Beat.timeouts``.
OPENING = "opening"

JOINING = "joining"
RUNNING = "running"
SAVING = "saving"
LEAVING = "leaving"
ENDED = "ended"

# Cached because the ranks of a host share an address, and every rank looks at rank 0's.
ip_address = functools.lru_cache(maxsize=4096)(ipaddress.ip_address)

# The largest number of seconds or samples that is accepted: JSON has numbers of any size.
LARGEST = 1e15
_ONE_LINE = r"\A[^\n]*\Z"  # all other characters that cannot be shown are escaped when a message is read

Name = Annotated[str, Meta(max_length=LONGEST_NAME, pattern=_ONE_LINE)]
Count = Annotated[int, Meta(ge=0, lt=1 << 62)]
Number = Annotated[float, Meta(ge=-LARGEST, le=LARGEST)]
Seconds = Annotated[float, Meta(ge=0, le=LARGEST)]
TimeOut = Annotated[float, Meta(gt=0, le=LARGEST)]
Port = Annotated[int, Meta(ge=0, lt=1 << 16)]
Option = tuple[Any, str]
"""The value of an option that ranks must agree on, and where it comes from, such as a file."""


class Moment(NamedTuple):
    """When a state was held. A later generation counts more than a later step: it has gone on from an agreed step."""

    generation: Count
    step: Count
    counts_calls: bool = False
    """Whether ``step`` counts the calls of ``hold``, as in a program that does not say its own steps."""

    @property
    def named(self) -> str:
        """The moment in words, as in: go on ``after step 604``."""
        return f"after call {self.step} of hold()" if self.counts_calls else f"after step {self.step}"


class Checked(msgspec.Struct, forbid_unknown_fields=True, omit_defaults=True):
    """A message or a part of one. Fields that are missing, unknown, of the wrong type or out of bounds are an error
    (``msgspec.ValidationError``) when it is read."""


class RankInfo(Checked):
    """Who a rank is and what it is about to run, as its agent says when it joins."""

    rank: Count
    world_size: Count
    host: Name
    pid: Count
    """The pid of the worker; that of its agent until the worker has started."""
    agent: Count
    """The pid of its agent."""
    world_size_source: Name = ""
    host_id: Name = ""
    """Differs between hosts even if their names do not: see ``machine.host_id``."""
    since: Annotated[float, Meta(ge=0, lt=1e11)] = 0.0
    """When it asked to join, in seconds since the epoch by its own clock."""
    address: Annotated[str, Meta(max_length=LONGEST_NAME)] = ""
    """Its IP address on the way to rank 0, to which the other ranks are told to connect."""
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
    """Argument of the user's own program -> value: ``--lr``, or ``argument 1`` for an argument without a name."""
    may_differ: Sequence[Name] = field(default_factory=list)
    """The arguments that may differ between ranks, as they were typed."""
    allow_mismatch: bool = False
    options: Mapping[Name, Option] = field(default_factory=dict)
    """The options that the ranks must agree on and that are known without torch."""
    has_launcher: bool = False
    """Whether something has started it together with others: ``launch``, srun, mpirun or torchrun."""
    goes_on: RunSoFar | None = None
    """The run that the rank was in, if it has lost the rank 0 of that run."""

    def __post_init__(self) -> None:
        if self.rank >= self.world_size:
            raise ValueError("impossible rank")
        if self.address:
            ip_address(self.address)

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"

    @property
    def starts_again(self) -> bool:
        """Whether its agent starts another worker by itself when its worker is lost."""
        return self.rank == 0 or self.has_launcher


class Ready(Checked):
    """What a rank knows once its worker has loaded torch."""

    pid: Count
    """The pid of the worker, which ``launch`` forks only once torch is loaded."""
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
    """On rank 0 its IP address and the port where its worker hosts torch's store; otherwise None."""
    may_use_cpu: bool = False
    """Whether it may train on the CPU instead of a GPU, since nobody has chosen a device for it."""
    chooses_device: bool = False
    """Whether its program chooses a device itself, so that nobody knows which GPU it will use."""
    cores: Sequence[tuple[Count, Count]] = ()
    """The ranges of CPU cores that it may use: the first and the last number of each."""


@dataclass(kw_only=True)
class Place:
    """A rank's place in the world, and among the hosts of the run."""

    rank: int
    """The rank in torch's process group: the rank's own, but counted anew in a world that has shrunk."""
    world_size: int
    """The number of ranks that are in the process group."""
    local_rank: int
    """Index of its GPU on the host."""
    local_world_size: int
    cores_shared_by: int
    """How many ranks of its host may use cores that it may use, with itself: 1 where each has cores of its own."""
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
    steps: int = 0
    """How many there are in all; 0 if that is not known."""
    samples_per_second: Number = 0.0
    step_seconds: Number = 0.0
    loss: Number | None = None
    """The loss that the script gives."""
    collectives: Mapping[Name, int] = field(default_factory=dict)
    """Process group that is open -> how many collectives this rank has begun in it."""
    closed: Mapping[Name, int] = field(default_factory=dict)
    """The same for the groups that it has closed last, as its agent sees it."""
    operations: int = 0
    """How many operations it has begun in all open groups: gloo also numbers sends and receives."""
    timeouts: Mapping[Name, TimeOut] = field(default_factory=dict)
    """Process group -> the seconds after which torch ends a collective in it; "" -> the shortest, for all groups that
    are not listed; OPENING -> those after which it ends the wait for other ranks in the call that opens a group."""
    unfinished: int = 0
    """How many collectives of NCCL this rank has begun and its GPU has not completed."""
    return_at_once: bool = False
    """Whether collectives of this rank return at once, as NCCL's do, and the program waits for them on a line of its
    own."""
    inside: bool = False
    """Whether the training thread is in a collective, or in a backward pass, which may contain one, or waits for a GPU
    that has collectives to complete."""
    opening: bool = False
    """Whether it is opening a process group, for which torch waits for other ranks."""
    place: Name = ""
    """The line of the user's program that is running."""
    debugging: bool = False
    """Whether a debugger waits for input."""
    calls: Mapping[Name, Annotated[Sequence[int], Meta(max_length=LONGEST_CHAINS)]] = field(default_factory=dict)
    """Process group -> number, chain, number, chain, ... of its last collectives, as its agent reads them: see
    ``collective_memory``."""
    raised: Name = ""
    """The exception because of which it has closed its default process group, and opened none since."""
    broken: bool = False
    """Whether that was the exception of a collective which had broken."""
    stopped: Name = ""
    """The signal that stopped the worker, such as SIGSTOP, as its agent sees it."""

    def __post_init__(self) -> None:
        if self.calls and any(len(sent) % 2 for sent in self.calls.values()):
            raise ValueError("chains of collectives are not pairs")

    @property
    def begun(self) -> Mapping[str, int]:
        return {**self.closed, **self.collectives}

    def timeout_of_wait(self, fewest: Mapping[str, int]) -> float | None:
        """Return the time-out of the process group in which this rank waits, if it waits; None if that is not known.

        Args:
            fewest: process group -> the fewest collectives that any rank has begun in it. Where this rank has begun
                more, it waits; of several such groups the shortest time-out is returned. Without such a group it may
                wait in any, as for a send of another rank, and the longest is returned: torch ends a shorter wait.
        """
        if self.opening:
            return self.timeouts.get(OPENING)
        counts = self.collectives.items()
        ahead = [group.removesuffix(BY_RECORDS) for group, count in counts if count > fewest.get(group, count)]
        found = [self.timeouts.get(group, self.timeouts.get("")) for group in ahead or self.timeouts]
        return (min if ahead else max)((seconds for seconds in found if seconds is not None), default=None)

    def at_step(self) -> str:
        """Return ``training, at step 120 of epoch 2``; the phase alone if steps are not counted."""
        return f"{self.phase}, at step {self.step} of epoch {self.epoch}" if self.step or self.epoch else self.phase

    def last_seen(self) -> str:
        """Return ``at_step()``, but for a script that does not count steps ``running, on train.py:26 in main``."""
        on_a_line = self.phase == RUNNING and self.place and not (self.step or self.epoch)
        return f"{self.phase}, on {self.place}" if on_a_line else self.at_step()


def named_from_outside(what: str, rank: Any) -> str:
    """Return a text in which a rank calls itself "this rank" with the rank's number instead."""
    return what.replace("this rank", f"rank {rank}")


class RunSoFar(Checked):
    """What the ranks of a run know of it, and tell a new rank 0."""

    run_id: Name
    run_dir: str | None
    generation: Count
    """How often the ranks have begun anew, since others took the places of lost ones."""
    losses: Count
    """How often ranks were lost."""
    lost_seconds: Seconds
    """The sum of the seconds from each loss until all ranks went on."""
    host: Name
    pid: Count
    """The pid of rank 0's worker, which was lost."""
    address: Name
    """The IP address that rank 0 listened on."""
    lost: Name = ""
    """How rank 0 was lost."""
    seconds: Seconds = 0.0
    """Seconds since rank 0 was lost."""
    held: Moment | None = None
    """The moment of the state that this rank holds, if it holds one."""

    def __post_init__(self) -> None:
        ip_address(self.address)


class RunInfo(Checked):
    """What run this is, as rank 0 tells each rank that joins."""

    run_id: str
    run_dir: str | None
    world_size: Count
    host: str
    pid: Count
    """The pid of rank 0's worker."""
    agent: Count
    """The pid of rank 0's agent."""
    address: str
    """The IP address rank 0 listens on."""
    since: float
    """When the run began, in seconds since the epoch by rank 0's clock."""
    command: str
    """The command that starts a rank of this run, with ``{rank}`` for its number; cut if nobody would type it."""
    launched: str | None
    """The ``launch`` command that continues the run, if ``launch`` started the ranks; cut as above."""
    peer_timeout: float
    stall_timeout: float
    resumes: bool = False
    """Whether the program saves checkpoints in the run's folder when it is asked to, and goes on from the newest."""
    stall_timeout_is_default: bool = False
    """Whether nobody has set ``stall_timeout`` for a program: then it counts only if the time-outs of the program's
    process groups are not known."""
    on_loss: str = LEAVE
    """What the ranks do when one of them is lost: see ``WorldSpec``."""
    rejoin_timeout: float = 0.0
    shrink_after: float | None = None
    on_loss_of_own_code: bool = False

    def __post_init__(self) -> None:
        ip_address(self.address)

    @property
    def heartbeat_period(self) -> float:
        """The seconds between heartbeats in both directions: rank 0 reads at most about 4,000 per second."""
        return max(0.5, self.world_size / 4000)

    @property
    def silent_after(self) -> float:
        """The seconds after which a rank counts as silent: one heartbeat may be unsent, another one on its way."""
        return self.peer_timeout + 2 * self.heartbeat_period

    @property
    def start_again(self) -> str:
        """What to do after the run has ended, as the end of a sentence."""
        if self.run_dir is None or not self.resumes:
            return "start all ranks again"
        return from_last_checkpoint(self.launched, self.run_dir)

    def command_for(self, rank: int) -> str:
        """Return what to type for a rank, as a line of its own; "" if there is nothing."""
        return whole(self.command.replace("{rank}", str(rank), 1))  # an argument may contain it too

    @property
    def where_to_type(self) -> str:
        """The words for where a command of ``command_for`` may be typed."""
        return f"on {self.host} (only it reaches {self.address})" if self.only_on_its_host else "on any host"

    @property
    def only_on_its_host(self) -> bool:
        """Whether rank 0 listens on loopback, which no other host reaches."""
        return ip_address(self.address).is_loopback


def more_seconds(world_size: int) -> float:
    """Return how much longer to wait in a large world for what rank 0 says once it has read from every rank: reading a
    reply of 4 KB, or a hello, takes it 0.3 to 0.7 ms."""
    return world_size / 1000


def resume_flags(run_dir: str) -> str:
    return f"--resume auto --run_dir {shlex.quote(run_dir)}"


def first_command_and(run_dir: str) -> str:
    """Say how ranks that were started by hand go on with the run in ``run_dir``: in words that are right for each."""
    return f"each rank with its first command and\n{whole(resume_flags(run_dir))}"


def from_last_checkpoint(launched: str | None, run_dir: str) -> str:
    """Say how all ranks go on after a failure.

    Args:
        launched: the command, if ``launch`` has started them.
    """
    how = f"\n{whole(launched)}" if launched else f" {first_command_and(run_dir)}"
    return f"start all ranks again, from the last checkpoint if there is one:{how}"


class LastWords(Checked):
    """The error that ends a worker or an agent; its texts are cut at their beginning if they are long."""

    identifier: str
    what: str
    why: str
    next: str
    exit_code: int

    @classmethod
    def of(cls, error: DdpManualError) -> LastWords:
        texts = {name: text[-LONGEST_TEXT:] for name, text in error.as_dict().items()}
        return cls(**texts, exit_code=error.exit_code)

    def error(self) -> DdpManualError:
        error = from_dict(msgspec.structs.asdict(self))
        error.exit_code = self.exit_code
        return error


class Verdict(LastWords):
    """What ends a rank or the run, about the rank that it names."""

    rank: Count
    host: Name
    pid: Count
    judged: bool = False
    """Whether the coordinator or the rank's agent says it about that rank, not the rank itself."""
    is_loss: bool = False
    """Whether that rank is gone, silent or stopped; otherwise it may be one that waits for others."""
