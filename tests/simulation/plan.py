"""What happens in one run: who types what when, and which faults strike. A seed draws it, ``shrunk`` makes it small."""

from __future__ import annotations

import itertools
import random
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

# Faults of one rank, of its host, and of the way between two hosts; and what people do.
OF_WORKERS = ("kill", "abort", "exit", "raise", "hang", "stop")
OF_AGENTS = ("kill agent", "freeze agent")
OF_HOSTS = ("host vanishes", "freeze host")
OF_LINKS = ("cut", "cut one way")
# After which a run that keeps seats goes on, if a person types what is missing.
RECOVERABLE = ("kill", "abort", "kill agent", "freeze agent")
OF_PEOPLE = ("ctrl-c", "ctrl-c twice", "type twice", "wrong world size", "shrink")
OF_STRANGERS = ("garbage", "mute stranger")
# Of a rank whose workers die one after the other, and of a process that lacks the token which all others have.
OF_FLAPPING = ("keep dying", "keep dying", "keep dying at work")
OF_TOKENS = ("type without the token", "garbage")
WORDS = {
    "kill": "SIGKILL ends the worker of rank {rank}",
    "abort": "SIGABRT ends the worker of rank {rank}",
    "exit": "the worker of rank {rank} exits with 3",
    "raise": "rank {rank} raises an exception",
    "hang": "rank {rank} is stuck in a loop",
    "stop": "SIGSTOP stops the worker of rank {rank}{while_}",
    "kill agent": "SIGKILL ends the agent of rank {rank}",
    "freeze agent": "SIGSTOP stops the agent of rank {rank}{while_}",
    "host vanishes": "the host of rank {rank} loses its power",
    "freeze host": "the host of rank {rank} freezes{while_}",
    "cut": "the network between rank {rank}'s host and rank {other}'s is cut{while_}",
    "cut one way": "nothing gets from rank {rank}'s host to rank {other}'s any more{while_}",
    "ctrl-c": "Ctrl-C at rank {rank}",
    "ctrl-c twice": "Ctrl-C at rank {rank}, and again after {seconds:.1f} s",
    "type twice": "rank {rank} is typed once more",
    "wrong world size": "rank {rank} is typed once more with a wrong --world_size",
    "type with": "rank {rank} is typed with {detail}",
    "sigterm": "SIGTERM for the agent of rank {rank}",
    "debugger": "rank {rank} comes to breakpoint()",
    "listener": "{detail} listens at rank 0's port",
    "name": "rank 0's name gets its address",
    "no process": "no process can be started on the host of rank {rank} any more",
    "keep dying": "SIGKILL ends each worker of rank {rank}, from now on {seconds:.1f} s after it has started",
    "keep dying at work": "SIGKILL ends each worker of rank {rank}, from now on as soon as it begins to work",
    "type without the token": "rank {rank} is typed once more without the token",
    "shrink": "status --shrink",
    "garbage": "a stranger sends garbage to rank 0's port",
    "mute stranger": "a stranger connects to rank 0's port and says nothing",
}
FOR_EVER = 1e9
# Seconds for ranks that are here to load torch: see roll_call.LOAD_WITHIN.
LOAD_WITHIN = 600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that strikes at a moment."""

    at: float
    """Seconds from the beginning of the run."""
    kind: str
    rank: int
    other: int = 0
    """The second rank of a link."""
    seconds: float = FOR_EVER
    """How long it lasts; of ``ctrl-c twice``, until the second one."""
    detail: str = ""

    def __str__(self) -> str:
        while_ = f" for {self.seconds:.2f} s" if self.seconds < FOR_EVER else ""
        named = {"rank": self.rank, "other": self.other, "seconds": self.seconds, "detail": self.detail}
        return f"at {self.at:.3f} s {WORDS[self.kind].format(**named, while_=while_)}"

    @classmethod
    def from_words(cls, line: str) -> Fault | None:
        """Return the fault that ``str`` has put into words; None if the line is no fault."""
        groups = {
            "{rank}": r"(?P<rank>\d+)",
            "{other}": r"(?P<other>\d+)",
            "{seconds:.1f}": r"(?P<seconds>[\d.]+)",
            "{while_}": r"(?: for (?P<seconds>[\d.]+) s)?",
            "{detail}": r"(?P<detail>.+)",
        }
        for kind, words in WORDS.items():
            pattern = re.escape(words)
            for name, group in groups.items():
                pattern = pattern.replace(re.escape(name), group)
            if found := re.fullmatch(rf"at (?P<at>[\d.]+) s {pattern}", line):
                given = {name: value for name, value in found.groupdict().items() if value is not None}
                numbers = {name: int(given[name]) for name in ("rank", "other") if name in given}
                seconds = {name: float(given[name]) for name in ("at", "seconds") if name in given}
                return cls(**{"rank": 0, **numbers, **seconds}, kind=kind, detail=given.get("detail", ""))
        return None


@dataclass(frozen=True, kw_only=True)
class Plan:
    """One run."""

    seed: int | None
    """Decides what the plan leaves open: delays, and what comes first. None: each delay is the mean one."""
    hosts: Sequence[int]
    """The host of each rank."""
    typed: Sequence[float]
    """When each rank is typed."""
    on_loss: str = "leave"
    script: bool = False
    """Whether the ranks run a user's own program."""
    launched: bool = False
    """Whether ``launch`` starts the ranks of each host, in place of a person who types each of them."""
    steps: int = 30
    step_seconds: float = 0.2
    hold_every: int = 1
    loads: tuple[float, float] = (0.5, 3.0)
    """Between how many seconds a worker takes to load torch."""
    join_timeout: float = 40.0
    rejoin_timeout: float = 40.0
    stall_timeout: float = 20.0
    peer_timeout: float = 10.0
    shrink_after: float | None = None
    types_again: int = 3
    """How often a person types the command of a rank that was lost."""
    moves: bool = False
    """Whether that is done on another host."""
    token: bool = False
    """Whether all ranks have a token."""
    by_name: bool = False
    """Whether rank 0's address is given as a name, which may have no address yet."""
    faults: Sequence[Fault] = ()

    @property
    def ranks(self) -> int:
        return len(self.hosts)

    @property
    def times(self) -> list[float]:
        """When ranks are typed."""
        return [at for at in self.typed if at < FOR_EVER]

    @property
    def limit(self) -> float:
        """Seconds after which every agent has ended: the longest time-outs one after the other, for each fault."""
        waits = self.join_timeout + self.stall_timeout + LOAD_WITHIN + 60
        for fault in self.faults:
            lasts = 0.0 if fault.seconds == FOR_EVER else fault.seconds
            waits += lasts + self.peer_timeout + self.stall_timeout + self.rejoin_timeout + 60
        return max(self.times) + self.steps * self.step_seconds * (2 + len(self.faults)) + waits + 100

    def __str__(self) -> str:
        """Put the plan into words that ``from_words`` reads."""
        kind = f"{'a program' if self.script else 'our training'}{', by launch' if self.launched else ''}"
        work = f"{self.steps} steps of {self.step_seconds:.2f} s, held every {self.hold_every}"
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != getattr(Plan, name)}
        lines = [
            f"{self.ranks} ranks of {kind}, --on_loss {self.on_loss}, {work}",
            *([] if self.seed is None else [f"seed {self.seed}"]),
            *(f"--{name} {value:g}" for name, value in options.items()),
            *([] if self.loads == Plan.loads else [f"loads torch for {self.loads[0]:g} to {self.loads[1]:g} s"]),
            *(["all ranks have a token"] if self.token else []),
            *(["rank 0's address is given as a name"] if self.by_name else []),
            *(
                f"rank {rank} on host {host} is {f'typed at {at:.3f} s' if at < FOR_EVER else 'not typed'}"
                for rank, (host, at) in enumerate(zip(self.hosts, self.typed, strict=True))
            ),
            f"a lost rank is typed again {self.types_again} times{', on another host' if self.moves else ''}",
            *map(str, self.faults),
        ]
        return "\n".join(lines)

    @classmethod
    def from_words(cls, text: str) -> Plan:
        """Read a plan; what it leaves out has its default, and all ranks are typed at once on one host.

        Raises:
            ValueError: a line is none of those that ``str`` writes.
        """
        first, *lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
        found = re.fullmatch(
            r"(\d+) ranks of (our training|a program)(, by launch)?(?:, --on_loss (\w+))?"
            r"(?:, (\d+) steps of ([\d.]+) s)?(?:, held every (\d+))?",
            first,
        )
        if found is None:
            raise ValueError(f"this does not begin a plan: {first}")
        ranks = int(found[1])
        values: dict[str, Any] = {"seed": None, "script": found[2] == "a program", "launched": bool(found[3])}
        values |= {name: kind(found[group]) for name, kind, group in WORK if found[group] is not None}
        hosts, typed, faults = [0] * ranks, [0.0] * ranks, []
        for line in lines:
            if of_rank := re.fullmatch(r"rank (\d+) on host (\d+) is (?:typed at ([\d.]+) s|not typed)", line):
                rank = int(of_rank[1])
                hosts[rank], typed[rank] = int(of_rank[2]), float(of_rank[3] or FOR_EVER)
            elif again := re.fullmatch(r"a lost rank is typed again (\d+) times(, on another host)?", line):
                values |= {"types_again": int(again[1]), "moves": bool(again[2])}
            elif seed := re.fullmatch(r"seed (\d+)", line):
                values["seed"] = int(seed[1])
            elif loads := re.fullmatch(r"loads torch for ([\d.]+) to ([\d.]+) s", line):
                values["loads"] = float(loads[1]), float(loads[2])
            elif (option := re.fullmatch(r"--(\w+) ([\d.]+)", line)) and option[1] in OPTIONS:
                values[option[1]] = float(option[2])
            elif line == "all ranks have a token":
                values["token"] = True
            elif line == "rank 0's address is given as a name":
                values["by_name"] = True
            elif (fault := Fault.from_words(line)) is not None:
                faults.append(fault)
            else:
                raise ValueError(f"this is no line of a plan: {line}")
        return cls(hosts=hosts, typed=typed, faults=tuple(faults), **values)


