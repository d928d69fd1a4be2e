"""Strangers at rank 0's port: plain TCP connections that speak JSON lines, or anything else.

``python -m tests.strangers PORT COUNT SECONDS SEED [HELLO]`` lets many of them come, evenly in that time.
"""

from __future__ import annotations

import json
import random
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from typing import Any

from ddp_manual.messages import Message
from ddp_manual.wire import encode, encode_local

# Seconds that one of many strangers stays; rank 0 has long closed its connection then.
STAYS = 8.0
PIECE = 1 << 16


class Stranger:
    """A connection to rank 0's agent, which greets first. Times are seconds."""

    def __init__(self, port: int) -> None:
        self.connection = socket.create_connection(("127.0.0.1", port), 5)
        self._received = b""
        self.greeting = self._line()

    def __enter__(self) -> Stranger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.connection.close()

    def say(self, message: Mapping[str, Any] | Message) -> None:
        self.connection.sendall(encode(message) if isinstance(message, Message) else encode_local(message))

    def hears(self, kind: str, timeout: float = 5) -> Any:
        """Return the content of the next message of a kind.

        Raises:
            ConnectionError: no such message has come.
        """
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            message = self._line()
            if message["type"] == kind:
                return message.get("content", message)
        raise ConnectionError(f"no {kind} within {timeout} s")

    def rest(self, timeout: float = 2) -> bytes:
        """Return all that the other side sends until it closes the connection or is silent for ``timeout``."""
        self.connection.settimeout(timeout)
        received, self._received = self._received, b""
        with suppress(OSError):
            while piece := self.connection.recv(65536):
                received += piece
        return received

    def _line(self) -> dict[str, Any]:
        while b"\n" not in self._received:
            piece = self.connection.recv(65536)
            if not piece:
                raise ConnectionError("the other side has closed the connection")
            self._received += piece
        line, _, self._received = self._received.partition(b"\n")
        found: dict[str, Any] = json.loads(line)
        return found


Pieces = Iterator[bytes]


def bytes_without_pause(drawn: random.Random, hello: bytes) -> Pieces:
    piece = drawn.randbytes(PIECE)
    while True:
        yield piece


def one_line_without_an_end(drawn: random.Random, hello: bytes) -> Pieces:
    yield b'{"type":"hello","content":{"host":"'
    while True:
        yield b"x" * PIECE


def only_newlines(drawn: random.Random, hello: bytes) -> Pieces:
    while True:
        yield b"\n" * PIECE


def empty_messages(drawn: random.Random, hello: bytes) -> Pieces:
    while True:
        yield b"{}\n" * (PIECE // 3)


def a_hello_again_and_again(drawn: random.Random, hello: bytes) -> Pieces:
    while True:
        yield hello


def a_hello_and_then_messages(drawn: random.Random, hello: bytes) -> Pieces:
    yield hello
    while True:
        yield b'{"type":"alive"}\n' * (PIECE // 17)


def looks_without_pause(drawn: random.Random, hello: bytes) -> Pieces:
    while True:
        yield b'{"type":"look","content":{"nonce":"x","stacks":true}}\n' * 1000


def a_damaged_hello(drawn: random.Random, hello: bytes) -> Pieces:
    damaged = bytearray(hello)
    for _ in range(drawn.randrange(1, 20)):
        place = drawn.randrange(len(damaged))
        damaged[place : place + drawn.choice((0, 1, 1, 8))] = drawn.choice(
            (b"", b"\n", b'"', b"{", b"]", b"9" * 5000, b"1e999", b"null", b"\\u001b[2J", b"\\n", drawn.randbytes(2))
        )
    yield bytes(damaged) + b"\n"


def nested_arrays(drawn: random.Random, hello: bytes) -> Pieces:
    yield b"[" * drawn.choice((900, 9_000, 60_000)) + b"\n"
    yield b'{"type":' * 5_000 + b"\n"


def half_a_hello(drawn: random.Random, hello: bytes) -> Pieces:
    yield hello[: drawn.randrange(len(hello))]


def single_bytes(drawn: random.Random, hello: bytes) -> Pieces:
    for byte in hello * 100:
        time.sleep(0.001)
        yield bytes([byte])


def nothing(drawn: random.Random, hello: bytes) -> Pieces:
    yield b""


KINDS: tuple[Callable[[random.Random, bytes], Pieces], ...] = (
    *(bytes_without_pause, one_line_without_an_end, only_newlines, empty_messages, a_hello_again_and_again),
    *(a_hello_and_then_messages, looks_without_pause, a_damaged_hello, nested_arrays, half_a_hello, single_bytes),
    nothing,
)


def come_once(port: int, seed: int, hello: bytes) -> None:
    """Come as one stranger: send without pause, read nothing, and stay until turned away or for some seconds."""
    drawn = random.Random(seed)
    with suppress(OSError), socket.create_connection(("127.0.0.1", port), 5) as connection:
        until = time.monotonic() + STAYS
        connection.settimeout(0.5)
        for piece in KINDS[seed % len(KINDS)](drawn, hello):
            while piece and time.monotonic() < until:
                with suppress(TimeoutError):
                    piece = piece[connection.send(piece) :]
            if time.monotonic() > until:
                return
        if drawn.random() < 0.3:  # end with a reset, or by a goodbye
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
            return
        connection.settimeout(max(0.1, until - time.monotonic()))
        while connection.recv(PIECE):
            pass


def main(port: int, count: int, seconds: float, seed: int, hello: str) -> None:
    began = time.monotonic()
    for number in range(count):
        time.sleep(max(0.0, began + number * seconds / count - time.monotonic()))
        threading.Thread(target=come_once, args=(port, seed + number, hello.encode()), daemon=True).start()
    print(f"{count} strangers came within {time.monotonic() - began:.1f} s", flush=True)


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]), sys.argv[5] + "\n")
