"""How many files this process may open: rank 0 has connections of all ranks."""

from __future__ import annotations

import os
import resource
from contextlib import suppress

from ddp_manual.environment import machine
from ddp_manual.errors import BadOption
from ddp_manual.rank_options import WorldSpec

# The most connections of a rank to one process of rank 0: 1 to its agent, at most 2 to torch's store in its worker.
CONNECTIONS_PER_RANK = 2
OWN_DESCRIPTORS = 100


def raise_soft_limit() -> tuple[int, int]:
    """Raise the soft limit of open files to the hard limit; return the two."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(ValueError, OSError):  # macOS calls its hard limit unlimited, and accepts only a lower one
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return resource.getrlimit(resource.RLIMIT_NOFILE)


def raise_descriptor_limit(spec: WorldSpec) -> str:
    """Raise the soft limit of open files to the hard limit, and return it.

    Raises:
        BadOption: rank 0 could not hold the connections of all ranks.
    """
    soft, hard = raise_soft_limit()
    if soft == resource.RLIM_INFINITY:
        return "unlimited"
    needed = OWN_DESCRIPTORS + CONNECTIONS_PER_RANK * spec.world_size
    if spec.rank == 0 and soft < needed:
        raise BadOption(
            f"rank 0 on {machine.host_name()} may open {soft} files, and a run of {spec.world_size} ranks "
            f"needs {needed}",
            why=f"each rank keeps up to {CONNECTIONS_PER_RANK} connections to rank 0; the hard limit is {hard}",
            next=f"raise it before rank 0 is started: ulimit -n {needed}"
            if os.geteuid() == 0
            else "have an administrator raise the hard limit: nofile in /etc/security/limits.conf, LimitNOFILE= of "
            f"systemd, or docker run --ulimit nofile={needed}",
        )
    return str(soft)
