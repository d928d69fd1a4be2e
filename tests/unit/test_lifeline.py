"""One end of a lifeline: messages whole, the end noticed, strangers' bytes refused, forked children no owners of it."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator

import pytest

from ddp_manual.rendezvous.lifeline import LONGEST_LINE, MOST_UNSENT, Lifeline, LineClosed

Ends = tuple[Lifeline, socket.socket]


@pytest.fixture
def ends() -> Iterator[Ends]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        other = socket.create_connection(listener.getsockname())
        line = Lifeline(listener.accept()[0])
        with other:
            other.settimeout(10)
            yield line, other
            line.close()


def receive(line: Lifeline, count: int) -> list[dict[str, object]]:
    """As many messages, however they are cut on their way."""
    found: list[dict[str, object]] = []
    line.connection.setblocking(False)
    while len(found) < count:
        found += line.receive()
    return found


def test_messages_come_whole_however_they_were_cut(ends: Ends) -> None:
    line, other = ends
    other.sendall(b'{"a": 1}\n{"b"')
    assert receive(line, 1) == [{"a": 1}]
    other.sendall(b": 2}\n")
    assert receive(line, 1) == [{"b": 2}]


def test_what_came_before_the_end_is_read_before_the_end_is_told(ends: Ends) -> None:
    line, other = ends
    other.sendall(b'{"failed": "words"}\n')
    other.close()
    assert receive(line, 1) == [{"failed": "words"}]
    with pytest.raises(LineClosed):
        receive(line, 1)


@pytest.mark.parametrize(
    "content", [b"GET / HTTP/1.1\n", b"[1]\n", b"\xff\n", b"[" * 20_000 + b"\n", b"x" * LONGEST_LINE * 2]
)
def test_bytes_that_are_no_message_end_the_line(ends: Ends, content: bytes) -> None:
    line, other = ends
    other.setblocking(False)

    def send_and_receive() -> None:
        sent = 0
        while True:
            if sent < len(content):
                sent += other.send(content[sent : sent + 4096])
            line.receive()

    with pytest.raises(LineClosed):
        send_and_receive()


def test_a_line_that_nobody_reads_is_given_up_instead_of_filling_memory(ends: Ends) -> None:
    line, _ = ends

    def send_much() -> None:
        for _ in range(1000):
            line.send({"words": "x" * (MOST_UNSENT // 50)})

    with pytest.raises(LineClosed):
        send_much()


def test_a_forked_child_does_not_keep_its_parents_line_open(ends: Ends) -> None:
    line, other = ends
    come, go = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(go)
        os.read(come, 1)  # until the parent closes its end
        os._exit(0)
    try:
        line.close()
        assert other.recv(1) == b""
    finally:
        os.close(go)
        os.close(come)
        os.waitpid(child, 0)
