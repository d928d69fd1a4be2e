"""The lifeline: a TCP connection from each rank to rank 0 that carries heartbeats one way and verdicts the other.

When a process ends, however it ends, the kernel closes its connection, and the other side knows at once. A store
cannot tell that: torch's says nothing of clients that go. Messages are JSON, one per line.
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import time
import weakref
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

# Bytes. Last words with a traceback and the stacks of a process are the longest messages.
LONGEST_LINE = 1 << 18
MOST_UNSENT = 1 << 20

_open_lines: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A worker process that a DataLoader forks would keep its parent's lifeline open after the parent's death."""
    for connection in list(_open_lines):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)


def kept_from_children(connection: socket.socket) -> socket.socket:
    _open_lines.add(connection)
    return connection


class LineClosed(Exception):
    """The other side has gone, or says something that is no message."""


class Lifeline:
    """One end of a connection, never blocking."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = kept_from_children(connection)
        connection.setblocking(False)
        with suppress(OSError):  # a peer that is gone already is noticed when it is read from
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._received = bytearray()
        self._unsent = bytearray()

    def send(self, message: Mapping[str, Any]) -> None:
        """Send as much as the network takes; ``flush`` sends the rest later.

        Raises:
            LineClosed: the other side is gone, or has read nothing for long.
        """
        self._unsent += json.dumps(message).encode() + b"\n"
        self.flush()

    def flush(self) -> None:
        try:
            while self._unsent:
                del self._unsent[: self.connection.send(self._unsent)]
        except BlockingIOError:
            if len(self._unsent) > MOST_UNSENT:
                raise LineClosed("it reads nothing") from None
        except OSError as error:
            raise LineClosed(error.strerror or str(error)) from None

    def receive(self) -> list[dict[str, Any]]:
        """All messages that have come.

        Raises:
            LineClosed: there is none, and there will be none. What came before the end is returned first.
        """
        closed: str | None = None
        try:
            while piece := self.connection.recv(1 << 16):
                self._received += piece
                if len(self._received) > LONGEST_LINE and b"\n" not in self._received[-len(piece) :]:
                    raise LineClosed("a message that is too long")
            closed = "closed by the other side"
        except BlockingIOError:
            pass
        except OSError as error:
            closed = error.strerror or str(error)
        *lines, rest = self._received.split(b"\n")
        self._received = rest
        if closed is not None and not lines:
            raise LineClosed(closed)
        return [_decoded(line) for line in lines]

    def finish(self, timeout: float) -> None:
        """Say that nothing more will come, and wait until the other side has read it all.

        A connection that is closed with something unread is reset, and may lose what it has sent.
        """
        with suppress(OSError):
            self.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + timeout
        with suppress(LineClosed), selectors.DefaultSelector() as selector:
            selector.register(self.connection, selectors.EVENT_READ)
            while (left := deadline - time.monotonic()) > 0:
                selector.select(left)
                self.receive()

    def close(self) -> None:
        self.connection.close()


def _decoded(line: bytearray) -> dict[str, Any]:
    try:
        message = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise LineClosed(f"no message: {error}") from None
    if not isinstance(message, dict):
        raise LineClosed("no message")
    return message
