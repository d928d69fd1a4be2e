"""``launch --hosts``: the ranks of several hosts from one terminal, by way of the system's ssh, one session a host.

No rank is started before every host is ready. What to run goes to ``launch/hosted.py`` on each host over standard
input, never on a command line; when that connection ends, however it ends, the ranks of the host end too.
"""

from __future__ import annotations

import asyncio
import dataclasses
import ipaddress
import shlex
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from ddp_manual import launchers, signals
from ddp_manual.agent import tasks
from ddp_manual.agent.program_source import check_program, source_of
from ddp_manual.errors import BadOption, DdpManualError, HostNotReady, PeerLost, Stopped, from_dict
from ddp_manual.launch import this_host
from ddp_manual.launch.host_list import Host
from ddp_manual.launch.hosted import END_WITHIN
from ddp_manual.launch.ssh_session import NotReady, Remote, Session
from ddp_manual.options import as_flags
from ddp_manual.program import Program, without_secrets
from ddp_manual.protocol.agent import SAVE_WITHIN
from ddp_manual.run_folder import default_run_dir, new_run_id
from ddp_manual.terminal import in_words, say
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

__all__ = ["HostedLaunch", "Remote", "hosted_launch"]


def hosted_launch(
    hosts: Sequence[Host],
    remote: Remote,
    spec: WorldSpec,
    task: Program | TrainConfig,
    *,
    after: Sequence[str],
    variables: Mapping[str, str],
    run_dir: str | None,
    **options: Any,
) -> HostedLaunch:
    """Return what starts the ranks of these hosts.

    Args:
        after: what was typed after the options of ``launch``: the script and its arguments, or training options.
        variables: to be passed on.
        options: of ``this_host.program_launch`` or ``this_host.training_launch``.
    """
    command, typed = launchers.typed_command()
    run_id = new_run_id()
    # Whoever looks at the run is shown the command to go on: it has no values of variables.
    names = ",".join(name for name in variables if name != launchers.TOKEN_VARIABLE)
    before = tasks.without_options(typed[: len(typed) - len(after)], ["export"])
    before = [*command, *before[:1], *(["--export", names] if names else []), *before[1:]]
    if isinstance(task, Program):
        go_on = shlex.join([*before, *after])
    else:
        words = [word for word in tasks.without_options(before, ["run_dir"]) if word != "--"]
        # The time in its name is this machine's on all hosts.
        options["chose_folder"] = run_dir is not None
        run_dir = run_dir or default_run_dir(run_id)
        go_on = this_host.command_to_resume(words, run_dir, after)
    return HostedLaunch(
        hosts=hosts,
        remote=remote,
        spec=spec,
        options={"run_id": run_id, "run_dir": run_dir, "go_on": go_on, **options},
        variables=variables,
        program=task if isinstance(task, Program) else None,
        config=task if isinstance(task, TrainConfig) else None,
    )


