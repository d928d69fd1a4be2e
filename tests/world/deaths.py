"""Three ranks of which one fails: what every survivor has to say, and how soon it has to be gone.

Seconds count from the signal, or from the line in which ``tests/faulty.py`` says that it strikes.
"""

from __future__ import annotations

import json
import os
import re
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import psutil

from ddp_manual.tools import status
from ddp_manual.world_spec import WorldSpec
from tests.conftest import LONGER, RankProcess, Start, has_ended
from tests.faulty import faulty
from tests.memory import MemoryGroup

HOST = os.uname().nodename
# Seconds; the options of the ranks in these tests.
PEER_TIMEOUT = 3
STALL_TIMEOUT = 3
# Seconds in which every survivor has to be gone.
WHERE_SOCKETS_CLOSE = 2.0
WHERE_SILENT = PEER_TIMEOUT + 2.0
WHERE_STUCK = STALL_TIMEOUT + 3.0
# A training longer than any of these tests.
TRAINING = (*LONGER, 500, "--peer_timeout", PEER_TIMEOUT)


class Three:
    """Three ranks, one of them with faults."""

    def __init__(self, ranks: Sequence[RankProcess], victim: int, hosts: Sequence[str] = (HOST,) * 3) -> None:
        self.ranks, self.victim, self.hosts = ranks, victim, hosts

    @property
    def process(self) -> RankProcess:
        return self.ranks[self.victim]

    @property
    def survivors(self) -> dict[int, RankProcess]:
        return {number: rank for number, rank in enumerate(self.ranks) if number != self.victim}

    @property
    def name(self) -> str:
        """The victim, as errors name it."""
        return f"rank {self.victim} ({self.hosts[self.victim]}, pid {self.process.worker})"

    def signal_worker(self, number: int) -> None:
        """Signal the process that trains; the rank's agent is another process."""
        os.kill(self.process.worker, number)

    @property
    def lost(self) -> str:
        """The identifier of the error if the victim dies without a message."""
        return "peer-lost" if self.victim else "master-lost"


def start_three(
    start: Start,
    rank_command: Callable[..., list[object]],
    victim: int,
    *faults: str,
    options: Sequence[object] = (),
    memory: MemoryGroup | None = None,
) -> Three:
    """Start three ranks that report their phases; the victim has these faults, and ``memory`` as its limit."""
    commands = [rank_command(rank, 3, *TRAINING, *options) for rank in range(3)]
    commands = [faulty(command, *(faults if rank == victim else ())) for rank, command in enumerate(commands)]
    if memory is not None:
        commands[victim] = memory.command(commands[victim])
    return Three([start(*command) for command in commands], victim)


def until_trained(three: Three, step: int = 100) -> None:
    """Wait until rank 0 has logged a step."""
    three.ranks[0].wait_for(f"[rank 0] step {step}/")


def until_heard(three: Three) -> None:
    """Wait until rank 0 has logged a step and, which may come later, has heard of a step of each rank."""
    until_trained(three)
    words = three.ranks[0].arguments
    spec = WorldSpec(world_size=3, rank=0, master_port=int(words[words.index("--master_port") + 1]))
    wait_until(lambda: all(line["step"] for line in status.watch(spec, lambda seen: None, again=False)["progress"]))


def wait_until(condition: Callable[[], bool], timeout: float = 20) -> None:
    deadline = time.monotonic() + timeout
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


def gone_at(pid: int, timeout: float = 60) -> float:
    """Wait for the end of a process; return when it was seen."""
    wait_until(lambda: has_ended(pid), timeout)
    return time.monotonic()


def ended(ranks: Mapping[int, RankProcess], timeout: float) -> dict[int, float]:
    """Return when each rank was seen to have ended, without the ranks that still run after ``timeout``."""
    moments: dict[int, float] = {}
    deadline = time.monotonic() + timeout
    while len(moments) < len(ranks) and time.monotonic() < deadline:
        for number, rank in ranks.items():
            if number not in moments and rank.process.poll() is not None:
                moments[number] = time.monotonic()
        time.sleep(0.01)
    return moments


def faults_found(
    three: Three, since: float, within: float, run_dir: Path, *, identifier: str, what: str, why: str = ""
) -> tuple[list[str], float]:
    """Return what any survivor does wrong, and the seconds that the slowest took.

    Args:
        since: the moment of the fault.
        within: seconds from then in which they have to be gone.
        identifier: of the error that each has to end with.
        what: a pattern for what follows the victim's name in the first line.
        why: a pattern that the rest of the error has to hold.
    """
    moments = ended(three.survivors, since + within + 20 - time.monotonic())
    found = []
    first_line = f"error[{identifier}]: {three.name} "
    for number, rank in three.survivors.items():
        who = f"rank {number}"
        if number not in moments:
            found.append(f"{who} still runs after {within + 20:g} s; it said\n{rank.err[-2000:]}")
            continue
        if moments[number] - since > within:
            found.append(f"{who} took {moments[number] - since:.1f} s, not {within:g} s")
        if rank.process.returncode != 14:
            found.append(f"{who} left with {rank.process.returncode}, not 14")
        error = last_lines(rank.err)
        if error is None or not re.match(re.escape(first_line) + what, error):
            found.append(f"{who} did not end with {first_line}{what} but with\n{rank.err[-3000:]}")
        elif not re.search(why, error, re.DOTALL):
            found.append(f"{who} did not say {why} but\n{error}")
        found += _wrong_in_file(run_dir / f"failure-rank{number}.json", error)
    return found, max(moments.values(), default=since) - since


def last_lines(text: str) -> str | None:
    """Return the error, if it is the very end of the text."""
    match = re.search(
        r"^error\[[a-z-]+\]: .*\n  why:  .*\n(?: {8}.*\n|\n)*  next: .*\n(?: {8}.*\n)*\Z", text, re.MULTILINE
    )
    return match[0] if match else None


def _wrong_in_file(file: Path, error: str | None) -> list[str]:
    if not file.exists():
        return [f"there is no {file.name}"]
    written = json.loads(file.read_text())
    first = f"error[{written['identifier']}]: {written['what']}\n"
    if error is None or not error.startswith(first) or written["exit_code"] != 14:
        return [f"{file.name} does not say what the screen does: {written}"]
    return []


def left_behind(ranks: Sequence[RankProcess], port: int) -> list[str]:
    """List processes of the ranks' sessions that still run, and rank 0's port if it is still taken."""
    sessions = {rank.process.pid for rank in ranks}
    found = []
    for process in psutil.process_iter():
        try:
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"pid {process.pid} still runs: {process.cmdline()}")
        except (ProcessLookupError, psutil.NoSuchProcess):
            continue
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended may linger
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError as error:
            found.append(f"port {port}: {error}")
    return found
