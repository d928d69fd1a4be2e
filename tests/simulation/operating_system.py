"""What an agent asks of the operating system, answered by a simulated one."""

from __future__ import annotations

import asyncio
import contextlib
import datetime
import gc
import itertools
import secrets
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest import mock

from ddp_manual import orphans, process_status, signal_handlers, terminal
from ddp_manual.agent import (
    coordinator,
    join,
    main,
    name_lookup,
    rank_result,
    reachability,
    wait_for_rank_0,
    worker_process,
)
from ddp_manual.agent.connection import Connection
from ddp_manual.environment import command_line, launcher_variables, machine, torchrun, user_variables
from ddp_manual.errors import DdpManualError, MasterUnresolvable, PortInUse
from ddp_manual.launch import this_host
from ddp_manual.protocol import admission
from ddp_manual.protocol import reachability as rounds
from ddp_manual.rank_options import WorldSpec
from tests.simulation.faults import FIRST_AGENT
from tests.simulation.moments import watched
from tests.simulation.network import Host, Listener
from tests.simulation.people import COLUMNS
from tests.simulation.virtual_time import EPOCH, PROCESS
from tests.simulation.worker import HeldState

if TYPE_CHECKING:
    from tests.simulation.run import Run


class Witness:
    """In place of the agent's witness: only Ctrl-C at a terminal comes to the program too."""

    pid = 0

    def __init__(self, *, own_session: bool, words: Sequence[str]) -> None:
        self._own_session = own_session

    def was_sent_to(self, number: int, program: int) -> bool:
        return number == signal.SIGINT and not self._own_session

    def forget(self) -> None:
        """Do nothing: this witness remembers no signal."""

    def close(self) -> None:
        """Do nothing: there is no process."""


