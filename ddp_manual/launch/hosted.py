"""The remote side of ``launch --hosts``: one process for each host, which ``launch/ssh.py`` starts by way of ssh.

It reads one JSON object a line from standard input, and lives only as long as that: at its end, or when nothing has
come for ``SILENT_AFTER`` seconds, it stops all ranks of its host. What it says to the other side are lines of standard
output that begin with ``MARK``; lines of ranks begin with ``[rank k]``. A second process only waits for its end, and
then ends whatever the ranks have started and left.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import sys
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import ddp_manual
from ddp_manual import launchers, orphans, signals
from ddp_manual.agent.program_source import source_of
from ddp_manual.errors import BadOption, DdpManualError, PeerLost
from ddp_manual.launch import this_host
from ddp_manual.messages import LastWords
from ddp_manual.program import Program
from ddp_manual.protocol.agent import SAVE_WITHIN
from ddp_manual.training.config import TrainConfig
from ddp_manual.wire import LONGEST_ANSWER, LineReader, Unreadable, encode_local, read_local
from ddp_manual.world_spec import WorldSpec

MARK = b"\x1eddp-manual "
# Seconds. Each side sends a line as often, and gives up the other when none has come for so long.
ALIVE_EVERY = 1.0
SILENT_AFTER = 5.0
# Seconds from the last sign of the other side to the end of this process, whatever it does: the kernel ends its workers
# with it.
END_WITHIN = 8.5
# Seconds in which the ranks of this host can say themselves that those of a lost host are gone.
EXPLAIN_WITHIN = 1.0


def serve() -> int:
    """Serve the launcher at the other end of standard input and standard output; returns the exit code.

    A script may start processes in sessions of their own, which the end of their rank does not end. This process adopts
    them, and ends them when its child, which has the agents, has ended.
    """
    signals.adopt_orphans()
    own = os.getpid()
    if child := os.fork():
        signals.leave_signals_to_the_agent()
        while (ended := os.wait())[0] != child:
            pass  # an adopted process
        signals.end_children()
        code = os.waitstatus_to_exitcode(ended[1])
        return code if code >= 0 else 128 - code
    signals.die_with_parent(own)
    orphans.adopt()
    with ThreadPoolExecutor(1, "ddp_manual output") as writer:
        asyncio.run(_Served(writer).run())
    return 0


class _Served:
    def __init__(self, writer: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._heard = time.monotonic()
        self._messages: asyncio.Queue[Mapping[str, Any] | None] = asyncio.Queue()
        self._launch: this_host.Launch | None = None
        self._stopping = self._host_goes_down = False

    async def run(self) -> None:
        self._tell({"hello": {"version": ddp_manual.__version__, **launchers.reached_at()}})
        loop = asyncio.get_running_loop()
        stdin = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        tasks = [asyncio.create_task(task) for task in (self._read(stdin), self._watch(), self._keep_alive())]
        try:
            order = await self._messages.get()
            if order is not None:
                with signals.handle_in_event_loop(self._take_signal):
                    await self._follow(order["order"])
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, order: Mapping[str, Any]) -> None:
        launchers.set_exported(order["variables"])
        try:
            launch = self._launch = launch_of(order)
            code = dict(source_of(launch.program).code) if launch.program else {}
        except DdpManualError as error:
            self._tell({"refused": LastWords.of(error)})
            return
        try:
            with launchers.reserved_port("") as port, launch.starter() as starter:
                self._tell({"ready": {"code": code, "port": port}})
                while (message := await self._messages.get()) is not None and "start" in message:
                    start = message["start"]
                    sources = {**launch.spec.sources, "master_addr": "flag", "master_port": "flag"}
                    launch.spec = dataclasses.replace(launch.spec, **start["at"], sources=sources)
                    if start["restarts"]:
                        launch.begin_again(starter)
                    await launch.attempt(starter, self._writer, self._tell_failure)
                    self._tell({"attempt": {"saved": launch.has_saved}})
        finally:
            launch.tidy_up()

    async def _read(self, stdin: asyncio.StreamReader) -> None:
        reader = LineReader(read_local, LONGEST_ANSWER)  # arguments and variables of the user's own
        try:
            while data := await stdin.read(1 << 16):
                self._heard = time.monotonic()
                for message in reader.feed(data):
                    self._take(message)
        except Unreadable as error:
            too_much = BadOption(f"what to run cannot be read: {error}", why="", next="give long arguments in a file")
            self._tell({"refused": LastWords.of(too_much)})
        self._stop(END_WITHIN)

    def _take(self, message: Mapping[str, Any]) -> None:
        if "signal" in message:
            self._signal(int(message["signal"]))
        elif "lost" in message:
            left = float(message["within"]) - EXPLAIN_WITHIN
            asyncio.get_running_loop().call_later(EXPLAIN_WITHIN, self._stop, left)
            if self._launch is not None:
                self._launch.give_up(PeerLost(str(message["lost"]), why="", next=""))
        elif "alive" not in message:
            self._messages.put_nowait(message)

    async def _keep_alive(self) -> None:
        while True:  # one at a time, since the other side may not read for as long as its terminal is held
            await asyncio.wrap_future(self._tell({"alive": 1}))
            await asyncio.sleep(ALIVE_EVERY)

    async def _watch(self) -> None:
        while time.monotonic() - self._heard < SILENT_AFTER:
            await asyncio.sleep(0.2)
        self._stop(END_WITHIN - SILENT_AFTER)

    def _take_signal(self, number: int) -> None:
        """Pass on a signal of this host, which may be about to end the connection to the other side too."""
        self._host_goes_down |= number != signals.SAVE
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._launch is not None:
            self._launch.take_signal(number)

    def _stop(self, within: float) -> None:
        """Stop all ranks: at first in order, then at once, and after ``within`` seconds with this process. Where a
        signal of this host has done the first, programs have the time to do what they do about it."""
        if self._stopping:
            return
        self._stopping = True
        within = SAVE_WITHIN if self._host_goes_down else within
        signal.setitimer(signal.ITIMER_REAL, within)  # no handler: this also ends a process that hangs
        self._messages.put_nowait(None)
        if not self._host_goes_down:
            self._signal(signal.SIGHUP)
        asyncio.get_running_loop().call_later(max(within / 2, within - END_WITHIN / 2), self._signal, signal.SIGHUP)

    def _tell_failure(self, failure: this_host.Failure) -> None:
        self._tell({"failed": [failure[0], LastWords.of(failure[1])]})

    def _tell(self, message: Mapping[str, Any]) -> Future[None]:
        return self._writer.submit(self._print, MARK + encode_local(message))

    @staticmethod
    def _print(line: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            os.write(1, line)


def launch_of(order: Mapping[str, Any]) -> this_host.Launch:
    """Return what starts the ranks of this host.

    Raises:
        DdpManualError: they would find the same, one by one.
    """
    hosts = this_host.Hosts.of_slots(order["slots"], order["node_rank"])
    spec = WorldSpec(**order["spec"], sources=order["spec_sources"])
    if order["program"] is not None:
        words = {**order["program"], "arguments": tuple(order["program"]["arguments"])}
        return this_host.program_launch(Program(**words), hosts, spec, **order["options"])
    config = TrainConfig(**order["config"], sources=order["config_sources"])
    return this_host.training_launch(config, hosts, spec, **order["options"])
