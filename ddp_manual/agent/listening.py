"""Rank 0's listening socket: on its own address only, or the reason why it cannot be had and who holds the port."""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime

import psutil

from ddp_manual import launchers
from ddp_manual.agent.address import at, family, interface_addresses
from ddp_manual.agent.observer import look_at
from ddp_manual.agent.probe import Answer, Probe, probe
from ddp_manual.agent.roll_call import MOST_NAMED, situation
from ddp_manual.errors import AddressNotLocal, BadOption, DdpManualError, PortInUse
from ddp_manual.world_spec import WorldSpec


async def listen(spec: WorldSpec, addresses: list[str], port: int) -> socket.socket:
    """Rank 0's listening socket, bound to the first of its ``addresses`` that is this host's own, and to no other.

    Args:
        port: 0 for any that is free.

    Raises:
        AddressNotLocal, PortInUse: rank 0 cannot be found at the address it was given.
        BadOption: this user may not listen on that port.
    """
    for address in addresses:
        try:
            # With SO_REUSEADDR: a run that has just ended leaves its port in TIME_WAIT for a minute.
            return socket.create_server((address, port), family=family(address), backlog=4096)
        except OSError as error:
            words = os.strerror(error.errno or 0)
            if error.errno == errno.EADDRNOTAVAIL:
                continue
            if error.errno == errno.EADDRINUSE:
                raise await _port_in_use(spec, address) from None
            if error.errno == errno.EACCES:
                raise BadOption(
                    f"--master_port {port} may not be used by this user",
                    why=f"binding {at(address, port)} gave: {words}",
                    next="choose a --master_port above 1023, the same on every rank",
                ) from None
            raise BadOption(
                f"rank 0 cannot listen at {at(address, port)}",
                why=f"{spec.named('master_addr')}; binding it gave: {words}",
                next="give rank 0's IP address as --master_addr, the same on every rank",
            ) from None
    raise AddressNotLocal(
        f"rank 0 runs on {launchers.host_name()}, but {spec.master_addr} is not an address of this host",
        why=f"{spec.named('master_addr')} resolves to {', '.join(addresses)}; "
        f"this host has {', '.join(sorted(interface_addresses()))}",
        next=f"start rank 0 on the host that has {addresses[0]}, or give every rank this host's --master_addr",
    )


async def _port_in_use(spec: WorldSpec, address: str) -> PortInUse:
    port = spec.master_port
    another = f"--master_port {port + 1 if port < 65535 else port - 1}"
    there = await probe(address, port)
    if there.answer in (Answer.GREETED, Answer.OVER):
        return PortInUse(
            f"another rank 0 is already running at {at(address, port)}",
            why=f"it answers there, held by {_port_owner(port)}\n"
            f"{await _run_there(there, spec)}; this process is {spec.named('rank')}",
            next=f"if this is another rank of the same run, say which: --rank 1 to {max(1, spec.world_size - 1)}\n"
            f"if it is another run, give all its ranks a port of its own: {another}",
        )
    return PortInUse(
        f"rank 0 cannot listen at {at(address, port)}: the port is in use",
        why=f"it is held by {_port_owner(port)}",
        next=f"end that process, or give every rank another port: {another}",
    )


async def _run_there(there: Probe, spec: WorldSpec) -> str:
    if there.connection is None:
        return "its run is ending"
    try:
        seen = await look_at(there, at(there.address, spec.master_port), launchers.token(spec.token_file))
    except DdpManualError as error:
        return f"of its run nothing is known: {error.what}"
    finally:
        there.connection.close()
    named = [f"{line['rank']} ({line['host']})" for line in seen["ranks"][:MOST_NAMED]]
    return f"it is run {seen['run']['run_id']}, {situation({**seen, 'named': named}, seen['run']['world_size'])}"


def _port_owner(port: int) -> str:
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
