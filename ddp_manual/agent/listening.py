"""Rank 0's own side of its address: its listening socket there, and which process holds its port.

Under torchrun, whose own agent has a TCPStore at MASTER_PORT, rank 0's address is one key in that store. The client
here sends the few messages that this takes, as torch/csrc/distributed/c10d/TCPStoreBackend.hpp of torch 2.11 to 2.15
defines them, so that no torch has to be loaded.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import resource
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from datetime import datetime

import psutil

from ddp_manual.agent.find_rank_0 import VALIDATE, look_at, probe
from ddp_manual.agent.network_interface import family, interface_addresses, own_address
from ddp_manual.deadline import POLL_EVERY, Waiting
from ddp_manual.environment import from_variables, machine, user_variables
from ddp_manual.errors import (
    AddressNotLocal,
    BadOption,
    DdpManualError,
    LoopbackMaster,
    MasterLost,
    PortInUse,
    RankMissing,
)
from ddp_manual.messages import News
from ddp_manual.protocol.missing_ranks import situation
from ddp_manual.protocol.roll_call import MOST_NAMED
from ddp_manual.protocol.search import is_loopback
from ddp_manual.terminal import at
from ddp_manual.wire import LONGEST_LINE, decode
from ddp_manual.world_options import WorldSpec

# Connections that a rank keeps to processes of rank 0: one to its agent, at most two to torch's store in its worker.
CONNECTIONS_PER_RANK = 2
OWN_DESCRIPTORS = 100
# Of torchrun's TCPStore; the time is in seconds.
_SET, _GET, _CHECK, _READY = b"\x01", b"\x03", b"\x05", b"\0"
REPLY_TIMEOUT = 5.0


def refuse_loopback(spec: WorldSpec, addresses: list[str]) -> None:
    """Refuse a loopback address for a run of several hosts, because each host would find itself there.

    Raises:
        LoopbackMaster: all addresses are loopback, and a launcher's variables tell of several hosts.
    """
    several_hosts = from_variables.several_hosts(spec.world_size)
    if several_hosts is None or not all(map(is_loopback, addresses)):
        return
    mine = own_address()
    raise LoopbackMaster(
        f"rank 0's address {spec.master_addr} is this host's own loopback, and the run has several hosts",
        why=f"{spec.named('master_addr')} is {', '.join(addresses)} on every host; {several_hosts}",
        next="give every rank the address of rank 0's host that the others can reach"
        + (f"; if that is this one: --master_addr {mine}" if mine else " as --master_addr"),
    )


def raise_descriptor_limit(spec: WorldSpec) -> str:
    """Raise the soft limit of open files to the hard limit, and return it.

    Raises:
        BadOption: rank 0 could not hold the connections of all ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls its hard limit unlimited and accepts less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    needed = OWN_DESCRIPTORS + CONNECTIONS_PER_RANK * spec.world_size
    if spec.rank == 0 and soft < needed:
        raise BadOption(
            f"rank 0 on {machine.host_name()} may open {soft} files, and a run of {spec.world_size} ranks "
            f"needs {needed}",
            why=f"each rank keeps up to {CONNECTIONS_PER_RANK} connections to rank 0; the hard limit is {hard}",
            next=f"raise it before rank 0 is started: ulimit -n {needed}",
        )
    return str(soft)


async def listen(spec: WorldSpec, addresses: list[str], port: int) -> socket.socket:
    """Open rank 0's listening socket at the first of ``addresses`` that is this host's own, and at no other.

    Args:
        port: 0 for any free port.

    Raises:
        AddressNotLocal, PortInUse: the other ranks could not find rank 0 at the address it was given.
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
    # A listener if there is one; otherwise a connection out of this host, which may have any port above 32767.
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


# -- torchrun's store -------------------------------------------------------------------------------------------------


async def write_torchrun_address(spec: WorldSpec, attempt: str, address: str, port: int) -> None:
    """As rank 0, write where its agent listens.

    Args:
        attempt: differs for each time that the ranks of this torchrun join.
    """
    async with _connected(spec) as (reader, writer):
        writer.write(_SET + _key(attempt) + _text(json.dumps([address, port]).encode()))
        await _get(reader, writer, attempt)  # the reply shows that the store has it


async def read_torchrun_address(spec: WorldSpec, attempt: str, waiting: Waiting) -> tuple[str, int]:
    """As another rank, wait until rank 0 has written where its agent listens.

    Raises:
        RankMissing: rank 0 has not written it when the time is up. MasterLost: the store is gone.
    """
    where = f"torchrun's store at {spec.master_addr}:{spec.master_port}"
    async with _connected(spec) as (reader, writer):
        while (found := await _get(reader, writer, attempt)) is None:
            missing = RankMissing(
                f"rank 0 did not join within {waiting.waited:.0f} s",
                why=f"{where} answers, without rank 0's address",
                next="look at what rank 0 says, then start torchrun again",
            )
            waiting.wait_on(f"rank 0 has not said yet in {where} where it is", missing)
            await asyncio.sleep(POLL_EVERY)
    address, port = decode(found.decode())
    return str(address), int(port)


@asynccontextmanager
async def _connected(spec: WorldSpec) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    where = f"{spec.master_addr}:{spec.master_port}"
    try:
        opening = asyncio.open_connection(spec.master_addr, spec.master_port)
        reader, writer = await asyncio.wait_for(opening, REPLY_TIMEOUT)
    except (OSError, TimeoutError, asyncio.TimeoutError):
        # torchrun's agent listens before it starts any rank: if nothing listens, there is no torchrun.
        variables = user_variables.listed("TORCHELASTIC_USE_AGENT_STORE", "MASTER_ADDR", "MASTER_PORT")
        raise BadOption(
            f"variables of another launcher say that its agent hosts the store at {where}, but nothing listens there",
            why="; ".join([variables, *(spec.named(name) for name in ("world_size", "rank"))]),
            next="unset TORCHELASTIC_USE_AGENT_STORE RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT\n"
            "then start every rank again, with flags",
        ) from None
    writer.write(VALIDATE)
    try:
        yield reader, writer
    except (OSError, EOFError, TimeoutError, asyncio.TimeoutError) as error:
        raise MasterLost(
            f"torchrun's store at {where} is gone",
            why=f"asking it for rank 0's address gave: {error or type(error).__name__}",
            next="look at what torchrun says, then start it again",
        ) from None
    finally:
        writer.close()


async def _get(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, attempt: str) -> bytes | None:
    """Return the value of the key, or None while nobody has set it."""

    async def read(count: int) -> bytes:
        return await asyncio.wait_for(reader.readexactly(count), REPLY_TIMEOUT)

    writer.write(_CHECK + struct.pack("<Q", 1) + _key(attempt))
    if await read(1) != _READY:
        return None
    writer.write(_GET + _key(attempt))
    (length,) = struct.unpack("<Q", await read(8))
    return await read(min(length, LONGEST_LINE))


def _key(attempt: str) -> bytes:
    """torch's own clients put a slash before every key."""
    return _text(f"/ddp_manual/{attempt}/coordinator".encode())


def _text(content: bytes) -> bytes:
    return struct.pack("<Q", len(content)) + content
