"""The worker's process as its agent sees it: asked for its stack, signalled, ended; and the cause of its death.

The kernel knows what the worker cannot tell: ``/proc`` has its exit status and the signal that has stopped it, and its
memory cgroup counts OOM kills. The worker's faulthandler writes the Python stack to a pipe when the worker crashes in
native code and, on a signal, even while a C call keeps the interpreter's lock.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial

from msgspec.structs import asdict, replace

from ddp_manual import from_agent, from_worker, orphans, process_status, signal_handlers
from ddp_manual.agent.collective_records import Records
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.worker_stack import WorkerStack
from ddp_manual.deadline import wait_until
from ddp_manual.errors import DdpManualError
from ddp_manual.memory_cgroup import OomKills
from ddp_manual.protocol.stop_signals import SAVE_WITHIN
from ddp_manual.ranks_and_runs import Beat, LastWords
from ddp_manual.wire import LONGEST_ANSWER, encode_local

# Seconds. A worker that is silent for so long is in a C call that keeps the interpreter's lock, not in a collective.
SILENT = 2.0
LOOK_EVERY = 0.2
KILL_AFTER = 2.0
LAST_LINES_WITHIN = 1.0
# Seconds that a program has to handle SIGTERM after another rank has failed.
TERM_GRACE = 5.0
KILLED_WITHIN = 10.0
# Seconds for a script whose collective breaks to notice the verdict, then to end by itself before it is made to end.
GRACE = 0.7
WAY_OUT = 10.0
ANSWER_WITHIN = 0.5
# Seconds from the end of the channel to the look whether exec has replaced the program. The delay is for a process that
# ends: it closes its descriptors before the kernel says that it has ended.
REPLACED_AFTER = 0.5


class Worker:
    """The process of a worker, which the agent has started or which has started the agent.

    Args:
        channel: the agent's end of a socket pair.
        faults: the reading end of the pipe that faulthandler writes to.
        process: given if the agent is its parent.
    """

    has_started_its_agent = False
    """Whether it is a script that has started its agent itself, and gets signals itself."""
    copies: Sequence[asyncio.Future[None]] = ()
    """Done when the worker's whole output is read; only ``launch`` gives a worker pipes, and a session, of its own."""

    def __init__(
        self,
        pid: int,
        channel: socket.socket,
        faults: int,
        process: subprocess.Popen[bytes] | None = None,
    ) -> None:
        self.pid = pid
        self.hears = True
        """Whether the worker runs Python that reads its agent's messages."""
        self._takes_stops = False
        """Whether the program stops with all ranks after the same step, so that SIGTERM does not end it."""
        self.ended = self.closed = False
        self.status: int | None = None
        """Its exit code, or minus the signal that has ended it; None while it runs, or if nobody could see that."""
        self.beat = Beat()
        """What the worker does, by its last message about that."""
        self.records = Records()
        """The collectives it has begun."""
        self.said: set[type[from_worker.FromWorker]] = set()
        """The types of its messages so far; until the first has come, the worker may not have been forked yet."""
        self.until: float | None = None
        """When a program that its agent or a signal has asked to end is killed if the run has ended too; 0: at once;
        None: the program was not asked to end."""
        self._channel, self._process = channel, process
        self._stack = WorkerStack(faults)
        self._connection: Connection[from_worker.FromWorker] | None = None
        self.children = orphans.Children()
        self._command = b""
        """How the program was started, as the kernel knows it."""
        self.log: Callable[[str], None] = lambda line: None
        """Prints a line for the rank; its agent sets it."""
        self._is_another_users = False
        """Whether the kernel has refused to end it."""
        self._is_replaced = False
        """Whether exec has replaced the program by another one, which has no channel and ends like an executable."""
        self._closed_group: from_worker.GroupClosed | None = None
        """The process group that it has closed last, if it has opened none since."""
        self._blocked_since: float | None = None
        """Since when its main thread is blocked in a collective, if it is."""
        self._spoke_at = time.monotonic()
        self._oom_kills = OomKills(self.pid)

    async def attach(self, take: Callable[[from_worker.FromWorker], None], gone: Callable[[], None]) -> None:
        """Connect: from now on call ``take`` with each message, and ``gone`` when the process has ended."""
        loop = asyncio.get_running_loop()
        connection = self._connection = Connection(from_worker.read, longest=LONGEST_ANSWER)
        connection.handle(lambda message: self._take(message, take), lambda reason: self._closed(take))
        self._stack.open()
        self._watching = asyncio.create_task(self._watch(gone))
        await loop.create_connection(lambda: connection, sock=self._channel)

    def _take(self, message: from_worker.FromWorker, take: Callable[[from_worker.FromWorker], None]) -> None:
        self.said.add(type(message))
        self._spoke_at = time.monotonic()
        match message:
            case from_worker.Born():
                self.pid = message.pid
                self._oom_kills = OomKills(self.pid)
            case from_worker.Loaded():  # it waits for its place
                self._command = process_status.command_line(self.pid)
            case from_worker.RecordsMemory():
                try:
                    self.records.open(self.pid, message.descriptor, message.complete, message.compared)
                except (OSError, ValueError) as error:  # it has ended (its last words follow) or has no such memory
                    take(from_worker.NotCompared(str(error)))
            case from_worker.ProgramBegins():
                self.hears = message.hears
            case from_worker.HandlesSignals(handling):
                self._takes_stops = handling is not from_worker.Handling.BY_ITSELF
            case from_worker.GroupOpened():
                self.records.add_group(asdict(message))
                self._closed_group = None
            case from_worker.GroupClosed():
                self.records.close_group(message.key, message.begun)
                self._closed_group = message
            case from_worker.NotCompared():
                self.records.complete = False
            case from_worker.Doing():
                self.beat = message.beat or self.beat
                self._blocked_since = (self._blocked_since or self._spoke_at) if message.blocked else None
        take(message)

    def _closed(self, take: Callable[[from_worker.FromWorker], None]) -> None:
        """Find out whether the closed channel means that exec has replaced the program, and not that it has ended."""

        def look() -> None:
            if self._command and not self.ended and process_status.command_line(self.pid) not in (b"", self._command):
                is_other, self.hears, self._is_replaced = self.hears, False, True
                if is_other:  # an executable has been another program all the time
                    take(from_worker.Replaced())

        asyncio.get_running_loop().call_later(REPLACED_AFTER, look)

    def heartbeat(self) -> Beat:
        """Return what the worker does now, as the next heartbeat is to say it."""
        calls = self.records.for_beat()
        begun, closed = self.records.count(self.beat.collectives)
        silent = time.monotonic() - self._spoke_at > SILENT
        inside, stopped = self.beat.inside and not silent, self.stopped_by()
        last = self._closed_group
        why = {"raised": last.raised, "broken": last.broken} if last is not None else {}
        seen = {"collectives": begun, "closed": closed, "calls": calls, "inside": inside, "stopped": stopped}
        return replace(self.beat, **seen, **why)

    @property
    def is_gone(self) -> bool:
        """Return whether the worker has ended or is ending: its channel is closed, and exec has not replaced it."""
        closed = self._connection is not None and self._connection.closed
        return self.ended or (closed and not self._is_replaced)

    async def _watch(self, gone: Callable[[], None]) -> None:
        loop, ended = asyncio.get_running_loop(), asyncio.Event()

        def end() -> None:  # at once, before the parent of the process collects its status
            self.status = process_status.exit_status(self.pid)
            ended.set()

        with suppress(AttributeError, OSError):  # another system than Linux; gone already, or forbidden in a container
            pidfd = os.pidfd_open(self.pid)
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
        while not (ended.is_set() or self._process or self._look_whether_it_has_ended()):
            await asyncio.sleep(LOOK_EVERY)
        await asyncio.sleep(0)  # its last message is read first
        self._stack.read()
        self.ended = True
        gone()

    def _look_whether_it_has_ended(self) -> bool:
        """Return whether the process has ended, where the kernel does not say when a process ends."""
        if self.has_started_its_agent or not os.path.isdir("/proc/self"):
            return self.is_gone
        self.status = process_status.exit_status(self.pid)
        return self.status is not None or not process_status.process_stat(self.pid)

    def send(self, message: from_agent.FromAgent) -> None:
        if self._connection is not None:
            self._connection.write(encode_local(message))

    @property
    def exists(self) -> bool:
        """Whether ``pid`` is known to be the worker's."""
        return bool(self.said)

    def signal_all(self, number: int) -> None:
        """Send a signal to the program. If it has a session of its own, Ctrl-C goes to all processes in its process
        group, as in a terminal; of an executable, which may be a shell with the program below it, each signal does.
        Python is left to end what it has started: a DataLoader's process that SIGTERM ends makes a save fail."""
        to_group = number in (signal.SIGINT, signal.SIGKILL) or not self.hears
        if self.copies and self.exists and to_group:
            self._send_signal(os.killpg, number)
        else:
            self.signal(number)

    def signal(self, number: int) -> None:
        if not self.ended:
            self._send_signal(os.kill, number)

    def _send_signal(self, kill: Callable[[int, int], None], number: int) -> None:
        try:
            kill(self.pid, number)
        except ProcessLookupError:
            pass
        except PermissionError:  # as of sudo, which is root's
            # macOS says so too of a group whose processes have all ended.
            is_left = not self.ended or sys.platform == "linux"
            if number in (signal.SIGTERM, signal.SIGKILL) and is_left and not self._is_another_users:
                self._is_another_users = True
                what, which = f"pid {self.pid}", str(self.pid)
                if kill is os.killpg:
                    what, which = f"a process of group {self.pid}", f"-- -{self.pid}"
                self.log(f"cannot end {what}, which runs as another user: sudo kill {which}")

    def stopped_by(self) -> str:
        """Return the name of the signal that has stopped the process; "" while it runs."""
        return process_status.stopped_by(self.pid)

    @property
    def ran_out_of_memory(self) -> bool:
        """Whether the kernel's OOM killer has struck in its memory cgroup since it was started."""
        return self.status in (None, -signal.SIGKILL) and self._oom_kills.any()

    @property
    def crash_stack(self) -> str:
        """What faulthandler has written because the process crashed."""
        return self._stack.text(self.beat.place)

    async def stack(self) -> str:
        """Return the Python stacks of all threads except this package's own."""
        if name := self.stopped_by():
            return f"its worker is stopped: {name}"
        if not process_status.is_caught(self.pid, signal_handlers.STACKS):  # the signal would end it
            return "it runs no Python that could write a stack"
        return await self._stack.ask(self.signal, self.beat.place) or "its worker gave none"

    async def silence(self, *, grace: float = TERM_GRACE) -> None:
        """Have the program end within ``grace`` seconds, so that it writes no more: its agent prints the last lines."""
        if self.exists:
            await self._end_program(grace)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        """End the process.

        Args:
            error: the error that ends the rank; None if its work is done.
            own: whether the error is the worker's own.
        """
        await self._kill(self.signal)
        self.close()

    async def _kill(self, send: Callable[[int], None]) -> None:
        """Kill the process by ``send``, and end the processes that it has started."""
        self.children.look(self.pid)
        send(signal.SIGKILL)
        # A process that waits in the kernel for a device or a file system ends only when it gets a reply.
        await wait_until(lambda: self.ended or self._is_another_users, KILLED_WITHIN)
        await self.children.end(self.pid if self.copies else None)
        # Its last output is still read, for a second at most: a process that it has started may keep the pipe open.
        await wait_until(lambda: all(copy.done() for copy in self.copies), LAST_LINES_WITHIN)

    async def _end_program(self, grace: float) -> None:
        """Have the program end: by itself if an exception ends it, otherwise by SIGTERM, which it may handle; then kill
        it. A stopped program is killed at once; a program that a signal has asked to end gets no second signal."""
        self.children.look(self.pid)
        if from_worker.ProgramBegins in self.said and not self.stopped_by():
            if from_worker.Failed in self.said:  # functions registered with atexit may take their time
                await wait_until(lambda: self.is_gone or self.until == 0, WAY_OUT)
            elif self.hears:
                await self._let_it_save()
            if self.until is None and not (self.is_gone or self._takes_stops):
                handles_it = process_status.is_caught(self.pid, signal.SIGTERM)
                self.until = time.monotonic() + (grace if handles_it else TERM_GRACE)
                self.signal_all(signal.SIGTERM)
            await wait_until(partial(self._has_had_its_time, time.monotonic()))
        await self._kill(self.signal_all)

    def _has_had_its_time(self, since: float) -> bool:
        """Return whether a program that is to end since then has ended, or is to be killed now."""
        now, blocked = time.monotonic(), self._blocked_since
        # Python calls no handler while the main thread is blocked in a collective.
        is_blocked = blocked is not None and now - max(since, blocked) > KILL_AFTER
        return self.is_gone or is_blocked or now >= (self.until or 0)

    async def _let_it_save(self) -> None:
        """Ask whether the worker is writing a checkpoint, and wait until it is written."""
        self.said -= {from_worker.IsSaving, from_worker.MayEnd}
        self.send(from_agent.BeforeTheEnd())
        await self._hear(from_worker.IsSaving, from_worker.MayEnd, from_worker.Noticed, within=ANSWER_WITHIN)
        if from_worker.IsSaving in self.said:
            await self._hear(from_worker.MayEnd, from_worker.Noticed, within=SAVE_WITHIN)

    async def _hear(self, *kinds: type[from_worker.FromWorker], within: float) -> None:
        """Wait until the worker has sent a message of one of these types, or is gone."""
        await wait_until(lambda: self.is_gone or not self.said.isdisjoint(kinds), within)

    def close(self) -> None:
        """Close the channel, the pipe and the memory that this agent shares with the process, once."""
        if self.closed:
            return
        self.closed = True
        if self._connection is not None:
            self._connection.close()
            self._watching.cancel()
        else:
            self._channel.close()
        self._stack.close()
        self.records = Records()  # lets go of the worker's memory
        for copy in self.copies:
            copy.cancel()


