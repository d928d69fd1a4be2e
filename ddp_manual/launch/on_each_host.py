"""The process of ``launch --hosts`` on each host, which ``launch/several_hosts.py`` starts by way of ssh.

It lives only as long as its connection to the launcher: at the end of standard input, or when nothing has come for
``SILENT_AFTER`` seconds, it ends all ranks of its host. Both sides' messages are in ``session_messages``; lines of
ranks begin with ``[rank k]``. Its parent process only waits for its end, and then ends all that its ranks have left.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

import ddp_manual
from ddp_manual import orphans, signal_handlers
from ddp_manual.agent.program_source import source_of
from ddp_manual.environment import machine, variables_for_a_rank
from ddp_manual.errors import BadOption, DdpManualError, PeerLost
from ddp_manual.launch import session_messages
from ddp_manual.launch.attempts import Failure
from ddp_manual.launch.session_messages import ALIVE_EVERY, END_WITHIN, MARK, SILENT_AFTER
from ddp_manual.launch.this_host import Ranks, prepared
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol.stop_signals import SAVE_WITHIN
from ddp_manual.ranks_and_runs import LastWords
from ddp_manual.wire import LONGEST_ANSWER, LineReader, Unreadable, encode_local

# Seconds for the ranks of this host to report the ranks of a lost host themselves, before they are stopped.
EXPLAIN_WITHIN = 1.0


def serve() -> int:
    """Serve the launcher at the other end of standard input and standard output; return the exit code.

    A script may start processes in sessions of their own, which the end of their rank does not end. This process adopts
    them, and ends them when its child, which has the agents, has ended.
    """
    orphans.adopt()
    own = os.getpid()
    if child := os.fork():
        signal_handlers.leave_signals_to_the_agent()
        while (ended := os.wait())[0] != child:
            pass  # an adopted process
        orphans.end_all()
        code = os.waitstatus_to_exitcode(ended[1])
        return code if code >= 0 else 128 - code
    orphans.die_with_parent(own)
    orphans.adopt()
    with ThreadPoolExecutor(1, "ddp_manual output") as writer:
        asyncio.run(_Served(writer).run())
    return 0


class _Served:
    def __init__(self, writer: ThreadPoolExecutor) -> None:
        self._writer = writer
        self._heard = time.monotonic()
        self._messages: asyncio.Queue[session_messages.Order | session_messages.Begin | None] = asyncio.Queue()
        self._ranks: Ranks | None = None
        self._stopping = self._host_goes_down = self._was_asked = False

    async def run(self) -> None:
        self._tell(session_messages.Hello(ddp_manual.__version__, *machine.reached_at()))
        loop = asyncio.get_running_loop()
        stdin = asyncio.StreamReader()
        await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(stdin), sys.stdin)
        tasks = [asyncio.create_task(task) for task in (self._read(stdin), self._watch(), self._keep_alive())]
        try:
            order = await self._messages.get()
            if isinstance(order, session_messages.Order):
                with signal_handlers.handle_in_event_loop(self._take_signal):
                    await self._follow(order)
        finally:
            for task in tasks:
                task.cancel()

    async def _follow(self, order: session_messages.Order) -> None:
        variables_for_a_rank.put(order.variables)
        try:
            job = prepared(order.job, order.hosts)
            code = dict(source_of(job.program).code) if job.program else {}
        except DdpManualError as error:
            self._tell(session_messages.Refused(LastWords.of(error)))
            return
        ranks = self._ranks = Ranks(job, order.hosts, self._writer)
        with machine.reserved_port("") as port, ranks.able_to_start():
            self._tell(session_messages.HostReady(code, port))
            while isinstance(begin := await self._messages.get(), session_messages.Begin):
                ranks.job = job.at(master_addr=begin.master_addr, master_port=begin.master_port)
                await ranks.attempt(begin.restarts, self._tell_failure)
                self._tell(session_messages.AttemptEnded(ranks.has_saved))

    async def _read(self, stdin: asyncio.StreamReader) -> None:
        # An Order has the user's arguments and variables.
        reader = LineReader(session_messages.read_from_launcher, LONGEST_ANSWER)
        try:
            while data := await stdin.read(1 << 16):
                self._heard = time.monotonic()
                for message in reader.feed(data):
                    self._take(message)
        except Unreadable as error:
            too_much = BadOption(f"what to run cannot be read: {error}", why="", next="give long arguments in a file")
            self._tell(session_messages.Refused(LastWords.of(too_much)))
        except DdpManualError as error:  # an option of the job is wrong
            self._tell(session_messages.Refused(LastWords.of(error)))
        self._end_with_connection(END_WITHIN)

    def _take(self, message: session_messages.FromLauncher) -> None:
        match message:
            case session_messages.Order() | session_messages.Begin():
                self._messages.put_nowait(message)
            case session_messages.PassOn():
                self._was_asked |= message.number in signal_handlers.STOP
                self._signal(message.number)
            case session_messages.GiveUp():
                self._give_up("the run is over")
            case session_messages.HostIsGone():
                asyncio.get_running_loop().call_later(EXPLAIN_WITHIN, self._stop, message.within - EXPLAIN_WITHIN)
                self._give_up(f"host {message.name} is gone")

    def _give_up(self, why: str) -> None:
        if self._ranks is not None:
            self._ranks.give_up(PeerLost(why, why="", next=""))

    async def _keep_alive(self) -> None:
        while True:  # one at a time: the launcher does not read while its terminal is held
            await asyncio.wrap_future(self._tell(session_messages.Alive()))
            await asyncio.sleep(ALIVE_EVERY)

    async def _watch(self) -> None:
        while time.monotonic() - self._heard < SILENT_AFTER:
            await asyncio.sleep(0.2)
        self._end_with_connection(END_WITHIN - SILENT_AFTER)

    def _take_signal(self, number: int) -> None:
        """Pass on a signal that came to this host. If it asks to stop, the host may be going down."""
        self._host_goes_down |= number != signal_handlers.SAVE
        self._signal(number)

    def _signal(self, number: int) -> None:
        if self._ranks is not None:
            self._ranks.take_signal(number)

    def _end_with_connection(self, within: float) -> None:
        """Stop all ranks, since the connection has ended. If the other hosts are to go on without this one, kill this
        process and so its ranks instead: a rank that stops in order has the ranks of all hosts stop."""
        keeps_seats = self._ranks is not None and self._ranks.agents and self._ranks.job.spec.on_loss != LEAVE
        if keeps_seats and not (self._stopping or self._host_goes_down or self._was_asked):
            os.kill(os.getpid(), signal.SIGKILL)
        self._stop(within)

    def _stop(self, within: float) -> None:
        """Stop all ranks in order, then end them at once, and end this process after ``within`` seconds. If a signal of
        this host has already stopped the ranks, programs have SAVE_WITHIN seconds to handle that signal."""
        if self._stopping:
            return
        self._stopping = True
        within = SAVE_WITHIN if self._host_goes_down else within
        signal.setitimer(signal.ITIMER_REAL, within)  # no handler: this also ends a process that hangs
        self._messages.put_nowait(None)
        if not self._host_goes_down:
            self._signal(signal.SIGHUP)
        asyncio.get_running_loop().call_later(max(within / 2, within - END_WITHIN / 2), self._signal, signal.SIGHUP)

    def _tell_failure(self, failure: Failure) -> None:
        self._tell(session_messages.RankFailed(failure[0], LastWords.of(failure[1])))

    def _tell(self, message: session_messages.FromHost) -> Future[None]:
        return self._writer.submit(self._print, MARK + encode_local(message))

    @staticmethod
    def _print(line: bytes) -> None:
        with suppress(OSError, ValueError):
            sys.stdout.flush()
            os.write(1, line)
