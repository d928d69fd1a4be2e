"""Whether the launcher of a rank is gone: an mpirun that is killed leaves the ranks of its host running."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress

from ddp_manual.rank_options import WorldSpec


def watch_launcher(spec: WorldSpec, gone: Callable[[str], None]) -> None:
    """Once the launcher of this rank is gone, call ``gone`` with words that say so; never, if nobody can see that."""

    def ended() -> None:
        loop.remove_reader(pidfd)
        gone(f"{spec.started_by} (pid {pid}), which started this rank, is gone")

    if pid := spec.launcher_pid:
        with suppress(AttributeError, OSError):  # an old system, forbidden in a container, or the launcher is gone
            loop, pidfd = asyncio.get_running_loop(), os.pidfd_open(pid)
            loop.add_reader(pidfd, ended)
