"""This host's network interfaces: the one on the way to rank 0, or the one that GLOO_ or NCCL_SOCKET_IFNAME names."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BadOption
from ddp_manual.protocol.search_for_rank_0 import is_loopback


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
        names, variable = user_variables.chosen_interfaces(backend)
        if names:
            self.address, self.interface = _chosen_address(names, variable, backend)
            self.source = f"{self.interface}, from {variable}"
        elif self.interface is not None:
            # gloo and NCCL get the interface's name and take its first address, maybe not the one on the way to rank 0.
            first, _ = _chosen_address([self.interface], variable, backend="gloo")
            if is_loopback(first) and not is_loopback(self.address):  # a router's host may have its address on lo
                self.interface = None
            else:
                self.address = first
        self.family = "IPv6" if ":" in self.address else "IPv4"
        self.variables = {}
        """The variables for gloo and NCCL; each applies unless the user has set it."""
        self.wrong_for_nccl = None
        """Why NCCL has to be told this interface; None if it finds a right one by itself, or has been told one."""
        if self.interface is not None:
            self.variables["GLOO_SOCKET_IFNAME"] = self.interface
            if not nccl_has_been_told():
                self.wrong_for_nccl = wrong_for_nccl(running_networks(), self.interface, rank_0)
        if self.wrong_for_nccl is not None:
            # NCCL takes its variable as a prefix (eth1 also means eth10) unless it begins with "=".
            self.variables["NCCL_SOCKET_IFNAME"] = f"={self.interface}"


# How the names of interfaces begin that NCCL takes only if the host has no other interface.
NCCL_AVOIDS = ("docker", "lo", "virbr")
IpNetwork = ipaddress.IPv4Network | ipaddress.IPv6Network


def wrong_for_nccl(networks: Mapping[str, Sequence[IpNetwork]], interface: str, rank_0: str) -> str | None:
    """Return why the interface on which NCCL would listen by itself is the wrong one; None if it is right.

    NCCL takes all interfaces whose names begin with "ib", otherwise all except docker*, lo* and virbr*, otherwise one
    of these, and listens on the first (https://docs.nvidia.com/deeplearning/nccl/user-guide/docs/env.html; the order
    is that of ncclFindInterfaces in its src/misc/socket.cc). If NCCL is told one interface, it does not use the others,
    which may be much of the bandwidth of a host with several.

    Args:
        networks: interface -> the networks of its addresses, in the kernel's order.
        interface: the interface on the way to ``rank_0``, an IP address.
    """

    def order(name: str) -> int:
        if name.startswith("ib"):
            return 0
        return next((2 + at for at, prefix in enumerate(NCCL_AVOIDS) if name.startswith(prefix)), 1)

    first = min(networks, key=order, default=interface)  # of names with equal order, the first
    address = ipaddress.ip_address(rank_0.split("%")[0])
    if first == interface:
        return None
    if address.is_loopback:
        return f"by itself it would listen on {first}, although all ranks are on this host"
    # Hosts that have InfiniBand share it, whatever the network of rank 0's address.
    if first.startswith("ib") or any(address in network for network in networks[first]):
        return None
    return f"by itself it would listen on {first}, which is not on the network of rank 0 at {rank_0}"


def nccl_has_been_told() -> bool:
    """Return whether the user has chosen NCCL's interfaces by NCCL_SOCKET_IFNAME, or an administrator by NCCL's own
    file: if this package set the variable, it would override that file."""
    variable, set_here = "NCCL_SOCKET_IFNAME", user_variables.network_variables()
    lines = []
    for path in (Path(set_here.get("NCCL_CONF_FILE") or "~/.nccl.conf"), Path("/etc/nccl.conf")):
        with suppress(OSError, RuntimeError):
            lines += path.expanduser().read_text(errors="replace").splitlines()
    return variable in set_here or any(line.strip().startswith(f"{variable}=") for line in lines)


def running_networks() -> dict[str, list[IpNetwork]]:
    """Return interface -> the networks of its addresses, of interfaces that run, in the kernel's order: IPv4 first."""
    states = psutil.net_if_stats()
    found: dict[str, list[IpNetwork]] = {}
    for interface, addresses in psutil.net_if_addrs().items():
        for address in addresses if interface in states and states[interface].isup else ():
            if address.family in (socket.AF_INET, socket.AF_INET6):
                own = ipaddress.ip_address(address.address.split("%")[0])
                with suppress(ValueError):  # a netmask that ``ipaddress`` cannot read
                    mask = int(ipaddress.ip_address(address.netmask)) if address.netmask else -1
                    bits = own.max_prefixlen if mask < 0 else mask.bit_count()
                    found.setdefault(interface, []).append(ipaddress.ip_network(f"{own}/{bits}", strict=False))
    return found


def _chosen_address(names: list[str], variable: str, backend: str) -> tuple[str, str]:
    """Return address and name of an interface in ``names``: NCCL takes a name as a prefix, gloo in full; IPv4 first."""
    mine = interface_addresses()
    found = [
        (address, interface)
        for address, interface in mine.items()
        if interface in names or (backend == "nccl" and interface.startswith(tuple(names)))
    ]
    if not found:
        raise BadOption(
            f"{variable}={','.join(names)} names no interface of {machine.host_name()} that has an address",
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


def own_address(at: str | None = None) -> str | None:
    """Return the first of ``own_addresses()``, that on the default route if there is one; None if the list is empty.

    Args:
        at: only addresses count at which a socket that listens at this one, such as ``0.0.0.0``, is reached.
    """
    reached = (one for one in own_addresses() if at is None or takes_both(at) or family(one) == family(at))
    return next(reached, None)


def own_addresses() -> list[str]:
    """Return this host's IP addresses that other hosts may reach, the one on the default route first, IPv4 first."""
    candidates = [address for address in interface_addresses() if not ipaddress.ip_address(address).is_link_local]
    for anywhere in ("192.0.2.1", "2001:db8::1"):  # addresses reserved for documentation: nothing is sent there
        with suppress(OSError):
            candidates.insert(0, route_to(anywhere)[0])
    real = dict.fromkeys(address for address in candidates if not is_loopback(address))
    return sorted(real, key=lambda address: ":" in address)


def is_everywhere(address: str) -> bool:
    """Return whether an address stands for all addresses of a host, as 0.0.0.0 does."""
    return ipaddress.ip_address(address.split("%")[0]).is_unspecified


def takes_both(address: str) -> bool:
    """Return whether a socket that listens at an address is to be reached over IPv4 and IPv6, as at ``::``."""
    return ":" in address and is_everywhere(address) and socket.has_dualstack_ipv6()


def family(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in address else socket.AF_INET
