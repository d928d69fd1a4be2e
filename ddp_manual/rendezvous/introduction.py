"""What a process says of itself when it asks to be a rank: where it is, what it would run, with what."""

from __future__ import annotations

import hashlib
import os
import platform
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ddp_manual
from ddp_manual import environment
from ddp_manual.errors import BadOption
from ddp_manual.rendezvous.address import family, interface_addresses, route_to
from ddp_manual.rendezvous.entries import Entry
from ddp_manual.world_spec import WorldSpec

PACKAGE = Path(ddp_manual.__file__).parent
DIGEST_BYTES = 6


@dataclass(frozen=True)
class Program:
    """What would run here. To find it out can take seconds, where the driver of a GPU has to wake up."""

    gpus: list[str]
    versions: dict[str, str | None]
    code: dict[str, str]

    @classmethod
    def of_this_process(cls, device: str, *, script: bool) -> Program:
        """``script``: the program that was started is the user's own, and has to be the same on every rank."""
        return cls(gpu_uuids() if device == "cuda" else [], versions(), code_digests(script=script))


def introduce(
    spec: WorldSpec,
    device: str,
    options: Mapping[str, tuple[Any, str]],
    own: OwnAddress,
    probe_port: int,
    program: Program,
) -> Entry:
    """The entry of this process."""
    return Entry(
        rank=spec.rank,
        world_size=spec.world_size,
        world_size_source=spec.source("world_size"),
        host=environment.host_name(),
        host_id=environment.host_id(),
        pid=os.getpid(),
        since=time.time(),
        address=own.address,
        probe_port=probe_port,
        device=device,
        local_rank=spec.local_rank,
        gpus=program.gpus,
        versions=program.versions,
        code=program.code,
        allow_mismatch=spec.allow_mismatch,
        # Lists, as they come out of JSON on the other side, where entries are compared.
        options={
            **{name: list(option) for name, option in options.items()},
            "address_family": [own.family, own.source],
        },
    )


class OwnAddress:
    """The address and the interface that the other ranks are to use: the user's choice, else the way to rank 0.

    Args:
        store_address: rank 0's IP address.

    Raises:
        BadOption: the interface that a variable names has no address here.
    """

    def __init__(self, store_address: str, backend: str) -> None:
        self.address, self.interface = route_to(store_address)
        self.source = f"{self.interface}, on the way to {store_address}"
        names, variable = environment.chosen_interfaces(backend)
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
            f"{variable}={','.join(names)} names no interface of {environment.host_name()} that has an address",
            why=f"this host has {', '.join(f'{name} ({address})' for address, name in mine.items())}",
            next=f"unset {variable}, and the interface on the way to rank 0 is taken",
        )
    return min(found, key=lambda pair: family(pair[0]))


def versions() -> dict[str, str | None]:
    import torch

    nccl = getattr(torch.cuda, "nccl", None)
    return {
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if nccl and torch.distributed.is_nccl_available() else None,
    }


def gpu_uuids() -> list[str]:
    """The UUID of each GPU this process may use, by index."""
    import torch

    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def code_digests(*, script: bool) -> dict[str, str]:
    """Part of the program -> digest of its source, so that a part that differs can be named."""
    parts: dict[str, Any] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        relative = path.relative_to(PACKAGE)
        digest = parts.setdefault(f"ddp_manual/{relative.parts[0]}", hashlib.sha256())
        digest.update(f"{relative}\n".encode() + path.read_bytes())
    program = environment.program_file() if script else None
    if program is not None:
        parts[program.name] = hashlib.sha256(program.read_bytes())
    return {name: digest.hexdigest()[: 2 * DIGEST_BYTES] for name, digest in parts.items()}
