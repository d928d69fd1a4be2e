"""From when the seconds of a fault count, and when it was told; never from a process's start, which is ``import torch``
for 1 to 2 s, and three times that while both cores are busy.

They count from the moment at which the rank had torch (``clocked`` makes it say so, before any work of its own) or was
seen to connect to rank 0 (``connected``), or from a line of another rank if the fact was not there before. They end
when this process sees the line that tells it, or the rank's end. So they hold what else the rank has to import and up
to 0.02 s of looking, never less than the truth. All times are seconds of CLOCK_MONOTONIC, which every process of a
machine shares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import REPOSITORY, RankProcess

_LOADED = "torch was loaded at "
# In sitecustomize.py, which Python runs before the program.
_SITE = f"import sys, time, torch\n%s\nprint(f'{_LOADED}{{time.monotonic()}}', file=sys.stderr, flush=True)\n"


def clocked(folder: Path, code: str = "", *, package: Path = REPOSITORY) -> dict[str, str]:
    """The environment of such a rank.

    Args:
        folder: where the module can be written that says it.
        code: run once torch is loaded.
        package: where ddp_manual is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(_SITE % code)
    # torch reads the level while it is loaded, here before ddp_manual can set it.
    return {"PYTHONPATH": f"{folder}:{package}", "TORCH_CPP_LOG_LEVEL": "ERROR"}


def loaded(process: RankProcess) -> float:
    """When the process had torch."""
    process.wait_for(_LOADED)
    return float(process.err.partition(_LOADED)[2].split()[0])


def all_loaded(processes: Sequence[RankProcess]) -> float:
    """When the last of them had torch: no roll call of theirs can be complete before."""
    return max(loaded(process) for process in processes)


def said(process: RankProcess, text: str, timeout: float = 60) -> float:
    """When stderr was seen to hold ``text``."""
    return process.started + process.wait_for(text, timeout)


def connected(process: RankProcess, port: int, timeout: float = 60) -> float:
    """The last moment at which a process was seen without a connection to rank 0's port."""
    watched = psutil.Process(process.process.pid)
    looked = process.started
    while time.monotonic() < process.started + timeout:
        looking = time.monotonic()
        try:
            connections = watched.net_connections("tcp")
        except psutil.Error:
            connections = []
        if process.process.poll() is not None or any(one.raddr and one.raddr.port == port for one in connections):
            return looked
        looked = looking
        time.sleep(0.01)
    pytest.fail(f"{process.arguments} did not connect to port {port} within {timeout} s but said:\n{process.err}")


def left(process: RankProcess, code: int, timeout: float = 60) -> float:
    """When a process was seen to have ended; it must be with this exit code."""
    assert process.wait(timeout) == code, process.err
    return time.monotonic()