# The time-outs of a plan, and its numbers, with the group that the first line has them in.
OPTIONS = ("join_timeout", "rejoin_timeout", "stall_timeout", "peer_timeout", "shrink_after")
WORK: Sequence[tuple[str, Callable[[str], Any], int]] = (
    ("on_loss", str, 4),
    ("steps", int, 5),
    ("step_seconds", float, 6),
    ("hold_every", int, 7),
)


def draw(seed: int, ranks: int | None = None, faults: int | None = None) -> Plan:
    """Draw a plan.

    Args:
        ranks: how many; None for 2 to 6.
        faults: how many; None for none to four.
    """
    chance = random.Random(seed)
    number = ranks or chance.choice((2, 2, 3, 3, 3, 4, 4, 5, 6))
    kind = chance.choice(("one host", "own hosts", "two hosts"))
    hosts = [0 if kind == "one host" else rank if kind == "own hosts" else rank % 2 for rank in range(number)]
    on_loss = chance.choice(("leave", "wait", "wait", "shrink"))
    script, launched = chance.random() < 0.35, chance.random() < 0.15
    if launched:
        hosts.sort()
    plan = Plan(
        seed=seed,
        hosts=hosts,
        typed=[round(chance.uniform(0, 4), 3) for _ in range(number)],
        on_loss=on_loss,
        script=script or launched,
        launched=launched,
        steps=chance.choice((5, 20, 40)),
        step_seconds=chance.choice((0.05, 0.2)),
        hold_every=chance.choice((1, 1, 3)),
        shrink_after=chance.choice((None, None, 5.0)) if on_loss == "wait" else None,
        types_again=chance.choice((0, 1, 3, 3)),
        moves=chance.random() < 0.3,
    )
    count = chance.choice((0, 1, 1, 1, 2, 2, 3, 4)) if faults is None else faults
    end = max(plan.typed) + plan.loads[1] + plan.steps * plan.step_seconds + 1
    found = [_fault(chance, plan, end) for _ in range(count)]
    for at in range(1, count):
        if chance.random() < 0.5:  # while the ranks still deal with the fault before
            found[at] = replace(found[at], at=round(found[at - 1].at + chance.uniform(0, 4), 3))
    plan = replace(plan, faults=tuple(sorted(found, key=lambda fault: fault.at)))
    return plan if faults is not None else _with_more(random.Random(seed ^ 0x70C3), plan, end)


