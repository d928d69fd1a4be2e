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
# Faults after which a run that keeps seats goes on, if a person types the missing ranks again.
RECOVERABLE = ("kill", "abort", "kill agent", "freeze agent")
# Faults that make ranks silent; rank 0 takes these ranks to be here until a time-out has passed.
SILENT = ("stop", "freeze agent", *OF_HOSTS, *OF_LINKS)
OF_PEOPLE = ("ctrl-c", "ctrl-c twice", "type twice", "wrong world size", "shrink")
OF_STRANGERS = ("garbage", "mute stranger")
# Faults of a rank whose workers die one after the other, and of a process that lacks the token of all others.
OF_FLAPPING = ("keep dying", "keep dying", "keep dying at work")
OF_TOKENS = ("type without the token", "garbage")
# Faults that take away a rank's worker, its agent, or its host.
LOSSES = ("kill", "abort", "kill agent", "kill agent", "freeze agent", "freeze host", "host vanishes", "host vanishes")
# What a person asks of a run.
REQUESTS = ("ctrl-c", "ctrl-c", "ctrl-c", "ctrl-c", "ctrl-c twice", "shrink")
# What a rank does -> the state of its agent (protocol/states.py); for "again" it must come to that state anew.
STATES = {
    "looks for rank 0": "Looking",
    "waits": "Waiting",
    "begins anew": "Replacing",
    "works": "Working",
    "works again": "Working",
    "closes": "Closing",
    "leaves": "Leaving",
    "has left": "Left",
    "has ended": "Ended",
}
# For a fault that strikes together with the fault before it, or some seconds later.
THAT = "that"
WORDS = {
    "kill": "SIGKILL ends the worker of rank {rank}",
    "abort": "SIGABRT ends the worker of rank {rank}",
    "exit": "the worker of rank {rank} exits with {detail}",
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
    "debugger": "rank {rank} is at a debugger's prompt{while_}",
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
WHEN = (
    r"(?:at (?P<at>[\d.]+) s|(?P<later>[\d.]+) s after "
    rf"(?:(?P<that>{THAT})|rank (?P<of>\d+) (?P<state>{'|'.join(STATES)})),)"
)
FOR_EVER = 1e9
# Seconds for ranks that are here to load torch: see run_states.LOAD_WITHIN.
LOAD_WITHIN = 600.0


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Something that strikes a run: at a time, or when a rank comes to a state, whenever that is."""

    at: float
    """Seconds from the beginning of the run, or from what ``after`` names."""
    kind: str
    rank: int
    other: int = 0
    """The second rank of a link."""
    seconds: float = FOR_EVER
    """How long it lasts; ``ctrl-c twice``: until the second Ctrl-C; ``keep dying``: how long each worker lives."""
    detail: str = ""
    after: str = ""
    """One of ``STATES``: rank ``of`` is in that state, or comes to it, after the turn of the fault before;
    ``THAT``: that fault has had its turn; "": nothing."""
    of: int = 0

    def __str__(self) -> str:
        while_ = f" for {self.seconds:.2f} s" if self.seconds < FOR_EVER else ""
        named = {"rank": self.rank, "other": self.other, "seconds": self.seconds, "detail": self.detail}
        after = self.after if self.after in ("", THAT) else f"rank {self.of} {self.after}"
        when = f"{self.at:.3f} s after {after}," if after else f"at {self.at:.3f} s"
        return f"{when} {WORDS[self.kind].format(**named, while_=while_)}"

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
            if found := re.fullmatch(rf"{WHEN} {pattern}", line):
                given = {name: value for name, value in found.groupdict().items() if value is not None}
                numbers = {name: int(given[name]) for name in ("rank", "other", "of") if name in given}
                at, seconds = float(given.get("later") or given["at"]), float(given.get("seconds", FOR_EVER))
                after, detail = given.get("that") or given.get("state", ""), given.get("detail", "")
                return cls(**{"rank": 0, **numbers}, kind=kind, at=at, seconds=seconds, after=after, detail=detail)
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
    on_each_host: bool = False
    """Whether a person types ``launch`` on each host; otherwise a person types it once, and ssh reaches all hosts."""
    steps: int = 30
    step_seconds: float = 0.2
    hold_every: int = 1
    loads: tuple[float, float] = (0.5, 3.0)
    """The least and the most seconds that a worker takes to load torch."""
    closes: tuple[float, float] = (0.01, 0.01)
    """The least and the most seconds that a worker takes to close its process group, once all work is done."""
    works_on: float = 0.0
    """The most seconds that the ranks of a program, except rank 0, work after their last collective."""
    saves: float = 0.0
    """Seconds for which a program that gets SIGTERM saves, before it leaves in order; 0: the signal ends it."""
    join_timeout: float = 40.0
    rejoin_timeout: float = 40.0
    stall_timeout: float = 20.0
    peer_timeout: float = 10.0
    shrink_after: float | None = None
    types_again: int = 3
    """How often a person types the command of a rank that was lost."""
    moves: bool = False
    """Whether a person types a lost rank again on another host."""
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
        launched = f", by launch{' on each host' if self.on_each_host else ''}" if self.launched else ""
        kind = f"{'a program' if self.script else 'our training'}{launched}"
        work = f"{self.steps} steps of {self.step_seconds:.2f} s, held every {self.hold_every}"
        options = {name: getattr(self, name) for name in OPTIONS if getattr(self, name) != getattr(Plan, name)}
        lines = [
            f"{self.ranks} ranks of {kind}, --on_loss {self.on_loss}, {work}",
            *([] if self.seed is None else [f"seed {self.seed}"]),
            *(f"--{name} {value:g}" for name, value in options.items()),
            *([] if self.loads == Plan.loads else [f"loads torch for {self.loads[0]:g} to {self.loads[1]:g} s"]),
            *([] if self.closes == Plan.closes else [f"closes for {self.closes[0]:g} to {self.closes[1]:g} s"]),
            *([f"works on for up to {self.works_on:g} s"] if self.works_on else []),
            *([f"saves for {self.saves:g} s after SIGTERM"] if self.saves else []),
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
            r"(\d+) ranks of (our training|a program)(, by launch( on each host)?)?(?:, --on_loss (\w+))?"
            r"(?:, (\d+) steps of ([\d.]+) s)?(?:, held every (\d+))?",
            first,
        )
        if found is None:
            raise ValueError(f"this does not begin a plan: {first}")
        ranks = int(found[1])
        values: dict[str, Any] = {"seed": None, "script": found[2] == "a program"}
        values |= {"launched": bool(found[3]), "on_each_host": bool(found[4])}
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
            elif closes := re.fullmatch(r"closes for ([\d.]+) to ([\d.]+) s", line):
                values["closes"] = float(closes[1]), float(closes[2])
            elif works_on := re.fullmatch(r"works on for up to ([\d.]+) s", line):
                values["works_on"] = float(works_on[1])
            elif saves := re.fullmatch(r"saves for ([\d.]+) s after SIGTERM", line):
                values["saves"] = float(saves[1])
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


# The time-outs of a plan; and what its first line says, with the group of that line's pattern.
OPTIONS = ("join_timeout", "rejoin_timeout", "stall_timeout", "peer_timeout", "shrink_after")
WORK: Sequence[tuple[str, Callable[[str], Any], int]] = (
    ("on_loss", str, 5),
    ("steps", int, 6),
    ("step_seconds", float, 7),
    ("hold_every", int, 8),
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
    on_loss = chance.choice(("leave", "wait", "wait", "shrink", "shrink"))
    script, launched = chance.random() < 0.35, chance.random() < 0.15
    if launched:
        hosts.sort()
    steps, step_seconds = chance.choice(((5, 0.05), (20, 0.05), (40, 0.05), (5, 0.2), (20, 0.2), (40, 0.2), (10, 1.0)))
    plan = Plan(
        seed=seed,
        hosts=hosts,
        typed=[round(chance.uniform(0, 4), 3) for _ in range(number)],
        on_loss=on_loss,
        script=script or launched,
        launched=launched,
        steps=steps,
        step_seconds=step_seconds,
        hold_every=chance.choice((1, 1, 3)),
        closes=chance.choice((Plan.closes, (0.01, 1.5))),
        works_on=chance.choice((0.0, 0.0, 8.0)) if script or launched else 0.0,
        saves=chance.choice((0.0, 2.0)) if script or launched else 0.0,
        shrink_after=chance.choice((None, None, 5.0)) if on_loss == "wait" else None,
        types_again=chance.choice((0, 1, 3, 3)),
        moves=chance.random() < 0.3,
        on_each_host=launched and seed % 2 == 1,
    )
    count = chance.choice((0, 1, 1, 1, 2, 2, 3, 4)) if faults is None else faults
    end = max(plan.typed) + plan.loads[1] + plan.steps * plan.step_seconds + 1
    plan = replace(plan, faults=_chains(chance, plan, count, end))
    if random.Random(seed ^ 0x51E7).random() < 0.2:
        plan = replace(plan, peer_timeout=60.0)
    return plan if faults is not None else _with_more(random.Random(seed ^ 0x70C3), plan, end)


def _with_more(chance: random.Random, plan: Plan, end: float) -> Plan:
    """Add to some plans a rank that dies again and again, to others a token, and a process that lacks it; let others be
    a chain of losses, or the loss of rank 0 that a survivor notices late."""
    dice, at, rank = chance.random(), round(chance.uniform(0.1, end), 3), chance.randrange(plan.ranks)
    if dice < (0.5 if plan.launched else 0.06) and plan.on_loss != "leave":
        seconds = round(chance.choice((0.3, 2.0, chance.uniform(0.3, 8))), 1)
        more = Fault(at=at, kind=chance.choice(OF_FLAPPING), rank=rank, seconds=seconds)
        plan = replace(plan, step_seconds=min(plan.step_seconds, 0.2))  # so that a step is done before the rank is back
    elif dice < 0.12:
        more = Fault(at=at, kind=chance.choice(OF_TOKENS), rank=max(rank, 1))
        plan = replace(plan, token=True)
    elif dice < 0.6 and plan.on_loss != "leave" and not plan.launched:
        return _while_lost(chance, plan)
    elif dice < 0.68 and plan.on_loss != "leave" and not plan.launched:
        return _while_late(chance, plan)
    elif dice < 0.72 and plan.on_loss != "leave" and not plan.launched and plan.ranks > 2:
        return _beside_a_cut(chance, plan)
    else:
        return plan
    return replace(plan, faults=(*plan.faults, more))


def _chains(chance: random.Random, plan: Plan, count: int, end: float) -> tuple[Fault, ...]:
    """Draw faults: each strikes at any moment, or while the ranks still deal with the fault before it."""
    chains: list[list[Fault]] = []
    for _ in range(count):
        kind, rank = chance.choice(_kinds(plan)), chance.choice((0, *range(plan.ranks)))
        if not chains or chance.random() < 0.5:
            at, after = _moment(chance, plan, end)
            chains.append([_fault(chance, plan, kind, rank, at, after)])
        else:
            chains[-1].append(_amid(chance, plan, chains[-1][-1], kind, rank))
    chains.sort(key=lambda chain: (("waits", "works", "", "closes").index(chain[0].after), chain[0].at))
    return tuple(itertools.chain.from_iterable(chains))


def _moment(chance: random.Random, plan: Plan, end: float) -> tuple[float, str]:
    """Draw when a fault strikes: at any time, while its rank waits or works, or as all have finished."""
    after = chance.choice(("", "", "waits", "waits", "works", "works", "closes"))
    until = {"": end, "waits": 4.0, "works": plan.steps * plan.step_seconds, "closes": plan.closes[1]}[after]
    return chance.uniform(0 if after else 0.1, until), after


def _amid(chance: random.Random, plan: Plan, before: Fault, kind: str, rank: int) -> Fault:
    """Draw a fault that strikes while the ranks deal with the fault before it: just after that fault, or when a rank
    that goes on, or is typed again, comes to one of its next states."""
    at = chance.choice((chance.uniform(0, 0.1), chance.uniform(0, 1), chance.uniform(0, 4)))
    if plan.on_loss == "leave":
        return _fault(chance, plan, kind, rank, at, THAT)
    if rank == before.rank:
        after = chance.choice((THAT, "waits", "waits", "works again"))
    elif before.rank == 0 and before.kind not in OF_WORKERS:
        after = chance.choice((THAT, "looks for rank 0", "looks for rank 0", "waits", "works again"))
    else:
        after = chance.choice((THAT, "begins anew", "begins anew", "waits", "works again"))
    return _fault(chance, plan, kind, rank, at, after)


def _while_lost(chance: random.Random, plan: Plan) -> Plan:
    """Let a rank be lost while all work; while its seat is free, or as it is back, somebody asks the run for something
    or another rank is lost; then comes a third loss, perhaps of whoever has asked."""
    lost, other = chance.sample(range(plan.ranks), 2)
    first, second, third = (chance.choice(LOSSES) for _ in range(3))
    if chance.random() < 0.7:
        second = chance.choice(REQUESTS)
        # If rank 0 is one of the two, it is lost first: with it a request would be lost, and awaited by nobody.
        lost, other = (other, lost) if other == 0 else (lost, other)
    if chance.random() < 0.5:  # the work lasts until a silent rank is noticed
        plan = replace(plan, steps=40, step_seconds=1.0)
    loads, shrink_after = chance.choice((plan.loads, (0.5, 6.0), (0.5, 6.0))), chance.choice((None, plan.shrink_after))
    plan = replace(plan, types_again=3, loads=loads, shrink_after=shrink_after)
    begins = chance.uniform(0, min(4.0, plan.steps * plan.step_seconds))
    faults = [_fault(chance, plan, first, lost, begins, "works")]
    faults.append(_amid(chance, plan, faults[0], second, chance.choice((other, other, lost))))
    asks = faults[1].rank
    faults.append(_amid(chance, plan, faults[1], third, chance.choice((other, lost, asks, asks))))
    return replace(plan, faults=tuple(faults))


def _while_late(chance: random.Random, plan: Plan) -> Plan:
    """Let rank 0 be lost while another rank is frozen, which notices the loss later than the others do."""
    late, seconds = chance.randrange(1, plan.ranks), round(chance.uniform(2.0, 6.0), 2)
    freezes = Fault(at=round(chance.uniform(0, 2), 3), kind="freeze agent", rank=late, seconds=seconds, after="works")
    lost = Fault(at=round(chance.uniform(0, 1), 3), kind="kill agent", rank=0, after=THAT)
    return replace(plan, types_again=3, steps=40, faults=(freezes, lost))


def _beside_a_cut(chance: random.Random, plan: Plan) -> Plan:
    """Let a lost rank be typed again on a host of its own, which is cut off from a working rank's; then lose a rank."""
    lost, other = chance.sample(range(1, plan.ranks), 2)
    plan = replace(plan, hosts=range(1, plan.ranks + 1), types_again=3, moves=True, steps=40)
    leaves = _fault(chance, plan, "kill agent", lost, chance.uniform(0, 4), "works")
    cut = Fault(at=round(chance.uniform(0, 0.5), 3), kind="cut", rank=lost, other=other, after="waits", of=lost)
    third = _fault(chance, plan, chance.choice(LOSSES), chance.choice((0, other)), chance.uniform(0, 30), THAT)
    return replace(plan, faults=(leaves, cut, third))


def _kinds(plan: Plan) -> list[str]:
    several_hosts = len(set(plan.hosts)) > 1
    kinds = [*OF_WORKERS, *OF_WORKERS, *OF_AGENTS, *OF_AGENTS, *OF_PEOPLE, *OF_STRANGERS]
    return kinds + [*OF_HOSTS, *OF_LINKS, *OF_LINKS] * several_hosts


def _fault(chance: random.Random, plan: Plan, kind: str, rank: int, at: float, after: str) -> Fault:
    """Complete a fault: how long it lasts, and between which hosts."""
    if kind in OF_HOSTS and len(set(plan.hosts)) == 1:  # the run would be gone with its only host
        kind = "freeze agent" if kind == "freeze host" else "kill agent"
    seconds = FOR_EVER
    if kind in ("stop", "freeze agent", "freeze host", "cut", "cut one way"):
        seconds = chance.choice((chance.uniform(0.2, 8), chance.uniform(8, 30), FOR_EVER))
    elif kind == "ctrl-c twice":
        seconds = chance.choice((chance.uniform(0.3, 0.3 + plan.step_seconds), chance.uniform(0.2, 4)))
    away = [other for other in range(plan.ranks) if plan.hosts[other] != plan.hosts[rank]]
    other = chance.choice(away) if away and kind in OF_LINKS else 0
    where: dict[str, Any] = {"rank": rank, "other": other, "of": rank if after in STATES else 0}
    if kind == "exit":  # where nothing joins, a program that exits with 0 is done
        where["detail"] = "3" if plan.script else chance.choice(("3", "0"))
    return Fault(at=round(at, 3), kind=kind, seconds=round(seconds, 2), after=after, **where)


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
        {"closes": Plan.closes},
        {"saves": 0.0},
        {"works_on": 0.0},
        {"launched": False},
        {"script": False, "launched": False},
    ):
        smaller = replace(plan, **simpler)  # type: ignore[arg-type]
        if smaller != plan:
            yield smaller
