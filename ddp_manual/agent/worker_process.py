"""A worker as its agent sees it: started, spoken to, asked for its stack, ended; and what became of it.

The kernel tells what the worker itself cannot: ``/proc`` has its exit status and the signal that has stopped it, its
memory cgroup whether it ran out of memory. Python's faulthandler, on a pipe, gives its stack when it crashes in native
code, and on a signal even while a C call keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_manual import signals
from ddp_manual.agent.connection import Connection
from ddp_manual.errors import DdpManualError, signal_name
from ddp_manual.launchers import start_python
from ddp_manual.messages import LONGEST_ANSWER, last_words

# Seconds: faulthandler takes a millisecond; then nothing more comes.
STACK_WITHIN = 1.0
STACK_ENDS_AFTER = 0.1
LOOK_EVERY = 0.2
LONGEST_STACK = 1 << 16
KILL_AFTER = 2.0
KILLED_WITHIN = 10.0
# A script whose collective breaks gets out by itself; what it does on its way has bounds of its own.
GRACE = 0.7
WAY_OUT = 10.0
# A checkpoint that is being written when the run ends is finished first.
SAVE_WITHIN = 30.0
ANSWER_WITHIN = 0.5
PROGRAM = Path(__file__).parent.parent / "worker"


class Worker:
    """A process that was started, or that has started its agent.

    Args:
        pid: of the process.
        channel: the agent's end of a socket pair.
        faults: the reading end of the pipe that faulthandler writes to.
        process: where the agent is its parent.
    """

    def __init__(
        self, pid: int, channel: socket.socket, faults: int, process: subprocess.Popen[bytes] | None = None
    ) -> None:
        self.pid = pid
        self.ended = asyncio.Event()
        self.status: int | None = None
        """Its exit code, or minus the signal that has ended it; None while it runs, or if nobody can tell."""
        self._channel = channel
        self._faults = faults
        self._process = process
        self._connection: Connection | None = None
        self._answered, self._may_end, self._quiet = asyncio.Event(), asyncio.Event(), asyncio.Event()
        self._hung_up = asyncio.Event()
        """Set once it has closed the channel, as the end of the process does."""
        self._fault_text = ""
        self._fault_came = asyncio.Event()
        self._speaks = asyncio.Event()
        """Set once it has torch, and reads what it is told."""
        self._saving = False
        self.look_at_memory()

    def look_at_memory(self) -> None:
        """Remember how often its memory cgroup has run out of memory so far."""
        self._oom_file = _oom_counter(self.pid)
        self._oom_kills = _oom_kills(self._oom_file)

    async def attach(self, take: Callable[[dict[str, Any]], None], gone: Callable[[], None]) -> None:
        """From now on ``take`` each message, and call ``gone`` when the process has ended."""
        loop = asyncio.get_running_loop()
        connection = self._connection = Connection(longest=LONGEST_ANSWER)
        connection.handle(lambda message: self._take(message, take), lambda reason: self._hung_up.set())
        os.set_blocking(self._faults, False)
        loop.add_reader(self._faults, self._read_faults)
        self._watching = asyncio.create_task(self._watch(gone))
        await loop.create_connection(lambda: connection, sock=self._channel)

    def _take(self, message: dict[str, Any], take: Callable[[dict[str, Any]], None]) -> None:
        self._speaks.set()
        if "born" in message:
            self.pid = int(message["born"])  # of a fork nobody else can tell it
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

    async def _watch(self, gone: Callable[[], None]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()
        pidfd = None
        if hasattr(os, "pidfd_open"):
            with suppress(OSError):  # gone already, or forbidden in a container
                pidfd = os.pidfd_open(self.pid)

        def end() -> None:  # at once, before whoever has started the process collects its status
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
        await asyncio.sleep(0)  # what it has said last is read first
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
        """The name of the signal that has stopped the process; "" while it runs."""
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
        """What faulthandler has written of its own accord, when the process crashed."""
        return readable_stack(self._fault_text)

    async def stack(self) -> str:
        """The Python stack of every thread but our own, also while a C call keeps the interpreter's lock."""
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
        """Let it write out what it has said so far, and then no more: its agent has the last word."""
        self.send({"quiet": True})
        if self._speaks.is_set() and not self.stopped_by():
            await first_of(self._quiet, self.ended, self._hung_up, within=ANSWER_WITHIN)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        """End the process. A checkpoint that is being written is finished first, for 30 s at most.

        Args:
            error: what ends the rank; None where its work is done.
            own: whether the worker itself has said so.
        """
        if self._speaks.is_set() and not self.ended.is_set() and error is not None:
            await self._let_it_save()
        self.signal(signal.SIGKILL)
        # One that waits for a device or a file system in the kernel ends when that answers.
        await first_of(self.ended, within=KILLED_WITHIN)
        self.close()

    async def _let_it_save(self, *unless: asyncio.Event) -> None:
        """Ask whether the worker would lose something that is ended now, and wait until it would not."""
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
    """Wait for one of them, ``within`` seconds at most."""
    waiting = [asyncio.ensure_future(event.wait()) for event in events]
    await asyncio.wait(waiting, timeout=within, return_when=asyncio.FIRST_COMPLETED)
    for one in waiting:
        one.cancel()


