"""The rank 0s of this user that wait for ranks on this host: a rank that looks for rank 0 elsewhere is told of them.

Each has a file, named by its pid, in a folder that only this user may write to.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ddp_manual.environment.machine import host_id, runtime_folder
from ddp_manual.options import as_flags
from ddp_manual.terminal import at
from ddp_manual.world_spec import WorldSpec


@dataclass(frozen=True)
class OwnRank0:
    """A rank 0 that waits for ranks."""

    pid: int
    host_id: str
    address: str
    port: int
    world_size: int
    run_id: str

    def announce(self) -> None:
        """Let ranks of this host know; where no such folder can be made they do not."""
        with suppress(OSError):
            folder = runtime_folder()
            folder.mkdir(mode=0o700, exist_ok=True)
            if folder.stat().st_uid == os.geteuid():
                _file(self.pid).write_bytes(msgspec.json.encode(self))

    def is_there(self) -> bool:
        """Return whether its process lives, and is the one that has written its file."""
        with suppress(psutil.Error, OSError):
            return psutil.Process(self.pid).create_time() <= _file(self.pid).stat().st_mtime
        return False


def withdraw(pid: int) -> None:
    """Let ranks know that the rank 0 with this pid waits no more."""
    with suppress(OSError):
        _file(pid).unlink()


def hint(spec: WorldSpec) -> str:
    """Say where on this host a rank 0 of this user waits for as many ranks, but not at this address; "" for nowhere."""
    for one in _announced():
        is_elsewhere = (one.address, one.port) != (spec.master_addr, spec.master_port)
        if one.world_size == spec.world_size and is_elsewhere:
            flags = as_flags({"master_addr": one.address, "master_port": one.port})
            return f"a rank 0 of yours waits on this host at {at(one.address, one.port)}, with {flags}"
    return ""


def _announced() -> Iterator[OwnRank0]:
    folder, files = runtime_folder(), list[Path]()
    with suppress(OSError):
        if folder.stat().st_uid == os.geteuid():
            files = sorted(folder.glob("*.json"))
    for file in files:
        with suppress(OSError, msgspec.MsgspecError):
            one = msgspec.json.decode(file.read_bytes(), type=OwnRank0)
            if one.host_id == host_id() and one.is_there():
                yield one
            elif one.host_id == host_id():
                withdraw(one.pid)


def _file(pid: int) -> Path:
    return runtime_folder() / f"{pid}.json"
