"""The probe between hosts, against real sockets of every kind; between real hosts in tests/hosts."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

import pytest

from ddp_manual.agent import reachability
from ddp_manual.agent.reachability import (
    GREETING_BYTES,
    MOST_CONNECTED,
    answer_at,
    greeting,
    try_to_reach,
)


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
