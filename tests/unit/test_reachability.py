"""The probe between hosts, against real sockets of every kind; between real hosts in tests/hosts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest
from msgspec.structs import replace

from ddp_manual.agent import reachability
from ddp_manual.agent.reachability import (
    GREETING_BYTES,
    MOST_CONNECTED,
    answer_at,
    greeting,
    try_to_reach,
)
from ddp_manual.messages import RankInfo
from ddp_manual.protocol.reachability import Probes, unreachable
from ddp_manual.protocol.roll_call import assign_places


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


def test_failing_pairs_are_named_with_their_direction_and_so_is_a_host_that_did_not_report() -> None:
    hosts = [
        RankInfo(rank=8 * node, world_size=24, host=host, pid=1, address=f"10.0.0.{node}", answer_port=4000 + node)
        for node, host in enumerate("abc")
    ]
    infos = [replace(host, rank=rank) for host in hosts for rank in range(host.rank, host.rank + 8)]
    probes = Probes(infos, assign_places([replace(info, host_id=info.host) for info in infos]), now=100.0)
    tried = {rank: [other for other, _, _ in request.hosts] for rank, request in probes.requests()}
    assert tried == {0: [1, 2], 8: [0, 2], 16: [0, 1]}
    keys = {rank: request.key for rank, request in probes.requests()}
    earlier = keys[0][0] - 1, 0
    probes.take(keys[8], [(0, "no answer"), (7, "of no host")])
    probes.take(earlier, [(1, "connection refused")])
    assert probes.failing(108.0) is None
    probes.take(keys[0], [])
    failing = probes.failing(108.1)
    assert failing is not None
    error = unreachable(failing)
    assert error.what == "2 of the connections between hosts cannot be made: b -> a, c is silent"
    assert "from 10.0.0.1 (rank 8 on b) to 10.0.0.0:4000 (rank 0 on a): no answer" in error.why
    assert "from 10.0.0.2 (rank 16 on c): said nothing for 8 s" in error.why
    assert "from 10.0.0.1 to 10.0.0.0" in error.next