def _with_more(chance: random.Random, plan: Plan, end: float) -> Plan:
    """Add to some plans a rank that dies again and again, to others a token, and a process that lacks it."""
    dice, at, rank = chance.random(), round(chance.uniform(0.1, end), 3), chance.randrange(plan.ranks)
    if dice < (0.3 if plan.launched else 0.06) and plan.on_loss != "leave":
        seconds = round(chance.choice((0.3, 2.0, chance.uniform(0.3, 8))), 1)
        more = Fault(at=at, kind=chance.choice(OF_FLAPPING), rank=rank, seconds=seconds)
    elif dice < 0.12:
        more = Fault(at=at, kind=chance.choice(OF_TOKENS), rank=max(rank, 1))
        plan = replace(plan, token=True)
    elif dice < 0.15 and plan.on_loss == "wait" and plan.ranks > 2 and not plan.launched:
        lost, asks = chance.sample(range(plan.ranks), 2)  # a seat is free when somebody asks to stop, and is lost too
        times = itertools.accumulate((at, chance.uniform(0.1, 2), chance.uniform(0.1, 3)))
        struck = zip(times, ("kill agent", "ctrl-c", "kill agent"), (lost, asks, asks), strict=True)
        faults = tuple(Fault(at=round(at, 3), kind=kind, rank=rank) for at, kind, rank in struck)
        return replace(plan, types_again=3, faults=faults)
    else:
        return plan
    return replace(plan, faults=tuple(sorted([*plan.faults, more], key=lambda fault: fault.at)))


