from __future__ import annotations

import asyncio
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import psutil
import pytest
import torch.distributed as dist

from ddp_manual.agent import address
from ddp_manual.agent.address import listen as listen_at
from ddp_manual.agent.connection import Connection, Seal
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.network_interface import route_to
from ddp_manual.agent.probe import Answer, Probe, find_rank_0
from ddp_manual.agent.probe import probe as probe_at
from ddp_manual.errors import (
    AddressNotLocal,
    LoopbackMaster,
    MasterLost,
    MasterNotAStore,
    MasterUnresolvable,
    PortInUse,
)
from ddp_manual.messages import RankInfo
from ddp_manual.terminal import Waiting
from ddp_manual.world_spec import WorldSpec
from tests.runs import run_info


def probe(host: str, port: int) -> Probe:
    return asyncio.run(probe_at(host, port))


def listen(spec: WorldSpec, addresses: list[str]) -> socket.socket:
    return asyncio.run(listen_at(spec, addresses, 0 if spec.alone else spec.master_port))


@contextmanager
def server(serve: Callable[[socket.socket], None]) -> Iterator[int]:
    """A server on loopback that handles each connection with ``serve``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            with connection:
                serve(connection)

    thread = threading.Thread(target=accept, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_is_recognised_and_not_disturbed(use_libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False, use_libuv=use_libuv)
    assert probe("127.0.0.1", store.port).answer is Answer.STORE
    store.set("key", "value")
    assert store.get("key") == b"value"


def test_rank_0s_agent_speaks_first_and_the_connection_is_kept() -> None:
    async def look() -> Probe:
        open_ones: list[Connection] = []

        def greet(connection: Connection) -> None:
            open_ones.append(connection)
            connection.send({"ddp_manual": 1, "challenge": "00", "host": "a", "pid": 1, "token": False})

        loop = asyncio.get_running_loop()
        agent = await loop.create_server(lambda: Connection(greet), "127.0.0.1", 0)
        try:
            found = await probe_at("127.0.0.1", agent.sockets[0].getsockname()[1])
            assert found.connection is not None
            open_ones.append(found.connection)
            return found
        finally:
            agent.close()
            for connection in open_ones:
                connection.close()
            await asyncio.sleep(0.01)

    found = asyncio.run(look())
    assert found.answer is Answer.GREETED
    assert found.greeting["challenge"] == "00"


def test_a_rank_0_that_takes_long_to_greet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_manual.agent.probe.GREETED_WITHIN", 0.2)

    def greet(connection: socket.socket) -> None:
        time.sleep(0.6)
        with suppress(OSError):
            connection.sendall(b'{"ddp_manual":1,"challenge":"00"}\n')

    with server(greet) as busy:
        assert probe("127.0.0.1", busy).answer is Answer.GREETED


def test_a_rank_0_that_does_not_greet_in_time_is_named_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_manual.agent.probe.GREETED_WITHIN", 0.2)
    monkeypatch.setattr("ddp_manual.agent.probe.BUSY_AGENT_GREETS_WITHIN", 0.3)

    def greet(connection: socket.socket) -> None:
        time.sleep(0.6)
        with suppress(OSError):
            connection.sendall(b'{"ddp_manual":1,"challenge":"00"}\n')

    with server(greet) as busy:
        spec = WorldSpec(world_size=2, rank=1, master_port=busy)
        with pytest.raises(MasterLost, match="is there, and does not greet this process"):
            asyncio.run(find_rank_0(spec, ["127.0.0.1"], Waiting(0.5, print), "train --rank 0"))


def test_a_store_without_a_roll_call_is_not_waited_for() -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
    spec = WorldSpec(world_size=2, rank=1, master_port=store.port)
    with pytest.raises(MasterNotAStore, match="has no roll call"):
        asyncio.run(find_rank_0(spec, ["127.0.0.1"], Waiting(30, print), "train --rank 0"))


def test_a_closed_port_is_told_from_another_program_that_listens(port: int) -> None:
    assert probe("127.0.0.1", port).answer is Answer.REFUSED
    with server(lambda connection: connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")) as other:
        found = probe("127.0.0.1", other)
    assert found.answer is Answer.STRANGER
    assert "SSH-2.0-OpenSSH_9.2" in found.detail


def test_a_server_that_says_nothing_is_recognised_within_5_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    started = time.monotonic()
    with server(lambda connection: release.wait(10) and None) as mute:
        assert probe("127.0.0.1", mute).answer is Answer.MUTE
        release.set()
    assert time.monotonic() - started < 5


def test_another_program_on_rank_0s_port_ends_the_wait_at_once() -> None:
    with server(lambda connection: connection.sendall(b"HTTP/1.0 400 Bad Request\r\n")) as other:
        spec = WorldSpec(world_size=2, rank=1, master_port=other)
        with pytest.raises(MasterNotAStore) as caught:
            asyncio.run(find_rank_0(spec, ["127.0.0.1"], Waiting(30, print), "train --rank 0"))
    assert "HTTP/1.0 400 Bad Request" in caught.value.why


def test_a_name_without_an_address_is_refused_at_once() -> None:
    with pytest.raises(MasterUnresolvable, match=r"no\.such\.host\.invalid"):
        address.resolve("no.such.host.invalid")


@pytest.fixture
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting is awaited for 0.7 s and not for 1.5 s."""
    monkeypatch.setattr("ddp_manual.agent.probe.GREETED_WITHIN", 0.7)


