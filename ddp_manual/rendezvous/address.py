"""Rank 0's address: resolve it, own it (rank 0), find out what answers there (the others), and the way to it.

Nothing here needs torch: a store is recognised by two messages of its protocol, on a plain socket.
"""

from __future__ import annotations

import errno
import logging
import os
import socket
import time
from dataclasses import dataclass
from enum import Enum

from ddp_manual import environment
from ddp_manual.config import WorldSpec
from ddp_manual.errors import (
    AddressNotLocal,
    BadOption,
    MasterAddressError,
    MasterNotAStore,
    MasterRefused,
    MasterUnreachable,
    MasterUnresolvable,
    PortInUse,
)
from ddp_manual.rendezvous.waiting import POLL_EVERY, Waiting

logger = logging.getLogger(__name__)

# TCPStore.cpp: every client first sends VALIDATE and a magic number; PING is answered with its own four bytes.
_VALIDATE = bytes.fromhex("00cef7853c")
_PING = b"\x0d"
CONNECT_TIMEOUT = 2.0
ANSWER_TIMEOUT = 3.0


class Answer(Enum):
    """What came back from an address and port."""

    STORE = "a TCPStore answers"
    REFUSED = "nothing listens"
    SILENT = "no answer: the packets are dropped, or there is no route"
    MUTE = "something accepts connections there but says nothing"
    STRANGER = "something else answers"


@dataclass(frozen=True)
class Probe:
    """What ``address`` answered; ``detail`` has the first bytes or the operating system's words."""

    address: str
    answer: Answer
    detail: str = ""


