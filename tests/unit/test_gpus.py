"""Which GPUs a process may use. For want of any, the files are fixtures: what the driver shows in /proc and /dev on a
host with GPUs, with divided ones (MIG), and below WSL2, and what ``nvidia-smi -L`` prints there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ddp_manual import gpus
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BadOption
from ddp_manual.worker import device_and_backend, private_torch

Host = Callable[..., None]
UUIDS = [f"GPU-{number}6cb44c-6756-fd30-cd4a-1e6da3caf9b0" for number in range(4)]
PARTS = [f"MIG-{number}7d2a5d8-7b1d-5b2c-a1c8-7a7b6c3cd0f1" for number in range(4)]
DIVIDED = f"""GPU 0: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[0]})
  MIG 3g.20gb     Device  0: (UUID: {PARTS[0]})
  MIG 3g.20gb     Device  1: (UUID: {PARTS[1]})
GPU 1: NVIDIA A100-SXM4-40GB (UUID: {UUIDS[1]})
  MIG 7g.40gb     Device  0: (UUID: {PARTS[2]})
"""
WSL = f"GPU 0: NVIDIA GeForce RTX 4090 (UUID: {UUIDS[0]})\nGPU 1: NVIDIA GeForce RTX 4090 (UUID: {UUIDS[1]})\n"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Host:
    """Make this a host with these files; ``listed`` is what nvidia-smi prints."""
    monkeypatch.setattr(gpus, "ROOT", tmp_path)
    monkeypatch.setattr(gpus.shutil, "which", lambda name: None)

    def make(*files: str, listed: str = "", chosen: str | None = None) -> None:
        for file in files:
            (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / file).touch()
        tool = tmp_path / gpus.WSL_FOLDER / "nvidia-smi"
        tool.parent.mkdir(parents=True, exist_ok=True)
        tool.write_text(f"#!/bin/sh\ncat <<END\n{listed}END\n")
        tool.chmod(0o755)
        if chosen is None:
            monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
        else:
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", chosen)

    return make


def driver_of(count: int) -> list[str]:
    files = [f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0/information" for number in range(count)]
    return ["dev/nvidiactl", *files]


MIG_FILES = [f"proc/driver/nvidia/capabilities/gpu{number}/mig/gi1/ci0/access" for number in range(2)]
WSL_FILES = ["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"]


@pytest.mark.parametrize(
    ("chosen", "count"),
    [
        (None, 4),
        ("0,2", 2),
        ("-1", 0),
        ("", 0),
        ("0,-1,1", 1),
        ("1,1", 0),
        (",".join(UUIDS[:3]), 3),
        (PARTS[0], 1),
    ],
)
def test_nproc_gpu_is_the_number_of_gpus_that_cuda_shows_a_process(host: Host, chosen: str | None, count: int) -> None:
    host(*driver_of(4), chosen=chosen)
    assert gpus.count(chosen) == count
    assert machine.likely_backend("auto", "auto") == "nccl"
    if count:
        assert machine.ranks_per_host("gpu") == count
    else:
        assert machine.ranks_per_host("auto") == machine.usable_cores()
        with pytest.raises(BadOption, match="--nproc gpu is not a number"):
            machine.ranks_per_host("gpu")


def test_wsl2_has_no_files_of_a_driver_and_its_gpus_count(host: Host) -> None:
    host("dev/dxg", listed=WSL)
    assert (gpus.count(None), gpus.are_here()) == (0, False)  # another vendor's GPU
    host(*WSL_FILES, listed=WSL)
    assert (gpus.count(None), gpus.count("1"), gpus.count("-1"), gpus.are_here()) == (2, 1, 0, True)


@pytest.mark.parametrize(
    ("chosen", "part"), [(None, PARTS[0]), ("1", PARTS[2]), (PARTS[1], PARTS[1]), (UUIDS[0], None), ("-1", None)]
)
def test_a_rank_uses_one_part_of_a_divided_gpu_which_is_its_only_gpu(
    host: Host, chosen: str | None, part: str | None
) -> None:
    host(*driver_of(2), *MIG_FILES, listed=DIVIDED, chosen=chosen)
    assert gpus.mig_device(chosen) == (part.removeprefix("MIG-") if part else None)
    if part:
        assert private_torch.gpus_without_cuda() == [part.removeprefix("MIG-")]
        assert gpus.count(chosen) == 1


def test_where_not_all_gpus_are_divided_the_whole_ones_count(host: Host) -> None:
    host(*driver_of(2), MIG_FILES[0], listed=DIVIDED.rpartition("  MIG")[0])
    assert gpus.mig_device(None) is None


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_the_ranks_of_a_host_share_out_its_cores_with_gpus_too(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    chosen: list[int] = []
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(machine, "usable_cores", lambda: 96)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 8)
    monkeypatch.setattr(torch.cuda, "set_device", lambda index: None)
    assert device_and_backend.pin(3, kind, 3, 8).type == kind
    monkeypatch.setenv("OMP_NUM_THREADS", "3,1")  # the second is for nested parallel regions
    assert device_and_backend.pin(3, kind, 3, 8).type == kind
    assert chosen == [12, 3] and user_variables.omp_num_threads(8) == "3,1"