class AttachedWorker(Worker):
    """A user's own script, which has started its agent. It ends by itself, with the verdict raised as an exception, and
    is killed only if it does not.

    Args:
        print_error: prints why the script is killed.
    """

    has_started_its_agent = True

    def __init__(
        self, pid: int, channel: socket.socket, faults: int, print_error: Callable[[DdpManualError], None]
    ) -> None:
        super().__init__(pid, channel, faults)
        self._print_error = print_error

    async def silence(self, *, grace: float = TERM_GRACE) -> None:
        """Have the script's reporter log nothing more."""
        self.send(from_agent.BeQuiet())
        if self.said and not self.stopped_by():
            await self._hear(from_worker.IsQuiet, within=ANSWER_WITHIN)

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if error is not None and from_worker.Result not in self.said:
            if not self.is_gone:
                await self._lead_out(error, own=own)
            elif not own:  # the script cannot say it any more
                self._print_error(error)
        self.close()

    async def _lead_out(self, error: DdpManualError, *, own: bool) -> None:
        self.send(from_agent.RunEnds(LastWords.of(error), own))
        # The exception lets the script close what it has open, so it gets a moment to notice the verdict.
        await self._hear(from_worker.Noticed, within=GRACE)
        if from_worker.Noticed not in self.said:
            await self._let_it_save()
        if from_worker.Noticed in self.said:
            await self._hear(within=WAY_OUT)
        if self.is_gone:
            return
        self._print_error(error)
        self.send(from_agent.Exit())
        await self._hear(within=KILL_AFTER)
        for number in (signal.SIGTERM, signal.SIGKILL):
            if not self.is_gone and (number == signal.SIGKILL or self.until is None):
                self.signal(number)
                await self._hear(within=KILL_AFTER)
