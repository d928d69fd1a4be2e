"""This host's network interfaces: the one on the way to rank 0, or the one that GLOO_ or NCCL_SOCKET_IFNAME names."""

from __future__ import annotations

import ipaddress
import socket
from contextlib import suppress

import psutil

from ddp_manual import launchers
from ddp_manual.errors import BadOption


class OwnAddress:
    """This rank's address and interface, for the other ranks, gloo and NCCL: the user's choice, or the way to rank 0.

    Args:
        rank_0: rank 0's IP address.

    Raises:
        BadOption: a variable names an interface that has no address here.
    """

    def __init__(self, rank_0: str, backend: str) -> None:
        self.address, self.interface = route_to(rank_0)
        self.source = f"{self.interface}, on the way to {rank_0}"
        names, variable = launchers.chosen_interfaces(backend)
        if names:
            self.address, self.interface = _chosen_address(names, variable, backend)
            self.source = f"{self.interface}, from {variable}"
        elif self.interface is not None:
            # gloo and NCCL get the interface's name and take its first address, perhaps not the one on the way.
            self.address, _ = _chosen_address([self.interface], variable, backend="gloo")
        self.family = "IPv6" if ":" in self.address else "IPv4"


def _chosen_address(names: list[str], variable: str, backend: str) -> tuple[str, str]:
    """Return address and interface: NCCL takes a name as a prefix, gloo in full, and both prefer IPv4 addresses."""
    mine = interface_addresses()
    found = [
        (address, interface)
        for address, interface in mine.items()
        if interface in names or (backend == "nccl" and interface.startswith(tuple(names)))
    ]
    if not found:
        raise BadOption(
            f"{variable}={','.join(names)} names no interface of {launchers.host_name()} that has an address",
            why=f"this host has {', '.join(f'{name} ({address})' for address, name in mine.items())}",
            next=f"unset {variable}, and the interface on the way to rank 0 is taken",
        )
    return min(found, key=lambda pair: family(pair[0]))


def interface_addresses() -> dict[str, str]:
    """Return IP address -> interface, for every interface of this host."""
    return {
        address.address.split("%")[0]: interface
        for interface, addresses in psutil.net_if_addrs().items()
        for address in addresses
        if address.family in (socket.AF_INET, socket.AF_INET6)
    }


def route_to(address: str) -> tuple[str, str | None]:
    """Return this host's own address on the way to ``address``, and the interface that has it (None if unknown).

    Connecting a datagram socket sends nothing; it only asks the kernel's routing table.
    """
    with socket.socket(family(address), socket.SOCK_DGRAM) as asking:
        asking.connect((address, 9))
        own = str(asking.getsockname()[0])
    return own, interface_addresses().get(own.split("%")[0])


def own_address() -> str | None:
    """Return this host's IP address on its default route, or its first that is neither loopback nor link-local."""
    candidates = [address for address in interface_addresses() if not ipaddress.ip_address(address).is_link_local]
    for anywhere in ("192.0.2.1", "2001:db8::1"):  # addresses reserved for documentation: nothing is sent there
        with suppress(OSError):
            candidates.insert(0, route_to(anywhere)[0])
    real = [address for address in candidates if not is_loopback(address)]
    return min(real, key=lambda address: ":" in address, default=None)


def is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.split("%")[0]).is_loopback


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET


def at(address: str, port: int) -> str:
    """``10.0.0.1:29500``, ``[fe80::1]:29500``"""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
