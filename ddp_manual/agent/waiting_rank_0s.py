"""The rank 0s of this user that wait for ranks on this host: a rank that looks for rank 0 elsewhere is told of them,
and ``runs`` takes their runs for running.

Each has a file, named by its pid, in a folder that only this user may write to.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec
import psutil

from ddp_manual.environment.machine import host_id, runtime_folder
from ddp_manual.option_fields import as_flags
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wire import printable
from ddp_manual.wording import at


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
        """Write the file that tells ranks on this host of this rank 0; do nothing if the folder cannot be made."""
        with suppress(OSError):
            runtime_folder().mkdir(mode=0o700, exist_ok=True)
            if _is_own():
                flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW
                with open(os.open(_file(self.pid), flags, 0o600), "wb") as file:
                    file.write(msgspec.json.encode(self))

    def is_there(self) -> bool:
        """Return whether this rank 0's process lives. A process younger than the file has only got the same pid."""
        with suppress(psutil.Error, OSError):
            return psutil.Process(self.pid).create_time() <= _file(self.pid).stat().st_mtime
        return False


def withdraw(pid: int) -> None:
    """Remove the file of the rank 0 with this pid: it no longer waits for ranks."""
    with suppress(OSError):
        _file(pid).unlink()


def hint(spec: WorldSpec, *, of_any_size: bool = False) -> str:
    """Name another rank 0 of this user that waits on this host for as many ranks as ``spec`` has; "" if none does."""
    for one in _announced():
        is_elsewhere = (one.address, one.port) != (spec.master_addr, spec.master_port)
        if one.pid != os.getpid() and is_elsewhere and (of_any_size or one.world_size == spec.world_size):
            there = {"master_addr": one.address, "master_port": one.port}
            flags = as_flags({name: value for name, value in there.items() if value != getattr(spec, name)})
            where = at(printable(one.address), one.port)
            return f"a rank 0 of yours waits on this host at {where}: {flags} reaches it"
    return ""


def waiting_runs() -> set[str]:
    """Return the ids of the runs whose rank 0 waits on this host."""
    return {one.run_id for one in _announced()}


def _announced() -> Iterator[OwnRank0]:
    files = list[Path]()
    with suppress(OSError):
        if _is_own():
            files = sorted(runtime_folder().glob("*.json"))
    for file in files:
        with suppress(OSError, msgspec.MsgspecError):
            one = msgspec.json.decode(file.read_bytes(), type=OwnRank0)
            if one.host_id == host_id() and one.is_there():
                yield one
            elif one.host_id == host_id():
                withdraw(one.pid)


def _is_own() -> bool:
    """Return whether the folder is not a link, and only this user may write to it."""
    found = runtime_folder().lstat()
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _file(pid: int) -> Path:
    return runtime_folder() / f"{pid}.json"
