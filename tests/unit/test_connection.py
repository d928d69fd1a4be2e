"""One end of a connection: messages whole, the end noticed, strangers' bytes refused; and the proof of the token."""

from __future__ import annotations

import asyncio
import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest

from ddp_manual.agent.connection import COSTS_AT_LEAST, LONGEST_READ, MOST_UNREAD, MOST_UNSENT, Connection
from ddp_manual.environment import user_variables
from ddp_manual.errors import BadOption
from ddp_manual.messages import Hello, Look, Signed
from ddp_manual.protocol.token_proof import Seal, Unsealed, claimed
from ddp_manual.wire import (
    LONGEST_ANSWER,
    LONGEST_LINE,
    LineReader,
    as_json,
    decode,
    encode,
    encode_local,
    local_reader_of,
)

WITHIN = 10.0
CLEAR = "\x1b[2J"


def with_ends(test: Callable[[Connection[Any], socket.socket], Awaitable[None]], **how: Any) -> None:
    """Run ``test`` with a connection, and the other end of it as a plain socket."""

    async def run() -> None:
        ours, other = socket.socketpair()
        other.setblocking(False)
        loop = asyncio.get_running_loop()
        _, connection = await loop.create_connection(partial(Connection, decode, **how), sock=ours)
        with other:
            try:
                await asyncio.wait_for(test(connection, other), 3 * WITHIN)
            finally:
                connection.close()

    asyncio.run(run())


async def receive(connection: Connection[Any]) -> dict[str, object] | None:
    return await asyncio.wait_for(connection.receive(), WITHIN)


async def read_to_the_end(other: socket.socket) -> bytes:
    found = b""
    with suppress(ConnectionResetError):  # as the kernel ends a connection that was closed with bytes still unread
        while piece := await asyncio.wait_for(asyncio.get_running_loop().sock_recv(other, 1 << 20), WITHIN):
            found += piece
    return found


@pytest.mark.parametrize(
    "content", [b"GET / HTTP/1.1\n", b"\xff\n", b"[" * 20_000 + b"\n", b"x" * LONGEST_LINE * 2, b'{"\\u001b[2J":\n']
)
def test_bytes_that_are_not_a_message_end_the_connection(content: bytes) -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        sending = asyncio.ensure_future(asyncio.get_running_loop().sock_sendall(other, content))
        assert await receive(connection) is None
        assert "message" in connection.ended and CLEAR not in connection.ended
        assert connection.first_bytes == content[:64]
        sending.cancel()

    with_ends(test)


def test_a_stranger_that_sends_byte_by_byte_is_read_only_so_often() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        sent = 0
        with suppress(ConnectionError):
            while not connection.ended:
                sent += await asyncio.get_running_loop().sock_sendall(other, b"x") is None
                await asyncio.sleep(0)
                await asyncio.sleep(0)
        assert connection.ended == "it sent more than a stranger may"
        assert sent <= 10_000 // COSTS_AT_LEAST + 10

    with_ends(test, longest=10_000, stranger=True)


def test_a_stranger_that_has_become_a_rank_may_send_on() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        connection.let_send(LONGEST_LINE)
        long = "x" * 100_000
        for _ in range(5):  # more than LONGEST_LINE in all
            await asyncio.get_running_loop().sock_sendall(other, f'{{"long": "{long}"}}\n'.encode())
            assert await receive(connection) == {"long": long}

    with_ends(test, longest=10_000, stranger=True)


def test_messages_that_nobody_takes_end_the_connection_instead_of_filling_the_memory() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        with suppress(ConnectionError):
            for _ in range(100 * MOST_UNREAD):
                await asyncio.get_running_loop().sock_sendall(other, b'{"a": 1}\n')
        found = [await receive(connection) for _ in range(MOST_UNREAD + 1)]
        assert found == [*[{"a": 1}] * MOST_UNREAD, None]

    with_ends(test)


