"""The agent of a person's own script, as a helper process of that: see ``worker/join.py``."""

from __future__ import annotations

import asyncio
import shlex
import signal
import socket
from pathlib import Path
from typing import Any

from ddp_manual import signals, terminal
from ddp_manual.agent.joining import Task
from ddp_manual.agent.main import Agent
from ddp_manual.agent.worker_process import Script
from ddp_manual.messages import LineReader
from ddp_manual.world_spec import WorldSpec


def main(channel: int, faults: int) -> None:
    """Until the script has left, or has been told why the run ends."""
    for number in (*signals.handled(), signals.SAVE):  # so far they are the script's alone
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signals.BLOCKED_AT_START)
    connection = socket.socket(fileno=channel)
    reader = LineReader()
    while not (messages := reader.feed(data := connection.recv(1))):  # byte by byte: the rest is for the event loop
        if not data:
            return  # the script has ended already
    asyncio.run(_run(messages[0]["attach"], connection, faults))


async def _run(attach: dict[str, Any], connection: socket.socket, faults: int) -> None:
    spec = WorldSpec(**attach["spec"], sources=attach["sources"])
    terminal.log_to_stderr(spec.rank)
    task = Task(
        start={"alone": False},
        run_dir=attach["run_dir"],
        command=attach["command"] or _command(spec, attach["typed"]),
        script=Path(attach["script"]) if attach["script"] else None,
        is_script=True,
        attempt=attach["attempt"],
    )
    script = Script(attach["pid"], connection, faults, terminal.print_error)
    agent = Agent(
        spec,
        task,
        start_worker=lambda: script,
        say=terminal.log,
        tell=lambda error: None,  # as an exception, or at last by ``script``
    )
    await agent.run()


def _command(spec: WorldSpec, typed: list[str]) -> str:
    """How a rank of a person's own script is started: by variables, since its flags are not ours to know."""
    return (
        f"WORLD_SIZE={spec.world_size} RANK={{rank}} MASTER_ADDR={spec.master_addr} "
        f"MASTER_PORT={{master_port}} {shlex.join(typed)}"
    )
