"""Processes that workers leave behind: this process becomes their parent, and ends them.

A DataLoader's process that hangs, or a process in a session of its own, ends neither with its parent nor by a signal to
its group. Once its parent has ended Linux gives it to the nearest ancestor that adopts orphans. Other systems give it
to init; there nothing is known of it.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any, NamedTuple

from ddp_manual import signals

# A signal, and the seconds it has. At first none: what removes files of shared memory does so once its parent is gone.
STEPS = ((0, 0.3), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0))
LOOK_EVERY = 0.02

# A variable of workers, which what they start inherits: the pid of the process that adopts it.
MARK = "DDP_MANUAL_ADOPTED_BY"

_started: list[subprocess.Popen[Any]] = []
"""What this process has started itself, and waits for."""
_adopts: list[bool] = []


class Process(NamedTuple):
    """A process, which no other one with the same pid equals."""

    pid: int
    born: int
    """In clock ticks since the host was started."""


class _Seen(NamedTuple):
    process: Process
    parent: int
    session: int
    name: str
    ended: bool


def adopt() -> None:
    """Become the parent of each process below this one whose parent ends."""
    if sys.platform == "linux" and not _adopts:
        signals.adopt_orphans()
        _adopts.append(True)


def is_own(process: subprocess.Popen[Any]) -> None:
    """Note a process that this one has started, and waits for itself."""
    _started[:] = [other for other in _started if other.returncode is None]
    _started.append(process)


def reap() -> None:
    """Take note of the end of orphans, so that none stays as a zombie. A process that this one waits for itself keeps
    its exit status."""
    with suppress(ChildProcessError):
        while _adopts:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in _own():
                break
            os.waitpid(ended.si_pid, 0)


class Children:
    """What a worker has started, with what that has started."""

    def __init__(self) -> None:
        self._known: set[Process] = set()
        self._all_before = 0.0
        """In clock ticks: all orphans that were born before are ended, since all workers of their time are."""
        self.ended: list[str] = []
        """What was ended, since it had not ended with the worker, such as ``tensorboard (pid 17)``."""

    def look(self, worker: int) -> None:
        """Remember what the worker has started, before it ends."""
        if _adopts:
            self._known.update(seen.process for seen in _below(_look(), {worker}))

    def look_at_all(self, worker: int) -> None:
        """Do so where all workers of this process are replaced: one that was killed had no time for a look."""
        self.look(worker)
        if _adopts:
            self._all_before = time.clock_gettime(time.CLOCK_BOOTTIME) * os.sysconf("SC_CLK_TCK")

    async def end(self, session: int | None = None) -> None:
        """End what is left of a worker that has ended: at first it has the time to end by itself, then a SIGTERM.

        Args:
            session: of the worker, where there are other workers, whose orphans stay; None: all orphans are its own.
        """
        import asyncio  # takes 0.05 s, which --help does without

        ended: dict[Process, str] = {}
        for number, within in STEPS if _adopts else ():
            deadline, signalled = time.monotonic() + within, set[Process]()
            while left := _orphans(
                lambda seen: session in (None, seen.session) or self._has(seen.process), self._known
            ):
                for seen in left:
                    self._known.add(seen.process)
                    if seen.process not in signalled:
                        signalled.add(seen.process)
                        with suppress(OSError):  # it has just ended, or is another user's
                            os.kill(seen.process.pid, number)
                    if number:
                        ended[seen.process] = f"{seen.name} (pid {seen.process.pid})"
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(LOOK_EVERY)
                reap()
        self.ended += ended.values()

    def _has(self, process: Process) -> bool:
        return process in self._known or process.born < self._all_before


def end_daemons() -> None:
    """End what multiprocessing ends when Python exits, such as a DataLoader's processes: this process ends without."""
    import multiprocessing  # takes 0.01 s, which --help does without

    with suppress(Exception):
        for process in multiprocessing.active_children():
            if process.daemon:
                process.terminate()


def _own() -> set[int]:
    return {process.pid for process in _started if process.returncode is None}


def _is_marked(pid: int) -> bool:
    """Return whether a worker of this process has started it; a container, or the shell that this process was before,
    may have other children."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return f"{MARK}={os.getpid()}".encode() in file.read().split(b"\0")
    return False


def _orphans(wanted: Callable[[_Seen], bool], known: set[Process]) -> list[_Seen]:
    """Return the orphans that are wanted, of those that workers have started, with what is below them, as far as they
    run.

    Args:
        known: what was seen below a worker.
    """
    all, own = _look(), _own()
    adopted = [seen for seen in all if seen.parent == os.getpid() and seen.process.pid not in own and wanted(seen)]
    orphans = [seen for seen in adopted if seen.process in known or _is_marked(seen.process.pid)]
    found = [*orphans, *_below(all, {seen.process.pid for seen in orphans})]
    return [seen for seen in found if not seen.ended]


def _below(all: Iterable[_Seen], pids: set[int]) -> list[_Seen]:
    """Return those that are below these."""
    found: list[_Seen] = []
    while children := [seen for seen in all if seen.parent in pids]:
        found += children
        pids = {seen.process.pid for seen in children}
    return found


def _look() -> list[_Seen]:
    """Return all processes, see proc(5)."""
    found = []
    for name in os.listdir("/proc"):
        if name.isdigit():
            with suppress(OSError), open(f"/proc/{name}/stat", encoding="ascii", errors="replace") as file:
                before, _, after = file.read().rpartition(")")
                fields = after.split()
                process = Process(int(name), int(fields[19]))
                command = before.partition("(")[2]
                found.append(_Seen(process, int(fields[1]), int(fields[3]), command, fields[0] in "ZX"))
    return found
