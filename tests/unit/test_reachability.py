"""The probe between hosts, against real sockets of every kind; between real hosts in tests/hosts."""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable

from ddp_manual.rendezvous.reachability import Answerer, accepts, greeting, try_to_reach


def reach_a_server_that(serve: Callable[[socket.socket, int], None]) -> str | None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]

        def accept() -> None:
            connection, _ = listener.accept()
            with connection:
                serve(connection, port)

        thread = threading.Thread(target=accept)
        thread.start()
        found = try_to_reach("127.0.0.1", port)
        thread.join()
    return found


def test_an_answerer_is_reached_until_it_is_closed() -> None:
    answerer = Answerer("127.0.0.1")
    assert try_to_reach("127.0.0.1", answerer.port) is None
    assert accepts("127.0.0.1", answerer.port) is True
    answerer.close()
    assert try_to_reach("127.0.0.1", answerer.port) == "connection refused"
    assert accepts("127.0.0.1", answerer.port) is False


def test_something_else_that_listens_there_is_told_from_an_answerer() -> None:
    assert reach_a_server_that(lambda peer, _: peer.sendall(b"SSH-2.0\r\n")) == "something else answers there"


def test_a_connection_that_large_packets_do_not_pass_is_found_out() -> None:
    held = threading.Event()

    def first_packet_only(peer: socket.socket, port: int) -> None:
        peer.sendall(greeting(port)[:1000])
        held.wait(5)

    found = reach_a_server_that(first_packet_only)
    held.set()
    assert found == "connected, but only 1000 of 16384 bytes came through (packet size?)"
