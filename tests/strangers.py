"""A stranger at rank 0's port: a plain TCP connection that speaks JSON lines, or anything else."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from ddp_manual.messages import Message
from ddp_manual.wire import encode, encode_local


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
