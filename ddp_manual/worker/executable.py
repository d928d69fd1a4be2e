"""Become any executable as one rank: wait for its place -> set the variables -> exec. torch is not loaded.

The agent knows of the executable what the kernel tells: that it runs, is stopped, or has ended, and how.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Iterable, Iterator

from ddp_manual import from_agent, from_worker, signal_handlers
from ddp_manual.environment import machine, variables_for_a_rank
from ddp_manual.errors import BadOption
from ddp_manual.ranks_and_runs import RUNNING, Beat, LastWords, Ready
from ddp_manual.wire import LONGEST_ANSWER, LineReader, encode_local
from ddp_manual.wording import as_ranges


def main(channel: int, ignored: Iterable[int]) -> None:
    """Replace this process by the program once all ranks have joined.

    Args:
        ignored: the signals that this process was told to ignore.
    """
    agent = socket.socket(fileno=channel)
    messages = _messages(agent)

    def send(message: from_worker.FromWorker) -> None:
        agent.sendall(encode_local(message))

    send(from_worker.Born(os.getpid()))
    start = next(message for message in messages if isinstance(message, from_agent.Start))
    program, reserved, address = start.program, socket.socket(), start.store_address
    assert program is not None
    if address:  # rank 0's program will host torch's store: reserve its port
        reserved = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        reserved.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        reserved.bind((address, 0))
    ready = Ready(
        pid=os.getpid(),
        device="cpu",
        backend="gloo",
        gpus=[],
        versions={},
        options={},
        store=(address, reserved.getsockname()[1]) if address else None,
        chooses_device=True,
        cores=as_ranges(machine.cores()),
    )
    send(from_worker.Loaded(ready))
    told = next(message for message in messages if isinstance(message, from_agent.TakePlace))
    variables_for_a_rank.become_rank(told.placed, told.interfaces, restarts=start.restarts, hosted=False)
    send(from_worker.Doing(Beat(phase=RUNNING)))
    send(from_worker.ProgramBegins(hears=False))
    signal_handlers.handle_as_any_program(ignored)
    for number in (signal.SIGPIPE, signal.SIGXFSZ):  # Python ignores these, and the program would inherit that
        signal.signal(number, signal.SIG_DFL)
    os.set_inheritable(channel, True)  # keep it open: the agent takes its end for the end of this worker
    try:
        os.execvp(program.name, [program.name, *program.arguments])
    except OSError as error:
        failed = BadOption(
            f"{program.name} cannot be started",
            why=f"{error.strerror}: {program.name}",
            next="name a program that this user may execute; a script in Python needs no --no_python",
        )
        send(from_worker.Failed(LastWords.of(failed)))


def _messages(agent: socket.socket) -> Iterator[from_agent.FromAgent]:
    """Yield the agent's messages; end this process when the agent is gone."""
    reader = LineReader(from_agent.read, LONGEST_ANSWER)
    while data := agent.recv(1 << 16):
        yield from reader.feed(data)
    raise SystemExit(1)
