"""Workers of ``launch``: forks of a process that has imported torch, or new processes; their output is copied line by
line."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from typing import Any, TextIO

from ddp_manual import launchers, orphans
from ddp_manual.agent.worker_process import (
    LOOK_EVERY,
    PROGRAM,
    Worker,
    check_torch_is_installed,
    start_process,
    words_for,
)
from ddp_manual.errors import DdpManualError
from ddp_manual.held_memory import HeldMemory
from ddp_manual.launchers import start_python
from ddp_manual.program import Program
from ddp_manual.terminal import RankOutput
from ddp_manual.wire import LONGEST_LINE

# Seconds between two states of a progress bar.
STATE_EVERY = 1.0


async def copy(descriptor: int, output: RankOutput, sink: TextIO) -> None:
    """Copy what the worker writes to this pipe, line by line, until its end; of a progress bar, which rewrites its line
    with a carriage return, the last state of each second."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    rest, shown, shown_at = b"", b"", -STATE_EVERY
    while True:
        is_new = b"\r" in rest and _last_state(rest) != shown
        piece: bytes | None = None
        with suppress(asyncio.TimeoutError):
            within = shown_at + STATE_EVERY - loop.time() if is_new else None
            piece = await asyncio.wait_for(reader.read(1 << 16), within)
        if piece is None:
            shown, shown_at = _last_state(rest), loop.time()
            lines = [shown]
        else:
            *lines, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
            if not piece or len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest] if rest else lines, b""
            lines = [_last_state(line) for line in lines]
            if lines and shown:  # a state that was shown has become a line
                lines, shown = lines[lines[0] == shown :], b""
            if b"\r" in rest:  # a state that another one has replaced is not kept
                rest = b"\r" + _last_state(rest) + b"\r" * rest.endswith(b"\r")
        if lines:
            await asyncio.wrap_future(output.write(b"\n".join(lines) + b"\n", sink))
        if piece == b"":
            return


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line that was rewritten with carriage returns."""
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")


class Forker:
    """The process that imports torch, and then forks each worker: see ``worker/__main__.py``.

    Args:
        program: what the workers run.
        modules: what it imports besides, before the first fork.
        in_terminal: whether the workers belong to this terminal, and write to it.
    """

    def __init__(
        self, nproc: int, program: Program | None = None, modules: Sequence[str] = (), *, in_terminal: bool = False
    ) -> None:
        self._nproc, self._program, self._in_terminal = nproc, program, in_terminal
        where = ["in=terminal"] if in_terminal else []
        self._words = [f"ranks={nproc}", *words_for(program), f"import={','.join(modules)}", *where]
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        own: dict[str, Any] = {} if self._in_terminal else {"stdin": subprocess.DEVNULL, "start_new_session": True}
        with theirs, nullcontext() if self._in_terminal else launchers.clean_variables(self._nproc):
            self._process = start_python(PROGRAM, [theirs.fileno()], self._words, **own)
            orphans.is_own(self._process)

    def start_again(self) -> None:
        """Start it again if it has been killed, as by the kernel when memory runs out; its workers died with it."""
        if self._process.poll() is not None:
            self.close()
            self._start()

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def start(self, rank: int, world_size: int, held: HeldMemory, output: RankOutput | None = None) -> Worker:
        """Ask for a worker; it exists once the forker has torch.

        Args:
            held: where it holds its state.
            output: takes what it writes; None: it writes to this terminal.
        """
        check_torch_is_installed()
        self.start_again()
        channel, theirs = socket.socketpair()
        faults, their_faults = os.pipe()
        (ours, pipes) = zip(*(os.pipe() for _ in ("stdout", "stderr")), strict=True) if output else ((), ())
        with theirs, suppress(BrokenPipeError):  # the forker has just ended; the worker's channel shows that too
            streams = pipes or (1, 2)
            socket.send_fds(self._control, [b"."], [theirs.fileno(), their_faults, held.descriptor, *streams])
        for descriptor in (their_faults, *pipes):
            os.close(descriptor)
        copied = copies(ours, output) if output else []
        return ForkedWorker(self._process, channel, faults, copied)


class ProcessStarter:
    """Starts each worker as a process of its own, for programs that must not be forked."""

    def __init__(self, nproc: int, program: Program | None) -> None:
        self._nproc, self._program = nproc, program

    def start_again(self) -> None:
        """Do nothing: no worker depends on this."""

    def close(self) -> None:
        """Do nothing: the agents end their workers."""

    def start(self, rank: int, world_size: int, held: HeldMemory, output: RankOutput) -> Worker:
        (out, err), theirs = zip(*(os.pipe() for _ in ("stdout", "stderr")), strict=True)
        with launchers.clean_variables(self._nproc):
            streams = {"stdin": subprocess.DEVNULL, "stdout": theirs[0], "stderr": theirs[1]}
            worker = start_process(rank, world_size, held, self._program, start_new_session=True, **streams)
        for descriptor in theirs:
            os.close(descriptor)
        worker.copies = copies((out, err), output)
        return worker


def copies(pipes: Sequence[int], output: RankOutput) -> list[asyncio.Future[None]]:
    """Copy stdout and stderr of a worker; each future is done when everything is read that the worker has written."""
    sinks = zip(pipes, (sys.stdout, sys.stderr), strict=True)
    return [asyncio.ensure_future(copy(pipe, output, sink)) for pipe, sink in sinks]


class ForkedWorker(Worker):
    """A worker that exists only once its forker has torch, and says so itself.

    Args:
        forker: the process that forks it; it ends if it cannot import torch.
    """

    def __init__(
        self,
        forker: subprocess.Popen[bytes],
        channel: socket.socket,
        faults: int,
        copies: Sequence[asyncio.Future[None]],
    ) -> None:
        super().__init__(forker.pid, channel, faults)
        self._forker = forker
        self.copies = copies

    async def _watch(self, gone: Callable[[], None]) -> None:
        while not self.said and not self.is_gone:
            await asyncio.sleep(0.01)
        if self.said:
            await super()._watch(gone)
            return
        await asyncio.sleep(LOOK_EVERY)  # perhaps only its child has ended, or the forker is about to end
        self.status = self._forker.poll()
        self.ended = True
        gone()

    def signal(self, number: int) -> None:
        if self.said:  # before that its pid is the forker's
            super().signal(number)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if self.said:
            await super().end(error, own=own)
        else:  # once it is forked it finds the channel closed, and ends
            self.close()
