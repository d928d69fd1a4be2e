"""What torchrun, ``accelerate launch`` and ``ddp-manual run`` say to the same ten faults of the same plain script.

python -m benchmarks.faults                                # as root, since hosts are network namespaces
python -m benchmarks.faults --only 3 --json faults.json    # once more; the other faults stay as they are in the file

Three ranks are typed on three hosts. Seconds count from the moment at which the last command was typed or, in a
training, at which the rank went wrong. A rank that has not ended after 60 s is ended, and is "-" in the table.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import click

from benchmarks.measuring import REPOSITORY, machine
from benchmarks.said import table_of
from tests.conftest import LAUNCHER_VARIABLES, named
from tests.hosts.hosts import Host, Network, remove_leftovers, why_not

HOSTS = 3
PORT = 29500
# Seconds until the rank that is to go wrong has gone wrong, on a busy machine.
STARTED_WITHIN = 180.0
# Seconds between two commands whose order matters.
APART = 3.0
READ_WITHIN = 5.0
LOOK_EVERY = 0.05
TIME_LIMIT = "10"
SCRIPT = "benchmarks/plain_faults.py"
BESIDE_PYTHON = Path(sys.executable).parent


@dataclass(frozen=True)
class Command:
    """What a person types on one host."""

    rank: int
    world_size: int = HOSTS
    port: int = PORT
    arguments: tuple[str, ...] = ()
    """The arguments of the script."""
    options: tuple[str, ...] = ()
    """The options of ``ddp-manual run``."""


def torchrun(command: Command, master: str) -> list[str]:
    hosts = ["--nnodes", str(command.world_size), "--node_rank", str(command.rank), "--nproc_per_node", "1"]
    return ["torchrun", *hosts, "--master_addr", master, "--master_port", str(command.port)]


def accelerate(command: Command, master: str) -> list[str]:
    # --multi_gpu: without it one process is started, without RANK; the script itself chooses the CPU. Without the two
    # options that follow, accelerate would warn that it has chosen their values itself.
    words = ["accelerate", "launch", "--multi_gpu", "--mixed_precision", "no", "--dynamo_backend", "no"]
    number = str(command.world_size)
    words += ["--num_machines", number, "--num_processes", number, "--machine_rank", str(command.rank)]
    return [*words, "--main_process_ip", master, "--main_process_port", str(command.port)]


def ours(command: Command, master: str) -> list[str]:
    place = ["--world_size", str(command.world_size), "--rank", str(command.rank)]
    return ["ddp-manual", "run", *place, "--master_addr", master, "--master_port", str(command.port), *command.options]


PROGRAMS: Mapping[str, Callable[[Command, str], list[str]]] = {
    "torchrun": torchrun,
    "accelerate launch": accelerate,
    "ddp-manual run": ours,
}
ALL = tuple(Command(rank) for rank in range(HOSTS))


@dataclass(frozen=True)
class Fault:
    title: str
    commands: tuple[Command, ...] = ALL
    """One for each host, in the order in which they are typed."""
    arguments: tuple[str, ...] = ()
    """The arguments of the script, on every host."""
    prepare: Callable[[Sequence[Host]], None] = lambda hosts: None
    pause: float = 0
    """Seconds between two commands."""
    time_limit: bool = False
    """Whether collectives get a time limit: from ``ddp-manual run``, under other launchers from the script."""


def goes_wrong(fault: str) -> tuple[str, ...]:
    return ("--fault", fault, "--on", "2")


FAULTS = (
    Fault("nothing is wrong"),
    Fault("rank 2 is never started", ALL[:2]),
    Fault("ranks 1 and 2 are given another port than rank 0", (ALL[0], *(replace(one, port=29501) for one in ALL[1:]))),
    Fault(
        "rank 0's firewall drops what comes from rank 2's host",
        prepare=lambda hosts: hosts[0].drop_from(hosts[2]),
    ),
    Fault("rank 1 is typed on two hosts, rank 2 on none", (ALL[0], ALL[1], ALL[1]), pause=APART),
    Fault("rank 2 is told that there are 4 ranks", (*ALL[:2], replace(ALL[2], world_size=4)), pause=APART),
    Fault("rank 2 has another learning rate", (*ALL[:2], replace(ALL[2], arguments=("--lr", "0.2"))), pause=APART),
    Fault("rank 2 raises an exception", arguments=goes_wrong("raise")),
    Fault("rank 2 is killed", arguments=goes_wrong("kill")),
    Fault("rank 2 is stuck in a loop", arguments=goes_wrong("loop"), time_limit=True),
    Fault("rank 2 calls broadcast where the others call all_reduce", arguments=goes_wrong("mismatch"), time_limit=True),
)


class Terminal:
    """A command that was typed, with the lines it prints and when. Times are seconds of the monotonic clock."""

    gone: float | None = None
    """When it ended by itself."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str]) -> None:
        self.lines: list[tuple[float, str]] = []
        self.typed = time.monotonic()
        self.process = subprocess.Popen(
            words,
            env=env,
            cwd=REPOSITORY,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        self._reading = threading.Thread(target=self._read, daemon=True)
        self._reading.start()

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append((time.monotonic(), line.decode(errors="replace").rstrip()))

    def has_ended(self) -> bool:
        if self.gone is None and self.process.poll() is not None:
            self.gone = time.monotonic()
        return self.gone is not None

    def described(self, zero: float, until: float) -> dict[str, Any]:
        """Return the exit code (None if it did not end), and lines with their seconds since ``zero``."""
        self._reading.join(READ_WITHIN)
        code, gone = (None, None) if self.gone is None else (self.process.returncode, round(self.gone - zero, 1))
        lines = [(round(at - zero, 1), line) for at, line in self.lines if at < until]
        return {"exit code": code, "gone": gone, "lines": lines}


def environment() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name not in (*LAUNCHER_VARIABLES, "OMP_NUM_THREADS")}
    return {**env, "PATH": f"{BESIDE_PYTHON}:{env['PATH']}", "PYTHONPATH": str(REPOSITORY), "PYTHONUNBUFFERED": "1"}


