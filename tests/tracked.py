"""Read the files of a run with TensorBoard's and Weights & Biases' own readers."""

from __future__ import annotations

import json
import subprocess
import warnings
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil


def wandb_records(file: Path) -> list[dict[str, Any]]:
    """The records of a ``.wandb`` file, by the reader behind ``wandb leet inspect``."""
    return _wandb_records(file, file.stat().st_size)


@cache
def _wandb_records(file: Path, size: int) -> list[dict[str, Any]]:
    package = find_spec("wandb")
    assert package is not None and package.submodule_search_locations
    program = Path(package.submodule_search_locations[0], "bin", "wandb-core")
    command = [program, "leet", "inspect", "--no-observability", "--json", "--run-file", file, file.parent.parent]
    said = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout
    return [json.loads(line) for line in said.splitlines()]


def wandb_files(run_dir: Path) -> list[Path]:
    """Return the files of the run in ``run_dir``: one for each time it was started."""
    return sorted(run_dir.glob("wandb/offline-run-*/run-*.wandb"), key=lambda file: file.stat().st_mtime)


def wandb_run(file: Path) -> dict[str, Any]:
    """Return the id, name and configuration of a run."""
    found: dict[str, Any] = next(record["run"] for record in wandb_records(file) if record["type"] == "run")
    return found


def wandb_curves(*files: Path) -> dict[str, dict[int, Any]]:
    """Return metric -> step -> value of files in the order they were written; wandb's own key is ``_step``."""
    curves: dict[str, dict[int, Any]] = {}
    for file in files:
        for record in wandb_records(file):
            if record["type"] == "history":
                item = record["history"]["item"]
                for name, value in item.items():
                    curves.setdefault(name, {})[item["_step"]] = value
    return curves


def wandb_processes(run_dir: Path) -> list[int]:
    """Return the pids of wandb's processes for the run in ``run_dir`` that still run."""
    found = []
    for process in psutil.process_iter(["name"]):
        try:
            if process.info["name"].startswith("wandb-") and process.environ()["WANDB_CACHE_DIR"].startswith(
                str(run_dir)
            ):
                found.append(process.pid)
        except (psutil.Error, KeyError):
            continue
    return found


def tensorboard(folder: Path) -> Any:
    """Return TensorBoard's own reader of ``folder``, with everything loaded."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(folder), size_guidance=dict.fromkeys(("scalars", "images", "tensors"), 0)).Reload()