def test_a_long_message_is_read_in_time_that_grows_with_its_length_only() -> None:
    """64 MiB in pieces of 64 KiB: to look for its end anew in all of it at each piece took 12 s."""
    reader, piece = LineReader(decode, LONGEST_ANSWER), b"x" * LONGEST_READ
    began = time.process_time()
    assert [*reader.feed(b'{"long": "')] == []
    for _ in range(LONGEST_ANSWER // LONGEST_READ - 1):
        assert [*reader.feed(piece)] == []
    (message,) = reader.feed(b'"}\n')
    assert len(message["long"]) == LONGEST_ANSWER - LONGEST_READ
    assert time.process_time() - began < 4


def test_a_connection_that_is_not_read_is_aborted_instead_of_filling_memory() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        for _ in range(1000):
            connection.send({"words": "x" * (MOST_UNSENT // 50)})
            assert connection.unsent < 2 * MOST_UNSENT
        assert await receive(connection) is None
        assert connection.ended == "it reads nothing"

    with_ends(test)


def test_short_messages_may_follow_one_that_is_longer_than_the_bytes_that_may_wait() -> None:
    """As heartbeats follow the roster of 16,384 ranks."""

    async def test(connection: Connection[Any], other: socket.socket) -> None:
        for words in ("x" * (8 * MOST_UNSENT), "y", "z"):
            connection.send({"words": words})
        assert connection.unsent > MOST_UNSENT
        connection.close()
        found = await read_to_the_end(other)
        assert len(found) > 8 * MOST_UNSENT and found.endswith(b'"z"}\n')

    with_ends(test)


def test_what_came_before_handle_is_handled_in_order_and_then_the_end() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        told: list[object] = []
        other.sendall(b'{"failed": "words"}\n{"bye": ""}\n')
        other.close()
        while not connection.closed:
            await asyncio.sleep(0.01)
        connection.handle(told.append, told.append)
        assert told == [{"failed": "words"}, {"bye": ""}, "closed by the other side"]

    with_ends(test)


def test_bytes_sent_before_close_arrive_and_what_comes_after_it_is_ignored() -> None:
    async def test(connection: Connection[Any], other: socket.socket) -> None:
        told: list[object] = []
        connection.handle(told.append, told.append)
        connection.send({"over": True})
        connection.close()
        connection.data_received(b'{"late": 1}\n')
        assert await read_to_the_end(other) == b'{"over":true}\n'
        assert told == []

    with_ends(test)


# -- the token --------------------------------------------------------------------------------------------------------

HELLO = {"rank": 1, "host": "b", "nonce": "00"}


def test_a_message_is_opened_by_the_same_token_for_the_same_purpose_and_does_not_contain_it() -> None:
    signed = Seal(b"token").close(Hello, "1", HELLO)
    assert Seal(b"token").open(signed, "1", decode) == claimed(signed) == HELLO
    assert b"token" not in encode(signed)
    unsigned = Seal(None).close(Hello, "1", HELLO)
    assert encode(unsigned) == b'{"type":"hello","content":{"rank":1,"host":"b","nonce":"00"}}\n'
    assert Seal(None).open(unsigned, "1", decode) == HELLO


@pytest.mark.parametrize(
    ("signs", "token", "kind", "nonce", "content", "reason"),
    [
        (b"token", b"other", Hello, "1", HELLO, "another token, or was recorded elsewhere"),
        (b"token", b"token", Hello, "2", HELLO, "another token, or was recorded elsewhere"),
        (b"token", b"token", Look, "1", HELLO, "another token, or was recorded elsewhere"),
        (b"token", b"token", Hello, "1", {**HELLO, "rank": 2}, "another token, or was recorded elsewhere"),
        (b"token", None, Hello, "1", HELLO, "this process has none"),
        (None, b"token", Hello, "1", HELLO, "not signed with a token"),
    ],
)
def test_a_message_is_not_opened_by_another_token_for_another_purpose_or_if_it_was_altered(
    signs: bytes | None, token: bytes | None, kind: type[Signed], nonce: str, content: Any, reason: str
) -> None:
    signed = Seal(signs).close(Hello, "1", HELLO)
    with pytest.raises(Unsealed, match=reason):
        Seal(token).open(kind(msgspec.Raw(as_json(content)), signature=signed.signature), nonce, decode)


@pytest.mark.parametrize(
    ("content", "what", "why"),
    [
        (b"\n", "holds no token", "it is empty"),
        (b"x" * 1_000_000, "holds no token", "it is longer than 4096 bytes"),
        (None, "cannot be read", "No such file or directory"),
    ],
)
def test_an_unusable_token_is_refused(tmp_path: Path, content: bytes | None, what: str, why: str) -> None:
    """Before anything listens: tests/unit/test_launching."""
    file = tmp_path / "token"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(BadOption, match=f"--token_file {file} {what}") as caught:
        user_variables.token(str(file))
    assert caught.value.why.startswith(why)


def test_text_from_the_network_arrives_with_control_characters_escaped_and_newlines_kept() -> None:
    """Also where it is signed, or where only an unsigned claim of it is read; a process of the rank itself keeps it."""
    said = {"why": f"one\n{CLEAR}\r\x07\x9b\u202e\u2028", "list": [{f"na\tme{CLEAR}": "é 漢"}, 1, None, 1.5]}
    why = "one\n\\x1b[2J\\r\\x07\\x9b\\u202e\\u2028"
    shown = {"why": why, "list": [{"na\\tme\\x1b[2J": "é 漢"}, 1, None, 1.5]}

    async def test(connection: Connection[Any], other: socket.socket) -> None:
        other.sendall(encode_local(said))
        assert await receive(connection) == shown

    with_ends(test)
    seal = Seal(b"token")
    signed = seal.close(Hello, "1", said)
    assert seal.open(signed, "1", decode) == claimed(signed) == shown
    assert list(LineReader(local_reader_of(dict[str, Any])).feed(encode_local(said))) == [said]


def test_a_text_that_is_not_unicode_is_escaped_by_its_sender_and_kept_within_a_rank() -> None:
    said = {"why": "a stray byte: \udcff", "lr": (0.1, "from donn\udce9es/config.json")}
    shown = {"why": "a stray byte: \\udcff", "lr": [0.1, "from donn\\udce9es/config.json"]}
    assert decode(as_json(said).decode()) == shown
    assert list(LineReader(local_reader_of(dict[str, Any])).feed(encode_local(said))) == [{**said, "lr": [*said["lr"]]}]