def start(*words: object, place: tuple[str, str], **env: str) -> Terminal:
    namespace, host = place
    typed = ["ip", "netns", "exec", namespace, *named(host), *map(str, words)]
    return Terminal(typed, {**environment(), **env})


def provoke(fault: Fault, program: str, seconds: float) -> list[dict[str, Any]]:
    """Provoke a fault; return for each host what was typed, printed and returned, and after how many seconds."""
    network = Network(1, HOSTS, ipv4=True, ipv6=False)
    typed: list[str] = []
    terminals: list[Terminal] = []
    with tempfile.TemporaryDirectory() as folder:
        try:
            network.add()
            for host in network.hosts:  # otherwise a host has the address 127.0.1.1, and bare gloo does not work at all
                host.resolve(host.name, host.address)
            fault.prepare(network.hosts)
            moment = Path(folder, "moment")
            for command, host in zip(fault.commands, network.hosts, strict=False):
                time.sleep(fault.pause if terminals else 0)
                words = words_for(program, fault, command, network.hosts[0].address, moment)
                typed.append(" ".join(words))
                terminals.append(start(*words, place=(host.namespace.name, host.name)))
            zero = moment_of(fault, terminals, moment)
            running = terminals
            while running and time.monotonic() < zero + seconds:
                time.sleep(LOOK_EVERY)
                running = [one for one in running if not one.has_ended()]
        finally:
            network.remove()
        return [
            {"typed": words, **one.described(zero, zero + seconds)} for words, one in zip(typed, terminals, strict=True)
        ]


def words_for(program: str, fault: Fault, command: Command, master: str, moment: Path) -> list[str]:
    """Return the words of a command with the script and its arguments."""
    arguments = [*fault.arguments, *command.arguments]
    if fault.arguments:
        arguments += ["--moment", str(moment)]
    if fault.time_limit and PROGRAMS[program] is ours:
        command = replace(command, options=("--stall_timeout", TIME_LIMIT))
    elif fault.time_limit:
        arguments += ["--timeout", TIME_LIMIT]
    return [*PROGRAMS[program](command, master), SCRIPT, *arguments]


def moment_of(fault: Fault, terminals: Sequence[Terminal], moment: Path) -> float:
    """Wait for the fault; return its time."""
    if not fault.arguments:
        return terminals[-1].typed
    until = time.monotonic() + STARTED_WITHIN
    while not (moment.exists() and (text := moment.read_text())):
        if time.monotonic() > until or any(one.has_ended() for one in terminals):
            said = "\n".join(line for one in terminals for _, line in one.lines)
            raise click.ClickException(f"{fault.title}: this did not come to pass, but:\n{said}")
        time.sleep(LOOK_EVERY)
    return float(text)


@click.command()
@click.option("--json", "file", type=click.Path(path_type=Path), default="faults.json", show_default=True)
@click.option("--only", type=int, multiple=True, help="Provoke only these faults; 0: none, to see that all goes well.")
@click.option("--by", type=click.Choice([*PROGRAMS]), multiple=True, help="Start the script only with these.")
@click.option("--seconds", default=60.0, show_default=True, help="What has not ended after so long is ended.")
@click.option("--table", is_flag=True, help="Only print the table of what the file has.")
def main(file: Path, only: Sequence[int], by: Sequence[str], *, seconds: float, table: bool) -> None:
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    if not table:
        if reason := why_not():
            raise click.ClickException(reason)
        remove_leftovers()
        for number in only or range(1, len(FAULTS)):
            for program in by or PROGRAMS:
                click.echo(f"{number}. {FAULTS[number].title}, {program}", err=True)
                found.setdefault(FAULTS[number].title, {})[program] = provoke(FAULTS[number], program, seconds)
                file.write_text(json.dumps(found, indent=1) + "\n")
    click.echo(f"{machine()}, accelerate {version('accelerate')}")
    ordered = {
        one.title: {name: found[one.title][name] for name in PROGRAMS if name in found[one.title]}
        for one in FAULTS
        if one.title in found
    }
    click.echo("\n".join(table_of(ordered)))


if __name__ == "__main__":
    main()
