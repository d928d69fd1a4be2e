"""NVIDIA's GPUs that a process may use, as the driver's files show them: without torch or initialising CUDA."""

from __future__ import annotations

import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

ROOT = Path("/")
# Where the driver shows its GPUs; in a container those that it was given.
DRIVER = "proc/driver/nvidia"
# In WSL2, where Windows has the driver: the device of any vendor's GPU, and the folder of NVIDIA's library and tools.
WSL_DEVICE, WSL_FOLDER = "dev/dxg", "usr/lib/wsl/lib"
# Seconds. Without persistence mode, nvidia-smi initialises the GPUs one by one.
LISTED_WITHIN = 30.0
_LISTED = re.compile(r"^(GPU \d+:|\s+MIG ).*\(UUID: (\S+)\)", re.MULTILINE)


def are_here() -> bool:
    """Return whether this host has NVIDIA's driver."""
    return (ROOT / "dev/nvidiactl").exists() or _is_wsl()


def _is_wsl() -> bool:
    return (ROOT / WSL_DEVICE).exists() and (ROOT / WSL_FOLDER / "libcuda.so.1").exists()


def count(chosen: str | None) -> int:
    """Return how many GPUs a process may use.

    Args:
        chosen: CUDA_VISIBLE_DEVICES: indexes or UUIDs, up to the first word that is none, as CUDA reads it; None if it
            is not set.
    """
    here = _count_here()
    if here and mig_device(chosen):
        return 1
    if chosen is None:
        return here
    valid: list[str] = []
    for word in map(str.strip, chosen.split(",")):
        if not (word.startswith("GPU-") or (word.isdigit() and int(word) < here)):
            break
        valid.append(word)
    return len(valid) if len(set(valid)) == len(valid) else 0  # CUDA takes none if one is named twice


def _count_here() -> int:
    folder = ROOT / DRIVER / "gpus"
    if folder.is_dir():
        return len(list(folder.iterdir()))
    return max(1, len(_listed())) if _is_wsl() else 0


def mig_device(chosen: str | None) -> str | None:
    """Return the UUID of the part of a GPU (MIG) that a process uses: CUDA uses only one. None: it uses whole GPUs.

    Args:
        chosen: as in ``count``.
    """
    first = (chosen or "").partition(",")[0].strip()
    if first.startswith("MIG-"):
        return first.removeprefix("MIG-")
    return _mig_of(int(first) if first.isdigit() else None) if chosen is None or first.isdigit() else None


def _mig_of(index: int | None) -> str | None:
    """Return the UUID of the first part of the GPU with this index; without index, of the first GPU if all have one."""
    if not any((ROOT / DRIVER / "capabilities").glob("gpu*/mig/gi*")):
        return None
    parts = [of_gpu for _, of_gpu in _listed()]
    chosen = parts if index is None else parts[index : index + 1]
    return chosen[0][0].removeprefix("MIG-") if chosen and all(chosen) else None


def _listed() -> list[tuple[str, list[str]]]:
    """Return the UUID of each GPU, and those of its parts, as ``nvidia-smi -L`` lists them; empty if it does not."""
    found: list[tuple[str, list[str]]] = []
    command = shutil.which("nvidia-smi") or str(ROOT / WSL_FOLDER / "nvidia-smi")
    with suppress(OSError, subprocess.SubprocessError):
        listed = subprocess.run([command, "-L"], capture_output=True, timeout=LISTED_WITHIN, check=True).stdout
        for kind, uuid in _LISTED.findall(listed.decode(errors="replace")):
            if kind.startswith("GPU"):
                found.append((uuid, []))
            elif found:
                found[-1][1].append(uuid)
    return found