def resolve(host: str) -> list[str]:
    """The IP addresses of a host name, in the resolver's order.

    Raises:
        MasterUnresolvable: it has none.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise MasterUnresolvable(
            f"rank 0's address {host!r} has no IP address",
            why=f"looking it up on {environment.host_name()} gave: {words}",
            next=f"check with: getent hosts {host}\nor give rank 0's IP address as --master_addr",
        ) from None
    return list(dict.fromkeys(str(entry[4][0]) for entry in found))


def at(address: str, port: int) -> str:
    """``10.0.0.1:29500``, ``[fe80::1]:29500``"""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def listen(spec: WorldSpec) -> socket.socket:
    """Rank 0's listening socket, bound to its own address only.

    Raises:
        MasterUnresolvable, AddressNotLocal, PortInUse: rank 0 cannot be found at the address it was given.
        BadOption: this user may not listen on that port.
    """
    addresses = resolve(spec.master_addr)
    port = 0 if spec.alone else spec.master_port
    for address in addresses:
        listener = socket.socket(_family(address), socket.SOCK_STREAM)
        # A run that has just ended leaves its port in TIME_WAIT for a minute; that is no reason to refuse the next.
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind((address, port))
            listener.listen(4096)
        except OSError as error:
            listener.close()
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            if error.errno == errno.EADDRINUSE:
                raise _port_in_use(spec, address) from None
            if error.errno == errno.EACCES:
                raise BadOption(
                    f"--master_port {port} may not be used by this user",
                    why=f"binding {at(address, port)} gave: {error.strerror}",
                    next="choose a --master_port above 1023, the same on every rank",
                ) from None
            raise BadOption(
                f"rank 0 cannot listen at {at(address, port)}",
                why=f"{spec.named('master_addr')}; binding it gave: {error.strerror}",
                next="give rank 0's IP address as --master_addr, the same on every rank",
            ) from None
        return listener
    raise AddressNotLocal(
        f"rank 0 runs on {environment.host_name()}, but {spec.master_addr} is not an address of this host",
        why=f"{spec.named('master_addr')} resolves to {', '.join(addresses)}; "
        f"this host has {', '.join(sorted(interface_addresses()))}",
        next=f"start rank 0 on the host that has {addresses[0]}, or give every rank this host's --master_addr",
    )


def _family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def _port_in_use(spec: WorldSpec, address: str) -> PortInUse:
    if spec.master_port and probe(address, spec.master_port).answer is Answer.STORE:
        return PortInUse(
            f"another rank 0 is already running at {at(address, spec.master_port)}",
            why=f"a TCPStore answers there, held by {_port_owner(spec.master_port)}; this process is "
            f"{spec.named('rank')}",
            next=f"if this is another rank of the same run, say which: --rank 1 to {max(1, spec.world_size - 1)}\n"
            f"if it is another run, give all its ranks a port of its own: --master_port {_another(spec.master_port)}",
        )
    return PortInUse(
        f"rank 0 cannot listen at {at(address, spec.master_port)}: the port is in use",
        why=f"it is held by {_port_owner(spec.master_port)}",
        next=f"end that process, or give every rank another port: --master_port {_another(spec.master_port)}",
    )


def _another(port: int) -> int:
    return port + 1 if port < 65535 else port - 1


def _port_owner(port: int) -> str:
    import psutil

    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process that this user may not see"
    # A listener if there is one; else a connection out of this host, which may be given any port above 32767.
    for entry in sorted(sockets, key=lambda entry: entry.status != psutil.CONN_LISTEN):
        if entry.laddr and entry.laddr.port == port and entry.pid:
            try:
                return f"pid {entry.pid} ({entry.status}): {' '.join(psutil.Process(entry.pid).cmdline())}"
            except psutil.Error:
                return f"pid {entry.pid} ({entry.status})"
    return "a process of another user or container, or one that has ended a moment ago"


def probe(address: str, port: int) -> Probe:
    """Ask what listens at an address, joining nothing, in at most 5 s."""
    nonce = os.urandom(4)
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as connection:
            connection.settimeout(ANSWER_TIMEOUT)
            try:
                connection.sendall(_VALIDATE + _PING + nonce)
                reply = connection.recv(64)
            except TimeoutError:
                return Probe(address, Answer.MUTE)
            except OSError as error:
                return Probe(address, Answer.STRANGER, error.strerror or str(error))
    except ConnectionRefusedError:
        return Probe(address, Answer.REFUSED)
    except TimeoutError:
        return Probe(address, Answer.SILENT, "timed out")
    except OSError as error:
        return Probe(address, Answer.SILENT, error.strerror or str(error))
    if reply == nonce:
        return Probe(address, Answer.STORE)
    if not reply:
        return Probe(address, Answer.STRANGER, "it closed the connection")
    return Probe(address, Answer.STRANGER, repr(reply.decode("ascii", "backslashreplace"))[1:-1])


def wait_for_store(spec: WorldSpec, waiting: Waiting, rank_0_command: str) -> str:
    """Block until a store answers at rank 0's address; returns the IP address that answered.

    Args:
        rank_0_command: what starts rank 0, for the advice.

    Raises:
        MasterUnresolvable, MasterNotAStore: at once; MasterRefused, MasterUnreachable: at the deadline.
    """
    addresses = resolve(spec.master_addr)
    where = at(spec.master_addr, spec.master_port)
    resolved = "" if addresses == [spec.master_addr] else f" ({spec.master_addr} is {', '.join(addresses)})"
    while True:
        probes = [probe(address, spec.master_port) for address in addresses]
        for one in probes:
            if one.answer is Answer.STORE:
                return one.address
        worst = max(probes, key=lambda one: list(Answer).index(one.answer))
        if worst.answer in (Answer.STRANGER, Answer.MUTE):
            raise _not_a_store(spec, where, worst)
        refused = any(one.answer is Answer.REFUSED for one in probes)
        said = (
            f"nothing listens at {where}{resolved}: is rank 0 started?"
            if refused
            else f"no answer from {where}{resolved}: dropped, or no route ({worst.detail})"
        )
        waiting.about(said)
        waiting.advise([rank_0_command])
        if waiting.over:
            raise _never_came(spec, where, probes, waiting, rank_0_command if refused else None)
        time.sleep(min(POLL_EVERY, waiting.remaining))


def _not_a_store(spec: WorldSpec, where: str, found: Probe) -> MasterNotAStore:
    answered = "" if found.answer is Answer.MUTE else f": {found.detail}"
    return MasterNotAStore(
        f"what listens at {where} is not rank 0's store",
        why=f"asked as a TCPStore client at {found.address}, {found.answer.value}{answered}",
        next=f"check --master_addr and --master_port against rank 0's, or see what it is on {spec.master_addr}: "
        f"ss -ltnp 'sport = :{spec.master_port}'",
    )


def _never_came(
    spec: WorldSpec, where: str, probes: list[Probe], waiting: Waiting, rank_0_command: str | None
) -> MasterAddressError:
    tried = "; ".join(
        f"{at(one.address, spec.master_port)}: {one.answer.value}{f' ({one.detail})' if one.detail else ''}"
        for one in probes
    )
    if rank_0_command:
        return MasterRefused(
            f"rank 0 did not start listening at {where} within {waiting.waited:.0f} s",
            why=f"rank {spec.rank} on {environment.host_name()} tried {tried}",
            next=f"{rank_0_command}\nthen start this rank again; if rank 0 does run, compare its port with this one's",
        )
    return MasterUnreachable(
        f"no answer from rank 0's address {where} within {waiting.waited:.0f} s",
        why=f"rank {spec.rank} on {environment.host_name()} tried {tried}",
        next=f"open TCP port {spec.master_port} on rank 0's host, or check the route: ping {spec.master_addr}",
    )


def interface_addresses() -> dict[str, str]:
    """IP address -> interface, for every interface of this host."""
    import psutil

    return {
        address.address.split("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def route_to(address: str) -> tuple[str, str | None]:
    """This host's own address on the way to ``address``, and the interface that has it (None if unknown).

    Connecting a datagram socket sends nothing; it only asks the kernel's routing table.
    """
    with socket.socket(_family(address), socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        own = str(asking.getsockname()[0])
    return own, interface_addresses().get(own.split("%")[0])
