"""Rank 0's name: which IP addresses it has, and the wait until it has one."""

from __future__ import annotations

import asyncio
import ipaddress
import re
import socket
import threading
from collections.abc import Callable
from contextlib import suppress

from ddp_manual.agent.network_interface import own_address
from ddp_manual.deadline import POLL_EVERY, Waiting
from ddp_manual.environment import machine
from ddp_manual.errors import MasterUnresolvable
from ddp_manual.protocol.search_for_rank_0 import is_loopback

MASTER_ADDR = "master_addr"
# Seconds until a name that has no address is looked up once more.
AGAIN_AFTER = 1.0
# Seconds. The resolver itself waits 5 to 40 s for a name server that does not answer: see resolv.conf(5).
ANSWERED_WITHIN = 5.0


def resolve(host: str, option: str = MASTER_ADDR) -> list[str]:
    """Return the IP addresses of a host name, in the order in which rank 0 should try to listen at them.

    A host's own name may be a loopback address on that host (Debian writes 127.0.1.1 into /etc/hosts), alone or beside
    a real one. Other hosts know another address for it, so this host's real address comes first.

    Args:
        option: the option that names the host.

    Raises:
        MasterUnresolvable: the name has no address.
    """
    refuse_malformed(host, option)
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except OSError as error:
        raise _unresolvable(host, f"gave: {error.strerror or error}", option) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    # IPv6's link-local addresses are of use with an interface only; a host's own name may have one for each of them.
    addresses = [one for one in addresses if not one.lower().startswith("fe80:")] or addresses
    # Many scripts put MASTER_ADDR into a URL, where IPv6's address of localhost would need brackets. Of other addresses
    # the system has one first that it can reach.
    addresses.sort(key=lambda one: is_loopback(one) and 1 + (":" in one))
    if is_own_name(host) and all(map(is_loopback, addresses)) and (real := own_address()) is not None:
        addresses.insert(0, real)
    return addresses


def is_own_name(host: str) -> bool:
    """Return whether this is the name of this host, with or without a domain."""
    first = host.split(".")[0].lower()
    # A machine that nobody has named is called localhost: for others that name means themselves.
    return not host[0].isdigit() and first == machine.host_name().split(".")[0].lower() and first != "localhost"


def refuse_malformed(host: str, option: str = MASTER_ADDR) -> None:
    """Raise MasterUnresolvable for a name or an address that no host can have, however long a rank waits for it."""
    with suppress(OSError, UnicodeError):
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST)
        address = str(found[0][4][0])
        if host.isdigit() and ipaddress.ip_address(address) in ipaddress.ip_network("0.0.0.0/8"):
            raise MasterUnresolvable(
                f"{_address(option)} {host!r} is all digits, and is read as the IP address {address}",
                why="the resolver takes a number for an address, not for a name; "
                "no host has an address that begins with 0",
                next=f"give the name with its domain, such as {host}.example.org, or rank 0's IP address",
            )
        return
    try:
        labels = host.removesuffix(".").encode("idna").decode().split(".")
    except UnicodeError as error:
        labels, reason = [], f"it is not a host name: {error}"
    else:
        reason = "a host name has only letters, digits and hyphens, between dots"
        if re.fullmatch(r"\d+", labels[-1]):
            reason = "its last part is a number, as in an IP address; but it is not an IP address"
        elif all(re.fullmatch(r"[A-Za-z0-9_-]+", label) for label in labels):
            return
    port = "; the port is given as --master_port" if re.search(r":\d+/?$", host) else ""
    raise MasterUnresolvable(
        f"{_address(option)} {host!r} can have no IP address",
        why=reason,
        next=f"give rank 0's host name or IP address as --{option}{port}",
    )


def _address(option: str) -> str:
    return "rank 0's address" if option == MASTER_ADDR else f"--{option}"


def _unresolvable(host: str, found: str, option: str = MASTER_ADDR) -> MasterUnresolvable:
    return MasterUnresolvable(
        f"{_address(option)} {host!r} has no IP address",
        why=f"looking it up on {machine.host_name()} {found}",
        next=f"check with: getent hosts {host}\nor give rank 0's IP address as --{option}",
    )


async def look_up(
    host: str, waiting: Waiting, log: Callable[[str], None], *, again: bool, option: str = MASTER_ADDR
) -> list[str]:
    """Return what ``resolve`` returns, and log the addresses.

    Args:
        again: whether to look up a name without an address again until the time is up: on Kubernetes, rank 0's name may
            get its address a minute after the other ranks have started. This host's own name with a domain, such as
            that of rank 0 of a TrainJob, is looked up again in any case.
        option: the option that names the host.

    Raises:
        MasterUnresolvable: see ``resolve``; or no name server answers, and the time is up.
    """
    refuse_malformed(host, option)
    while True:
        looking = resolve_in_thread(host, option)
        while not (await asyncio.wait([looking], timeout=POLL_EVERY))[0]:
            waiting.about(f"no name server has answered yet which IP address {_address(option)} {host} has")
            if waiting.over and waiting.waited > ANSWERED_WITHIN:
                raise _unresolvable(host, f"has taken {waiting.waited:.0f} s: no name server answers", option)
        found = looking.result()
        if isinstance(found, list):
            break
        own = is_own_name(host) and "." in host
        if waiting.over or not (again or own):
            raise found
        started = "" if own else ", and is rank 0 started"
        waiting.about(f"{found.what} yet ({found.why}): is the name right{started}?")
        await asyncio.sleep(min(AGAIN_AFTER, waiting.remaining))
    if host.isdigit():  # a number is never looked up: the resolver reads it as a 32-bit address
        log(f"{_address(option)} {host} is all digits: it is read as the IP address {found[0]}, not as a name")
    if found != [host]:
        both = is_loopback(found[-1]) and not is_loopback(found[0])
        first = f" ({found[0]} first: other hosts cannot reach {found[-1]})" if both else ""
        log(f"{_address(option)} {host} is {', '.join(found)}{first}")
    return found


def resolve_in_thread(host: str, option: str = MASTER_ADDR) -> asyncio.Future[list[str] | MasterUnresolvable]:
    """Resolve a name in a daemon thread; return the future of the result. A process that ends does not wait for such a
    thread, while asyncio's executor would keep the process until the name server answers."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[list[str] | MasterUnresolvable] = loop.create_future()

    def finish(found: list[str] | MasterUnresolvable) -> None:
        if not future.done():
            future.set_result(found)

    def run() -> None:
        found: list[str] | MasterUnresolvable
        try:
            found = resolve(host, option)
        except MasterUnresolvable as error:
            found = error
        except Exception as error:  # a library may raise any; without an answer this rank would wait for ever
            found = _unresolvable(host, f"gave: {type(error).__name__}: {error}", option)
        with suppress(RuntimeError):  # the loop has ended meanwhile
            loop.call_soon_threadsafe(finish, found)

    threading.Thread(target=run, daemon=True).start()
    return future
