"""What agent, worker and coordinator say to each other, each message a JSON object on a line (``wire``).

    agent -> coordinator     hello, ready, beat, probed, failed, finished, stacks, records, bye
    coordinator -> agent     greeting, welcome or refused, news, line, probe, place, beat, stacks, records, close,
                             verdict, over
    observer -> coordinator  look; the answer is seen, which comes once more when the run has ended
    worker -> agent          born, ready, beat, memory, group, not_compared, notes, run_dir, failed, finished, left,
                             done, quiet, may_end
    agent -> worker          start, place, stop, save, close, over, quiet, end
    script -> its agent      attach, signalled and noticed besides
    agent -> its script      verdict and exit besides

Messages from the network are checked before they are used or shown.
"""

from __future__ import annotations

import functools
import ipaddress
import math
import shlex
import time
from collections.abc import Hashable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, fields
from numbers import Real
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from typing_extensions import Self

from ddp_manual.errors import DdpManualError
from ddp_manual.on_loss import LEAVE
from ddp_manual.wire import LONGEST_NAME, printable

# Characters of an error's text, such as a traceback; of a line of the program.
LONGEST_TEXT = 20_000
LONGEST_PLACE = 200
# Numbers and chains that a heartbeat may say of a group.
LONGEST_CHAINS = 256
# Of the time-out of a process group: ranks wait for less long in a collective. After the time-out torch ends those that
# wait, and nobody would name the rank that they wait for.
SHARE_OF_TIMEOUT = 0.8

JOINING = "joining"
RUNNING = "running"
SAVING = "saving"
LEAVING = "leaving"
ENDED = "ended"


# Cached because the ranks of a host share an address, and every rank looks at rank 0's.
_ip_address = functools.lru_cache(maxsize=4096)(ipaddress.ip_address)


# The JSON type of a field, by what its annotation begins with.
_JSON_TYPES: Mapping[str, type | tuple[type, ...]] = {
    **{"int": int, "int | None": (int, type(None)), "bool": bool},
    **{"float": (int, float), "float | None": (int, float, type(None))},
    **{"str": str, "str | None": (str, type(None))},
    **{"Mapping": dict, "Sequence": list},
}


# A number of seconds or samples; JSON brings integers of any size, and NaN.
_LARGEST = 1e15


@functools.cache
def _json_types(cls: Hashable) -> list[tuple[str, type | tuple[type, ...]]]:
    """Return the fields of a message with their JSON types; worked out once, since rank 0 reads 4,000 a second."""
    return [(own.name, _JSON_TYPES[str(own.type).partition("[")[0]]) for own in fields(cls)]  # type: ignore[arg-type]


class _FromNetwork:
    """A message whose fields are checked when it comes from the network."""

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Self:
        """Build it from what the network brought.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type, or their values cannot be right.
        """
        made = cls(**message)
        for name, kind in _json_types(cls):  # type: ignore[arg-type]
            value = getattr(made, name)
            # A bool is an int in Python, but True is not a rank.
            if not isinstance(value, kind) or (value.__class__ is bool and kind is not bool):
                raise TypeError(f"{name} is {type(value).__name__}")
        made._check_values()
        return made

    def _check_values(self) -> None:
        """Check what the types do not say."""


