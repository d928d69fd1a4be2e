"""When something was told: seconds of a fault count from the start of the process that is to tell it, or from a line.

They end when this process sees the line that tells it, or the rank's end, so they hold up to 0.02 s of looking, never
less than the truth. All times are seconds of CLOCK_MONOTONIC, which every process of a machine shares.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from tests.conftest import REPOSITORY, RankProcess


def with_site(folder: Path, code: str = "", *, package: Path = REPOSITORY) -> dict[str, str]:
    """Return the environment of a rank that runs other code before its program.

    Args:
        folder: where the module with this code is written; the rank imports from this folder first.
        code: run by agent and worker alike.
        package: where ddp_manual is.
    """
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "sitecustomize.py").write_text(f"import sys, time\n{code}\n")
    return {"PYTHONPATH": f"{folder}:{package}"}


def all_started(processes: Sequence[RankProcess]) -> float:
    """Return when the last of these processes was started."""
    return max(process.started for process in processes)


def said(process: RankProcess, text: str, timeout: float = 60) -> float:
    """Wait for ``text`` on stderr; return when it was seen."""
    return process.started + process.wait_for(text, timeout)


def left(process: RankProcess, code: int, timeout: float = 60) -> float:
    """Wait for the end of a process, which must be with this exit code; return when it was seen."""
    assert process.wait(timeout) == code, process.err
    return time.monotonic()
