"""The agent of a user's own script, a helper process that ``worker/join.py`` starts:
``python .../ddp_manual/agent CHANNEL FAULTS``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder

import asyncio
import signal
import socket

from ddp_manual import signal_handlers, terminal, unread
from ddp_manual.agent.main import Agent
from ddp_manual.agent.to_type import script_command
from ddp_manual.agent.what_to_run import Task
from ddp_manual.agent.worker_process import AttachedWorker
from ddp_manual.from_worker import Attach
from ddp_manual.program import SCRIPT, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wire import LineReader, local_reader_of


@unread.never_block()
def main(channel: int, faults: int) -> None:
    """Serve the script at the other end of ``channel`` until the script has left, or was told why the run ends."""
    for number in (*signal_handlers.handled(), signal_handlers.SAVE):  # the script alone handles signals
        signal.signal(number, lambda number, frame: None)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, signal_handlers.BLOCKED_AT_START)
    connection = socket.socket(fileno=channel)
    reader = LineReader(local_reader_of(Attach))
    while not (messages := [*reader.feed(data := connection.recv(1))]):  # byte by byte: the event loop reads the rest
        if not data:
            return  # the script has ended already
    asyncio.run(_run(messages[0], connection, faults))


async def _run(attach: Attach, connection: socket.socket, faults: int) -> None:
    spec = WorldSpec(**attach.spec, sources=attach.sources)
    terminal.log_to_stderr(spec.rank)
    task = Task(
        run_dir=attach.run_dir,
        command=script_command(spec, attach.typed),
        # Without arguments: these may say which rank a script is, as in "python script.py 0", and so differ.
        source=Program(kind=SCRIPT, name=attach.script) if attach.script else None,
        attempt=attach.attempt,
    )
    worker = AttachedWorker(attach.pid, connection, faults, terminal.print_error)
    # The agent prints no error: the script raises it as an exception, otherwise ``worker`` prints it.
    await Agent(spec, task, start_worker=lambda held: worker, log=terminal.log, print_error=lambda error: None).run()


if __name__ == "__main__":
    main(*map(int, sys.argv[1:3]))
