"""Rank 0's listening socket: on its own address only, or the reason why it cannot be had and who holds the port."""

from __future__ import annotations

import errno
import socket
from datetime import datetime

from ddp_manual import environment
from ddp_manual.errors import AddressNotLocal, BadOption, DdpManualError, PortInUse
from ddp_manual.rendezvous.address import at, family, interface_addresses
from ddp_manual.rendezvous.observer import Observer
from ddp_manual.rendezvous.probing import Answer, probe
from ddp_manual.world_spec import WorldSpec


def listen(spec: WorldSpec, addresses: list[str]) -> socket.socket:
    """Rank 0's listening socket, bound to the first of its ``addresses`` that is this host's own, and to no other.

    Raises:
        AddressNotLocal, PortInUse: rank 0 cannot be found at the address it was given.
        BadOption: this user may not listen on that port.
    """
    port = 0 if spec.alone else spec.master_port
    for address in addresses:
        listener = socket.socket(family(address), socket.SOCK_STREAM)
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


def _port_in_use(spec: WorldSpec, address: str) -> PortInUse:
    if spec.master_port and probe(address, spec.master_port).answer is Answer.STORE:
        return PortInUse(
            f"another rank 0 is already running at {at(address, spec.master_port)}",
            why=f"a TCPStore answers there, held by {_port_owner(spec.master_port)}\n"
            f"{_run_there(address, spec.master_port)}; this process is {spec.named('rank')}",
            next=f"if this is another rank of the same run, say which: --rank 1 to {max(1, spec.world_size - 1)}\n"
            f"if it is another run, give all its ranks a port of its own: --master_port {_another(spec.master_port)}",
        )
    return PortInUse(
        f"rank 0 cannot listen at {at(address, spec.master_port)}: the port is in use",
        why=f"it is held by {_port_owner(spec.master_port)}",
        next=f"end that process, or give every rank another port: --master_port {_another(spec.master_port)}",
    )


def _run_there(address: str, port: int) -> str:
    try:
        found = Observer(address, port).observe()
    except DdpManualError as error:
        return f"it is no run of this program: {error.what}"
    return f"it is run {found.hello.run_id}, {found.situation()}"


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
                owner = psutil.Process(entry.pid)
                started = datetime.fromtimestamp(owner.create_time()).strftime("%Y-%m-%d %H:%M:%S")
                # On one line: a script after ``python -c`` has several, which would pass for ours.
                command = " ".join(" ".join(owner.cmdline()).split())
                return f"pid {entry.pid} ({entry.status}), started {started}: {command}"
            except psutil.Error:
                return f"pid {entry.pid} ({entry.status})"
    return "a process of another user or container, or one that has ended a moment ago"
