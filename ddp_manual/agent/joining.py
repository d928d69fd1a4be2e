"""How a rank comes into its run: rank 0 listens, the others find it, and all say hello over the one connection."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_manual import launchers, run_folder
from ddp_manual.agent import address as addresses
from ddp_manual.agent import reachability, torch_store
from ddp_manual.agent.connection import Connection, Seal, Unsealed
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.host import OwnAddress, code_digests, installed_versions
from ddp_manual.agent.listening import listen
from ddp_manual.agent.probe import Probe, find_rank_0
from ddp_manual.errors import MasterLost, TokenMismatch, from_dict
from ddp_manual.messages import RankInfo, RunInfo, Steps
from ddp_manual.terminal import POLL_EVERY, Say, Waiting
from ddp_manual.world_spec import WorldSpec

# Seconds until rank 0, which is busy or has to find out whether another process is alive, is said not to answer.
ANSWER_WITHIN = 1.0


@dataclass(frozen=True, kw_only=True)
class Task:
    """What the worker of a rank is to do, and what of it the ranks must have in common."""

    start: Mapping[str, Any]
    """What the worker is told."""
    options: Mapping[str, tuple[Any, str]] = field(default_factory=dict)
    """Option -> (value, source), for what all ranks must have in common and what is known without torch."""
    run_dir: str | None = None
    """Where the files of the run go, with ``{run_id}`` for its name; rank 0's counts. None: no files."""
    command: str
    """What starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers."""
    script: Path | None = None
    """The user's own, which then has to be the same on every rank."""
    is_script: bool = False
    """Whether the worker is a script of the user's own, whose options are not ours to know."""
    launched: str | None = None
    """What goes on with the run, if ``launch`` has started the ranks."""
    wait_until_ready: bool = False
    """Whether a failure waits for what the worker finds out, as ``check`` does."""
    attempt: str = field(default_factory=lambda: f"{launchers.restart_count()}.0")
    """Differs for each time that the ranks of one torchrun meet."""


