"""How a rank joins its run: rank 0 listens, the others find it, all say hello and wait for the missing ranks."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
from msgspec.structs import replace

from ddp_manual import messages
from ddp_manual.agent import reachability
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.installed import code_digests, installed_versions
from ddp_manual.agent.name_lookup import look_up, refuse_malformed
from ddp_manual.agent.network_interface import OwnAddress, is_everywhere, own_address, own_addresses, route_to
from ddp_manual.agent.program_source import ProgramSource, source_of
from ddp_manual.agent.rank_0_port import listen, refuse_loopback
from ddp_manual.agent.to_type import status_of_run, with_port
from ddp_manual.agent.torchrun_store import read_torchrun_address, write_torchrun_address
from ddp_manual.agent.wait_for_rank_0 import Probe, find_rank_0
from ddp_manual.agent.waiting_rank_0s import OwnRank0, hint, withdraw
from ddp_manual.agent.what_to_run import Task
from ddp_manual.deadline import POLL_EVERY, Waiting
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import DdpManualError, TokenMismatch
from ddp_manual.join_steps import Step, Steps
from ddp_manual.protocol.collective_variables import collective_variables
from ddp_manual.protocol.compatibility import other_version
from ddp_manual.protocol.missing_ranks import advice_for, all_here, missing_ranks_error, situation
from ddp_manual.protocol.program_arguments import named_arguments
from ddp_manual.protocol.search_for_rank_0 import Search
from ddp_manual.protocol.token_proof import Seal, Unsealed
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import RankInfo, RunInfo, RunSoFar
from ddp_manual.text_wrapping import whole
from ddp_manual.wire import LONGEST_ANSWER, Read, printable, reader_of
from ddp_manual.wording import at, counted

# Seconds until a line says that rank 0 does not reply: it is busy, or asks if another process with this rank is alive.
REPLY_WITHIN = 1.0
# Seconds after which rank 0 says that another rank 0 of the same user waits too, perhaps for the same ranks.
BESIDE_AFTER = 3.0
# Seconds for which the other ranks wait longer than rank 0, which tells all of them which ranks are missing.
RANK_0_FIRST = 1.0
WITHOUT_A_TOKEN = (
    "can read arguments and stacks, take a seat or end the run; to prevent that: "
    "(umask 077; openssl rand -hex 32 > token), and --token_file token for each rank"
)

_read_run: Read[RunInfo] = reader_of(RunInfo)


class Join:
    """One rank's way into its run, from the look-up of rank 0's address until all ranks have joined.

    Args:
        log: prints a line for this rank.
        so_far: the run that this rank was in, if it has lost rank 0.
        since: when this rank lost rank 0, on the monotonic clock.
    """

    def __init__(
        self,
        spec: WorldSpec,
        task: Task,
        *,
        steps: Steps,
        log: Callable[[str], None],
        so_far: RunSoFar | None = None,
        since: float = 0.0,
    ) -> None:
        self.info = RankInfo(
            rank=spec.rank,
            world_size=spec.world_size,
            host=machine.host_name(),
            pid=machine.own_pid(),
            agent=machine.own_pid(),
            has_launcher=task.launched is not None or spec.started_by is not None,
            goes_on=so_far,
        )
        """What this rank knows of itself so far, and says in its hello."""
        self.coordinator: Coordinator | None = None
        self.probe_server: asyncio.Server | None = None
        """Answers the other hosts' probes."""
        self.connection: Connection[messages.FromRank0] | None = None
        """The connection to the coordinator, once it has admitted this rank."""
        self.own_address: OwnAddress
        self.seal = Seal(user_variables.token(spec.token_file))
        self.nonce = secrets.token_hex(16)
        self._spec, self._task, self._steps = spec, task, steps
        self._since = since
        self._log = log
        self._log_waiting = (lambda line: None) if task.waits_silently else log
        self._waiting = Waiting(spec.join_timeout, (lambda line: None) if task.searches_silently else log)
        self._run: RunInfo
        self._roll_call: Step | None = None
        self.news: messages.News | None = None
        """Rank 0's last news of which ranks are here and which are missing."""
        self._logged: set[str] = set()
        self._waits_here: OwnRank0 | None = None
        """If this is rank 0: what other ranks on this host can read of it while it waits."""
        self._has_said_beside = False

    async def join(self) -> tuple[RunInfo, Connection[messages.FromRank0]]:
        """Find rank 0, be admitted as a rank of its run, and return that run and the connection to the coordinator.

        Raises:
            DdpManualError: there is no rank 0, it refuses this rank, or it does not have this run's token.
        """
        spec = self._spec
        with self._steps.step("address") as step:
            name = "listen_addr" if spec.rank == 0 and spec.listen_addr else "master_addr"
            refuse_malformed(spec.master_addr)  # the other ranks need it even if rank 0 has --listen_addr
            # A rank that has lost rank 0 and may find it at --standby_addr does not wait until the name has an address.
            so_far = self.info.goes_on
            again = spec.rank != 0 and not (so_far and spec.standby)
            try:
                found = await look_up(getattr(spec, name), self._waiting, self._log, again=again, option=name)
            except DdpManualError:
                if again or so_far is None:
                    raise
                found = [so_far.address]
            step.detail = f"{spec.named(name)} is {', '.join(found)}"
            refuse_loopback(spec, found)
        if spec.rank == 0:
            found = [await self._become_rank_0(found)]
        while True:
            with self._steps.step("rank 0") as step:
                if spec.agent_store and spec.rank != 0:
                    address, port = await read_torchrun_address(spec, self._task.attempt, self._waiting)
                    self._spec = dataclasses.replace(spec, master_addr=address, master_port=port)
                    found = [address]
                there = await self._find_rank_0(found)
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
                return run, there.connection
            self._steps.remove(step)
            await asyncio.sleep(POLL_EVERY)

    async def _find_rank_0(self, found: list[str]) -> Probe:
        """Wait for rank 0 at these addresses; a rank that has lost rank 0 also looks at --standby_addr."""
        asked = find_rank_0(self._search, found, self._waiting)
        if not self.info.goes_on or self._spec.standby is None:
            return await asked
        host, port = self._spec.standby
        self._log(f"also looking at {at(host, port)} (--standby_addr)")
        beside = dataclasses.replace(self._spec, master_addr=host, master_port=port)

        async def find_beside() -> Probe:
            silent = Waiting(self._spec.join_timeout, lambda line: None)
            there = await look_up(host, silent, lambda line: None, again=True)
            return await find_rank_0(self._search._replace(spec=beside), there, silent)

        here, other = asyncio.ensure_future(asked), asyncio.ensure_future(find_beside())
        try:
            await asyncio.wait([here, other], return_when=asyncio.FIRST_COMPLETED)
            if here.done() and here.exception() is not None:
                await asyncio.wait([other])
            if other.done() and other.exception() is None:
                self._spec = beside
                return other.result()
            return await here
        finally:
            here.cancel()
            other.cancel()

    def close(self, how_it_ended: Mapping[str, Any]) -> None:
        for one in (self.probe_server, self.connection):
            if one is not None:
                one.close()
        if self.coordinator is not None:
            withdraw(os.getpid())
            self.coordinator.close(how_it_ended)

    # -- the wait for the other ranks ---------------------------------------------------------------------------------

    def take_news(self, news: messages.News) -> None:
        """Take rank 0's news of which ranks are here and which are missing, and how long rank 0 has waited for them."""
        if self.news is None or bool(self.news.missing) != bool(news.missing):
            # Rank 0's time counts, but no rank that holds no state waits longer than its own time for the missing ones.
            is_own = bool(news.missing) and not (news.for_lost or self.info.goes_on)
            own = self._spec.join_timeout + news.waited if is_own else news.timeout
            self._waiting = Waiting(min(own, news.timeout), self._log_waiting, news.waited)
        self.news = news
        for warning in news.warnings:
            if warning not in self._logged:
                self._logged.add(warning)
                self._log(warning)
        self.log_missing()

    def log_missing(self) -> None:
        """Print which ranks are missing when a line is due and, once each, which left or were refused.

        Raises:
            RankMissing: the time is up, and rank 0, which may have more time, has not ended this rank.
        """
        if self.news is None:
            return
        news, run = self.news, self._run
        of_this_rank = f"rank {self._spec.rank} ("  # another process that was started as this rank
        said = (words for words in (*news.gone, *news.refused) if not words.startswith(of_this_rank))
        not_logged = [words for words in said if words not in self._logged]
        missing = bool(news.missing)
        if self._waiting.about(situation(news, run.world_size), not_logged, each_change=missing):
            self._logged.update(not_logged)
        if missing and not news.for_lost:  # otherwise rank 0 has sent a line about the lost ranks
            self._say_what_waits_beside()
            self._waiting.advise(advice_for(news.missing, run, self._own_addresses))
            may_leave = self._spec.rank != 0 and self.info.goes_on is None
            if may_leave and self._waiting.waited > self._waiting.timeout + RANK_0_FIRST:
                raise missing_ranks_error(news, run, self._waiting.timeout, self._own_addresses)

    def _say_what_waits_beside(self) -> None:
        """Name, once, another rank 0 that waits here for as many ranks: it may have been typed by mistake, or this."""
        waits = self._waits_here is not None and self._waiting.waited > BESIDE_AFTER
        if waits and not self._has_said_beside and (beside := hint(self._spec)):
            self._has_said_beside = True
            self._log(f"{beside}; this one is another run")

    @property
    def _own_addresses(self) -> Sequence[str]:
        """This host's addresses if rank 0's address cannot be reached from other hosts; otherwise ()."""
        return own_addresses() if self._run.only_on_its_host else ()

    async def probe_hosts(self, wanted: Sequence[tuple[int, str, int]], key: tuple[int, int]) -> None:
        """Try to connect to the other hosts, and tell rank 0 which cannot be reached."""
        with self._steps.step("reachability") as step:
            failures = await reachability.try_all(wanted)
            step.detail = f"{counted(len(wanted), 'other host')} tried, {len(failures)} cannot be reached"
            if failures:
                step.outcome = "failed"
        if self.connection is not None:
            self.connection.send(messages.Probed(key, failures))

    def complete(self, nodes: int) -> None:
        """End the steps of joining, since all ranks have joined, on ``nodes`` hosts."""
        assert self._roll_call is not None
        self._waiting.ends()
        self._steps.end(self._roll_call, f"{all_here(self._run.world_size)}, on {counted(nodes, 'host')}")
        if "reachability" not in [step.name for step in self._steps]:
            with self._steps.step("reachability") as step:
                step.detail = "one host" if nodes == 1 else f"{nodes} hosts, tried by others"
        if self._waits_here is not None:
            withdraw(os.getpid())

    def begin_again(self) -> None:
        """Forget rank 0's news of missing ranks, since a new roll call begins; on rank 0, announce that it waits."""
        self.news = None
        if self._waits_here is not None:
            self._waits_here.announce()

    def fail(self, error: DdpManualError) -> None:
        self._waiting.ends()
        if self._roll_call is not None:
            self._steps.end(self._roll_call, error.what, "failed")

    # -- rank 0 -------------------------------------------------------------------------------------------------------

    async def _become_rank_0(self, found: list[str]) -> str:
        """Listen at one of the addresses in ``found``, start the coordinator there, and return its IP address."""
        spec = self._spec
        with self._steps.step("listen") as step:
            port = 0 if spec.alone else spec.master_port
            if spec.agent_store:  # torchrun's store has --master_port: the coordinator takes a free port
                found, port = [route_to(found[0])[0]], 0
            listener = await listen(spec, found, port)
            address, port = listener.getsockname()[:2]
            if is_everywhere(address):
                address = own_address(address) or ("::1" if ":" in address else "127.0.0.1")
            if spec.agent_store:
                await write_torchrun_address(spec, self._task.attempt, address, port)
            self._spec = spec = dataclasses.replace(spec, master_port=port)
            step.detail = at(address, port)
        info = await self._describe_this_rank(address)
        run = self._task.describe_run(spec, info, address, self._command_for(None))
        policy = WaitOrShrink(spec.max_restarts, status_of_run(self._spec, shrink=True), self._task.run_dir)
        self.coordinator = Coordinator(run, info, self.seal, self.nonce, spec.join_timeout, policy)
        await self.coordinator.serve(listener)
        self._log(f"listening at {step.detail}")
        if not (self.seal or run.only_on_its_host or spec.world_size == 1):
            self._log(f"anybody who reaches {step.detail} {WITHOUT_A_TOKEN}")
        if not (spec.alone or spec.agent_store):
            self._waits_here = OwnRank0(os.getpid(), info.host_id, address, port, spec.world_size, run.run_id)
            self._waits_here.announce()
        return str(address)

    # -- hello --------------------------------------------------------------------------------------------------------

    async def _describe_this_rank(self, rank_0: str) -> RankInfo:
        """Return what this rank says of itself in its hello; complete it first, now that rank 0's address is known."""
        if self.probe_server is None:
            spec = self._spec
            with self._steps.step("interface") as step:
                self.own_address = OwnAddress(rank_0, machine.likely_backend(spec.device, spec.backend))
                step.detail = f"{self.own_address.address} on {self.own_address.source}"
            self.probe_server = await reachability.answer_at(self.own_address.address)
            task = self._task
            source = source_of(task.source) if task.source else ProgramSource()
            self.info = replace(
                self.info,
                world_size_source=spec.source("world_size"),
                host_id=machine.host_id(),
                since=time.time(),
                address=self.own_address.address,
                answer_port=self.probe_server.sockets[0].getsockname()[1],
                local_rank=spec.local_rank,
                versions={**source.packages, **installed_versions()},
                code={**code_digests(), **source.code},
                variables=collective_variables(user_variables.network_variables()),
                arguments=named_arguments(task.source.arguments) if task.source else {},
                may_differ=list(task.may_differ),
                allow_mismatch=spec.allow_mismatch,
                options={**task.options, "address_family": (self.own_address.family, self.own_address.source)},
            )
        return self.info

    async def _say_hello(self, there: Probe, connection: Connection[messages.FromRank0], where: str) -> RunInfo | None:
        """Ask to be a rank, and return the run once this rank is admitted; None: ask again, over a new connection."""
        info, greeting = await self._describe_this_rank(there.address), there.greeting
        assert greeting is not None
        search, unacknowledged = self._search, 0  # bytes of the hello that rank 0's host has not confirmed in a second
        try:
            if greeting.protocol != messages.PROTOCOL:
                raise ValueError(
                    f"it speaks version {greeting.protocol} of what ranks say, and this rank {messages.PROTOCOL}"
                )
            if self.seal and not greeting.token:
                raise Unsealed(f"rank 0 ({greeting.host}, pid {greeting.pid}) has no token at all")
            if (so_far := info.goes_on) is not None:
                info = replace(info, goes_on=replace(so_far, seconds=time.monotonic() - self._since))
            connection.send(self.seal.close(messages.Hello, greeting.challenge, messages.Claim(info, self.nonce)))
            while True:
                try:
                    reply = await asyncio.wait_for(connection.receive(), REPLY_WITHIN)
                except (TimeoutError, asyncio.TimeoutError):
                    unacknowledged = connection.unacknowledged
                    self._waiting.wait_on(*search.unanswered(where, unacknowledged, self._waiting.waited))
                    continue
                if reply is None or isinstance(reply, messages.Later):
                    if unacknowledged:  # rank 0 closed the connection, since the hello has not come
                        self._waiting.wait_on(*search.unanswered(where, unacknowledged, self._waiting.waited))
                    else:
                        self._waiting.wait_on(*search.run_is_over(where, self._waiting.waited))
                    return None
                if isinstance(reply, messages.Refused):
                    raise self.seal.refusal(reply, self.nonce)
                if isinstance(reply, messages.Welcome):
                    connection.let_send(LONGEST_ANSWER)  # rank 0's own agent reads the roster of all ranks
                    return self.seal.open(reply, self.nonce, _read_run)
        except Unsealed as reason:
            raise TokenMismatch(
                f"rank 0 at {where} does not have this rank's token",
                why=f"of its answer to {self.info.who}: {reason}",
                next="give every rank the same DDP_MANUAL_TOKEN or --token_file; "
                "if they have, something else poses as rank 0",
            ) from None
        except (msgspec.MsgspecError, ValueError) as reason:
            why = f"{self.info.who} cannot read its answer: {printable(str(reason))}"
            raise other_version(f"rank 0 at {where}", "this rank", why) from None

    @property
    def _search(self) -> Search:
        who, patient = f"rank {self._spec.rank}", bool(self.info.goes_on)
        return Search(
            self._spec, who, machine.host_name(), whole(self._command_for(0)), patient, partial(hint, self._spec)
        )

    def _command_for(self, rank: int | None) -> str:
        command = with_port(self._task.command, self._spec)
        if rank is None:
            return command
        is_of_one_rank = "--rank {rank}" in command  # a launcher's command has rank 0's options already
        besides = f" {self._task.for_rank_0}" if rank == 0 and is_of_one_rank and self._task.for_rank_0 else ""
        return command.replace("{rank}", str(rank), 1) + besides
