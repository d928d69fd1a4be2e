from __future__ import annotations

import asyncio
import ipaddress
import os
import socket
import socketserver
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from ddp_manual.agent import name_lookup, network_interface
from ddp_manual.agent.join import Join
from ddp_manual.agent.network_interface import OwnAddress, wrong_for_nccl
from ddp_manual.agent.rank_0_port import listen as listen_at
from ddp_manual.agent.wait_for_rank_0 import Probe
from ddp_manual.agent.wait_for_rank_0 import probe as probe_at
from ddp_manual.agent.waiting_rank_0s import OwnRank0, hint, withdraw
from ddp_manual.agent.what_to_run import Task
from ddp_manual.atomic_files import append_json_line
from ddp_manual.deadline import Waiting
from ddp_manual.environment import machine
from ddp_manual.errors import (
    MasterUnresolvable,
)
from ddp_manual.join_steps import Steps
from ddp_manual.messages import Greeting
from ddp_manual.protocol.search_for_rank_0 import Answer, Search, Seen
from ddp_manual.rank_options import WorldSpec
from ddp_manual.run_folder import RunPaths
from ddp_manual.tools.recorded_run import read_end
from ddp_manual.wire import encode

GREETING = Greeting(1, "00", "a", 1, token=False)


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

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            serve(self.request)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Handler) as listener:
        threading.Thread(target=listener.serve_forever, args=(0.05,), daemon=True).start()
        yield listener.server_address[1]
        listener.shutdown()


@pytest.mark.parametrize("use_libuv", [True, False])
def test_a_store_is_recognised_and_not_disturbed(use_libuv: bool) -> None:
    store = dist.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False, use_libuv=use_libuv)
    assert probe("127.0.0.1", store.port).answer is Answer.STORE
    store.set("key", "value")
    assert store.get("key") == b"value"