@pytest.mark.usefixtures("_impatient")
def test_a_server_that_waits_for_a_line_is_given_one_and_named() -> None:
    def serve(connection: socket.socket) -> None:
        with connection.makefile("rb") as lines:
            lines.readline()
        connection.sendall(b"HTTP/1.1 400 Bad Request\r\n")

    with server(serve) as other:
        found = probe("127.0.0.1", other)
    assert found.answer is Answer.STRANGER
    assert found.detail.startswith("HTTP/1.1 400 Bad Request")


def test_a_name_of_digits_that_reads_as_an_impossible_address_is_refused_at_once() -> None:
    with pytest.raises(MasterUnresolvable, match=r"all digits, and is read as the IP address 0\.0\.104\.103"):
        address.resolve("26727")


def test_a_name_of_digits_that_reads_as_an_address_gives_a_warning() -> None:
    said: list[str] = []
    assert address.resolve("2130706433", said.append) == ["127.0.0.1"]
    assert "is all digits: it is read as the IP address 127.0.0.1" in said[0]


def test_a_loopback_address_is_refused_if_the_launcher_has_several_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    spec = WorldSpec(world_size=4, rank=2, master_addr="localhost")
    address.refuse_loopback(spec, ["127.0.0.1"])
    monkeypatch.setenv("SLURM_STEP_NUM_NODES", "2")
    address.refuse_loopback(spec, ["10.0.0.1"])
    with pytest.raises(LoopbackMaster, match="this host's own loopback") as caught:
        address.refuse_loopback(spec, ["::1", "127.0.0.1"])
    assert "SLURM_STEP_NUM_NODES=2" in caught.value.why


def test_rank_0_listens_on_its_own_address_only(port: int) -> None:
    with listen(WorldSpec(world_size=2, master_port=port), ["127.0.0.1"]) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))


def test_rank_0_does_not_listen_at_an_address_of_another_host(port: int) -> None:
    with pytest.raises(AddressNotLocal) as caught:
        listen(WorldSpec(world_size=2, master_addr="192.0.2.1", master_port=port), ["192.0.2.1"])
    assert "192.0.2.1" in caught.value.why
    assert "127.0.0.1" in caught.value.why


@pytest.mark.usefixtures("_impatient")
def test_a_port_in_use_names_the_process_that_holds_it() -> None:
    with socket.create_server(("127.0.0.1", 0)) as holder, pytest.raises(PortInUse) as caught:
        listen(WorldSpec(world_size=2, master_port=holder.getsockname()[1]), ["127.0.0.1"])
    assert psutil.Process().cmdline()[0] in caught.value.why


def test_a_port_that_another_rank_0_holds_is_named_with_its_run() -> None:
    async def listen_twice() -> None:
        run = run_info(run_id="first-run", world_size=2, address="127.0.0.1")
        rank_0 = RankInfo(rank=0, world_size=2, host="a", pid=1, address="127.0.0.1")
        listener = socket.create_server(("127.0.0.1", 0))
        coordinator = Coordinator(run, rank_0, Seal(None), "", join_timeout=30.0)
        await coordinator.serve(listener)
        port = listener.getsockname()[1]
        try:
            await listen_at(WorldSpec(world_size=2, master_port=port), ["127.0.0.1"], port)
        finally:
            coordinator.close()

    with pytest.raises(PortInUse) as caught:
        asyncio.run(listen_twice())
    assert caught.value.what.startswith("another rank 0 is already running at 127.0.0.1:")
    assert "it is run first-run, waiting for ranks 0-1" in caught.value.why
    assert "--rank 1" in caught.value.next


def test_a_world_of_one_takes_any_free_port() -> None:
    with listen(WorldSpec(), ["127.0.0.1"]) as first, listen(WorldSpec(), ["127.0.0.1"]) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


def test_the_interface_on_the_way_to_loopback_is_loopback() -> None:
    own, interface = route_to("127.0.0.1")
    assert own == "127.0.0.1"
    assert interface in ("lo", "lo0")