@dataclass(frozen=True, kw_only=True)
class RankInfo(_FromNetwork):
    """Who a rank is and what it is about to run, as its agent says when it joins."""

    rank: int
    world_size: int
    host: str
    pid: int
    """Of the worker; of its agent until the worker has started."""
    world_size_source: str = ""
    host_id: str = ""
    """Differs between hosts even if their names do not: see ``launchers.host_id``."""
    since: float = 0.0
    """Seconds since the epoch, by the rank's own clock."""
    address: str = ""
    """Its IP address on the way to rank 0, which its peers are told to connect to."""
    answer_port: int = 0
    """The port at that address where its agent answers other hosts' probes."""
    local_rank: int | None = None
    versions: Mapping[str, str | None] = field(default_factory=dict)
    """The installed versions of torch and python, and of the packages that the user's own program imports."""
    code: Mapping[str, str] = field(default_factory=dict)
    """Part of the program -> digest of its source code."""
    variables: Mapping[str, str] = field(default_factory=dict)
    """The variables that change how ranks talk to one another, as far as they are set."""
    arguments: Mapping[str, str] = field(default_factory=dict)
    """Of the user's own program: ``--lr``, or ``argument 1`` for one without a name -> value."""
    may_differ: Sequence[str] = field(default_factory=list)
    """The arguments that may differ between ranks, as they were typed."""
    allow_mismatch: bool = False
    options: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    """Option -> [value, source], for options that the ranks must agree on and that are known without torch."""
    starts_again: bool = False
    """Whether its agent starts another worker by itself when one is lost."""
    goes_on: Mapping[str, Any] = field(default_factory=dict)
    """Of a rank that has lost rank 0: ``RunSoFar`` of the run that it was in."""

    def _check_values(self) -> None:
        if self.goes_on:
            RunSoFar.from_message(self.goes_on)
        if self.local_rank is not None and self.local_rank < 0:
            raise TypeError("local_rank is not an index")
        if not 0 <= self.since < 1e11 or not 0 <= self.answer_port < 65536:
            raise TypeError("impossible time or port")
        if not 0 <= self.rank < self.world_size:
            raise TypeError("impossible rank")
        names = [self.host, self.host_id, self.address, self.world_size_source]
        _check_names([*names, *filter(None, self.versions.values()), *self.versions])
        _ip_address(self.address)  # which is short, since it is cached
        _check_names([*self.code, *self.code.values(), *self.options, *self.may_differ])
        for named in (self.variables, self.arguments):
            _check_names([*named, *named.values()])
        _check_options(self.options)

    @property
    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class RunSoFar(_FromNetwork):
    """What the ranks of a run know of it, and tell a new rank 0."""

    run_id: str
    run_dir: str | None
    generation: int
    """How often the ranks have begun anew, since others took the places of lost ones."""
    losses: int
    """How often ranks were lost."""
    lost_seconds: float
    """From each loss until all ranks went on."""
    host: str
    pid: int
    """Of rank 0's worker, which was lost."""
    address: str
    """The IP address that rank 0 listened on."""
    lost: str = ""
    """How it was lost."""
    seconds: float = 0.0
    """Since then."""
    held: Sequence[int] = field(default_factory=list)
    """The ``Moment`` of the state that the rank holds; [] if it holds none."""

    def _check_values(self) -> None:
        _check_names([self.run_id, self.host, self.lost])
        _ip_address(self.address)
        numbers = [self.generation, self.losses, self.pid, *self.held]
        if not all(isinstance(number, int) and 0 <= number < 1 << 62 for number in numbers):
            raise TypeError("impossible number")
        if len(self.held) not in (0, 2):
            raise TypeError("a moment is not a generation and a step")


@dataclass(frozen=True, kw_only=True)
class Ready(_FromNetwork):
    """What a rank knows once its worker has loaded torch."""

    pid: int
    """Of the worker, which ``launch`` forks only once torch is loaded."""
    device: str
    """``cpu`` or ``cuda``."""
    backend: str
    """``gloo`` or ``nccl``."""
    gpus: Sequence[str]
    """The UUIDs of the GPUs it could use, by index."""
    versions: Mapping[str, str | None]
    """The versions of torch, python, cuda and nccl, according to torch."""
    options: Mapping[str, Sequence[Any]]
    """Option -> [value, source], for what the ranks must agree on and only torch or the user's code can tell."""
    store: Sequence[Any]
    """From rank 0 its IP address and the port where its worker hosts torch's store; empty from other ranks."""
    may_use_cpu: bool = False
    """Whether it may train on the CPU instead of a GPU, since nobody has chosen a device for it."""
    chooses_device: bool = False
    """Whether its program chooses a device itself, so that nobody knows which GPU it will use."""

    def _check_values(self) -> None:
        _check_names([self.device, self.backend, *self.gpus, *self.options])
        _check_names([*filter(None, self.versions.values()), *self.versions])
        _check_options(self.options)


def _check_names(names: Sequence[str]) -> None:
    if max(map(len, names), default=0) > LONGEST_NAME or not "".join(names).isprintable():
        raise TypeError("a name is too long, or not printable")


def _check_options(options: Mapping[str, Sequence[Any]]) -> None:
    if not all(isinstance(option, list) and len(option) == 2 for option in options.values()):
        raise TypeError("an option is not a pair of value and source")


def more_seconds(world_size: int) -> float:
    """Return how much longer to wait in a large world for what rank 0 says once it has read from every rank: reading a
    reply of 4 KB, or a hello, takes it 0.3 to 0.7 ms."""
    return world_size / 1000


def resume_flags(run_dir: str) -> str:
    return f"--resume auto --run_dir {shlex.quote(run_dir)}"


def first_command_and(run_dir: str) -> str:
    """Say how ranks that were started by hand go on with the run in ``run_dir``: in words that are right for each."""
    return f"each rank with its first command and {resume_flags(run_dir)}"


def from_last_checkpoint(how: str) -> str:
    return f"start all ranks again, from the last checkpoint if there is one: {how}"


