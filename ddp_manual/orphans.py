"""No process outlives the one it belongs to: it ends with its parent, and what workers leave behind is ended.

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
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from ddp_manual import process_status

if TYPE_CHECKING:
    import psutil

# Of prctl(2).
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36

# A signal, and the seconds to wait after it. At first none: some processes remove shared memory once their parent ends.
STEPS = ((0, 0.3), (signal.SIGTERM, 1.0), (signal.SIGKILL, 1.0))
LOOK_EVERY = 0.02

# A variable that workers and all that they start inherit: the pid of the process that adopts their orphans.
MARK = "DDP_MANUAL_ADOPTED_BY"

_started: list[subprocess.Popen[Any]] = []
"""The processes that this process has started itself and waits for."""
_adopts: list[int] = []
"""The pid of this process once it adopts orphans; behind those of the processes that it was forked from."""


def adopt() -> None:
    """Become the parent of each process below this one whose parent ends; on other systems than Linux init does."""
    if sys.platform == "linux" and os.getpid() not in _adopts:
        _prctl(PR_SET_CHILD_SUBREAPER, 1)
        _adopts.append(os.getpid())


def note_own(process: subprocess.Popen[Any]) -> None:
    """Note a process that this one has started, and waits for itself."""
    _started[:] = [other for other in _started if other.returncode is None]
    _started.append(process)


def reap() -> None:
    """Collect orphans that have ended, so that none stays as a zombie. A process that this one waits for itself keeps
    its exit status."""
    with suppress(ChildProcessError):
        while _adopts:
            ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            if ended is None or ended.si_pid in _own():
                break
            os.waitpid(ended.si_pid, 0)


class Children:
    """The processes that a worker has started, and those that they have started."""

    def __init__(self) -> None:
        self._known: set[psutil.Process] = set()
        self.ended: list[str] = []
        """The processes that ``end`` had to end, such as ``tensorboard (pid 17)``."""

    def look(self, worker: int) -> None:
        """Remember what the worker has started, before it ends."""
        if _adopts:
            self._known.update(_below(worker))

    def look_at_all(self, worker: int) -> None:
        """Do the same if all workers here are replaced: one that was killed had no time for a look."""
        self.look(worker)
        if _adopts:
            self._known.update(process for process in _below(os.getpid()) if _is_marked(process.pid))

    async def end(self, session: int | None = None) -> None:
        """End what a worker that has ended left behind: wait, then send SIGTERM, then SIGKILL (see STEPS).

        Args:
            session: the worker's, if there are other workers, whose orphans stay; None: all orphans are this worker's.
        """
        import asyncio  # takes 0.05 s, which --help does without

        import psutil  # takes 0.03 s

        ended: dict[psutil.Process, str] = {}
        for number, within in STEPS if _adopts else ():
            deadline, signalled = time.monotonic() + within, set[psutil.Process]()
            while left := self._orphans(session):
                self._known.update(left)
                for process in left:
                    with suppress(psutil.Error):  # it has just ended, or is another user's
                        if number:
                            ended[process] = f"{process.name()} (pid {process.pid})"
                        if process not in signalled:
                            signalled.add(process)
                            process.send_signal(number)
                if time.monotonic() > deadline:
                    break
                await asyncio.sleep(LOOK_EVERY)
                reap()
        self.ended += ended.values()

    def _orphans(self, session: int | None) -> list[psutil.Process]:
        """Return the orphans of this worker that still run, and their descendants."""
        import psutil

        own, found = _own(), dict[int, psutil.Process]()
        for process in _below(os.getpid()):  # one look at all processes: each comes after its parent
            with suppress(psutil.Error, OSError):
                parent = process.ppid()
                is_adopted = parent == os.getpid() and process.pid not in own
                is_wanted = parent in found or (is_adopted and self._has(process, session))
                if is_wanted and process.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
                    found[process.pid] = process
        return [*found.values()]

    def _has(self, process: psutil.Process, session: int | None) -> bool:
        return process in self._known or (session in (None, _session(process.pid)) and _is_marked(process.pid))


def end_all() -> None:
    """Kill all processes below this one, within 1 s: one that waits in the kernel for a device may end later."""
    import psutil

    deadline = time.monotonic() + 1
    while (left := _below(os.getpid())) and time.monotonic() < deadline:
        for process in left:
            with suppress(psutil.Error):  # it has just ended, or is another user's
                process.kill()
        psutil.wait_procs(left, timeout=0.1)


def end_daemons() -> None:
    """End what multiprocessing would end at exit, such as a DataLoader's processes: this process skips that exit."""
    import multiprocessing  # takes 0.01 s, which --help does without

    with suppress(Exception):
        for process in multiprocessing.active_children():
            if process.daemon:
                process.terminate()


def _own() -> set[int]:
    return {process.pid for process in _started if process.returncode is None}


def _is_marked(pid: int) -> bool:
    """Return whether a worker of this process has started that one; a container, or the shell that this process was
    before, may have other children."""
    with suppress(OSError), open(f"/proc/{pid}/environ", "rb") as file:
        return f"{MARK}={os.getpid()}".encode() in file.read().split(b"\0")
    return False


def _session(pid: int) -> int:
    with suppress(OSError):  # it has just ended
        return os.getsid(pid)
    return 0


def _below(pid: int) -> list[psutil.Process]:
    """Return the processes below this one, each after its parent; those of others may be hidden (hidepid of /proc), at
    which ``psutil.Process.children`` fails."""
    import psutil

    children: dict[int, list[int]] = {}
    for other in psutil.pids():
        if stat := process_status.process_stat(other):
            children.setdefault(int(stat[1]), []).append(other)
    below, found = [pid], list[psutil.Process]()
    for above in below:
        for child in children.get(above, ()):
            with suppress(psutil.Error, OSError):  # it has just ended, or is another user's
                found.append(psutil.Process(child))
                below.append(child)
    return found


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent; on other systems than Linux the closed channel ends it."""
    if sys.platform == "linux":
        _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def _prctl(option: int, value: int) -> None:
    import ctypes  # takes 2 ms, which --help does without

    ctypes.CDLL(None).prctl(option, value)
