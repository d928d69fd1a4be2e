"""Run the real coordinator in a process that does nothing else: the other side of benchmarks/simulated_ranks.py.

python -m benchmarks.coordinator_process RANKS NONCE [TOKEN]

It answers the line "port" with its port, "figures" with its CPU seconds, bytes of memory and open files, and every
other line with the CPU seconds it has used. At "join" it also connects as rank 0's own agent; at "finish" that
agent says that rank 0 has finished. It ends when its input ends. ``hosted`` starts it.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from benchmarks.measuring import REPOSITORY
from benchmarks.simulated_ranks import (
    LOOPBACK,
    Order,
    allow_many_connections,
    rank_infos,
    ready_of,
    run_info,
    seal,
)
from ddp_manual.agent.collective_records import Records
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.messages import (
    AskRecords,
    Claim,
    Finished,
    FromRank0,
    Heartbeat,
    Hello,
    Probe,
    Probed,
    Welcome,
    WorkerReady,
    read_from_rank_0,
)
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.wire import LONGEST_ANSWER

JOIN_TIMEOUT = 120.0

Tell = Callable[[str], str]
"""Send a line to a process and return the line that it answers."""


@contextmanager
def talking_to(module: str, *arguments: str) -> Iterator[Tell]:
    """Run a module of this folder while the body runs; yield the function that sends it lines."""
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
    """Run a coordinator for ``ranks`` ranks; yield its port, and the function that asks it for its CPU seconds."""
    with talking_to("coordinator_process", str(ranks), nonce, *([token] if token else [])) as tell:
        yield int(tell("port")), tell


@contextmanager
def simulated_ranks(order: Order) -> Iterator[Tell]:
    with talking_to("simulated_ranks") as tell:
        tell(json.dumps(asdict(order)))
        yield tell


class RankZero:
    """The connection of rank 0's own agent, which is in the coordinator's process."""

    def __init__(self, ranks: int, nonce: str, port: int) -> None:
        self._info, self._nonce, self._port = rank_infos(ranks)[0], nonce, port
        self._period = run_info(ranks).heartbeat_period
        self._connection: Connection[FromRank0]

    async def join(self) -> None:
        _, self._connection = await asyncio.get_running_loop().create_connection(
            lambda: Connection(read_from_rank_0), LOOPBACK, self._port
        )
        connection = self._connection
        await connection.receive()
        connection.send(Seal(None).close(Hello, "", Claim(self._info, self._nonce)))
        assert isinstance(await connection.receive(), Welcome)
        connection.let_send(LONGEST_ANSWER)
        connection.send(WorkerReady(ready_of(self._info)))
        connection.handle(self._take, self._gone)
        while not connection.closed:
            connection.send(Heartbeat())
            await asyncio.sleep(self._period)

    async def finish(self) -> None:
        self._connection.send(Finished())

    def _take(self, message: FromRank0) -> None:
        if isinstance(message, Probe):
            self._connection.send(Probed(message.key, ()))
        elif isinstance(message, AskRecords):
            self._connection.send(Records().answer(message))

    def _gone(self, reason: str) -> None:
        print(f"rank 0 has lost its connection: {reason}", file=sys.stderr, flush=True)


def figures() -> dict[str, float]:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    memory = pages * os.sysconf("SC_PAGE_SIZE")
    return {"cpu": time.process_time(), "memory": memory, "files": len(os.listdir("/proc/self/fd"))}


async def serve(ranks: int, nonce: str, token: str | None) -> None:
    allow_many_connections()
    coordinator = Coordinator(
        run_info(ranks), rank_infos(ranks)[0], seal(token), nonce, JOIN_TIMEOUT, WaitOrShrink(0, "")
    )
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    await coordinator.serve(listener)
    ended = asyncio.Event()

    own = RankZero(ranks, nonce, listener.getsockname()[1])

    def answer() -> None:
        line = sys.stdin.readline().strip()
        if line == "port":
            print(listener.getsockname()[1], flush=True)
        elif line == "figures":
            print(json.dumps(figures()), flush=True)
        elif line:
            if line in ("join", "finish"):
                asked.append(asyncio.ensure_future(getattr(own, line)()))
            print(time.process_time(), flush=True)
        else:
            ended.set()

    asked: list[asyncio.Future[None]] = []

    asyncio.get_running_loop().add_reader(sys.stdin, answer)
    await ended.wait()
    assert "torch" not in sys.modules


if __name__ == "__main__":
    _, size, own_nonce, *tokens = sys.argv
    asyncio.run(serve(int(size), own_nonce, tokens[0] if tokens else None))