def _fault(chance: random.Random, plan: Plan, end: float) -> Fault:
    kinds = [*OF_WORKERS, *OF_WORKERS, *OF_AGENTS, *OF_HOSTS, *OF_PEOPLE, *OF_STRANGERS]
    if len(set(plan.hosts)) > 1:
        kinds += [*OF_LINKS, *OF_LINKS]
    else:
        kinds = [kind for kind in kinds if kind not in OF_HOSTS]
    kind, rank = chance.choice(kinds), chance.randrange(plan.ranks)
    seconds = FOR_EVER
    if kind in ("stop", "freeze agent", "freeze host", "cut", "cut one way"):
        seconds = chance.choice((chance.uniform(0.2, 8), chance.uniform(8, 30), FOR_EVER))
    elif kind == "ctrl-c twice":
        seconds = chance.uniform(0.2, 4)
    away = [other for other in range(plan.ranks) if plan.hosts[other] != plan.hosts[rank]]
    other = chance.choice(away) if away and kind in OF_LINKS else 0
    return Fault(at=round(chance.uniform(0.1, end), 3), kind=kind, rank=rank, other=other, seconds=round(seconds, 2))


def shrunk(plan: Plan, fails: Callable[[Plan], bool]) -> Plan:
    """Return the smallest plan that was found to fail too: with fewer faults, then fewer ranks, then a simpler run."""
    changed = True
    while changed:
        changed = False
        for smaller in _smaller(plan):
            if fails(smaller):
                plan, changed = smaller, True
                break
    return plan


def _smaller(plan: Plan) -> Iterator[Plan]:
    for left_out in range(len(plan.faults)):
        yield replace(plan, faults=tuple(fault for at, fault in enumerate(plan.faults) if at != left_out))
    last = plan.ranks - 1
    if last > 1 and not any(last in (fault.rank, fault.other) for fault in plan.faults):
        yield replace(plan, hosts=plan.hosts[:-1], typed=plan.typed[:-1])
    for simpler in (
        {"hosts": [0] * plan.ranks},
        {"typed": [0.0] * plan.ranks},
        {"moves": False},
        {"hold_every": 1},
        {"steps": 20},
        {"types_again": 1},
        {"shrink_after": None},
        {"loads": (1.0, 1.0)},
        {"launched": False},
        {"script": False, "launched": False},
    ):
        smaller = replace(plan, **simpler)  # type: ignore[arg-type]
        if smaller != plan:
            yield smaller
