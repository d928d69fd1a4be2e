"""A run as rank 0 describes it, and what its ranks say of themselves, for tests without processes."""

from __future__ import annotations

from typing import Any

from ddp_manual.ranks_and_runs import RankInfo, Ready, RunInfo


def run_info(**other: Any) -> RunInfo:
    """Return a run of three ranks; ``other`` replaces its fields."""
    usual: dict[str, Any] = {
        "run_id": "r",
        "run_dir": None,
        "world_size": 3,
        "host": "a",
        "pid": 1,
        "agent": 1,
        "address": "10.0.0.1",
        "since": 0.0,
        "command": "",
        "launched": None,
        "peer_timeout": 10.0,
        "stall_timeout": 300.0,
        "resumes": True,
    }
    return RunInfo(**{**usual, **other})


RUN = run_info(run_dir="d", command="train --rank {rank} --data '{x}'")


def info(rank: int, host_id: str, local_rank: int | None = None, **other: Any) -> RankInfo:
    """Return what a rank says of itself in its hello; ``other`` replaces fields."""
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": max(3, rank + 1),
        "world_size_source": "flag",
        "host": host_id,
        "host_id": host_id,
        "pid": 1,
        "agent": 1,
        "since": 0.0,
        "address": "10.0.0.1",
        "answer_port": 1,
        "local_rank": local_rank,
        "versions": {"torch": "2.15.0+cu132", "python": "3.11"},
        "code": {"ddp_manual/training": "aa"},
        "allow_mismatch": False,
        "options": {"lr": (0.04, "default")},
    }
    return RankInfo(**{**fields, **other})


def ready(**other: Any) -> Ready:
    """Return what a rank says of its device once it has loaded torch; ``other`` replaces fields."""
    fields: dict[str, Any] = {
        "pid": 1,
        "device": "cpu",
        "backend": "gloo",
        "gpus": [],
        "versions": {"torch": "2.15.0+cu132", "python": "3.11", "cuda": "13.2", "nccl": "2.30.7"},
        "options": {"device": ("cpu", "default"), "backend": ("gloo", "default")},
    }
    return Ready(**{**fields, **other})
