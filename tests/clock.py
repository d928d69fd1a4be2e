"""Times without a process's start-up: importing torch takes 1 to 2 s, and three times that while both cores are busy.

A rank started with ``**clocked(folder)`` says when torch was loaded, before any work of its own. The seconds of a fault
count from there, or from a line of another rank if the fact was not there before; they end when this process sees the
line that tells it. So they hold what else the rank has to import and up to 0.02 s of looking, never less than the
truth. All times are seconds of CLOCK_MONOTONIC, which every process of a machine shares.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

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


def told(process: RankProcess, text: str, timeout: float = 60) -> float:
    """When stderr was seen to hold ``text``."""
    return process.started + process.wait_for(text, timeout)