@dataclass(kw_only=True)
class HostedLaunch:
    """A run of ranks on several hosts, with all attempts at it."""

    hosts: Sequence[Host]
    remote: Remote
    spec: WorldSpec
    options: Mapping[str, Any]
    """Of ``this_host.program_launch`` or ``this_host.training_launch``."""
    variables: Mapping[str, str]
    program: Program | None = None
    config: TrainConfig | None = None
    """Of our own training; either this or ``program`` is given."""
    signalled: int = 0

    def run(self) -> int:
        """Run to the end; returns the exit code of the rank that failed first, or 0.

        Raises:
            HostNotReady: before any rank was started. PeerLost: a host was lost. Stopped: by a signal.
        """
        if self.program is not None:
            check_program(self.program)
        if (token := launchers.token(self.spec.token_file)) is not None:
            self.variables = {**self.variables, launchers.TOKEN_VARIABLE: token.decode("utf-8", "surrogateescape")}
        return asyncio.run(self._run())

    def dry_run(self) -> str:
        """Return what would be run on each host, without secrets."""
        lines = []
        for number, host in enumerate(self.hosts):
            ranks = self._ranks(number)
            lines += [
                f"{host.name}: {in_words([[ranks[0], ranks[-1]]])}",
                f"  {shlex.join(self.remote.command(host.name))}",
            ]
        what = self.program.typed if self.program else as_flags(self.config.given_options() if self.config else {})
        lines.append(f"over standard input: {what or 'the built-in training'}")
        given = [f"{name}={value}" for name, value in self.variables.items()]
        return "\n".join([*lines, f"variables: {shlex.join(without_secrets(given)) or 'none'}"])

    def _ranks(self, number: int) -> range:
        return this_host.Hosts.of_slots([host.slots for host in self.hosts], number).ranks

    def order(self, number: int) -> dict[str, Any]:
        """Return what a host is told to start."""
        spec = {**self.spec.values(), "token_file": None}
        return {
            "slots": [host.slots for host in self.hosts],
            "node_rank": number,
            "spec": spec,
            "spec_sources": {name: of for name, of in self.spec.sources.items() if name != "token_file"},
            "program": dataclasses.asdict(self.program) if self.program else None,
            "config": self.config.values() if self.config else None,
            "config_sources": dict(self.config.sources) if self.config else None,
            "options": dict(self.options),
            "variables": dict(self.variables),
        }

    async def _run(self) -> int:
        with ThreadPoolExecutor(1, "ddp_manual output") as writer:
            self._sessions = [
                Session(host, self.remote, self._ranks(number), writer) for number, host in enumerate(self.hosts)
            ]
            self._closing: list[asyncio.Future[None]] = []
            with signals.handle_in_event_loop(self._take_signal):
                beating = [asyncio.create_task(session.keep_alive()) for session in self._sessions]
                try:
                    self._preparing: asyncio.Future[Any] | None = asyncio.ensure_future(self._prepare())
                    try:
                        await self._preparing
                    except asyncio.CancelledError:
                        raise Stopped(self.signalled, "before any rank was started") from None
                    self._preparing = None
                    failed, lost, saved = await self._attempts()
                finally:
                    await asyncio.gather(*(session.close() for session in self._sessions))
                    for task in (*beating, *self._closing):
                        task.cancel()
        # What a rank says because its peers are gone, or because its host has stopped it, follows from that.
        of_lost = failed is None or failed[1].exit_code == PeerLost.exit_code or failed[1].identifier == "stopped"
        if lost is not None and of_lost and not self.signalled:
            raise lost
        return this_host.conclude(failed, self.signalled, str(self.options["go_on"]), has_saved=saved)

    async def _prepare(self) -> None:
        code = dict(source_of(self.program).code) if self.program else {}
        differ = self.spec.allow_mismatch
        found = await asyncio.gather(
            *(
                session.prepare(self.order(number), code, may_differ=differ)
                for number, session in enumerate(self._sessions)
            ),
            return_exceptions=True,
        )
        wrong = [(session.host.name, error) for session, error in zip(self._sessions, found, strict=True) if error]
        for _, error in wrong:
            if not isinstance(error, NotReady):
                raise error
        if wrong:
            names = ", ".join(name for name, _ in wrong)
            raise HostNotReady(
                f"{len(wrong)} of {len(self.hosts)} hosts cannot run their ranks: {names}",
                why="\n".join(f"{name}: {error.args[0]}" for name, error in wrong),
                next="\n".join(f"{name}: {error.args[1]}" for name, error in wrong),
            )

    def _meeting_point(self) -> dict[str, Any]:
        first = self._sessions[0]
        address, port = first.hello["address"], first.ready["port"]
        if self.spec.source("master_addr") != "default":
            address = self.spec.master_addr
        elif len(self.hosts) > 1 and ipaddress.ip_address(address.partition("%")[0]).is_loopback:
            other = self._sessions[1].hello["from"]
            raise BadOption(
                f"{first.host.name} was reached at {address}, where no other host reaches rank 0",
                why=f"rank 0 is on the first host, and {self.hosts[1].name} was reached from {other}",
                next=f"give its address: --master_addr {other}",
            )
        if self.spec.source("master_port") != "default":
            port = self.spec.master_port
        return {"master_addr": address, "master_port": port}

    async def _attempts(self) -> tuple[this_host.Failure | None, DdpManualError | None, bool]:
        at, restarts = self._meeting_point(), 0
        command, _ = launchers.typed_command()
        say(f"to look at this run from another terminal: {shlex.join([*command, 'status'])} --watch {as_flags(at)}")
        while True:
            self._failed: list[this_host.Failure] = []
            self._lost: DdpManualError | None = None
            for session in self._sessions:
                session.send({"start": {"at": at, "restarts": restarts}})
            saved = await asyncio.gather(*map(self._follow, self._sessions))
            failed = this_host.first_of(self._failed)
            most = int(self.options["max_restarts"])
            if (
                failed is None
                or self._lost
                or self.signalled
                or restarts >= most
                or not this_host.may_be_fixed(failed[1])
            ):
                return failed, self._lost, any(saved)
            restarts += 1
            say(f"restart {restarts} of {most} after {this_host.in_short(failed[1])}")

    async def _follow(self, session: Session) -> bool:
        """Wait until the ranks of a host have ended; returns whether the run has a checkpoint there."""
        while (message := await session.messages.get()) is not None:
            if "failed" in message:
                rank, words = message["failed"]
                self._failed.append((int(rank), from_dict(words, int(words["exit_code"]))))
            elif "attempt" in message:
                return bool(message["attempt"]["saved"])
        name, ranks = session.host.name, in_words([[session.ranks[0], session.ranks[-1]]])
        cause, remedy = session.why_ended()
        self._lost = self._lost or PeerLost(
            f"the connection to host {name} has ended, and {ranks} with it",
            why=f"{name}: {cause}",
            next=f"{remedy}\nthen start again:\n{self.options['go_on']}",
        )
        was_stopped = any(rank in session.ranks and error.identifier == "stopped" for rank, error in self._failed)
        within = SAVE_WITHIN if was_stopped else session.others_end_within  # a host that went down, and said so
        for other in self._sessions:
            other.send({"lost": f"host {name} is gone", "within": within})
            asyncio.get_running_loop().call_later(max(within, END_WITHIN) + 1, other.kill)
        return False

    def _take_signal(self, number: int) -> None:
        if number != signals.SAVE:
            if not self.signalled:
                say(this_host.STOPPING)
                self._asked = time.monotonic()
            elif time.monotonic() - self._asked > signals.ONCE_WITHIN and not self._closing:
                # Also those of hosts that take no signal any more.
                self._closing = [asyncio.ensure_future(session.close()) for session in self._sessions]
            self.signalled = self.signalled or number
            if self._preparing is not None:
                self._preparing.cancel()
        for session in self._sessions[: 1 if number == signals.SAVE and self.program is None else None]:
            session.send({"signal": number})
