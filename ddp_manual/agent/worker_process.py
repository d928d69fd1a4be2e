"""The worker's process as its agent sees it: started, asked for its stack, ended; and the cause of its death.

The kernel knows what the worker cannot tell: ``/proc`` has its exit status and the signal that has stopped it, its
memory cgroup whether it ran out of memory. Python's faulthandler writes its stack to a pipe when it crashes in native
code and, on a signal, even while a C call keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_manual import signals
from ddp_manual.agent.connection import Connection
from ddp_manual.errors import DdpManualError, not_installed, signal_name
from ddp_manual.launchers import start_python
from ddp_manual.messages import LONGEST_ANSWER, Beat, last_words

# Seconds. A worker that is silent for so long is in a C call that keeps the interpreter's lock, not in
# a collective.
SILENT = 2.0
# Seconds. faulthandler takes a millisecond; a stack is complete when nothing more comes.
STACK_WITHIN = 1.0
STACK_ENDS_AFTER = 0.1
LOOK_EVERY = 0.2
LONGEST_STACK = 1 << 16
KILL_AFTER = 2.0
KILLED_WITHIN = 10.0
# A script whose collective breaks ends by itself; what it does on its way has time limits of its own.
GRACE = 0.7
WAY_OUT = 10.0
# A checkpoint that is being written when the run ends is finished first.
SAVE_WITHIN = 30.0
ANSWER_WITHIN = 0.5
PROGRAM = Path(__file__).parent.parent / "worker"


class Worker:
    """The process of a worker, which the agent has started or which has started the agent.

    Args:
        channel: the agent's end of a socket pair.
        faults: the reading end of the pipe that faulthandler writes to.
        process: given if the agent is its parent.
    """

    def __init__(
        self, pid: int, channel: socket.socket, faults: int, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.ended = False
        self.status: int | None = None
        """Its exit code, or minus the signal that has ended it; None while it runs, or if nobody could see that."""
        self.beat = Beat()
        """What it has last said that it does."""
        self.said: set[str] = set()
        """The kinds of its messages so far; it sends the first once it has torch."""
        self._channel, self._faults, self._process = channel, faults, process
        self._connection: Connection | None = None
        self._fault_text = ""
        self._saving = False
        self._spoke_at = time.monotonic()
        self._look_at_memory()

    def _look_at_memory(self) -> None:
        """Remember how often its memory cgroup has run out of memory so far."""
        self._oom_file = _oom_counter(self.pid)
        self._oom_kills = _oom_kills(self._oom_file)

    async def attach(self, take: Callable[[dict[str, Any]], None], gone: Callable[[], None]) -> None:
        """Connect: from now on call ``take`` with each message, and ``gone`` when the process has ended."""
        loop = asyncio.get_running_loop()
        connection = self._connection = Connection(longest=LONGEST_ANSWER)
        connection.handle(lambda message: self._take(message, take), lambda reason: None)
        os.set_blocking(self._faults, False)
        loop.add_reader(self._faults, self._read_faults)
        self._watching = asyncio.create_task(self._watch(gone))
        await loop.create_connection(lambda: connection, sock=self._channel)

    def _take(self, message: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        self.said.update(message)
        self._spoke_at = time.monotonic()
        if "born" in message:
            self.pid = int(message["born"])  # only the fork itself knows its pid
            self._look_at_memory()
        elif "may_end" in message:
            self._saving = not message["may_end"]
        elif not {"quiet", "noticed"} & message.keys():
            take(message)

    def take_beat(self, beat: Mapping[str, Any] | None) -> bool:
        """Take what the worker does now, None if that is unchanged; returns whether its phase is another one."""
        before = self.beat.phase
        self.beat = self.beat if beat is None else Beat.from_message(beat)
        return self.beat.phase != before

    def heartbeat(self) -> Beat:
        """Return what the worker does now, as the next heartbeat is to say it."""
        self.beat = replace(self.beat, stopped=self.stopped_by())
        silent = time.monotonic() - self._spoke_at > SILENT
        return replace(self.beat, inside=False) if silent and self.beat.inside else self.beat

    @property
    def is_gone(self) -> bool:
        """Return whether the worker has ended, or has closed its channel, as a process does that is just ending."""
        return self.ended or (self._connection is not None and self._connection.closed)

    async def _watch(self, gone: Callable[[], None]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # gone already, or forbidden in a container
                pidfd = os.pidfd_open(self.pid)

        def end() -> None:  # at once, before the parent of the process collects its status
            self.status = _exit_status(self.pid)
            ended.set()

        if pidfd is not None:
            loop.add_reader(pidfd, end)
            try:
                await ended.wait()
            finally:
                loop.remove_reader(pidfd)
                os.close(pidfd)
        if self._process is not None:
            while self._process.poll() is None:
                await asyncio.sleep(LOOK_EVERY)
            self.status = self._process.returncode
        while pidfd is None and not self.is_gone and self._process is None:
            await asyncio.sleep(LOOK_EVERY)
        await asyncio.sleep(0)  # its last message is read first
        self._read_faults()
        self.ended = True
        gone()

    def send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if not self.ended:
                os.kill(self.pid, number)

    def stopped_by(self) -> str:
        """Return the name of the signal that has stopped the process; "" while it runs."""
        fields = _stat(self.pid)
        if not fields or fields[0] != "T":
            return ""
        number = int(fields[-1])
        return signal_name(number) if number else ""  # not all of its threads have stopped yet

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer has struck in its memory cgroup since it was started."""
        now = _oom_kills(self._oom_file)
        return self.status == -signal.SIGKILL and now is not None and now > (self._oom_kills or 0)

    @property
    def crash_stack(self) -> str:
        """What faulthandler has written because the process crashed."""
        return readable_stack(self._fault_text)

    async def stack(self) -> str:
        """Return the Python stacks of all threads except this package's own."""
        if name := self.stopped_by():
            return f"its worker is stopped: {name}"
        self._fault_text = before = ""
        self.signal(signals.STACKS)
        await wait_until(lambda: bool(self._fault_text), STACK_WITHIN)
        while self._fault_text != before:
            before = self._fault_text
            await asyncio.sleep(STACK_ENDS_AFTER)
        self._fault_text = ""
        return readable_stack(before) or "its worker gave none"

    async def silence(self) -> None:
        """Let it flush its output and then write no more: its agent prints the last lines."""
        self.send({"quiet": True})
        if self.said and not self.stopped_by():
            await self._hear("quiet", within=ANSWER_WITHIN)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        """End the process. A checkpoint that is being written is finished first, within 30 s at most.

        Args:
            error: what ends the rank; None if its work is done.
            own: whether the error is the worker's own.
        """
        if self.said and error is not None:
            await self._let_it_save()
        self.signal(signal.SIGKILL)
        # A process that waits in the kernel for a device or a file system ends only when that replies.
        await wait_until(lambda: self.ended, KILLED_WITHIN)
        self.close()

    async def _let_it_save(self) -> None:
        """Ask whether the worker is writing a checkpoint, and wait until it is written."""
        self.said.discard("may_end")
        self.send({"end": True})
        await self._hear("may_end", "noticed", within=ANSWER_WITHIN)
        if self._saving:
            self.said.discard("may_end")
            await self._hear("may_end", "noticed", within=SAVE_WITHIN)

    async def _hear(self, *kinds: str, within: float) -> None:
        """Wait until the worker has sent a message of one of these kinds, or is gone."""
        await wait_until(lambda: self.is_gone or not self.said.isdisjoint(kinds), within)

    def close(self) -> None:
        loop = asyncio.get_running_loop()
        if self._connection is not None:
            self._connection.close()
            loop.remove_reader(self._faults)
            self._watching.cancel()
        else:
            self._channel.close()
        os.close(self._faults)

    def _read_faults(self) -> None:
        with suppress(OSError):  # such as BlockingIOError: that was all for now
            while piece := os.read(self._faults, 65536):
                self._fault_text = (self._fault_text + piece.decode(errors="replace"))[-LONGEST_STACK:]
            asyncio.get_running_loop().remove_reader(self._faults)


