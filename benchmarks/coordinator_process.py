"""Run the real coordinator in a process that does nothing else: the other side of benchmarks/simulated_ranks.py.

python -m benchmarks.coordinator_process RANKS NONCE [TOKEN]

It answers the line "port" with its port, and every other line with the CPU seconds it has used. It ends when its input
ends. ``hosted`` starts it.
"""

from __future__ import annotations

import asyncio
import json
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict

from benchmarks.measuring import REPOSITORY
from benchmarks.simulated_ranks import LOOPBACK, Order, allow_many_connections, rank_infos, run_info, seal
from ddp_manual.agent.coordinator import Coordinator

JOIN_TIMEOUT = 120.0

Tell = Callable[[str], str]
"""Send a line to a process and return the line that it answers."""


@contextmanager
def talking_to(module: str, *arguments: str) -> Iterator[Tell]:
    """Run a module of this folder while the body runs."""
    command = [sys.executable, "-m", f"benchmarks.{module}", *arguments]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    to, of = process.stdin, process.stdout
    assert to is not None and of is not None

    def tell(line: str) -> str:
        to.write(f"{line}\n")
        to.flush()
        answered = of.readline()
        if not answered:
            raise RuntimeError(f"{' '.join(command)} ended early")
        return answered

    with process:
        yield tell


@contextmanager
def hosted(ranks: int, nonce: str, token: str | None) -> Iterator[tuple[int, Tell]]:
    """Run a coordinator for ``ranks`` ranks; yields its port, and the function to ask it for its CPU seconds."""
    with talking_to("coordinator_process", str(ranks), nonce, *([token] if token else [])) as tell:
        yield int(tell("port")), tell


@contextmanager
def simulated_ranks(order: Order) -> Iterator[Tell]:
    with talking_to("simulated_ranks") as tell:
        tell(json.dumps(asdict(order)))
        yield tell


async def serve(ranks: int, nonce: str, token: str | None) -> None:
    allow_many_connections()
    coordinator = Coordinator(run_info(ranks), rank_infos(ranks)[0], seal(token), nonce, JOIN_TIMEOUT)
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    await coordinator.serve(listener)
    ended = asyncio.Event()

    def answer() -> None:
        if line := sys.stdin.readline():
            print(listener.getsockname()[1] if line == "port\n" else time.process_time(), flush=True)
        else:
            ended.set()

    asyncio.get_running_loop().add_reader(sys.stdin, answer)
    await ended.wait()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    _, size, own_nonce, *tokens = sys.argv
    asyncio.run(serve(int(size), own_nonce, tokens[0] if tokens else None))
