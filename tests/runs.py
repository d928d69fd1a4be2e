"""A run as rank 0 describes it, for tests without a rank 0."""

from __future__ import annotations

from typing import Any

from ddp_manual.messages import RunInfo


def run_info(**other: Any) -> RunInfo:
    """Return a run of three ranks; ``other`` replaces its fields."""
    usual: dict[str, Any] = {
        "run_id": "r",
        "run_dir": None,
        "world_size": 3,
        "host": "a",
        "pid": 1,
        "address": "10.0.0.1",
        "since": 0.0,
        "command": "",
        "launched": None,
        "peer_timeout": 10.0,
        "stall_timeout": 300.0,
        "resumes": True,
    }
    return RunInfo(**{**usual, **other})