async def wait_until(holds: Callable[[], bool], within: float) -> None:
    """Wait until the condition holds, ``within`` seconds at most."""
    deadline = time.monotonic() + within
    while not holds() and time.monotonic() < deadline:
        await asyncio.sleep(0.01)


class ScriptWorker(Worker):
    """A user's own script, which has started its agent. It ends by itself, with the verdict raised as an exception, and
    is killed only if it does not.

    Args:
        print_error: prints why the script is killed.
    """

    def __init__(
        self, pid: int, channel: socket.socket, faults: int, print_error: Callable[[DdpManualError], None]
    ) -> None:
        super().__init__(pid, channel, faults)
        self._print_error = print_error

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if error is not None and "done" not in self.said:
            if not self.is_gone:
                await self._lead_out(error, own=own)
            elif not own:  # the script cannot say it any more
                self._print_error(error)
        self.close()

    async def _lead_out(self, error: DdpManualError, *, own: bool) -> None:
        self.send({"verdict": {**last_words(error), "own": own}})
        # The exception lets the script close what it has open, so it gets a moment to notice the verdict.
        await self._hear("noticed", within=GRACE)
        if "noticed" not in self.said:
            await self._let_it_save()
        if "noticed" in self.said:
            await self._hear(within=WAY_OUT)
        if self.is_gone:
            return
        self._print_error(error)
        self.send({"exit": error.exit_code})
        await self._hear(within=KILL_AFTER)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.is_gone:
                self.signal(number)
                await self._hear(within=KILL_AFTER)


