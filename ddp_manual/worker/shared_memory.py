"""Whether this host has as much shared memory as NCCL needs."""

from __future__ import annotations

import logging
import os
import shutil
import sys

from ddp_manual.join_steps import Step

logger = logging.getLogger(__name__)

# NCCL's shared-memory transport takes up to about 10 MB for each pair of ranks on a host.
SHARED_MEMORY_PER_RANK = 32 << 20
SHARED_MEMORY = "/dev/shm"


def check_shared_memory(step: Step, backend: str, ranks_on_host: int) -> None:
    """Warn where NCCL may crash with a bus error, since this host has too little shared memory."""
    if os.path.isdir(SHARED_MEMORY):
        usage, needed = shutil.disk_usage(SHARED_MEMORY), SHARED_MEMORY_PER_RANK * ranks_on_host
        step.detail = f"{SHARED_MEMORY}: {usage.free >> 20} of {usage.total >> 20} MB free"
        if usage.free >= needed:
            return
        complaint = (
            f"{SHARED_MEMORY} has {usage.free >> 20} MB free, and NCCL may need {needed >> 20} MB for {ranks_on_host} "
            "ranks: start the container with a larger --shm-size, or with --ipc=host"
        )
    else:
        step.detail = f"{SHARED_MEMORY}: none"
        complaint = f"there is no {SHARED_MEMORY}, which NCCL uses between the ranks of a host"
    if backend == "nccl" and sys.platform == "linux":
        step.warn(complaint)
        logger.warning("%s", complaint)
