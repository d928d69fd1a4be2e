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
        self.ended = asyncio.Event()
        self.status: int | None = None
        """Its exit code, or minus the signal that has ended it; None while it runs, or if nobody could see that."""
        self._channel = channel
        self._faults = faults
        self._process = process
        self._connection: Connection | None = None
        self._answered, self._may_end, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._hung_up = asyncio.Event()
        """Set once the channel is closed, by the process or its end."""
        self._fault_text = ""
        self._fault_came = asyncio.Event()
        self._speaks = asyncio.Event()
        """Set once it has torch and reads its messages."""
        self._saving = False
        self.beat = Beat()
        """What it has last said that it does."""
        self._spoke_at = time.monotonic()
        self.look_at_memory()

    def look_at_memory(self) -> None:
        """Remember how often its memory cgroup has run out of memory so far."""
        self._oom_file = _oom_counter(self.pid)
        self._oom_kills = _oom_kills(self._oom_file)

    async def attach(self, take: Callable[[dict[str, Any]], None], gone: Callable[[], None]) -> None:
        """Connect: from now on call ``take`` with each message, and ``gone`` when the process has ended."""
        loop = asyncio.get_running_loop()
        connection = self._connection = Connection(longest=LONGEST_ANSWER)
        connection.handle(lambda message: self._take(message, take), lambda reason: self._hung_up.set())
        os.set_blocking(self._faults, False)
        loop.add_reader(self._faults, self._read_faults)
        self._watching = asyncio.create_task(self._watch(gone))
        await loop.create_connection(lambda: connection, sock=self._channel)

    def _take(self, message: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        self._speaks.set()
        self._spoke_at = time.monotonic()
        if "born" in message:
            self.pid = int(message["born"])  # only the fork itself knows its pid
            self.look_at_memory()
        elif "quiet" in message:
            self._quiet.set()
        elif "may_end" in message:
            self._answered.set()
            self._saving = not message["may_end"]
            if message["may_end"]:
                self._may_end.set()
        else:
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
        elif self._process is None:
            await self._hung_up.wait()
        while self._process is not None and self._process.poll() is None:
            await asyncio.sleep(LOOK_EVERY)
        if self._process is not None:
            self.status = self._process.returncode
        await asyncio.sleep(0)  # its last message is read first
        self._read_faults()
        self.ended.set()
        gone()

    def send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if not self.ended.is_set():
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
        self._fault_text = ""
        self._fault_came.clear()
        self.signal(signals.STACKS)
        with suppress(TimeoutError, asyncio.TimeoutError):
            await asyncio.wait_for(self._fault_came.wait(), STACK_WITHIN)
            while True:
                before = len(self._fault_text)
                await asyncio.sleep(STACK_ENDS_AFTER)
                if len(self._fault_text) == before:
                    break
        text, self._fault_text = self._fault_text, ""
        return readable_stack(text) or "its worker gave none"

    async def silence(self) -> None:
        """Let it flush its output and then write no more: its agent prints the last lines."""
        self.send({"quiet": True})
        if self._speaks.is_set() and not self.stopped_by():
            await first_of(self._quiet, self.ended, self._hung_up, within=ANSWER_WITHIN)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        """End the process. A checkpoint that is being written is finished first, within 30 s at most.

        Args:
            error: what ends the rank; None if its work is done.
            own: whether the error is the worker's own.
        """
        if self._speaks.is_set() and not self.ended.is_set() and error is not None:
            await self._let_it_save()
        self.signal(signal.SIGKILL)
        # A process that waits in the kernel for a device or a file system ends only when that replies.
        await first_of(self.ended, within=KILLED_WITHIN)
        self.close()

    async def _let_it_save(self, *unless: asyncio.Event) -> None:
        """Ask whether the worker is writing a checkpoint, and wait until it is written."""
        self.send({"end": True})
        await first_of(self._answered, self.ended, *unless, within=ANSWER_WITHIN)
        if self._saving:
            await first_of(self._may_end, self.ended, *unless, within=SAVE_WITHIN)

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
        with suppress(BlockingIOError, OSError):
            while piece := os.read(self._faults, 65536):
                self._fault_text = (self._fault_text + piece.decode(errors="replace"))[-LONGEST_STACK:]
                self._fault_came.set()
            asyncio.get_running_loop().remove_reader(self._faults)


async def first_of(*events: asyncio.Event, within: float | None = None) -> None:
    """Wait for the first of these events, ``within`` seconds at most."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


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
        self._noticed = asyncio.Event()
        self._has_left = False

    def _take(self, message: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        if "noticed" in message:
            self._noticed.set()
        else:
            self._has_left = self._has_left or "done" in message
            super()._take(message, take)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if error is not None and not self._has_left:
            if not self._is_gone:
                await self._lead_out(error, own=own)
            elif not own:  # the script cannot say it any more
                self._print_error(error)
        self.close()

    @property
    def _is_gone(self) -> bool:
        return self._hung_up.is_set() or self.ended.is_set()

    async def _lead_out(self, error: DdpManualError, *, own: bool) -> None:
        self.send({"verdict": {**last_words(error), "own": own}})
        # The exception lets the script close what it has open, so it gets a moment to notice the verdict.
        await first_of(self._noticed, self._hung_up, self.ended, within=GRACE)
        if not self._noticed.is_set():
            await self._let_it_save(self._noticed)
        if self._noticed.is_set():
            await first_of(self._hung_up, self.ended, within=WAY_OUT)
        if self._is_gone:
            return
        self._print_error(error)
        self.send({"exit": error.exit_code})
        await first_of(self._hung_up, self.ended, within=KILL_AFTER)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._is_gone:
                self.signal(number)
                await first_of(self._hung_up, self.ended, within=KILL_AFTER)


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
