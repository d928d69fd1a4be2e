"""The memory cgroup of a process, of version 2 or 1: how much it may still take, and how often memory ran out in it."""

from __future__ import annotations

import re
from contextlib import suppress
from pathlib import Path

import psutil

# Of version 2 and of version 1: what counts OOM kills; the limit, and what is taken; and the cached files, which the
# kernel gives up before anything else.
COUNTERS = ("memory.events", "memory.oom_control")
LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
CACHED = re.compile(r"^(?:total_)?(?:in)?active_file (\d+)$", re.MULTILINE)


def oom_counter(pid: int | str) -> Path | None:
    """Return the file that counts OOM kills in the memory cgroup of a process."""
    with suppress(OSError):
        groups = [line.split(":", 2) for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
        for mount in Path("/proc/self/mounts").read_text().splitlines():
            _, place, kind, options, *_ = mount.split()
            for _, controllers, path in groups:
                if kind == "cgroup2" and not controllers:
                    file = Path(place + path) / COUNTERS[0]
                elif kind == "cgroup" and "memory" in controllers.split(",") and "memory" in options.split(","):
                    file = Path(place + path) / COUNTERS[1]
                else:
                    continue
                if file.exists():
                    return file
    return None


class OomKills:
    """How often memory has run out in the cgroup of a process since this was made."""

    def __init__(self, pid: int) -> None:
        self._file = oom_counter(pid)
        self._before = self._count()

    def any(self) -> bool:
        """Return whether the kernel's OOM killer has struck there; False if nobody knows."""
        return self._count() > self._before

    def _count(self) -> int:
        with suppress(OSError):
            found = self._file and re.search(r"^oom_kill (\d+)$", self._file.read_text(), re.MULTILINE)
            return int(found[1]) if found else 0
        return 0


def memory_left() -> int:
    """Return how many bytes this process may take until memory runs out, in its cgroups or on the machine."""
    left = [psutil.virtual_memory().available]
    counter = oom_counter("self")
    for folder in counter.parents if counter is not None else ():  # a limit counts for all groups below it
        for limit, taken in LIMITS:
            with suppress(OSError, ValueError):  # no such file, or "max"
                most = int((folder / limit).read_text())
                cached = sum(map(int, CACHED.findall((folder / "memory.stat").read_text())))
                left.append(most - int((folder / taken).read_text()) + cached)
    return min(left)