@dataclass(frozen=True, kw_only=True)
class RunInfo(_FromNetwork):
    """What run this is, as rank 0 tells each rank that joins."""

    run_id: str
    run_dir: str | None
    world_size: int
    host: str
    pid: int
    """Of rank 0's worker."""
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
    script: bool
    """Whether the ranks run the user's own script, whose options are unknown here."""
    stall_timeout_is_default: bool = False
    """Whether nobody has set it for a script: then it counts only where the time-outs of its process groups are not
    known."""
    on_loss: str = LEAVE
    """What the ranks do when one of them is lost: see ``WorldSpec``."""
    rejoin_timeout: float = 0.0
    shrink_after: float | None = None
    on_loss_of_own_code: bool = False

    def _check_values(self) -> None:
        _ip_address(self.address)

    @property
    def start_again(self) -> str:
        """What to do after the run has ended, as the end of a sentence."""
        if self.run_dir is None or self.script:
            return "start all ranks again"
        return from_last_checkpoint(self.launched or first_command_and(self.run_dir))

    def longest_wait(self, timeout: float | None, until_known: float) -> LongestWait:
        """Return how long ranks may wait in a collective of a process group.

        Args:
            timeout: the seconds of the group's own time-out; None if that is not known.
            until_known: seconds from the begin of a wait until rank 0 knows of it, at most.
        """
        own = LongestWait(self.stall_timeout)
        if timeout is None:
            return own
        of_group = LongestWait(max(timeout / 2, SHARE_OF_TIMEOUT * timeout - until_known), timeout)
        return of_group if self.stall_timeout_is_default or of_group.seconds < own.seconds else own

    def command_for(self, rank: int) -> str:
        return self.command.replace("{rank}", str(rank), 1)  # a program may have an argument with such a word

    @property
    def only_on_its_host(self) -> bool:
        """Whether rank 0 listens on loopback, which no other host reaches."""
        return _ip_address(self.address).is_loopback


def timeout_for(stall_timeout: float) -> float:
    """Return the seconds of a time-out that ends no collective before ``stall_timeout`` does."""
    return stall_timeout / SHARE_OF_TIMEOUT + 10


@dataclass(frozen=True)
class LongestWait:
    """How long ranks may wait in a collective for one that lives but does not come."""

    seconds: float
    timeout: float | None = None
    """The time-out of their process group, if it follows from that; otherwise it is ``stall_timeout``."""

    @property
    def reason(self) -> str:
        if self.timeout is None:
            return "--stall_timeout"
        return f"{SHARE_OF_TIMEOUT:.0%} of their process group's time-out of {self.timeout:g} s"

    @property
    def larger(self) -> str:
        """What makes it longer."""
        if self.timeout is None:
            return "a larger --stall_timeout"
        return (
            f"a larger timeout in\ninit_process_group or new_group: it is {self.timeout:g} s, and the run ends before "
            "torch ends the ranks that wait\n(for the group that join() opens, a larger stall_timeout)"
        )


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


@dataclass
class Progress:
    """What a rank is doing: the training loop writes it, the reporter's thread reads it.

    ``world.progress(step=120, epoch=2)`` in a script's own loop sets what it names; ``status`` shows it, and messages
    say at which step a rank was. The numbers are Python's: a tensor counts as 0, since reading it could wait for a GPU.
    """

    phase: str = JOINING
    """joining, loading, training, evaluating, saving, leaving or ended; running in a script that does not say."""
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    """Of this rank."""
    step_seconds: float = 0.0
    """This rank's own work per step, without waiting for the others; 0 if not measured."""
    saving: bool = False
    """Whether it is writing files that it must finish before its process is ended."""

    def __call__(
        self,
        *,
        step: int | None = None,
        epoch: int | None = None,
        phase: str | None = None,
        samples_per_second: float | None = None,
    ) -> None:
        given = {"step": step, "epoch": epoch, "phase": phase, "samples_per_second": samples_per_second}
        vars(self).update({name: value for name, value in given.items() if value is not None})


