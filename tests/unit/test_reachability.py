"""The probe between hosts, against real sockets of every kind; between real hosts in tests/hosts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest

from ddp_manual.agent import reachability
from ddp_manual.agent.reachability import GREETING_BYTES, MOST_CONNECTED, answer_at, greeting, try_to_reach
from ddp_manual.protocol.places import assign_places
from ddp_manual.protocol.reachability import Probes
from tests.runs import info, ready


def reach_a_server_that(serve: Callable[[socket.socket, int], None]) -> str | None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection, port)

        thread = threading.Thread(target=accept)
        thread.start()
        found = asyncio.run(try_to_reach("127.0.0.1", port))
        thread.join()
    return found


def test_both_sides_send_more_than_a_packet() -> None:
    """Where large packets are dropped in one direction only, that is found out too."""
    received: list[bytes] = []

    def answer(peer: socket.socket, port: int) -> None:
        peer.sendall(greeting(port))
        while piece := peer.recv(65536):
            received.append(piece)

    assert reach_a_server_that(answer) is None
    assert len(b"".join(received)) == GREETING_BYTES


def test_silent_connections_to_the_port_for_probes_make_room_for_a_host_and_are_closed_in_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(reachability, "ANSWER_WITHIN", 0.5)

    async def strangers() -> None:
        answering = await answer_at("127.0.0.1")
        port = answering.sockets[0].getsockname()[1]
        silent = [await asyncio.open_connection("127.0.0.1", port) for _ in range(2 * MOST_CONNECTED)]
        assert await try_to_reach("127.0.0.1", port) is None
        for reader, writer in silent:
            with suppress(ConnectionResetError):
                while await reader.read(65536):
                    pass
            writer.close()
        answering.close()

    asyncio.run(asyncio.wait_for(strangers(), 5))


def test_another_program_that_listens_there_is_not_taken_for_an_agent() -> None:
    assert reach_a_server_that(lambda peer, _: peer.sendall(b"SSH-2.0\r\n")) == "something else answers there"


@pytest.mark.parametrize(
    ("cores", "shared_by"),
    [
        ([[(0, 7)], [(8, 15)], [(0, 7)]], [1, 1, 1]),  # the last is on another host
        ([[(0, 3), (8, 11)], [(0, 3), (8, 11)], [(0, 3)]], [2, 2, 1]),
        ([[(0, 3)], [(3, 7)], [(0, 15)]], [2, 2, 1]),
        ([[], [(0, 7)], [(0, 7)]], [2, 1, 1]),
    ],
)
def test_only_ranks_that_may_use_the_same_cores_share_them(cores: list[Any], shared_by: list[int]) -> None:
    infos = [info(rank, host, world_size=3, address="10.0.0.1") for rank, host in enumerate("aab")]
    places = assign_places(infos, {rank: ready(cores=found) for rank, found in enumerate(cores)})
    assert [places[rank].cores_shared_by for rank in range(3)] == shared_by


def test_of_the_reports_of_hosts_only_those_of_this_round_count_and_a_host_that_does_not_report_fails() -> None:
    """What the ranks print: tests/scenarios/peer-unreachable.txt."""
    infos = [info(rank, host, world_size=6, address=f"10.0.0.{rank}") for rank, host in enumerate("aabbcc")]
    probes = Probes(infos, assign_places(infos), now=100.0)
    keys = {rank: request.key for rank, request in probes.requests()}
    assert {rank: len(request.hosts) for rank, request in probes.requests()} == {0: 2, 2: 2, 4: 2}
    probes.take((keys[0][0] - 1, keys[0][1]), [(1, "connection refused")])
    probes.take(keys[2], [(0, "no answer"), (7, "of no host")])
    assert probes.failing(104.0) is probes.failing(108.0) is None
    probes.take(keys[0], [])
    failing = probes.failing(108.1) or []
    assert [(one.rank, other and other.rank, how) for one, other, how in failing] == [
        (2, 0, "no answer"),
        (4, None, "said nothing for 8 s"),
    ]
