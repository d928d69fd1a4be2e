"""What a rank can know of its host before it joins: its interface on the way to rank 0, how many files may be open, how
long a look-up by address takes, and what code and versions would run here. Nothing is imported to know them."""

from __future__ import annotations

import hashlib
import platform
import resource
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import ddp_manual
from ddp_manual import launchers
from ddp_manual.agent.address import family, interface_addresses, route_to
from ddp_manual.errors import BadOption
from ddp_manual.world_spec import WorldSpec

# Connections a rank keeps to a process of rank 0: one to its agent; to its worker, torch's store, at most two.
CONNECTIONS_PER_RANK = 2
OWN_DESCRIPTORS = 100
PACKAGE = Path(ddp_manual.__file__).parent
DIGEST_BYTES = 6


class OwnAddress:
    """This rank's address and interface, which the other ranks, gloo and NCCL are to use: the user's choice, else the
    way to rank 0.

    Args:
        rank_0: rank 0's IP address.

    Raises:
        BadOption: the interface that a variable names has no address here.
    """

    def __init__(self, rank_0: str, backend: str) -> None:
        self.address, self.interface = route_to(rank_0)
        self.source = f"{self.interface}, on the way to {rank_0}"
        names, variable = launchers.chosen_interfaces(backend)
        if names:
            self.address, self.interface = _chosen_address(names, variable, backend)
            self.source = f"{self.interface}, from {variable}"
        elif self.interface is not None:
            # gloo and NCCL are told the interface, and take its first address, which need not be the one on the way.
            self.address, _ = _chosen_address([self.interface], variable, backend="gloo")
        self.family = "IPv6" if ":" in self.address else "IPv4"


def _chosen_address(names: list[str], variable: str, backend: str) -> tuple[str, str]:
    """NCCL takes a name as a prefix, gloo in full; an interface's IPv4 address comes first for both."""
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


def raise_descriptor_limit(spec: WorldSpec) -> str:
    """Raise the soft limit of open files to the hard one; returns what it is.

    Raises:
        BadOption: rank 0 could not hold the connections of all ranks.
    """
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls its hard limit unlimited and takes less
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    needed = OWN_DESCRIPTORS + CONNECTIONS_PER_RANK * spec.world_size
    if spec.rank == 0 and soft < needed:
        raise BadOption(
            f"rank 0 on {launchers.host_name()} may open {soft} files, and a run of {spec.world_size} ranks "
            f"needs {needed}",
            why=f"each rank keeps up to {CONNECTIONS_PER_RANK} connections to rank 0; the hard limit is {hard}",
            next=f"raise it before rank 0 is started: ulimit -n {needed}",
        )
    return str(soft)


def installed_versions() -> dict[str, str | None]:
    """torch's, and Python's minor one."""
    try:
        torch: str | None = version("torch")
    except PackageNotFoundError:
        torch = None
    return {"torch": torch, "python": ".".join(platform.python_version_tuple()[:2])}


def code_digests(script: Path | None) -> dict[str, str]:
    """Part of the program -> digest of its source, so that a part that differs can be named.

    Args:
        script: the user's own, which then has to be the same on every rank.
    """
    parts: dict[str, Any] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        digest = parts.setdefault(f"ddp_manual/{relative.parts[0]}", hashlib.sha256())
        digest.update(f"{relative}\n".encode() + path.read_bytes())
    if script is not None:
        parts[script.name] = hashlib.sha256(script.read_bytes())
    return {name: digest.hexdigest()[: 2 * DIGEST_BYTES] for name, digest in parts.items()}
