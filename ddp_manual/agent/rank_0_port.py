"""Rank 0's own side of its address: its listening socket there, and which process holds its port."""

from __future__ import annotations

import errno
import os
import socket
from datetime import datetime

import psutil

from ddp_manual.agent.network_interface import family, interface_addresses, own_address, takes_both
from ddp_manual.agent.wait_for_rank_0 import look_at, probe
from ddp_manual.environment import launcher_variables, machine, user_variables
from ddp_manual.errors import (
    AddressNotLocal,
    BadOption,
    DdpManualError,
    LoopbackMaster,
    PortInUse,
)
from ddp_manual.messages import News
from ddp_manual.protocol.missing_ranks import situation
from ddp_manual.protocol.roll_call import MOST_NAMED
from ddp_manual.protocol.search_for_rank_0 import is_loopback
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wording import at


def refuse_loopback(spec: WorldSpec, addresses: list[str]) -> None:
    """Refuse a loopback address for a run of several hosts, because each host would find itself there.

    Raises:
        LoopbackMaster: all addresses are loopback, and a launcher's variables tell of several hosts.
    """
    several_hosts = launcher_variables.several_hosts(spec.world_size)
    if several_hosts is None or not all(map(is_loopback, addresses)):
        return
    mine = own_address()
    raise LoopbackMaster(
        f"rank 0's address {spec.master_addr} is this host's own loopback, and the run has several hosts",
        why=f"{spec.named('master_addr')} is {', '.join(addresses)} on every host; {several_hosts}",
        next="give every rank the address of rank 0's host that the others can reach"
        + (f"; if that is this one: --master_addr {mine}" if mine else " as --master_addr"),
    )


async def listen(spec: WorldSpec, addresses: list[str], port: int) -> socket.socket:
    """Open rank 0's listening socket at the first of ``addresses`` that is this host's own, and at no other.

    Args:
        port: 0 for any free port.

    Raises:
        AddressNotLocal, PortInUse: rank 0 cannot listen where the other ranks look for it.
        BadOption: this user may not listen on that port.
    """
    for address in addresses:
        try:
            # create_server sets SO_REUSEADDR: a run that has just ended leaves its port in TIME_WAIT for a minute.
            both = takes_both(address)
            return socket.create_server((address, port), family=family(address), backlog=4096, dualstack_ipv6=both)
        except OSError as error:
            words = os.strerror(error.errno or 0)
            is_without_family = error.errno == errno.EAFNOSUPPORT and len(addresses) > 1
            if error.errno == errno.EADDRNOTAVAIL or is_without_family:
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
    name = "listen_addr" if spec.listen_addr else "master_addr"
    mine = own_address() or "an address of its network"
    next = f"start rank 0 on the host that has {addresses[0]}"
    if machine.in_container():
        next += (
            "; if this container runs there, start it in that host's network, such as with docker's --network host\n"
            f"or publish port {port} and listen inside: --listen_addr {mine}; "
            "gloo and NCCL must then reach the containers of all ranks directly"
        )
    else:
        next += (
            f", or give every rank this host's --master_addr {mine}\n"
            f"if {addresses[0]} is forwarded to this host: --listen_addr {mine}"
        )
    raise AddressNotLocal(
        f"rank 0 runs on {machine.host_name()}, but {getattr(spec, name)} is not an address of this host",
        why=f"{spec.named(name)} resolves to {', '.join(addresses)}; "
        f"this host has {', '.join(sorted(interface_addresses()))}",
        next=next,
    )


async def _port_in_use(spec: WorldSpec, address: str) -> PortInUse:
    port = spec.master_port
    another = f"--master_port {port + 1 if port < 65535 else port - 1}"
    there = await probe(address, port)
    if there.connection is None:
        return PortInUse(
            f"rank 0 cannot listen at {at(address, port)}: the port is in use",
            why=f"it is held by {_port_owner(port)}",
            next=f"end that process, or give every rank another port: {another}",
        )
    try:
        seen = await look_at(there, at(address, port), user_variables.token(spec.token_file))
        named = [f"{line['rank']} ({line['host']})" for line in seen["ranks"][:MOST_NAMED]]
        news = News(seen["here"], seen["left_out"], named, missing=seen["missing"], loading=seen["loading"])
        run = f"it is run {seen['run']['run_id']}, {situation(news, seen['run']['world_size'])}"
    except DdpManualError as error:
        run = f"of its run nothing is known: {error.what}"
    finally:
        there.connection.close()
    last = spec.world_size - 1
    is_typed = not spec.source("rank").startswith("from ")
    say_which = f"if this is another rank of the same run, say which: --rank 1{f' to {last}' if last > 1 else ''}\n"
    return PortInUse(
        f"another rank 0 is already running at {at(address, port)}",
        why=f"it answers there, held by {_port_owner(port)}\n{run}; this process is {spec.named('rank')}",
        next=f"{say_which if is_typed else ''}if it is another run, give all its ranks a port of its own: {another}",
    )


def _port_owner(port: int) -> str:
    try:
        sockets = psutil.net_connections(kind="tcp")
    except psutil.AccessDenied:
        return "a process that this user may not see"
    # A process that listens, if any; otherwise one with an outgoing connection: its port may be any above 32767.
    for entry in sorted(sockets, key=lambda entry: entry.status != psutil.CONN_LISTEN):
        if entry.laddr and entry.laddr.port == port and entry.pid:
            try:
                owner = psutil.Process(entry.pid)
                started = datetime.fromtimestamp(owner.create_time()).strftime("%Y-%m-%d %H:%M:%S")
                # On one line: a script after ``python -c`` has several, which would look like lines of this error.
                command = " ".join(" ".join(owner.cmdline()).split())
                return f"pid {entry.pid} ({entry.status}), started {started}: {command}"
            except psutil.Error:
                return f"pid {entry.pid} ({entry.status})"
    return "a process of another user or container, or one that has ended a moment ago"
