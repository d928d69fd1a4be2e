"""Rank 0's address: what it resolves to, whether it can be anybody's, and this host's own way to it."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Callable
from contextlib import suppress

import psutil

from ddp_manual import launchers
from ddp_manual.errors import LoopbackMaster, MasterUnresolvable
from ddp_manual.world_spec import WorldSpec


def resolve(host: str, say: Callable[[str], None] = lambda line: None) -> list[str]:
    """The IP addresses of a host name, those first that rank 0 should listen on.

    A host whose own name is only a loopback address to itself (Debian writes 127.0.1.1 into /etc/hosts) is known to
    others by another one, so its real address comes first then.

    Raises:
        MasterUnresolvable: it has none, or one that no host can have.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        words = getattr(error, "strerror", None) or str(error)
        raise MasterUnresolvable(
            f"rank 0's address {host!r} has no IP address",
            why=f"looking it up on {launchers.host_name()} gave: {words}",
            next=f"check with: getent hosts {host}\nor give rank 0's IP address as --master_addr",
        ) from None
    addresses = list(dict.fromkeys(str(entry[4][0]) for entry in found))
    if host.isdigit():  # which is never looked up: it is read as one 32-bit number
        if ipaddress.ip_address(addresses[0]) in ipaddress.ip_network("0.0.0.0/8"):
            raise MasterUnresolvable(
                f"rank 0's address {host!r} is all digits, and is read as the IP address {addresses[0]}",
                why="the resolver takes a number for an address, not for a name; "
                "no host has an address that begins with 0",
                next=f"give the name with its domain, such as {host}.example.org, or rank 0's IP address",
            )
        say(f"rank 0's address {host} is all digits: it is read as the IP address {addresses[0]}, not as a name")
    if _is_own_name(host) and all(map(is_loopback, addresses)) and (real := own_address()) is not None:
        addresses.insert(0, real)
    return addresses


def resolved(host: str, addresses: list[str]) -> str:
    """What ``resolve`` made of a name, in words; empty for an IP address."""
    if addresses == [host]:
        return ""
    own_name = _is_own_name(host) and len(addresses) > 1 and is_loopback(addresses[-1])
    first = f" ({addresses[0]} first: other hosts cannot reach {addresses[-1]})" if own_name else ""
    return f"rank 0's address {host} is {', '.join(addresses)}{first}"


def _is_own_name(host: str) -> bool:
    """Also with its domain, or without."""
    return not host[0].isdigit() and host.split(".")[0].lower() == launchers.host_name().split(".")[0].lower()


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def own_address() -> str | None:
    """This host's IP address on its default route, else its first that is neither loopback nor link-local."""
    candidates = [address for address in interface_addresses() if not ipaddress.ip_address(address).is_link_local]
    for anywhere in ("192.0.2.1", "2001:db8::1"):  # addresses for documentation: nothing is sent there
        with suppress(OSError):
            candidates.insert(0, route_to(anywhere)[0])
    real = [address for address in candidates if not is_loopback(address)]
    return min(real, key=lambda address: ":" in address, default=None)


def refuse_loopback(spec: WorldSpec, addresses: list[str]) -> None:
    """A loopback address means each host itself, so with several hosts it cannot be rank 0's.

    Raises:
        LoopbackMaster: it is one, and a launcher's variables tell of several hosts.
    """
    several_hosts = launchers.launcher_hosts(spec.world_size)
    if several_hosts is None or not all(map(is_loopback, addresses)):
        return
    mine = own_address()
    raise LoopbackMaster(
        f"rank 0's address {spec.master_addr} is this host's own loopback, and the run has several hosts",
        why=f"{spec.named('master_addr')} is {', '.join(addresses)} on every host; {several_hosts}",
        next="give every rank the address of rank 0's host that the others can reach"
        + (f"; if that is this one: --master_addr {mine}" if mine else " as --master_addr"),
    )


def at(address: str, port: int) -> str:
    """``10.0.0.1:29500``, ``[fe80::1]:29500``"""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def interface_addresses() -> dict[str, str]:
    """IP address -> interface, for every interface of this host."""
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
    with socket.socket(family(address), socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        own = str(asking.getsockname()[0])
    return own, interface_addresses().get(own.split("%")[0])
