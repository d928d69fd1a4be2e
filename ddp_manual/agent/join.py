"""How a rank joins its run: rank 0 listens, the others find it, all say hello and wait for the missing ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import shlex
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_manual import launchers, run_folder
from ddp_manual.agent import reachability
from ddp_manual.agent.address import (
    listen,
    read_torchrun_address,
    refuse_loopback,
    resolve,
    write_torchrun_address,
)
from ddp_manual.agent.compatibility import code_digests, installed_versions
from ddp_manual.agent.connection import Connection, Seal, Unsealed
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.network_interface import OwnAddress, at, route_to
from ddp_manual.agent.probe import Probe, find_rank_0
from ddp_manual.agent.roll_call import advice_for, all_here, missing_ranks_error, situation, wait_within
from ddp_manual.errors import DdpManualError, MasterLost, MasterUnreachable, TokenMismatch, from_dict
from ddp_manual.messages import RankInfo, RunInfo, Steps
from ddp_manual.terminal import POLL_EVERY, Waiting
from ddp_manual.world_spec import WorldSpec

# Seconds until a line says that rank 0 does not reply: it is busy, or finds out whether another process is alive.
REPLY_WITHIN = 1.0
# Seconds that the other ranks wait longer than rank 0, which tells all of them who is missing.
RANK_0_FIRST = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the worker of a rank is to do, and what of it all ranks must have in common."""

    start: Mapping[str, Any] = field(default_factory=dict)
    """The message that starts the worker."""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Option -> (value, source), for the options that all ranks must share and that are known without torch."""
    run_dir: str | None = None
    """The run's folder, with ``{run_id}`` for its name; all ranks use rank 0's. None: the run keeps no files."""
    command: str
    """The command that starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers."""
    script: Path | None = None
    """The user's own script, which must be the same on every rank."""
    is_script: bool = False
    """Whether the worker is a user's own script, whose options are not known here."""
    launched: str | None = None
    """The command that resumes the run, if ``launch`` has started the ranks."""
    wait_until_ready: bool = False
    """Whether a rank that fails still waits for what its worker finds out, as ``check`` does."""
    attempt: str = field(default_factory=lambda: f"{launchers.restart_count()}.0")
    """Differs for each time that the ranks of one torchrun join."""


