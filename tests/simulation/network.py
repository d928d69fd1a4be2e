"""Simulated hosts and the TCP between them: delays, cuts in one direction or both, resets, hosts that vanish."""

from __future__ import annotations

import asyncio
import errno
import itertools
import os
import random
from collections import deque
from collections.abc import Callable
from contextvars import Context
from typing import Any

from tests.simulation.virtual_time import PROCESS, Process, VirtualLoop

# Bytes that the kernels of both hosts keep for a connection that nobody reads.
IN_KERNELS = 400_000
# The most seconds after a cut has healed until TCP tries again.
TRIES_AGAIN = 1.5
FIN, RESET = "fin", "reset"
# The context of callbacks that belong to no simulated process.
EMPTY = Context()


class Host:
    """A machine with one address, to which its name resolves on all hosts."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.name = f"host{chr(ord('A') + number % 26)}{number // 26 or ''}"
        self.address = f"10.0.{number // 250}.{number % 250 + 1}"
        self.up = True


class Listener:
    """What ``listen`` returns, and what ``create_server`` takes and returns."""

    def __init__(self, network: Network, host: Host, address: str, port: int, process: Process | None) -> None:
        self.network, self.host, self.address, self.port, self.process = network, host, address, port, process
        self.factory: Callable[[], asyncio.BaseProtocol] | None = None
        self.sockets = [self]

    def getsockname(self) -> tuple[str, int]:
        return self.address, self.port

    def listen(self, backlog: int) -> None:
        """Do nothing: any number of connections may wait."""

    def close(self) -> None:
        self.network.listeners.pop((self.host.number, self.port), None)


class Stream:
    """One direction of a connection: what was sent arrives in order, as soon as the path lets it."""

    def __init__(self, network: Network, source: Host, target: Host, receiver: Transport) -> None:
        self.network, self.source, self.target, self.receiver = network, source, target, receiver
        self.on_its_way: deque[bytes | str] = deque()
        self._moving = False

    def push(self, what: bytes | str) -> None:
        self.on_its_way.append(what)
        self.move()

    def move(self) -> None:
        if self.on_its_way and not self._moving:
            self._moving = True
            network = self.network
            network.loop.call_at(
                network.loop.now + network.delay(self.source, self.target), self._arrive, context=EMPTY
            )

    def _arrive(self) -> None:
        self._moving = False
        if not self.network.reaches(self.source, self.target):
            self.network.waiting.append(self)
        elif self.on_its_way:
            self.receiver.arrive(self.on_its_way.popleft())
            self.move()


class Transport(asyncio.Transport):
    """One end of a connection."""

    def __init__(self, network: Network, host: Host, process: Process | None, address: tuple[str, int]) -> None:
        super().__init__()
        self.network, self.host, self.process = network, host, process
        self.context = process.context if process is not None else EMPTY
        self.out: Stream
        self.protocol: asyncio.BaseProtocol
        self.closed = self.process_gone = False
        self._unread = 0
        self._address = address
        network.transports.append(self)

    def write(self, data: Any) -> None:
        if not self.closed:
            data = bytes(data)
            if len(data) > 1 and self.network.random.random() < 0.05:  # a line may come in pieces
                at = self.network.random.randrange(1, len(data))
                self.out.push(data[:at])
                data = data[at:]
            self.out.push(data)

    def arrive(self, what: bytes | str) -> None:
        """Take what the network brings: the process reads it when it runs."""
        if self.process_gone:
            if what != RESET and self.out.network.reaches(self.host, self.out.target):
                self.out.push(RESET)
        elif not self.closed:
            self._unread += 1
            self.network.loop.call_soon(self._read, what, context=self.context)

    def _read(self, what: bytes | str) -> None:
        self._unread -= 1
        if self.closed:
            return
        if what == RESET:
            self._end(ConnectionResetError(errno.ECONNRESET, os.strerror(errno.ECONNRESET)))
        elif what == FIN:
            eof = getattr(self.protocol, "eof_received", None)
            if eof is None or not eof():
                self.close()
        elif isinstance(self.protocol, asyncio.BufferedProtocol):
            data = what if isinstance(what, bytes) else b""
            while data and not self.closed:
                buffer = self.protocol.get_buffer(len(data))
                size = min(len(buffer), len(data))
                buffer[:size], data = data[:size], data[size:]
                self.protocol.buffer_updated(size)
        elif isinstance(what, bytes):
            self.protocol.data_received(what)  # type: ignore[attr-defined]

    def close(self) -> None:
        if not self.closed:
            self.out.push(FIN)
            self._end(None)

    def abort(self) -> None:
        if not self.closed:
            self.out.on_its_way.clear()
            self.out.push(RESET)
            self._end(None)

    def _end(self, error: Exception | None) -> None:
        self.closed = True
        self.network.forget(self)
        self.network.loop.call_soon(self.protocol.connection_lost, error, context=self.context)

    def end_with_process(self) -> None:
        """Close as the kernel does: with a reset if something was not read."""
        if not self.closed:
            self.closed = self.process_gone = True
            self.out.push(RESET if self._unread else FIN)
            self.network.forget(self)

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return max(0, self.unacknowledged - IN_KERNELS)

    @property
    def unacknowledged(self) -> int:
        return sum(len(piece) for piece in self.out.on_its_way if isinstance(piece, bytes))

    def get_extra_info(self, name: str, default: Any = None) -> Any:
        return self._address if name == "sockname" else default


class Network:
    """All hosts, and what is between them."""

    def __init__(self, loop: VirtualLoop, hosts: int, chance: random.Random) -> None:
        self.loop, self.random = loop, chance
        self.hosts = [Host(number) for number in range(hosts)]
        self.listeners: dict[tuple[int, int], Listener] = {}
        self.transports: list[Transport] = []
        self.waiting: list[Stream] = []
        """The directions that are stopped by a cut."""
        self.cuts: set[tuple[int, int]] = set()
        """The directions that are cut: (number of the sending host, number of the receiving host)."""
        self.were_cut: set[tuple[int, int]] = set()
        """Those that are or were cut."""
        self._healed = -TRIES_AGAIN
        self._ports = itertools.count(40_000)

    def forget(self, transport: Transport) -> None:
        if transport in self.transports:
            self.transports.remove(transport)

    def delay(self, source: Host, target: Host) -> float:
        return self.random.uniform(0.00005, 0.0003) if source is target else self.random.uniform(0.0003, 0.003)

    def reaches(self, source: Host, target: Host) -> bool:
        return source.up and target.up and (source.number, target.number) not in self.cuts

    def both_ways(self, one: Host, other: Host) -> bool:
        return self.reaches(one, other) and self.reaches(other, one)

    def heal(self, cuts: set[tuple[int, int]]) -> None:
        self.cuts -= cuts
        self._healed = self.loop.now
        waiting, self.waiting = self.waiting, []
        for stream in waiting:
            self.loop.call_at(self.loop.now + self.random.uniform(0, TRIES_AGAIN), stream.move, context=EMPTY)

    @property
    def all_has_come(self) -> bool:
        """Whether nothing is still on its way because of a cut."""
        return not self.cuts and self.loop.now - self._healed > TRIES_AGAIN

    def host_of(self, address: str, asking: Host) -> Host | None:
        if address.startswith("127."):
            return asking
        return next((host for host in self.hosts if host.address == address), None)

    def listen(self, host: Host, address: str, port: int, process: Process | None) -> Listener | None:
        """Return a listener at a port, for 0 at any free port; None if the port is taken."""
        port = port or next(self._ports)
        if (host.number, port) in self.listeners:
            return None
        found = self.listeners[host.number, port] = Listener(self, host, address, port, process)
        return found

    async def connect(self, factory: Callable[[], Any], here: Host, address: str, port: int) -> tuple[Transport, Any]:
        loop, there, process = self.loop, self.host_of(address, here), PROCESS.get()
        await asyncio.sleep(self.delay(here, there or here))
        while there is None or not self.both_ways(here, there):
            await asyncio.sleep(1.0)  # SYN is sent again
        await asyncio.sleep(self.delay(there, here))
        listener = self.listeners.get((there.number, port))
        if listener is None or listener.factory is None:
            raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        ours = Transport(self, here, process, (here.address, next(self._ports)))
        theirs = Transport(self, there, listener.process, (address, port))
        ours.out, theirs.out = Stream(self, here, there, theirs), Stream(self, there, here, ours)

        def accept() -> None:
            assert listener.factory is not None
            theirs.protocol = listener.factory()
            theirs.protocol.connection_made(theirs)

        theirs.protocol = asyncio.Protocol()  # until ``accept`` is called in the process
        loop.call_soon(accept, context=theirs.context)
        ours.protocol = factory()
        ours.protocol.connection_made(ours)
        return ours, ours.protocol

    def end_process(self, process: Process) -> None:
        """Close all that a process has open, as its kernel does."""
        for listener in [found for found in self.listeners.values() if found.process is process]:
            listener.close()
        for transport in [found for found in self.transports if found.process is process]:
            transport.end_with_process()
