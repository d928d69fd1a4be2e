from __future__ import annotations

import asyncio
import ipaddress
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch.distributed as dist

from ddp_manual.agent import address, name_lookup
from ddp_manual.agent.address import listen as listen_at
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.join import Join, Task
from ddp_manual.agent.network_interface import OwnAddress, route_to, running_networks, wrong_for_nccl
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
from ddp_manual.messages import Greeting, RankInfo, RunInfo, read_from_stranger
from ddp_manual.program import SCRIPT, Program
from ddp_manual.protocol.seal import Seal
from ddp_manual.protocol.seats import Seats
from ddp_manual.steps import Steps
from ddp_manual.terminal import Waiting
from ddp_manual.wire import encode
from ddp_manual.world_spec import WorldSpec
from tests.conftest import REPOSITORY, free_port
from tests.runs import run_info

GREETING = Greeting(1, "00", "a", 1, token=False)


def test_two_lines_that_alternate_are_said_every_10_s_each(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    monkeypatch.setattr("ddp_manual.terminal.time.monotonic", lambda: now[0])
    said: list[str] = []
    waiting = Waiting(60, said.append)
    while not waiting.over:
        waiting.about(("timed out", "No route to host")[int(now[0]) % 2])
        now[0] += 0.5
    assert len(said) <= 12
    waiting.about("something else")
    assert said[-1] == "something else (60 s of 60 s)"


def probe(host: str, port: int) -> Probe:
    async def closed() -> Probe:
        found = await probe_at(host, port)
        if found.connection is not None:
            found.connection.close()
            await asyncio.sleep(0)  # a transport closes its socket one turn of the loop later
        return found

    return asyncio.run(closed())


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
        open_ones: list[Connection[Any]] = []

        def greet(connection: Connection[Any]) -> None:
            open_ones.append(connection)
            connection.send(GREETING)

        loop = asyncio.get_running_loop()
        agent = await loop.create_server(lambda: Connection(read_from_stranger, greet), "127.0.0.1", 0)
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
    assert found.greeting == GREETING


def test_a_rank_0_that_takes_long_to_greet_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_manual.agent.probe.GREETED_WITHIN", 0.2)

    def greet(connection: socket.socket) -> None:
        time.sleep(0.6)
        with suppress(OSError):
            connection.sendall(encode(GREETING))

    with server(greet) as busy:
        assert probe("127.0.0.1", busy).answer is Answer.GREETED


def test_a_rank_0_that_does_not_greet_in_time_is_named_as_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ddp_manual.agent.probe.GREETED_WITHIN", 0.2)
    monkeypatch.setattr("ddp_manual.agent.probe.BUSY_AGENT_GREETS_WITHIN", 0.3)

    def greet(connection: socket.socket) -> None:
        time.sleep(0.6)
        with suppress(OSError):
            connection.sendall(encode(GREETING))

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


def find_address(host: str, said: list[str], *, seconds: float = 0.0, again: bool = False) -> list[str]:
    return asyncio.run(name_lookup.look_up(host, Waiting(seconds, said.append), said.append, again=again))


def test_rank_0_does_not_wait_for_a_name_without_an_address() -> None:
    with pytest.raises(MasterUnresolvable, match=r"no\.such\.host\.invalid"):
        find_address("no.such.host.invalid", [], seconds=30)


@pytest.mark.parametrize(
    ("master_addr", "listen_addr", "named", "option"),
    [
        ("192.0.2.1", "no.such.host.invalid", "--listen_addr 'no.such.host.invalid' has no IP address", "listen_addr"),
        ("192.0.2.1", "a/b", "--listen_addr 'a/b' can have no IP address", "listen_addr"),
        ("host:80", "127.0.0.1", "rank 0's address 'host:80' can have no IP address", "master_addr"),
    ],
)
def test_of_two_addresses_the_wrong_one_is_named_with_its_option(
    master_addr: str, listen_addr: str, named: str, option: str
) -> None:
    spec = WorldSpec(world_size=2, master_addr=master_addr, listen_addr=listen_addr)

    async def join() -> None:
        await Join(spec, Task(command=""), steps=Steps(), log=print).join()

    with pytest.raises(MasterUnresolvable) as caught:
        asyncio.run(join())
    assert caught.value.what == named
    assert f"IP address as --{option}" in caught.value.next


def test_another_rank_waits_for_a_name_without_an_address_until_the_time_is_up() -> None:
    said: list[str] = []
    started = time.monotonic()
    with pytest.raises(MasterUnresolvable, match=r"no\.such\.host\.invalid"):
        find_address("no.such.host.invalid", said, seconds=2, again=True)
    assert 2 <= time.monotonic() - started < 5
    assert said[0].startswith("rank 0's address 'no.such.host.invalid' has no IP address yet (looking it up on ")


def test_a_name_server_that_does_not_answer_is_named_while_a_rank_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    release = threading.Event()
    monkeypatch.setattr(name_lookup, "ANSWERED_WITHIN", 1.5)
    monkeypatch.setattr(socket, "getaddrinfo", hanging(socket.getaddrinfo, release))
    said: list[str] = []
    with pytest.raises(MasterUnresolvable, match="has no IP address") as caught:
        find_address("job-0.svc", said)
    release.set()
    assert "no name server answers" in caught.value.why
    assert said[0].startswith("no name server has answered yet which IP address rank 0's address job-0.svc has")


def hanging(getaddrinfo: Callable[..., Any], release: threading.Event) -> Callable[..., Any]:
    """Look up names like ``getaddrinfo``, but only when released; IP addresses need no look-up."""

    def look_up(host: str, *arguments: Any, **options: Any) -> Any:
        if not options.get("flags"):
            release.wait(20)
        return getaddrinfo(host, *arguments, **options)

    return look_up


@pytest.mark.parametrize(
    ("host", "reason"),
    [
        ("rank0..example", "it is not a host name"),
        ("x" * 64 + ".example", "it is not a host name"),
        ("http://hostA", "only letters, digits and hyphens"),
        ("hostA:29500", "only letters, digits and hyphens"),
        ("host A", "only letters, digits and hyphens"),
        ("10.0.0.300", "its last part is a number"),
        ("fe80::zz", "only letters, digits and hyphens"),
    ],
)
def test_a_name_that_no_host_can_have_is_refused_at_once_on_every_rank(host: str, reason: str) -> None:
    with pytest.raises(MasterUnresolvable, match="can have no IP address") as caught:
        find_address(host, [], seconds=30, again=True)
    assert reason in caught.value.why
    assert ("--master_port" in caught.value.next) == host.endswith(":29500")


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
        find_address("26727", [])


def test_a_name_of_digits_that_reads_as_an_address_gives_a_warning() -> None:
    said: list[str] = []
    assert find_address("2130706433", said) == ["127.0.0.1"]
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


def test_rank_0_does_not_listen_at_an_address_of_another_host(port: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(address.launchers, "in_container", lambda: False)
    with pytest.raises(AddressNotLocal) as caught:
        listen(WorldSpec(world_size=2, master_addr="192.0.2.1", master_port=port), ["192.0.2.1"])
    assert "192.0.2.1" in caught.value.why
    assert "127.0.0.1" in caught.value.why
    assert "if 192.0.2.1 is forwarded to this host: --listen_addr " in caught.value.next


def test_in_a_container_the_advice_is_the_hosts_network_or_a_published_port(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(address.launchers, "in_container", lambda: True)  # not a real one
    with pytest.raises(AddressNotLocal) as caught:
        listen(WorldSpec(world_size=2, master_addr="192.0.2.1", master_port=port), ["192.0.2.1"])
    assert "docker's --network host" in caught.value.next
    assert f"publish port {port} and listen inside: --listen_addr " in caught.value.next


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
        coordinator = Coordinator(run, rank_0, Seal(None), "", 30.0, Seats(0, ""))
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


@pytest.mark.parametrize(
    ("task", "typed", "is_default"),
    [
        (Task(command=""), {}, True),
        (Task(command=""), {"stall_timeout": 1800.0}, False),
        (Task(command="", program=Program(kind=SCRIPT, name="train.py")), {}, True),
        (Task(command="", program=Program(kind=SCRIPT, name="train.py")), {"stall_timeout": 300.0}, False),
        (Task(command="", prepare="training:prepare"), {}, False),  # our training
    ],
)
def test_rank_0_tells_whether_the_stall_timeout_of_a_script_was_typed(
    task: Task, typed: dict[str, float], is_default: bool
) -> None:
    """If it was not, the time-outs of the script's process groups count in its place."""
    spec = WorldSpec.from_environment(world_size=1, rank=0, **typed)

    async def join() -> RunInfo:
        joining = Join(spec, task, steps=Steps(), log=lambda line: None)
        run, _ = await joining.join()
        joining.close({})
        return run

    assert asyncio.run(join()).stall_timeout_is_default is is_default


def test_a_world_of_one_takes_any_free_port() -> None:
    with listen(WorldSpec(), ["127.0.0.1"]) as first, listen(WorldSpec(), ["127.0.0.1"]) as second:
        assert first.getsockname()[1] != second.getsockname()[1]


@pytest.mark.parametrize(
    ("interfaces", "interface", "rank_0", "why"),
    [
        ("lo:127.0.0.0/8 eth0:10.0.0.0/24", "eth0", "10.0.0.1", None),
        ("lo:127.0.0.0/8", "lo", "127.0.0.1", None),
        ("lo:127.0.0.0/8 eth0:10.0.0.0/24", "lo", "127.0.0.1", "on eth0, although all ranks are on this host"),
        # Rails of one network each: rank 0's address is on the first, or behind its router.
        ("eth0:10.0.0.0/24 eth1:10.1.0.0/24 eth2:10.2.0.0/24", "eth0", "10.9.0.1", None),
        ("eth0:10.0.0.0/24 eth1:10.0.0.0/24", "eth1", "10.0.0.1", None),
        ("nat:10.0.2.0/24 eth1:10.0.0.0/24", "eth1", "10.0.0.1", "on nat, which is not on the network of rank 0"),
        ("docker0:172.17.0.0/16 lo:127.0.0.0/8 virbr0:192.168.122.0/24 eth0:10.0.0.0/24", "eth0", "10.0.0.1", None),
        ("docker0:172.17.0.0/16 eth0:10.0.0.0/24", "docker0", "172.17.0.1", "on eth0, which is not on the network"),
        ("virbr0:192.168.122.0/24 docker0:172.17.0.0/16", "virbr0", "192.168.122.1", "on docker0, which is not"),
        # Hosts with InfiniBand share it, though rank 0's address is on the Ethernet.
        ("eth0:10.0.0.0/24 ib0:192.168.0.0/24", "eth0", "10.0.0.1", None),
        (
            "eth0:fd00::/64 eth1:fd01::/64",
            "eth1",
            "fd01::1",
            "not on the network of rank 0 at fd01::1",
        ),
        ("", "eth0", "10.0.0.1", None),
    ],
)
def test_nccl_is_told_an_interface_where_the_first_it_would_take_is_not_on_rank_0s_network(
    interfaces: str, interface: str, rank_0: str, why: str | None
) -> None:
    pairs = [one.split(":", 1) for one in interfaces.split()]
    networks = {name: [ipaddress.ip_network(network)] for name, network in pairs}
    found = wrong_for_nccl(networks, interface, rank_0)
    assert found is None if why is None else found is not None and why in found


def test_an_administrators_choice_for_nccl_counts_like_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nccl.conf"
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    assert OwnAddress("127.0.0.1", "nccl").variables["NCCL_SOCKET_IFNAME"] == "=lo"
    file.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth\n")
    own = OwnAddress("127.0.0.1", "nccl")
    assert own.variables == {"GLOO_SOCKET_IFNAME": "lo"} and own.wrong_for_nccl is None


def test_the_networks_of_this_host_are_found_in_the_kernels_order() -> None:
    networks = running_networks()
    assert networks["lo"][0] == ipaddress.ip_network("127.0.0.0/8")
    assert next(iter(networks)) == "lo"


def test_the_interface_on_the_way_to_loopback_is_loopback() -> None:
    own, interface = route_to("127.0.0.1")
    assert own == "127.0.0.1"
    assert interface in ("lo", "lo0")


def test_no_two_tests_are_given_the_same_port() -> None:
    """Of one process or of two, also while nobody listens there yet."""
    given = free_port()
    draw_it_again = (
        "import random; from tests.conftest import free_port; "
        f"drawn = iter([{given}, {given}, *range(20_000, 30_000)]); "
        "random.SystemRandom.randrange = lambda *bounds: next(drawn); print(free_port(), free_port())"
    )
    command = [sys.executable, "-c", draw_it_again]
    others = subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout.split()
    assert len({str(given), *others}) == 3