class Join:
    """One rank's way into its run, from the look-up of rank 0's address until all ranks have joined.

    Args:
        log: prints a line for this rank.
    """

    def __init__(self, spec: WorldSpec, task: Task, *, steps: Steps, log: Callable[[str], None]) -> None:
        self.info = RankInfo(rank=spec.rank, world_size=spec.world_size, host=launchers.host_name(), pid=os.getpid())
        """What this rank knows of itself so far, and says in its hello."""
        self.coordinator: Coordinator | None = None
        self.probe_server: asyncio.Server | None = None
        """Answers the other hosts' probes."""
        self.connection: Connection | None = None
        """The connection to the coordinator, once it has admitted this rank."""
        self.own_address: OwnAddress
        self.seal = Seal(launchers.token(spec.token_file))
        self.nonce = secrets.token_hex(16)
        self._spec, self._task, self._steps = spec, task, steps
        self._log = log
        # The ranks of ``launch`` share one terminal, in which rank 0 says which ranks are missing.
        self._log_waiting = log if task.launched is None or spec.rank == 0 else lambda line: None
        self._waiting = Waiting(spec.join_timeout, self._log_waiting)
        self._run: RunInfo
        self._news: Mapping[str, Any] | None = None
        self._logged: set[str] = set()
        self._all_here = False
        self._unacknowledged = 0
        """Bytes of the hello that rank 0's host has not confirmed within a second."""

    async def join(self) -> tuple[RunInfo, Connection]:
        """Find rank 0 and be admitted as a rank of its run.

        Raises:
            DdpManualError: there is no rank 0, it refuses this rank, or it does not have this run's token.
        """
        spec = self._spec
        with self._steps.step("address") as step:
            found = resolve(spec.master_addr, self._log)
            step.detail = f"{spec.named('master_addr')} is {', '.join(found)}"
            refuse_loopback(spec, found)
        if spec.rank == 0:
            found = [await self._become_rank_0(found)]
        while True:
            with self._steps.step("rank 0") as step:
                if spec.agent_store and spec.rank != 0:
                    address, port = await read_torchrun_address(spec, self._task.attempt, self._waiting)
                    self._spec = dataclasses.replace(spec, master_addr=address, master_port=port)
                    found = [address]
                there = await find_rank_0(self._spec, found, self._waiting, self._command_for(0))
                assert there.connection is not None
                where = at(there.address, self._spec.master_port)
                step.detail = f"its agent answers at {where}"
            run = None
            try:
                run = await self._say_hello(there, there.connection, where)
            finally:
                if run is None:
                    there.connection.close()
            if run is not None:
                self._run, self.connection = run, there.connection
                self._roll_call = self._steps.begin("roll call")
                if spec.rank != 0:
                    # Rank 0's own time counts from when it began to listen, so rank 0 ends first, and ends all ranks.
                    self._waiting = Waiting(spec.join_timeout, self._log_waiting)
                return run, there.connection
            if self._unacknowledged:  # rank 0 has closed the connection, since it has heard nothing
                self._say_that_rank_0_is_silent(where)
            else:
                self._waiting.about(f"the run at {where} is ending; waiting for the next run")
            if self._waiting.over:
                waited = f"{self._waiting.waited:.0f} s"
                raise MasterLost(
                    f"the run at {where} has ended, and no other has begun",
                    why=f"this rank came when it was over, and has waited {waited} for the next run",
                    next=self._command_for(0),
                )
            self._steps.remove(step)
            await asyncio.sleep(POLL_EVERY)

    def refusal(self, message: Mapping[str, Any]) -> DdpManualError:
        """Return the error with which rank 0 refuses this rank."""
        return from_dict(self.seal.open(f"refused {self.nonce}", message["refused"]))

    def close(self) -> None:
        for one in (self.probe_server, self.connection, self.coordinator):
            if one is not None:
                one.close()

    # -- the wait for the other ranks ---------------------------------------------------------------------------------

    def take_news(self, news: Mapping[str, Any]) -> None:
        """Take rank 0's news of which ranks are here and which are missing."""
        self._news = news
        for warning in news["warnings"]:
            if warning not in self._logged:
                self._logged.add(warning)
                self._log(warning)
        self.log_missing()

    def log_missing(self) -> None:
        """Print which ranks are missing when a line is due and, once each, which left or were refused.

        Raises:
            RankMissing: the time is up, and rank 0, which may have more time, has not ended this rank.
        """
        if self._news is None:
            return
        news, run = self._news, self._run
        not_logged = [words for words in (*news["gone"], *news["refused"]) if words not in self._logged]
        missing = bool(news["missing"])
        if missing == self._all_here:
            self._all_here = not missing
            self._waiting = Waiting(wait_within(self._spec.join_timeout, all_here=self._all_here), self._log_waiting)
        if self._waiting.about(situation(news, run.world_size), not_logged, each_change=missing):
            self._logged.update(not_logged)
        if missing:
            self._waiting.advise(advice_for(news["missing"], run))
            if self._spec.rank != 0 and self._waiting.waited > self._spec.join_timeout + RANK_0_FIRST:
                raise missing_ranks_error(news, run, self._spec.join_timeout)

    async def probe_hosts(self, wanted: list[tuple[int, str, int]], key: list[int]) -> None:
        """Try to connect to the other hosts, and tell rank 0 which cannot be reached."""
        with self._steps.step("reachability") as step:
            failures = await reachability.try_all(wanted)
            step.detail = f"{len(wanted)} other host(s) tried, {len(failures)} cannot be reached"
            if failures:
                step.outcome = "failed"
        if self.connection is not None:
            self.connection.send({"probed": failures, "for": key})

    def complete(self, nodes: int) -> None:
        """End the steps of joining: all ranks have joined, on so many hosts."""
        self._steps.end(self._roll_call, f"{all_here(self._run.world_size)}, on {nodes} host(s)")
        if "reachability" not in [step.name for step in self._steps]:
            with self._steps.step("reachability") as step:
                step.detail = "one host" if nodes == 1 else f"{nodes} hosts, tried by others"
        if self.probe_server is not None:
            self.probe_server.close()

    def fail(self, error: DdpManualError) -> None:
        self._steps.end(self._roll_call, error.what, "failed")

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    async def _become_rank_0(self, found: list[str]) -> str:
        """Listen, start the coordinator there, and return the IP address."""
        spec = self._spec
        with self._steps.step("listen") as step:
            port = 0 if spec.alone else spec.master_port
            if spec.agent_store:  # torchrun's store has rank 0's port; the coordinator takes any other
                found, port = [route_to(found[0])[0]], 0
            listener = await listen(spec, found, port)
            address, port = listener.getsockname()[:2]
            if spec.agent_store:
                await write_torchrun_address(spec, self._task.attempt, address, port)
            self._spec = spec = dataclasses.replace(spec, master_port=port)
            step.detail = at(address, port)
        info = await self._describe_this_rank(address)
        run_id = spec.run_id or run_folder.new_run_id()
        run = RunInfo(
            run_id=run_id,
            run_dir=self._task.run_dir and self._task.run_dir.replace("{run_id}", run_id),
            world_size=spec.world_size,
            host=info.host,
            pid=info.pid,
            address=address,
            since=info.since,
            command=self._command_for(None),
            launched=self._task.launched,
            peer_timeout=spec.peer_timeout,
            stall_timeout=spec.stall_timeout,
            script=self._task.is_script,
        )
        self.coordinator = Coordinator(run, info, self.seal, self.nonce, spec.join_timeout)
        await self.coordinator.serve(listener)
        self._log(f"listening at {step.detail}")
        return str(address)

    # -- hello --------------------------------------------------------------------------------------------------------

    async def _describe_this_rank(self, rank_0: str) -> RankInfo:
        """Complete what this rank says of itself, now that it knows rank 0's IP address."""
        if self.probe_server is None:
            spec = self._spec
            with self._steps.step("interface") as step:
                self.own_address = OwnAddress(rank_0, launchers.likely_backend(spec.device, spec.backend))
                step.detail = f"{self.own_address.address} on {self.own_address.source}"
            self.probe_server = await reachability.answer_at(self.own_address.address)
            self.info = dataclasses.replace(
                self.info,
                world_size_source=spec.source("world_size"),
                host_id=launchers.host_id(),
                since=time.time(),
                address=self.own_address.address,
                answer_port=self.probe_server.sockets[0].getsockname()[1],
                local_rank=spec.local_rank,
                versions=installed_versions(),
                code=code_digests(self._task.script),
                allow_mismatch=spec.allow_mismatch,
                # Lists, because rank 0 compares them with what it reads from JSON.
                options={
                    **{name: list(option) for name, option in self._task.options.items()},
                    "address_family": [self.own_address.family, self.own_address.source],
                },
            )
        return self.info

    async def _say_hello(self, there: Probe, connection: Connection, where: str) -> RunInfo | None:
        """Ask to be a rank, and wait for the reply; None: that run is over."""
        info, greeting = await self._describe_this_rank(there.address), there.greeting
        self._unacknowledged = 0
        try:
            if self.seal and not greeting.get("token"):
                raise Unsealed(f"rank 0 ({greeting.get('host')}, pid {greeting.get('pid')}) has no token at all")
            hello = {**dataclasses.asdict(info), "nonce": self.nonce}
            connection.send({"hello": self.seal.close(f"hello {greeting['challenge']}", hello)})
            while True:
                try:
                    reply = await asyncio.wait_for(connection.receive(), REPLY_WITHIN)
                except (TimeoutError, asyncio.TimeoutError):
                    self._unacknowledged = connection.unacknowledged
                    self._say_that_rank_0_is_silent(where)
                    continue
                if reply is None or "over" in reply:
                    return None
                if "refused" in reply:
                    raise self.refusal(reply)
                if "welcome" in reply:
                    return RunInfo(**self.seal.open(f"welcome {self.nonce}", reply["welcome"])["run"])
        except Unsealed as reason:
            raise TokenMismatch(
                f"rank 0 at {where} does not have this rank's token",
                why=f"of its answer to {self.info.who}: {reason}",
                next="give every rank the same DDP_MANUAL_TOKEN or --token_file; "
                "if they have, something else poses as rank 0",
            ) from None

    def _say_that_rank_0_is_silent(self, where: str) -> None:
        """Log that rank 0, which may have been stopped after its greeting, does not answer the hello.

        Raises:
            MasterLost: the time is up. MasterUnreachable: the time is up, and the hello has not arrived.
        """
        lost = f"rank 0 at {where} has greeted this rank, and what this rank sends does not arrive"
        unanswered = f"rank 0 at {where} has greeted this rank, and does not answer it"
        self._waiting.about(f"{lost}: large packets are lost" if self._unacknowledged else unanswered)
        if self._waiting.over:
            waited = f"{self._waiting.waited:.0f} s"
            if self._unacknowledged:
                raise MasterUnreachable(
                    f"{lost}, for {waited}",
                    why=f"its host has not confirmed {self._unacknowledged} bytes, while small packets do arrive: "
                    "large packets are lost on the way, or the host has gone meanwhile",
                    next=reachability.compare_mtu(self._spec.master_addr),
                )
            raise MasterLost(
                f"rank 0 at {where} has greeted this rank, and has not answered it for {waited}",
                why="its process is stopped or frozen, its host is down, or the network is cut",
                next=f"look at rank 0; to start it again: {self._command_for(0)}",
            )

    def _command_for(self, rank: int | None) -> str:
        command = self._task.command.replace("{master_port}", str(self._spec.master_port))
        if rank is None:
            return command
        # Rank 0 chooses the folder, for which this rank may have been given the name too.
        folder = self._task.run_dir if rank == 0 and not self._task.is_script else None
        chosen = f" --run_dir {shlex.quote(folder)}" if folder and "{run_id}" not in folder else ""
        return command.replace("{rank}", str(rank)) + chosen