@contextlib.contextmanager
def patched(run: Run) -> Iterator[None]:
    """Replace the clock, the network, the names and the descriptors that agents use."""
    network, loop = run.network, run.loop

    class Output:
        """Takes the lines of a rank under ``launch``."""

        def __init__(self, log: Any, rank: int, writer: Any) -> None:
            self._rank = rank

        def print(self, line: str, *, shown: bool = True) -> None:
            if shown:
                run.see(self._who, line)

        def print_error(self, error: DdpManualError, *, shown: bool) -> None:
            if shown:
                run.see(self._who, error.render(COLUMNS - len(terminal.tag(self._rank)) - 1))

        @property
        def _who(self) -> str:
            process = PROCESS.get()
            return next(one.who for one in run.ranks if one.process is process and one.number == self._rank)

    def here() -> Host:
        process = PROCESS.get()
        return next(rank.host for rank in run.ranks if rank.process is process)

    def own_pid() -> int:
        """Return the pid of an agent, or of the ``launch`` with several."""
        process = PROCESS.get()
        return FIRST_AGENT + next(number for number, rank in enumerate(run.ranks) if rank.process is process)

    def detail(begins: str, usual: str) -> str:
        """Return the ``detail`` of the running rank without ``begins``, or ``usual`` if it begins otherwise."""
        process = PROCESS.get()
        rank = next(rank for rank in run.ranks if rank.process is process)
        return rank.detail.removeprefix(begins) if begins and rank.detail.startswith(begins) else usual or rank.detail

    def token(detail: str) -> bytes | None:
        if run.plan.token:
            return {"": b"secret", "no token": None}.get(detail, b"another")
        return b"secret" if "token" in detail else None

    async def listen(spec: WorldSpec, addresses: list[str], port: int) -> Listener:
        found = network.listen(here(), addresses[0], port, PROCESS.get())
        if found is None:
            raise PortInUse(f"port {port} of {here().name} is in use", why="by another rank 0", next="end it")
        return found

    async def create_connection(factory: Callable[[], Any], host: str, port: int, **options: Any) -> Any:
        return await network.connect(factory, here(), host, port)

    async def create_server(
        factory: Callable[[], Any], host: str = "", port: int = 0, *, sock: Listener | None = None, **options: Any
    ) -> Listener:
        found = sock or network.listen(here(), host, port, PROCESS.get())
        assert found is not None
        found.factory = factory
        return found

    async def answer_at(address: str) -> Listener:
        found = network.listen(here(), address, 0, PROCESS.get())
        assert found is not None
        found.factory = asyncio.Protocol
        return found

    async def try_to_reach(address: str, port: int) -> str | None:
        own, there = here(), network.host_of(address, here())
        for _ in range(round(reachability.CONNECT_TIMEOUT)):
            await asyncio.sleep(run.random.uniform(0.001, 0.02))
            if there is not None and network.both_ways(own, there):
                return None if (there.number, port) in network.listeners else "connection refused"
            await asyncio.sleep(1.0)  # SYN is sent again
        return f"no answer within {reachability.CONNECT_TIMEOUT:.0f} s: dropped"

    def resolve_in_thread(host: str, option: str = "master_addr") -> asyncio.Future[Any]:
        """Look a name up: the name of a host has an address once ``run.resolves``; an address stays as it is."""
        named = next((one.address for one in network.hosts if one.name == host), host)
        unknown = MasterUnresolvable(
            f"rank 0's address {host!r} has no IP address",
            why=f"looking it up on {here().name} gave: Name or service not known",
            next=f"check with: getent hosts {host}",
        )
        future, answer = loop.create_future(), [named] if named == host or run.resolves else unknown
        loop.call_later(run.random.uniform(0, 0.02), future.set_result, answer, context=PROCESS.get().context)  # type: ignore[union-attr]
        return future

    loop.create_connection = create_connection  # type: ignore[method-assign,assignment]
    loop.create_server = create_server  # type: ignore[method-assign,assignment]
    token_hex = lambda size=16: f"{run.random.getrandbits(8 * size):0{2 * size}x}"  # noqa: E731
    utc = type("utc", (datetime.datetime,), {"fromtimestamp": classmethod(lambda cls, at: _at(at))})
    replaced: list[tuple[Any, dict[str, Any]]] = [
        (time, {"monotonic": lambda: loop.now, "time": lambda: EPOCH + loop.now}),
        (secrets, {"token_hex": token_hex}),
        (admission, {"datetime": utc}),
        (join, {"own_addresses": lambda: [here().address]}),
        (coordinator, {"own_addresses": lambda: [here().address], "stopped_agent": run.faults.stopped_agent}),
        (wait_for_rank_0, {"resolve_in_thread": resolve_in_thread}),
        (name_lookup, {"own_address": lambda: here().address, "resolve_in_thread": resolve_in_thread}),
        (reachability, {"answer_at": answer_at, "try_to_reach": try_to_reach}),
        (rounds, {"_rounds": itertools.count()}),
        (rank_result, {"host_name": lambda: here().name}),
        (signal_handlers, {"handle_in_event_loop": lambda handle: contextlib.nullcontext(), "Witness": Witness}),
        (orphans, {"_adopts": []}),
        (process_status, {"is_caught": lambda pid, number: run.plan.saves > 0}),
        (this_host, {"RankOutput": Output}),
        (worker_process, {"OomKills": lambda pid: SimpleNamespace(any=lambda: False)}),
        (main, {"raise_descriptor_limit": lambda spec: "any", "HeldMemory": SimpleNamespace(create=HeldState)}),
        (main, {"own_addresses": lambda: [here().address], "stopped_agent": run.faults.stopped_agent}),
        (
            machine,
            {
                "host_name": lambda: here().name,
                "host_id": lambda: here().name,
                "own_pid": own_pid,
                "likely_backend": lambda device, backend: "gloo",
            },
        ),
        (user_variables, {"token": lambda file: token(detail("", ""))}),
        (launcher_variables, {"several_hosts": lambda world_size: None}),
        (command_line, {"typed_command": lambda: (["ddp-manual"], ["train"])}),
        (torchrun, {"store_at": lambda address, port: False, "restart_count": lambda: 0}),
        (
            join,
            {
                "listen": listen,
                "OwnAddress": lambda rank_0, backend: _own_address(here(), rank_0),
                "route_to": lambda address: (here().address, "eth0"),
                "own_address": lambda: here().address,
                "installed_versions": lambda: {"torch": detail("torch ", "2.15"), "python": "3.11"},
                "code_digests": lambda: {"ddp_manual/agent": detail("other ", "4f2a")},
                "collective_variables": dict,
                "source_of": lambda program: join.ProgramSource(),
                "hint": lambda spec: "",
                "OwnRank0": lambda *_: SimpleNamespace(announce=lambda: None),
            },
        ),
    ]
    with contextlib.ExitStack() as stack:
        for module, names in replaced:
            for name, value in names.items():
                stack.enter_context(mock.patch.object(module, name, value))
        stack.enter_context(mock.patch.object(Connection, "unacknowledged", property(_unacknowledged)))
        stack.enter_context(watched(run))
        gc.collect(0)
        yield


def _at(seconds: float) -> datetime.datetime:
    return datetime.datetime.fromtimestamp(seconds, datetime.timezone.utc)


def _unacknowledged(connection: Connection) -> int:
    transport: Any = connection._transport
    return 0 if transport is None or connection.closed else int(transport.unacknowledged)


def _own_address(host: Host, rank_0: str) -> Any:
    address = "127.0.0.1" if rank_0.startswith("127.") else host.address
    return SimpleNamespace(
        address=address, interface="eth0", source="eth0", family="IPv4", variables={}, wrong_for_nccl=None
    )