def sends(*pieces: bytes, after: float = 0.0) -> Callable[[socket.socket], None]:
    def serve(connection: socket.socket) -> None:
        time.sleep(after)
        with suppress(OSError):
            for number, piece in enumerate(pieces):
                time.sleep(0.5 if number else 0)
                connection.sendall(piece)

    return serve


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A greeting is awaited for 0.3 s and not for 1.5 s."""
    monkeypatch.setattr("ddp_manual.agent.wait_for_rank_0.GREETED_WITHIN", 0.3)


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize(
    ("serve", "answer", "detail"),
    [
        (sends(encode(GREETING)[:40], encode(GREETING)[40:], after=0.8), Answer.GREETED, ""),  # its host is busy
        (sends(b""), Answer.CLOSED, "closed by the other side"),
    ],
)
def test_what_listens_is_told_from_its_first_words_within_5_seconds(
    serve: Callable[[socket.socket], None], answer: Answer, detail: str
) -> None:
    """An SSH server, an HTTP server and one that says nothing: tests/scenarios."""
    started = time.monotonic()
    with server(serve) as other:
        found = probe("127.0.0.1", other)
        assert time.monotonic() - started < 5
    assert (found.answer, found.detail) == (answer, detail)
    assert found.greeting == (GREETING if answer is Answer.GREETED else None)


@pytest.mark.parametrize(
    ("answers", "line", "error"),
    [
        ([Answer.STORE], "has no roll call: a TCPStore of torch", "the store at a:29500 has no roll call"),
        ([Answer.SILENT, Answer.CLOSED], "closes them: a proxy", "has closed every connection for 9 s"),
        ([Answer.BUSY, Answer.SILENT], "is there, and takes long to answer", "is there, and does not greet"),
        ([Answer.REFUSED, Answer.BUSY], "is rank 0 started?", "nothing has listened for 9 s at rank 0's address a:"),
        ([Answer.SILENT], "dropped, or no route (timed out)", "no answer for 9 s from rank 0's address a:29500 (a is "),
    ],
)
def test_of_several_addresses_the_answer_that_says_most_is_told(answers: list[Answer], line: str, error: str) -> None:
    """Between hosts and with real programs that answer: tests/scenarios."""
    search = Search(WorldSpec(world_size=2, rank=1, master_addr="a"), "rank 1", "h", "train --rank 0")
    seen = [Seen(f"10.0.0.{number}", answer, "timed out") for number, answer in enumerate(answers)]
    _, finding = search.judge(seen, 9.0)
    assert line in finding.line and error in finding.error.what


def find_address(host: str, said: list[str], *, seconds: float = 0.0, again: bool = False) -> list[str]:
    return asyncio.run(name_lookup.look_up(host, Waiting(seconds, said.append), said.append, again=again))


@pytest.mark.parametrize(
    ("option", "name", "named"),
    [
        ("listen_addr", "no.such.host.invalid", "--listen_addr 'no.such.host.invalid' has no IP address"),
        ("listen_addr", "a/b", "--listen_addr 'a/b' can have no IP address"),
        ("master_addr", "host:80", "rank 0's address 'host:80' can have no IP address"),
    ],
)
def test_of_two_addresses_the_wrong_one_is_named_with_its_option(option: str, name: str, named: str) -> None:
    usual: dict[str, Any] = {"world_size": 2, "master_addr": "192.0.2.1", "listen_addr": "127.0.0.1"}
    spec = WorldSpec(**{**usual, option: name})

    async def join() -> None:
        await Join(spec, Task(command=""), steps=Steps(), log=print).join()

    with pytest.raises(MasterUnresolvable) as caught:
        asyncio.run(join())
    assert caught.value.what == named
    assert f"IP address as --{option}" in caught.value.next


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
        ("hostA:29500", "only letters, digits and hyphens"),
        ("10.0.0.300", "its last part is a number"),
        ("26727", "the resolver takes a number for an address"),
    ],
)
def test_a_name_that_no_host_can_have_is_refused_at_once_on_every_rank(host: str, reason: str) -> None:
    with pytest.raises(MasterUnresolvable) as caught:
        find_address(host, [], seconds=30, again=True)
    assert reason in caught.value.why
    assert ("--master_port" in caught.value.next) == host.endswith(":29500")


@pytest.mark.parametrize(
    ("looked_up", "addresses"),
    [
        ("::1 127.0.0.1", "127.0.0.1 ::1"),
        ("fe80::1 ::1 fd00::1 10.0.0.1 127.0.1.1", "fd00::1 10.0.0.1 127.0.1.1 ::1"),
        ("fe80::1", "fe80::1"),
    ],
)
def test_of_a_names_addresses_those_that_others_and_most_scripts_can_use_come_first(
    looked_up: str, addresses: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = [(0, 0, 0, "", (one, 0)) for one in looked_up.split()]
    monkeypatch.setattr(socket, "getaddrinfo", lambda *name, **how: found)
    monkeypatch.setattr(machine, "host_name", lambda: "localhost.localdomain")
    assert find_address("localhost", []) == addresses.split()


def test_rank_0_listens_on_its_own_address_only(port: int) -> None:
    with listen(WorldSpec(world_size=2, master_port=port), ["198.51.100.1", "127.0.0.1"]) as listener:
        assert listener.getsockname() == ("127.0.0.1", port)
        with socket.socket() as other:
            other.bind(("127.0.0.2", port))


def test_rank_0_that_listens_at_all_its_addresses_names_one_at_which_it_is_reached(
    port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with listen(WorldSpec(world_size=2, master_port=port), ["::"]):
        socket.create_connection(("127.0.0.1", port)).close()
    for mine, at, named in (("10.0.0.1 fd00::1", "::", "10.0.0.1"), ("fd00::1", "0.0.0.0", None)):
        monkeypatch.setattr(network_interface, "own_addresses", mine.split)
        assert network_interface.own_address(at) == named


@pytest.mark.parametrize(
    ("interfaces", "interface", "rank_0", "why"),
    [
        ("lo:127.0.0.0/8 eth0:10.0.0.0/24", "eth0", "10.0.0.1", None),
        ("lo:127.0.0.0/8 eth0:10.0.0.0/24", "lo", "127.0.0.1", "on eth0, although all ranks are on this host"),
        # Rails of one network each: rank 0's address is on the first, or behind its router.
        ("eth0:10.0.0.0/24 eth1:10.1.0.0/24 eth2:10.2.0.0/24", "eth0", "10.9.0.1", None),
        ("nat:10.0.2.0/24 eth1:10.0.0.0/24", "eth1", "10.0.0.1", "on nat, which is not on the network of rank 0"),
        ("docker0:172.17.0.0/16 lo:127.0.0.0/8 virbr0:192.168.122.0/24 eth0:10.0.0.0/24", "eth0", "10.0.0.1", None),
        ("virbr0:192.168.122.0/24 docker0:172.17.0.0/16", "virbr0", "192.168.122.1", "on docker0, which is not"),
        # Hosts with InfiniBand share it, though rank 0's address is on the Ethernet.
        ("eth0:10.0.0.0/24 ib0:192.168.0.0/24", "eth0", "10.0.0.1", None),
        ("eth0:fd00::/64 eth1:fd01::/64", "eth1", "fd01::1", "not on the network of rank 0 at fd01::1"),
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


def test_a_host_that_has_its_address_on_lo_keeps_it_and_gives_gloo_no_interface(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(network_interface, "route_to", lambda rank_0: ("10.9.9.1", "lo"))
    own = OwnAddress("10.9.9.2", "gloo")
    assert own.address == "10.9.9.1" and own.variables == {}


def test_an_administrators_choice_for_nccl_counts_like_the_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "nccl.conf"
    monkeypatch.setenv("NCCL_CONF_FILE", str(file))
    assert OwnAddress("127.0.0.1", "nccl").variables["NCCL_SOCKET_IFNAME"] == "=lo"
    file.write_text("NCCL_DEBUG=WARN\nNCCL_SOCKET_IFNAME=eth\n")
    own = OwnAddress("127.0.0.1", "nccl")
    assert own.variables == {"GLOO_SOCKET_IFNAME": "lo"} and own.wrong_for_nccl is None


def test_a_rank_that_looks_elsewhere_is_told_of_a_rank_0_of_its_user_that_waits_on_this_host(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    spec, folder = WorldSpec(world_size=2, rank=1, master_port=29500), tmp_path / "ddp_manual"
    waits = OwnRank0(os.getppid(), machine.host_id(), "127.0.0.1", 29601, 2, "0af3")
    replace(waits, pid=os.getpid(), port=29602).announce()
    assert hint(spec) == "", "that is this process, at an address that it knows by its name"
    waits.announce()
    replace(waits, pid=2**22 + 1).announce()  # which has died
    told = "a rank 0 of yours waits on this host at 127.0.0.1:29601: --master_port 29601 reaches it"
    assert hint(spec) == told
    assert hint(replace(spec, master_port=29601)) == hint(replace(spec, world_size=3)) == ""
    search = Search(spec, "rank 1", "h", "train --rank 0", hint=partial(hint, spec))
    _, finding = search.judge([Seen("127.0.0.1", Answer.REFUSED)], 1.0, search.hint())
    assert finding.line.endswith(f"is rank 0 started? ({told})") and finding.error.next.startswith(told)
    paths = RunPaths(tmp_path / "run")
    paths.run_dir.mkdir()
    append_json_line(paths.config, {"run": {"run_id": "0af3"}})
    assert read_end(paths).state == "running", "the seat of a lost rank is kept"
    for pid in (os.getpid(), waits.pid):
        withdraw(pid)
    assert read_end(paths).state == "unfinished"
    assert hint(spec) == ""
    assert not any(folder.iterdir())
    folder.rename(folder.with_name("elsewhere"))
    folder.symlink_to(folder.with_name("elsewhere"))  # as somebody else may make it in /tmp
    waits.announce()
    assert hint(spec) == "" and not any(folder.iterdir())
    folder.unlink()
