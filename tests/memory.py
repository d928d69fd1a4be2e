"""A memory cgroup: processes that together use more than its limit are ended by the kernel's OOM killer.

No resource limit (``ulimit``) does the same: with one of those, allocating fails, and the process can still speak.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from itertools import chain
from pathlib import Path

import pytest


class MemoryGroup:
    """A cgroup, of version 2 or 1, with a limit of ``most`` bytes."""

    def __init__(self, folder: Path, most: int) -> None:
        self._folder = folder
        # The second of each pair counts swap too, and must not be below the first.
        pair = ("memory.max", "memory.swap.max")
        if not self._has(pair[0]):
            pair = ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        self._write(pair[0], most)
        if self._has(pair[1]):
            self._write(pair[1], 0 if pair[0] == "memory.max" else most)

    def command(self, words: Sequence[object]) -> list[object]:
        """Return a command that runs ``words`` in the group from its first instruction on, with the same process id."""
        return ["sh", "-c", 'echo $$ >"$0" && exec "$@"', self._folder / "cgroup.procs", *words]

    def _has(self, name: str) -> bool:
        return (self._folder / name).exists()

    def _write(self, name: str, value: int) -> None:
        (self._folder / name).write_text(str(value))


@contextmanager
def memory_group(most: int, private: Path) -> Iterator[MemoryGroup]:
    """Make a group with a limit of ``most`` bytes, and remove it at the end; skip the test if none can be made.

    Args:
        private: a folder for a mount of our own, where the machine's are not there or may not be written.
    """
    reasons: list[str] = []
    mounted: list[Path] = []
    for parent in chain(_mounts(), _own_mounts(private, mounted, reasons)):
        folder = parent / f"ddp-manual-test-{os.getpid()}"
        try:
            if (parent / "cgroup.subtree_control").exists():
                (parent / "cgroup.subtree_control").write_text("+memory")
            folder.mkdir()
            break
        except OSError as error:
            reasons.append(str(error))
    else:
        pytest.skip(f"no memory cgroup can be made: {'; '.join(reasons) or 'none is mounted, and none can be'}")
    try:
        yield MemoryGroup(folder, most)
    finally:
        _remove(folder)
        for place in mounted:
            subprocess.run(["umount", place], check=True)


def _mounts() -> Iterator[Path]:
    for line in Path("/proc/self/mounts").read_text().splitlines():
        _, place, kind, options, *_ = line.split()
        if kind == "cgroup2" or (kind == "cgroup" and "memory" in options.split(",")):
            yield Path(place)


def _own_mounts(private: Path, mounted: list[Path], reasons: list[str]) -> Iterator[Path]:
    for kind in (["-t", "cgroup2"], ["-t", "cgroup", "-o", "memory"]):
        place = private / kind[1]
        place.mkdir(parents=True, exist_ok=True)
        done = subprocess.run(["mount", *kind, "none", place], capture_output=True, text=True)
        if done.returncode:
            reasons.append(done.stderr.strip())
            continue
        mounted.append(place)
        yield place


def _remove(folder: Path, timeout: float = 10) -> None:
    """Remove a group, which is possible once its last process has been waited for."""
    deadline = time.monotonic() + timeout
    while folder.exists():
        with suppress(OSError):
            folder.rmdir()
            return
        assert time.monotonic() < deadline, f"{folder} still has processes: {(folder / 'cgroup.procs').read_text()}"
        time.sleep(0.05)
