"""Which device and backend a rank uses: chosen before it joins, pinned once it knows its place on the host; and whether
this host has as much shared memory as NCCL needs."""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import shutil
import sys

import torch
import torch.distributed

from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BackendUnavailable, DeviceMissing
from ddp_manual.join_steps import Step
from ddp_manual.rank_options import WorldSpec
from ddp_manual.wording import counted

logger = logging.getLogger(__name__)

# Parameters of mallopt(3), and their values in bytes: glibc allows at most 32 MiB for M_MMAP_THRESHOLD.
M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
LARGEST_KEPT_BLOCK = 32 << 20
MOST_KEPT = 1 << 30
# NCCL's shared-memory transport takes up to about 10 MB for each pair of ranks on a host.
SHARED_MEMORY_PER_RANK = 32 << 20
SHARED_MEMORY = "/dev/shm"


def choose(spec: WorldSpec) -> tuple[str, str, int]:
    """Return the kind of device (``cpu`` or ``cuda``), the backend (``gloo`` or ``nccl``) and how many GPUs are usable.

    Raises:
        DeviceMissing: cuda was asked for, and there is no GPU. BackendUnavailable: nccl without cuda, or not built in.
    """
    host = machine.host_name()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    device = ("cuda" if gpus else "cpu") if spec.device == "auto" else spec.device
    if device == "cuda" and not gpus:
        raise DeviceMissing(
            f"rank {spec.rank} on {host} has no GPU",
            why=f"{spec.named('device')}, but torch {torch.__version__} finds no usable CUDA device",
            next="check with nvidia-smi, or train on the CPU: --device cpu on every rank",
        )
    backend = ("nccl" if device == "cuda" else "gloo") if spec.backend == "auto" else spec.backend
    if backend == "nccl" and device != "cuda":
        raise BackendUnavailable(
            f"rank {spec.rank} on {host} cannot use nccl without a GPU",
            why=f"{spec.named('backend')}, device {device}; NCCL moves data between CUDA devices only",
            next="use --backend gloo on every rank",
        )
    if not torch.distributed.is_backend_available(backend):
        raise BackendUnavailable(
            f"rank {spec.rank} on {host} cannot use {backend}",
            why=f"{spec.named('backend')}; torch {torch.__version__} was built without it",
            next=f"use --backend {'gloo' if backend == 'nccl' else 'nccl'} on every rank",
        )
    if device == "cuda" and spec.local_rank is not None and not _from_launcher(spec):
        _check_gpu(spec.rank, spec.local_rank, gpus)
    return device, backend, gpus


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


def may_use_cpu(spec: WorldSpec) -> bool:
    """Return whether the rank may train on the CPU instead of a GPU, since nobody has chosen a device for it."""
    return spec.device == "auto" and spec.backend != "nccl" and (spec.local_rank is None or _from_launcher(spec))


def for_all_devices(backend: str) -> str:
    """Return the argument of ``init_process_group`` for a backend. NCCL moves only tensors of GPUs; many scripts reduce
    tensors of the CPU too, for which gloo is added, where torch has it."""
    return "cpu:gloo,cuda:nccl" if backend == "nccl" and torch.distributed.is_gloo_available() else backend


def _from_launcher(spec: WorldSpec) -> bool:
    """Return whether a launcher has given local_rank: it is the position on the host then, not a choice of GPU."""
    return spec.source("local_rank").startswith("from ")


def pin(rank: int, device: str, local_rank: int, cores_shared_by: int) -> torch.device:
    """Use this rank's share of the cores, and make ``cuda:local_rank`` the current device.

    Raises:
        DeviceMissing: this host has fewer GPUs than ranks.
    """
    torch.set_num_threads(user_variables.cpu_threads(cores_shared_by))
    if device == "cpu":
        return torch.device("cpu")
    _check_gpu(rank, local_rank, torch.cuda.device_count())
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)


def keep_freed_memory() -> None:
    """Have glibc's malloc keep what a training step frees, as the next step needs it again. This cannot be undone.

    Otherwise malloc returns large blocks to the kernel, which clears each of their pages again at the next step: a
    fifth of the training time of the default model.
    """
    if platform.libc_ver()[0] == "glibc" and not user_variables.malloc_is_tuned():
        libc = ctypes.CDLL(None)
        libc.mallopt(M_MMAP_THRESHOLD, LARGEST_KEPT_BLOCK)
        libc.mallopt(M_TRIM_THRESHOLD, MOST_KEPT)


def _check_gpu(rank: int, local_rank: int, gpus: int) -> None:
    if local_rank >= gpus:
        raise DeviceMissing(
            f"rank {rank} on {machine.host_name()} wants cuda:{local_rank}, which does not exist",
            why=f"this host has {counted(gpus, 'usable GPU')}, cuda:0 to cuda:{gpus - 1}; local_rank is {local_rank}",
            next=f"start at most {counted(gpus, 'rank')} on this host, choose with --local_rank, "
            "or use --device cpu on every rank",
        )


def gpu_uuids() -> list[str]:
    """Return the UUIDs of the GPUs this process may use, by index."""
    return [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]


def versions() -> dict[str, str | None]:
    """Return the versions of torch, python, cuda and nccl."""
    nccl = getattr(torch.cuda, "nccl", None)
    return {
        "torch": str(torch.__version__),
        "python": ".".join(platform.python_version_tuple()[:2]),
        "cuda": torch.version.cuda,
        "nccl": ".".join(map(str, nccl.version())) if nccl and torch.distributed.is_nccl_available() else None,
    }
