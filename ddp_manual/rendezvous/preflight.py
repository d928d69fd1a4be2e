"""What one host can find out before it joins: open files, shared memory, the time a look-up by address takes."""

from __future__ import annotations

import logging
import os
import resource
import shutil
import socket
import sys
import time

from ddp_manual import environment
from ddp_manual.errors import BadOption
from ddp_manual.rendezvous import device as devices
from ddp_manual.rendezvous.address import own_address, resolve
from ddp_manual.rendezvous.steps import Steps
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

# Connections a rank keeps to rank 0: to its store its own and two of the roll call, and the lifeline.
CONNECTIONS_PER_RANK = 4
OWN_DESCRIPTORS = 100
# NCCL's shared-memory transport takes up to about 10 MB for each pair of ranks on a host.
SHARED_MEMORY_PER_RANK = 32 << 20
SHARED_MEMORY = "/dev/shm"
SLOW_LOOKUP = 0.5


def before_joining(spec: WorldSpec, steps: Steps) -> tuple[str, str]:
    """Raise what can be raised, and find the device.

    Returns:
        device (``cpu`` or ``cuda``) and backend (``gloo`` or ``nccl``).

    Raises:
        BadOption, DeviceMissing, BackendUnavailable: this rank cannot run here.
    """
    with steps.step("open files") as step:
        step.detail = f"up to {raise_descriptor_limit(spec)}"
    with steps.step("device") as step:
        device, backend, gpus = devices.choose(spec)
        step.detail = f"{device} ({spec.source('device')}), {backend} ({spec.source('backend')}), {gpus} GPU(s)"
    with steps.step("shared memory") as step:
        step.detail = f"{SHARED_MEMORY}: {shared_memory()}"
        complaint = shared_memory_complaint(backend, min(gpus, spec.world_size))
        if complaint:
            step.warn(complaint)
            logger.warning("%s", complaint)
    return device, backend


def raise_descriptor_limit(spec: WorldSpec) -> str:
    """Raise the soft limit of open files to the hard one; returns what it is.

    Raises:
        BadOption: rank 0 could not hold the connections of all ranks.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
            soft = hard
        except (ValueError, OSError):  # macOS calls its hard limit unlimited and takes less
            pass
    needed = OWN_DESCRIPTORS + CONNECTIONS_PER_RANK * spec.world_size
    hosts_the_store = spec.rank == 0 and not spec.agent_store
    if hosts_the_store and soft != resource.RLIM_INFINITY and soft < needed:
        raise BadOption(
            f"rank 0 on {environment.host_name()} may open {soft} files, and a run of {spec.world_size} ranks "
            f"needs {needed}",
            why=f"each rank keeps {CONNECTIONS_PER_RANK} connections to rank 0; the hard limit is {hard}",
            next=f"raise it before rank 0 is started: ulimit -n {needed}",
        )
    return "unlimited" if soft == resource.RLIM_INFINITY else str(soft)


def shared_memory_complaint(backend: str, ranks_on_host: int) -> str | None:
    """Why NCCL may crash with a bus error on this host, or None."""
    if backend != "nccl" or sys.platform != "linux":
        return None
    if not os.path.isdir(SHARED_MEMORY):
        return f"there is no {SHARED_MEMORY}, which NCCL uses between the ranks of a host"
    free, needed = shutil.disk_usage(SHARED_MEMORY).free, SHARED_MEMORY_PER_RANK * ranks_on_host
    if free < needed:
        return (
            f"{SHARED_MEMORY} has {free >> 20} MB free, and NCCL may need {needed >> 20} MB for {ranks_on_host} "
            "ranks: a container takes --shm-size or --ipc=host"
        )
    return None


def shared_memory() -> str:
    if not os.path.isdir(SHARED_MEMORY):
        return "none"
    usage = shutil.disk_usage(SHARED_MEMORY)
    return f"{usage.free >> 20} of {usage.total >> 20} MB free"


def look_up_addresses(spec: WorldSpec, steps: Steps) -> None:
    """Time a look-up by address, as ``check`` does: torch asks for the name of every peer that connects.

    Raises:
        MasterUnresolvable: rank 0's address.
    """
    with steps.step("names") as step:
        mine = own_address()
        asked = dict.fromkeys([*resolve(spec.master_addr), *([mine] if mine else [])])
        found = [(address, *reverse_lookup(address)) for address in asked]
        step.detail = ", ".join(f"{address} is {name or 'nameless'} ({took:.2f} s)" for address, took, name in found)
        if max(took for _, took, _ in found) > SLOW_LOOKUP:
            step.warn(f"slow: {step.detail}; the name server in /etc/resolv.conf does not answer")


def reverse_lookup(address: str) -> tuple[float, str | None]:
    """Seconds that looking up an address's name took, and the name if it has one."""
    started = time.monotonic()
    try:
        name: str | None = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    except OSError:
        name = None
    return time.monotonic() - started, name
