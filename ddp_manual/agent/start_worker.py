"""How a worker is started, whatever it runs: as a new Python, or as a fork of a process that has imported torch; in
this terminal, or with its output copied line by line."""

from __future__ import annotations

import asyncio
import os
import socket
import subprocess
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_manual import from_worker, orphans, signal_handlers
from ddp_manual.agent.open_files import raise_soft_limit
from ddp_manual.agent.program_source import forkable_imports
from ddp_manual.agent.worker_process import LOOK_EVERY, Worker
from ddp_manual.environment import variables_for_a_rank
from ddp_manual.environment.start_python import start_python
from ddp_manual.errors import DdpManualError, not_installed
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.program import EXECUTABLE, Program
from ddp_manual.rank_output import RankOutput, copies

PROGRAM = Path(__file__).parent.parent / "worker"


def words_of(program: Program) -> list[str]:
    """Return what the command line of a worker says of its program, for ps and pkill."""
    return [f"runs={program.name}", f"kind={program.kind}"]


def witness_of(program: Program, *, own_session: bool) -> signal_handlers.Witness:
    """Start the witness of the agents whose workers run this program."""
    return signal_handlers.Witness(own_session=own_session, words=[str(PROGRAM), *words_of(program)])


class Starter:
    """Starts workers, each as a new Python.

    Args:
        program: what the workers run.
        nproc: how many workers this host has, each with a session of its own; 0: they belong to this terminal.
    """

    kind = Worker

    def __init__(self, program: Program, nproc: int = 0) -> None:
        self._program, self._nproc = program, nproc

    def close(self) -> None:
        """Do nothing: the agents end their workers."""

    def start(self, rank: int, world_size: int, held: HeldMemory, output: RankOutput | None = None) -> Worker:
        """Start a worker.

        Args:
            held: the memory in which the worker holds its state.
            output: takes what the worker writes; None: the worker writes to this terminal.
        """
        if self._program.kind != EXECUTABLE:
            check_torch_is_installed()
        channel, theirs = socket.socketpair()
        faults, their_faults = os.pipe()
        (ours, pipes) = zip(*(os.pipe() for _ in ("stdout", "stderr")), strict=True) if output else ((), ())
        with theirs:
            who = [f"rank={rank}", f"of={world_size}"]  # for ps and nvidia-smi
            process = self._begin([theirs.fileno(), their_faults, held.descriptor], pipes, who)
        for descriptor in (their_faults, *pipes):
            os.close(descriptor)
        worker = self.kind(process.pid, channel, faults, process)
        worker.copies = copies(ours, output) if output else []
        return worker

    def _begin(self, descriptors: Sequence[int], pipes: Sequence[int], who: Sequence[str]) -> subprocess.Popen[bytes]:
        """Start a process that inherits these descriptors, and the pipes as stdout and stderr; return it."""
        return self._new_python(descriptors, who, **dict(zip(("stdout", "stderr"), pipes, strict=False)))

    def _new_python(self, descriptors: Sequence[int], who: Sequence[str], **streams: int) -> subprocess.Popen[bytes]:
        options: dict[str, Any] = {"stdin": subprocess.DEVNULL, "start_new_session": True} if self._nproc else {}
        with variables_for_a_rank.clean_variables(self._nproc) if self._nproc else nullcontext():
            process = start_python(PROGRAM, descriptors, [*who, *words_of(self._program)], **{**options, **streams})
        orphans.note_own(process)
        return process


class ForkedWorker(Worker):
    """A worker that exists only once its forker has imported torch; its first message shows that it exists. Until then
    ``process`` is the forker, which ends if it cannot import torch."""

    @property
    def exists(self) -> bool:
        return from_worker.Born in self.said

    async def _watch(self, gone: Callable[[], None]) -> None:
        while not self.exists and not self.is_gone:
            await asyncio.sleep(0.01)
        forker, self._process = self._process, None
        if self.exists:
            await super()._watch(gone)
            return
        await asyncio.sleep(LOOK_EVERY)  # the forked child has ended, or the forker is about to end
        self.status = forker.poll() if forker is not None else None
        self.ended = True
        gone()

    def signal(self, number: int) -> None:
        if self.exists:  # before that, ``pid`` is the forker's
            super().signal(number)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if self.exists:
            await super().end(error, own=own)
        else:  # a worker that is forked later finds the channel closed, and ends
            self.close()


class Forker(Starter):
    """Starts workers as forks of a process that imports torch first: see ``worker/__main__.py``."""

    kind = ForkedWorker

    def __init__(self, program: Program, nproc: int = 0) -> None:
        super().__init__(program, nproc)
        where = [] if nproc else ["in=terminal"]
        self._words = [f"ranks={nproc or 1}", f"import={','.join(forkable_imports(program))}", *where]
        self._fork()

    def _fork(self) -> None:
        raise_soft_limit()  # its forks inherit the limit of open files
        self._control, theirs = socket.socketpair()
        with theirs:
            self._process = self._new_python([theirs.fileno()], self._words)

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def _begin(self, descriptors: Sequence[int], pipes: Sequence[int], who: Sequence[str]) -> subprocess.Popen[bytes]:
        """Ask the process that forks for a worker, which exists once that process has imported torch; return the
        process that forks."""
        if self._process.poll() is not None:  # it was killed, as by the OOM killer; its workers died with it
            self.close()
            self._fork()
        with suppress(BrokenPipeError):  # the process has just ended; the worker's channel shows that too
            socket.send_fds(self._control, [b"."], [*descriptors, *(pipes or (1, 2))])
        return self._process


def check_torch_is_installed() -> None:
    """Raise BackendUnavailable before a worker is started in vain."""
    if find_spec("torch") is None:
        raise not_installed("torch")
