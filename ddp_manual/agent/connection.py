"""One connection of an agent, to the coordinator or to its worker: messages as JSON lines.

When a process ends, however it ends, the kernel closes its connections, and the other side knows at once.
"""

from __future__ import annotations

import asyncio
import fcntl
import sys
import termios
from collections.abc import Callable
from typing import Generic, TypeVar

from ddp_manual.messages import Message
from ddp_manual.protocol.handshakes import CLOSED
from ddp_manual.wire import LONGEST_LINE, LineReader, Read, Unreadable, encode

# Bytes that may wait to be read by the other side; a connection with more is aborted.
MOST_UNSENT = 1 << 20
# Bytes that are read from a connection (LONGEST_READ), or from a stranger's, before the next one has its turn.
LONGEST_READ = 1 << 16
STRANGERS_READ = 1 << 12
# Each read from a stranger counts as at least this many bytes: to read a single byte costs as much as to read a line.
COSTS_AT_LEAST = 1 << 8
# Messages that may wait until ``receive`` or ``handle`` takes them.
MOST_UNREAD = 256

M = TypeVar("M")

# All connections are read into this buffer and handled in the same turn of the event loop. asyncio's own reading
# allocates 256 KiB for each message, which is a third of what a heartbeat costs.
_buffer = memoryview(bytearray(LONGEST_READ))


class Connection(asyncio.BufferedProtocol, Generic[M]):
    """One end of a connection, over which messages of type M come; it never blocks.

    Args:
        read: reads a message.
        on_open: called with the connection when it is open.
        longest: bytes that a message may have.
        stranger: whether nothing is known of the other side; a stranger may send ``longest`` bytes in all.
    """

    def __init__(
        self,
        read: Read[M],
        on_open: Callable[[Connection[M]], None] | None = None,
        longest: int = LONGEST_LINE,
        *,
        stranger: bool = False,
    ) -> None:
        self.reader = LineReader(read, longest)
        self._may_send = longest if stranger else None
        self.first_bytes = b""
        """The first bytes that came; if they are not a message, they show what kind of program is at the other end."""
        self.closed = False
        self._longest_sent = 0
        self._on_open = on_open
        self._take: Callable[[M], None] | None = None
        self._gone: Callable[[str], None] | None = None
        self._inbox: asyncio.Queue[M | None] = asyncio.Queue()
        self._transport: asyncio.Transport | None = None
        self.ended = ""
        """How the connection ended, unless this side has closed it."""

    def handle(self, take: Callable[[M], None], gone: Callable[[str], None]) -> None:
        """From now on call ``take`` with each message, and ``gone`` once with how the connection ended.

        ``take`` may raise Unreadable if the other side must not send this message now; that ends the connection.
        ``take`` must raise nothing else: asyncio would close the connection because of it.
        """
        self._take, self._gone = take, gone
        while not self._inbox.empty():
            message = self._inbox.get_nowait()
            if message is None:
                gone(self.ended)
            elif self.ended or not self.closed:  # once this side has closed the connection, messages are dropped
                take(message)

    async def receive(self) -> M | None:
        """Return the next message, before ``handle`` is called; None: the connection has ended."""
        return await self._inbox.get()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        if self._on_open:
            self._on_open(self)

    def get_buffer(self, sizehint: int) -> memoryview:
        return _buffer if self._may_send is None else _buffer[:STRANGERS_READ]

    def buffer_updated(self, nbytes: int) -> None:
        if self._may_send is not None:
            self._may_send -= max(nbytes, COSTS_AT_LEAST)
            if self._may_send < 0:
                self.abort("it sent more than a stranger may")
                return
        self.data_received(bytes(_buffer[:nbytes]))

    def let_send(self, longest: int, read: Read[M] | None = None, *, stranger: bool = False) -> None:
        """From now on let the other side send messages of up to ``longest`` bytes each; a stranger may send ``longest``
        bytes in all. If ``read`` is given, it reads the messages."""
        self.reader.longest, self.reader.read = longest, read or self.reader.read
        self._may_send = longest if stranger else None

    def data_received(self, data: bytes) -> None:
        self.first_bytes = self.first_bytes or data[:64]
        try:
            for message in self.reader.feed(data):
                if self.closed:
                    return
                if self._take is not None:
                    self._take(message)
                elif self._inbox.qsize() < MOST_UNREAD:
                    self._inbox.put_nowait(message)
                else:
                    raise Unreadable("more messages than this process takes")
        except Unreadable as error:  # what the other side sends can end only its own connection
            self.abort(str(error))

    def connection_lost(self, exc: Exception | None) -> None:
        if self.closed:
            return
        self.closed = True
        how = CLOSED if exc is None else getattr(exc, "strerror", None) or str(exc)
        self.ended = self.ended or how
        if self._gone is None:
            self._inbox.put_nowait(None)
        else:
            self._gone(self.ended)

    def send(self, message: Message) -> None:
        self.write(encode(message))

    def write(self, line: bytes) -> None:
        """Send a line that ``encode`` has made; do nothing if the connection is closed."""
        if self._transport is None or self.closed or self._transport.is_closing():
            return
        # One message of the longest length may wait too: rank 0's own agent reads the roster of 16,384 ranks, 4 MB.
        self._longest_sent = max(self._longest_sent, len(line))
        if self._transport.get_write_buffer_size() > MOST_UNSENT + self._longest_sent:
            self.abort("it reads nothing")
        else:
            self._transport.write(line)

    def close(self) -> None:
        """Close the connection once all that was sent is written; ignore what comes from now on."""
        self.closed = True
        if self._transport is not None:
            self._transport.close()

    def abort(self, reason: str) -> None:
        """Close the connection at once, and keep the reason in ``ended``."""
        self.ended = reason
        if self._transport is not None:
            self._transport.abort()

    @property
    def unacknowledged(self) -> int:
        """Bytes that the other host has not confirmed, on Linux; elsewhere 0."""
        if self._transport is None or self.closed or sys.platform != "linux":
            return 0
        descriptor = self._transport.get_extra_info("socket").fileno()
        return int.from_bytes(fcntl.ioctl(descriptor, termios.TIOCOUTQ, bytes(4)), sys.byteorder)  # tcp(7): SIOCOUTQ

    @property
    def unsent(self) -> int:
        """Bytes that still wait in this process, because the other side has not read what was sent before."""
        return self._transport.get_write_buffer_size() if self._transport is not None and not self.closed else 0
