"""``launch --hosts``: the ranks of several hosts from one terminal, by way of the system's ssh, one session a host.

No rank is started before every host is ready. What to run goes to ``launch/on_each_host.py`` on each host over standard
input, never on a command line; when that connection ends, however it ends, the ranks of the host end too. With
``--on_loss wait`` or ``shrink`` the other ranks go on then, and the host gets another session.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import shlex
import sys
import time
from collections.abc import Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from ddp_manual import signal_handlers
from ddp_manual.agent.program_source import check_program, source_of
from ddp_manual.environment import user_variables
from ddp_manual.errors import BadOption, DdpManualError, HostNotReady, PeerLost, Stopped
from ddp_manual.launch import session_messages
from ddp_manual.launch.attempts import Launch, Tell, root_failure, say_how_to_look
from ddp_manual.launch.host_list import Host
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.launch.session_messages import END_WITHIN
from ddp_manual.launch.ssh_session import NotReady, Remote, Session
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.option_fields import as_flags
from ddp_manual.protocol.stop_signals import SAVE_WITHIN
from ddp_manual.secret_arguments import without_secrets
from ddp_manual.terminal import say, width_of
from ddp_manual.text_wrapping import whole
from ddp_manual.wording import in_words

# Seconds from the loss of a session to each try to open another one. By then the ranks of the old session have ended.
OPEN_AGAIN_AFTER = 5.0


class HostedLaunch(Launch):
    """A run of ranks on several hosts, with all attempts at it.

    Args:
        variables: the environment variables to pass on to the hosts.
    """

    def __init__(self, job: Job, hosts: Sequence[Host], remote: Remote, variables: Mapping[str, str]) -> None:
        super().__init__(job)
        self.remote, self.variables = remote, variables
        self.writer = ThreadPoolExecutor(1, "ddp_manual output")
        slots = [host.slots for host in hosts]
        self.parts: Sequence[RanksOfHost] = [
            RanksOfHost(self, host, Hosts(slots, number, by_ssh=True)) for number, host in enumerate(hosts)
        ]
        self.lost: DdpManualError | None = None
        """Why the run ends, if it ends because a host is gone."""
        self.at_work: set[RanksOfHost] = set()
        """The hosts whose ranks run."""
        self.over = asyncio.Event()
        """Set once this attempt is ending or a signal asks to stop: no host is prepared or waited for any more."""
        self._closing: list[asyncio.Future[None]] = []

    def run(self) -> int:
        """Run to the end; return the exit code of the rank that failed first, or 0.

        Raises:
            HostNotReady: before any rank was started. PeerLost: a host was lost. Stopped: by a signal.
        """
        self.code: Mapping[str, str] = {}
        if self.job.program is not None:
            check_program(self.job.program)
            self.code = source_of(self.job.program).code
        if (token := user_variables.token(self.job.spec.token_file)) is not None:
            self.variables = {**self.variables, user_variables.TOKEN_VARIABLE: token.decode("utf-8", "surrogateescape")}
        return asyncio.run(self._run())

    def dry_run(self) -> str:
        """Return what would be run on each host, without secrets."""
        lines = []
        for part in self.parts:
            lines += [f"{part.name}: {part.ranks_in_words}", f"  {shlex.join(self.remote.command(part.name))}"]
        job = self.job
        what = job.program.typed if job.program else as_flags(job.config.given_options() if job.config else {})
        lines.append(f"over standard input: {what or 'the built-in training'}")
        given = [f"{name}={value}" for name, value in self.variables.items()]
        return "\n".join([*lines, f"variables: {shlex.join(without_secrets(given)) or 'none'}"])

    async def _run(self) -> int:
        with self.writer, signal_handlers.handle_in_event_loop(self.take_signal):
            try:
                if await self.is_over_before(self._prepare()):
                    raise Stopped(self.signalled, "before any rank was started")
                self.meeting_point = self._find_meeting_point()
                say_how_to_look({**self.meeting_point, "token_file": self.job.spec.token_file})
                await self.attempts()
            finally:
                await asyncio.gather(*(part.session.close() for part in self.parts))
                for task in self._closing:
                    task.cancel()
        return self.conclude()

    async def _prepare(self) -> None:
        found = await asyncio.gather(*(part.prepare() for part in self.parts), return_exceptions=True)
        wrong = [(part.name, error) for part, error in zip(self.parts, found, strict=True) if error]
        for _, error in wrong:
            if not isinstance(error, NotReady):
                raise error
        if wrong:
            names = ", ".join(name for name, _ in wrong)
            raise HostNotReady(
                f"{len(wrong)} of {len(self.parts)} hosts cannot run their ranks: {names}",
                why="\n".join(f"{name}: {error.args[0]}" for name, error in wrong),
                next="\n".join(f"{name}: {error.args[1]}" for name, error in wrong),
            )

    def _find_meeting_point(self) -> dict[str, Any]:
        first = self.parts[0].session
        assert first.hello is not None and first.ready is not None
        address, port = first.hello.address, first.ready.port
        if self.job.spec.source("master_addr") != "default":
            address = self.job.spec.master_addr
        elif len(self.parts) > 1 and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            hello = self.parts[1].session.hello
            assert hello is not None
            raise BadOption(
                f"{first.host.name} was reached at {address}, where no other host reaches rank 0",
                why=f"rank 0 is on the first host, and {self.parts[1].name} was reached from {hello.reached_from}",
                next=f"give its address: --master_addr {hello.reached_from}",
            )
        if self.job.spec.master_port and self.job.spec.source("master_port") != "default":
            port = self.job.spec.master_port
        return {"master_addr": address, "master_port": port}

    async def attempt(self) -> None:
        self.over = asyncio.Event()
        await super().attempt()

    def may_start_again(self, error: DdpManualError) -> bool:
        return self.lost is None and super().may_start_again(error)

    def keeps_seats_of(self, lost: RanksOfHost) -> bool:
        """Return whether ``on_loss`` keeps this host's seats: another host works, no rank here failed, no signal."""
        stops = self.signalled or any(rank in lost.hosts.ranks for rank, _ in self.failed)
        return self.job.spec.on_loss != LEAVE and bool(self.at_work) and not stops

    def have_ended(self, ended: RanksOfHost) -> None:
        """Handle the end of a host's ranks. Unless they were newcomers and another host works, the attempt is over, and
        newcomers that still wait for a seat give up."""
        if not ended.is_newcomer or not self.at_work:
            self.over.set()
            for part in self.parts:
                if part.is_newcomer:
                    part.session.send(session_messages.GiveUp())

    async def is_over_before(self, work: Coroutine[Any, Any, None]) -> bool:
        """Wait for the work, or cancel it once the attempt is over; return whether the attempt is over."""
        tasks: list[asyncio.Task[Any]] = [asyncio.create_task(work), asyncio.create_task(self.over.wait())]
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in tasks:
            task.cancel()
        done, _ = await asyncio.gather(*tasks, return_exceptions=True)
        if not self.over.is_set() and isinstance(done, Exception):
            raise done
        return self.over.is_set()

    def end_without(self, lost: RanksOfHost) -> None:
        """Have all ranks end, since the run does not go on without this host."""
        self.over.set()
        cause, remedy = lost.session.why_ended()
        self.lost = self.lost or PeerLost(
            f"the connection to host {lost.name} has ended, and {lost.ranks_in_words} with it",
            why=f"{lost.name}: {cause}",
            next=f"{remedy}\nthen start again:\n{whole(self.job.go_on)}",
        )
        was_stopped = any(rank in lost.hosts.ranks and error.identifier == "stopped" for rank, error in self.failed)
        within = SAVE_WITHIN if was_stopped else lost.session.others_end_within  # a host that goes down
        for part in self.parts:
            part.session.send(session_messages.HostIsGone(lost.name, within))
            asyncio.get_running_loop().call_later(max(within, END_WITHIN) + 1, part.session.kill)

    def take_signal(self, number: int) -> None:
        if number != signal_handlers.SAVE:
            if not self.signalled:
                self._asked = time.monotonic()
            elif time.monotonic() - self._asked > signal_handlers.ONCE_WITHIN and not self._closing:
                # A second signal also closes the sessions of hosts that take no signal any more.
                self._closing = [asyncio.ensure_future(part.session.close()) for part in self.parts]
            self.over.set()
        super().take_signal(number)

    def conclude(self) -> int:
        failed = root_failure(self.failed)
        # An error about gone peers, or about the stop of a rank by its host, is only a consequence of the lost host.
        of_lost = failed is None or failed[1].exit_code == PeerLost.exit_code or failed[1].identifier == "stopped"
        if self.lost is not None and of_lost and not self.signalled:
            raise self.lost
        return super().conclude()