def check_torch_is_installed() -> None:
    """Raise BackendUnavailable before a worker is started in vain."""
    if find_spec("torch") is None:
        raise not_installed("torch")


def start_process(rank: int, world_size: int) -> Worker:
    """Start a new Python as the worker of this agent: it writes to this terminal, and dies with the agent."""
    check_torch_is_installed()
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        who = [f"rank={rank}", f"of={world_size}"]  # for ps and nvidia-smi
        process = start_python(PROGRAM, [theirs.fileno(), writing], who)
        os.close(writing)
    return Worker(process.pid, ours, reading, process)


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on, see proc(5); [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _exit_status(pid: int) -> int | None:
    """Return the exit code, or minus the signal's number, of a process that has ended and was not waited for yet."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _oom_counter(pid: int) -> Path | None:
    """Return the file that counts OOM kills in the memory cgroup, of version 2 or 1, of a process."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        for mount in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = mount.split()
            for _, controllers, path in groups:
                if kind == "cgroup2" and not controllers:
                    file = Path(place + path) / "memory.events"
                elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                    file = Path(place + path) / "memory.oom_control"
                else:
                    continue
                if file.exists():
                    return file
    return None


def _oom_kills(file: Path | None) -> int | None:
    with suppress(OSError, ValueError):
        if file is not None:
            found = re.search(r"^oom_kill (\d+)$", file.read_text(), re.MULTILINE)
            return int(found[1]) if found else None
    return None


def readable_stack(text: str) -> str:
    """Return what faulthandler has written, without this package's own threads, the main thread first."""
    text = re.sub(r"(?m)^Extension modules: .*\n?", "", text)
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    head = threads[0].strip()
    own = os.path.join("ddp_manual", "worker", "reporter.py")
    shown = [thread.strip() for thread in threads[1:] if own not in thread]
    # faulthandler begins with the youngest thread; the main one is the oldest.
    return "\n".join(filter(None, [head, *reversed(shown)]))