@dataclass(frozen=True, kw_only=True)
class Beat(_FromNetwork):
    """What a worker is doing and how far its collectives are; sent with a heartbeat when it has changed."""

    phase: str = JOINING
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    """Process group -> how many collectives this rank has begun in it."""
    timeouts: Mapping[str, float] = field(default_factory=dict)
    """Process group -> the seconds after which torch ends a collective in it; "" -> those of all that are left out: the
    shortest."""
    unfinished: int = 0
    """How many collectives of NCCL this rank has begun and its GPU has not completed."""
    inside: bool = False
    """Whether the training thread is in a collective, or in a backward pass, which may contain one, or waits for a GPU
    that has collectives to complete."""
    place: str = ""
    """The line of the user's program that is running."""
    debugging: bool = False
    """Whether a debugger waits for input."""
    calls: Mapping[str, Sequence[int]] = field(default_factory=dict)
    """Process group -> number, chain, number, chain, ... of its last collectives, as its agent reads them: see
    ``collectives``."""
    stopped: str = ""
    """The signal that stopped the worker, such as SIGSTOP, as its agent sees it."""

    @classmethod
    def of(
        cls,
        progress: Progress,
        collectives: Mapping[str, int],
        *,
        timeouts: Mapping[str, float] | None = None,
        unfinished: int = 0,
        inside: bool,
        place: str,
        debugging: bool,
    ) -> Beat:
        """Make a heartbeat that ``from_message`` accepts, whatever a script has put into ``progress``.

        Texts are cut and made printable; numbers that are not finite become 0; the shortest time-out is said once.
        """
        shortest = min(timeouts.values()) if timeouts else 0.0
        longer = {group: seconds for group, seconds in (timeouts or {}).items() if seconds > shortest}
        return cls(
            phase=printable(str(progress.phase)),
            epoch=int(_number(progress.epoch)),
            step=int(_number(progress.step)),
            samples_per_second=round(_number(progress.samples_per_second), 1),
            step_seconds=round(_number(progress.step_seconds), 6),
            collectives=collectives,
            timeouts={"": shortest, **longer} if shortest > 0 else {},
            unfinished=unfinished,
            inside=inside,
            place=printable(place, LONGEST_PLACE),
            debugging=debugging,
        )

    def _check_values(self) -> None:
        if not {int, float}.issuperset(map(type, self.collectives.values())):
            raise TypeError("a number of collectives is not a number")
        if not {int, float}.issuperset(map(type, self.timeouts.values())):
            raise TypeError("a time-out is not a number")
        if not all(abs(value) <= _LARGEST for value in (self.samples_per_second, self.step_seconds)):
            raise ValueError("no number of samples or seconds")
        if not all(0 < seconds <= _LARGEST for seconds in self.timeouts.values()):
            raise ValueError("an impossible time-out")
        _check_names([self.phase, self.place, self.stopped, *self.calls])
        for sent in self.calls.values():
            if not isinstance(sent, list) or not {int}.issuperset(map(type, sent)):
                raise TypeError("a chain of collectives is not numbers")
            if len(sent) % 2 or len(sent) > LONGEST_CHAINS:
                raise ValueError("chains of collectives are not pairs, or too many")

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


def _number(value: Any) -> float:
    """Return a finite number as it is, anything else as 0; reading a tensor could wait for a GPU that hangs."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else 0.0


@dataclass
class Step:
    """A step of joining, with the time it took; ``check`` shows it."""

    name: str
    seconds: float = 0.0
    outcome: str = "ok"
    """``ok``, ``warning`` or ``failed``."""
    detail: str = ""

    def warn(self, detail: str) -> None:
        self.outcome, self.detail = "warning", detail


class Steps(list[Step]):
    """The steps of joining so far; the last one may have failed."""

    @contextmanager
    def step(self, name: str) -> Iterator[Step]:
        step = Step(name)
        self.append(step)
        started = time.monotonic()
        try:
            yield step
        except BaseException as error:
            step.outcome = "failed"
            step.detail = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
            raise
        finally:
            step.seconds = time.monotonic() - started

    def begin(self, name: str) -> Step:
        """Begin a step that ``end`` ends; until then it counts as failed."""
        step = Step(name, outcome="failed")
        self._began = time.monotonic()
        self.append(step)
        return step

    def end(self, step: Step, detail: str, outcome: str = "ok") -> None:
        """End the step that was begun last."""
        step.outcome, step.detail = outcome, detail
        step.seconds = time.monotonic() - self._began

    def as_dicts(self) -> list[dict[str, Any]]:
        return [asdict(step) for step in self]


Verdict = dict[str, Any]
"""An error as JSON: identifier, what, why, next; exit_code; rank, host and pid of the rank it is about; ``judged`` if
the coordinator says it about that rank, not the rank itself."""


def last_words(error: DdpManualError) -> Verdict:
    """Return the error that ends a worker, as the worker tells its agent."""
    return {**shortened(error.as_dict()), "exit_code": error.exit_code}


def named_from_outside(what: str, rank: Any) -> str:
    """Say which rank a text is about that calls it "this rank"."""
    return what.replace("this rank", f"rank {rank}")


def shortened(words: Mapping[str, Any]) -> dict[str, str]:
    return {name: str(words[name])[-LONGEST_TEXT:] for name in ("identifier", "what", "why", "next")}