class RanksOfHost:
    """The ranks of one host, as a part of a launch."""

    def __init__(self, launch: HostedLaunch, host: Host, hosts: Hosts) -> None:
        self.hosts, self.name = hosts, host.name
        self.ranks_in_words = in_words([[hosts.ranks[0], hosts.ranks[-1]]])
        self.has_saved = False
        self.is_newcomer = False
        """Whether its session replaces a lost one in this attempt, so that its ranks take the seats of lost ranks."""
        self._launch, self._host = launch, host
        self._new_session()

    def _new_session(self) -> None:
        self.session = Session(self._host, self._launch.remote, self._launch.writer)

    async def prepare(self) -> None:
        await self.session.prepare(self.order(), self._launch.code)

    def order(self) -> session_messages.Order:
        """Return what the host is told to start."""
        job = self._launch.job
        sources = {name: of for name, of in job.spec.sources.items() if name != "token_file"}
        spec = dataclasses.replace(job.spec, token_file=None, sources=sources)
        width = width_of(sys.stderr)  # the terminal is here, and the hosts' lines come through pipes
        variables = {**({"COLUMNS": str(width)} if width else {}), **self._launch.variables}
        return session_messages.Order(dataclasses.replace(job, spec=spec), self.hosts, variables)

    def take_signal(self, number: int) -> None:
        self.session.send(session_messages.PassOn(number))

    async def attempt(self, restarts: int, tell: Tell) -> None:
        """Have the host start its ranks, and wait until they have ended. If the run goes on without this host
        after its loss, open another session as soon as that is possible."""
        launch, self.is_newcomer = self._launch, False
        while not await self._have_ended(restarts, tell):
            if self.is_newcomer and launch.over.is_set():
                return
            if not launch.keeps_seats_of(self):
                launch.end_without(self)
                return
            if not await self._open_again():
                return
            # A newcomer's error does not end the run: another rank may have its seat, or it cannot work on this host.
            self.is_newcomer, tell = True, lambda failure: None
        launch.have_ended(self)

    async def _have_ended(self, restarts: int, tell: Tell) -> bool:
        """Have the host start its ranks; return True once they have ended, False if the session ends first."""
        launch = self._launch
        launch.at_work.add(self)
        self.session.send(session_messages.Begin(**launch.meeting_point, restarts=restarts))
        try:
            while (message := await self.session.hear()) is not None:
                if isinstance(message, session_messages.RankFailed):
                    tell((message.rank, message.words.error()))
                elif isinstance(message, session_messages.AttemptEnded):
                    self.has_saved = message.has_saved
                    return True
            return False
        finally:
            launch.at_work.discard(self)

    async def _open_again(self) -> bool:
        """Open another session; return False if the run is over, or ``rejoin_timeout`` is over, before that works."""
        launch, name, ranks = self._launch, self.name, self.ranks_in_words
        cause, _ = self.session.why_ended()
        say(f"the connection to host {name} has ended, and {ranks} with it: {cause}")
        say(f"the run goes on; host {name} is tried again every {OPEN_AGAIN_AFTER:.0f} s")
        until, said = time.monotonic() + launch.job.spec.rejoin_timeout, cause
        while time.monotonic() < until and not await launch.is_over_before(asyncio.sleep(OPEN_AGAIN_AFTER)):
            await self.session.close()
            self._new_session()
            try:
                if not await launch.is_over_before(self.prepare()):
                    say(f"host {name} is there again, and starts {ranks}")
                    return True
            except NotReady as error:
                if error.args[0] != said:
                    said = error.args[0]
                    say(f"{name}: {said}")
        return False