class Joining:
    """One rank's way into its run.

    ``who`` is what is known of the rank so far.
    """

    coordinator: Coordinator | None = None
    answering: asyncio.Server | None = None
    own: OwnAddress

    def __init__(self, spec: WorldSpec, task: Task, *, steps: Steps, say: Say) -> None:
        host = launchers.host_name()
        self.who = RankInfo(rank=spec.rank, world_size=spec.world_size, host=host, pid=os.getpid())
        self._spec = spec
        self._task = task
        self._steps = steps
        self._say = say
        self.seal = Seal(launchers.token(spec.token_file))
        self.nonce = secrets.token_hex(16)

    async def join(self, waiting: Waiting) -> tuple[RunInfo, Connection]:
        """Find rank 0 and be taken as a rank of its run.

        Raises:
            DdpManualError: there is no rank 0, or it refuses this rank, or is not to be believed.
        """
        spec = self._spec
        with self._steps.step("address") as step:
            found = addresses.resolve(spec.master_addr, self._say)
            step.detail = f"{spec.named('master_addr')} is {', '.join(found)}"
            if words := addresses.resolved(spec.master_addr, found):
                self._say(words)
            addresses.refuse_loopback(spec, found)
        if spec.rank == 0:
            found = [await self._become_rank_0(found)]
        while True:
            with self._steps.step("rank 0") as step:
                if spec.agent_store and spec.rank != 0:
                    address, port = await torch_store.ask_address(spec, self._task.attempt, waiting)
                    self._spec = dataclasses.replace(spec, master_addr=address, master_port=port)
                    found = [address]
                there = await find_rank_0(self._spec, found, waiting, self._command_for(0))
                assert there.connection is not None
                where = addresses.at(there.address, self._spec.master_port)
                step.detail = f"its agent answers at {where}"
            try:
                run = await self._say_hello(there, there.connection, where, waiting)
            except BaseException:
                there.connection.close()
                raise
            if run is not None:
                return run, there.connection
            there.connection.close()
            # A run that was ending; ours is still to come.
            waiting.about(f"the run at {where} is ending; waiting for the next run")
            if waiting.over:
                raise MasterLost(
                    f"the run at {where} has ended, and no other has begun",
                    why=f"this rank came when it was over, and has waited {waiting.waited:.0f} s for the next one",
                    next=self._command_for(0),
                )
            self._steps.remove(step)
            await asyncio.sleep(POLL_EVERY)

    async def _become_rank_0(self, found: list[str]) -> str:
        """Listen, and have the coordinator serve there; returns the IP address."""
        spec = self._spec
        with self._steps.step("listen") as step:
            port = 0 if spec.alone else spec.master_port
            if spec.agent_store:  # which has rank 0's port; ours is any other
                found, port = [addresses.route_to(found[0])[0]], 0
            listener = await listen(spec, found, port)
            address, port = listener.getsockname()[:2]
            if spec.agent_store:
                await torch_store.tell_address(spec, self._task.attempt, address, port)
            self._spec = spec = dataclasses.replace(spec, master_port=port)
            step.detail = addresses.at(address, port)
        own = await self._introduce(address)
        run_id = spec.run_id or run_folder.new_run_id()
        run = RunInfo(
            run_id=run_id,
            run_dir=self._task.run_dir and self._task.run_dir.replace("{run_id}", run_id),
            world_size=spec.world_size,
            host=own.host,
            pid=own.pid,
            address=address,
            since=own.since,
            command=self._command_for(None),
            launched=self._task.launched,
            peer_timeout=spec.peer_timeout,
            stall_timeout=spec.stall_timeout,
            script=self._task.is_script,
        )
        self.coordinator = Coordinator(run, own, self.seal, self.nonce, spec.join_timeout)
        await self.coordinator.serve(listener)
        self._say(f"listening at {step.detail}")
        return str(address)

    async def _introduce(self, rank_0: str) -> RankInfo:
        """What this rank says of itself, now that it knows its way to rank 0."""
        if self.answering is None:
            spec = self._spec
            with self._steps.step("interface") as step:
                self.own = OwnAddress(rank_0, launchers.likely_backend(spec.device, spec.backend))
                step.detail = f"{self.own.address} on {self.own.source}"
            self.answering = await reachability.answer_at(self.own.address)
            self.who = dataclasses.replace(
                self.who,
                world_size_source=spec.source("world_size"),
                host_id=launchers.host_id(),
                since=time.time(),
                address=self.own.address,
                answer_port=self.answering.sockets[0].getsockname()[1],
                local_rank=spec.local_rank,
                versions=installed_versions(),
                code=code_digests(self._task.script),
                allow_mismatch=spec.allow_mismatch,
                # Lists, as they come out of JSON on the other side, where they are compared.
                options={
                    **{name: list(option) for name, option in self._task.options.items()},
                    "address_family": [self.own.family, self.own.source],
                },
            )
        return self.who

    async def _say_hello(self, there: Probe, connection: Connection, where: str, waiting: Waiting) -> RunInfo | None:
        """Ask to be a rank, and wait for the answer; None: that run is over."""
        who, greeting = await self._introduce(there.address), there.greeting
        if self.seal and not greeting.get("token"):
            reason = f"rank 0 ({greeting.get('host')}, pid {greeting.get('pid')}) has no token at all"
            raise self._not_believed(where, reason)
        hello = {**dataclasses.asdict(who), "nonce": self.nonce}
        connection.send({"hello": self.seal.close(f"hello {greeting['challenge']}", hello)})
        answer = await self._answered(connection, where, waiting)
        try:
            if answer is not None and "refused" in answer:
                raise from_dict(self.seal.open(f"refused {self.nonce}", answer["refused"]))
            if answer is not None and "welcome" in answer:
                return RunInfo(**self.seal.open(f"welcome {self.nonce}", answer["welcome"])["run"])
        except Unsealed as reason:
            raise self._not_believed(where, str(reason)) from None
        return None

    async def _answered(self, connection: Connection, where: str, waiting: Waiting) -> Mapping[str, Any] | None:
        """What rank 0 says to the hello; None: it has closed the connection.

        Raises:
            MasterLost: it says nothing, as one that was stopped after it had greeted.
        """
        while True:
            try:
                answer = await asyncio.wait_for(connection.receive(), ANSWER_WITHIN)
                if answer is None or {"refused", "welcome", "over"} & answer.keys():
                    return answer
            except (TimeoutError, asyncio.TimeoutError):
                waiting.about(f"rank 0 at {where} has greeted this rank, and does not answer it")
                if waiting.over:
                    raise MasterLost(
                        f"rank 0 at {where} has greeted this rank, and has not answered it for {waiting.waited:.0f} s",
                        why="its process is stopped or frozen, its host is down, or the network is cut",
                        next=f"look at rank 0; to start it again: {self._command_for(0)}",
                    ) from None

    def _not_believed(self, where: str, reason: str) -> TokenMismatch:
        return TokenMismatch(
            f"rank 0 at {where} does not have this rank's token",
            why=f"of its answer to {self.who.who}: {reason}",
            next="give every rank the same DDP_MANUAL_TOKEN or --token_file; "
            "if they have, something else poses as rank 0",
        )

    def _command_for(self, rank: int | None) -> str:
        command = self._task.command.replace("{master_port}", str(self._spec.master_port))
        return command if rank is None else command.replace("{rank}", str(rank))