class Script(Worker):
    """A person's own script, which has started its agent: it leaves by itself, by the exception that the verdict
    becomes, and is ended only where it does not.

    Args:
        tell: says why it is ended.
    """

    def __init__(self, pid: int, channel: socket.socket, faults: int, tell: Callable[[DdpManualError], None]) -> None:
        super().__init__(pid, channel, faults)
        self._tell = tell
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
            elif not own:  # nobody else can say it
                self._tell(error)
        self.close()

    @property
    def _is_gone(self) -> bool:
        return self._hung_up.is_set() or self.ended.is_set()

    async def _lead_out(self, error: DdpManualError, *, own: bool) -> None:
        self.send({"verdict": {**last_words(error), "own": own}})
        # Its own way out closes what it has open, so it gets a moment to notice.
        await first_of(self._noticed, self._hung_up, self.ended, within=GRACE)
        if not self._noticed.is_set():
            await self._let_it_save(self._noticed)
        if self._noticed.is_set():
            await first_of(self._hung_up, self.ended, within=WAY_OUT)
        if self._is_gone:
            return
        self._tell(error)
        self.send({"exit": error.exit_code})
        await first_of(self._hung_up, self.ended, within=KILL_AFTER)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self._is_gone:
                self.signal(number)
                await first_of(self._hung_up, self.ended, within=KILL_AFTER)


def start_process(rank: int, world_size: int) -> Worker:
    """A new Python that becomes the worker of this agent: it has this terminal, and dies with the agent."""
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        who = [f"rank={rank}", f"of={world_size}"]  # for ps and nvidia-smi
        process = start_python(PROGRAM, [theirs.fileno(), writing], who)
        os.close(writing)
    return Worker(process.pid, ours, reading, process)


def _stat(pid: int) -> list[str]:
    """The fields of /proc/<pid>/stat from the state on: see proc(5); [] where there is none."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def _exit_status(pid: int) -> int | None:
    """Of a process that has ended and was not waited for yet: its exit code, or minus the signal's number."""
    fields = _stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def _oom_counter(pid: int) -> Path | None:
    """The file that counts OOM kills in the memory cgroup of a process, of version 2 or 1."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        mounts = [line.split() for line in Path("/proc/self/mounts").read_text().splitlines()]
        for _, place, kind, options, *_ in mounts:
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
    """What faulthandler writes, without this package's own threads, the main thread first."""
    text = re.sub(r"(?m)^Extension modules: .*\n?", "", text)
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    head = threads[0].strip()
    own = os.path.join("ddp_manual", "worker", "reporter.py")
    shown = [thread.strip() for thread in threads[1:] if own not in thread]
    # faulthandler begins with the youngest thread; the main one is the oldest.
    return "\n".join(filter(None, [head, *reversed(shown)]))
