"""Where else a run is followed: TensorBoard, Weights & Biases, a file of events.

Each is a ``Sink`` in a thread of its own; ``Followed`` tells them what happens.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_manual.config import TrainConfig
from ddp_manual.rundir import RunPaths
from ddp_manual.training.trackers.followed import Followed
from ddp_manual.training.trackers.jsonl import JsonLines
from ddp_manual.training.trackers.sink import About, Sink
from ddp_manual.training.trackers.tensorboard import TensorBoard
from ddp_manual.training.trackers.wandb import WeightsAndBiases
from ddp_manual.training.tracking import RunFiles, Several, Tracker


def of_rank_0(config: TrainConfig, paths: RunPaths, hyperparameters: Mapping[str, Any], run_id: str) -> Tracker:
    """What rank 0 keeps of a run: the run's files, and whatever ``--track`` names.

    Args:
        hyperparameters: the content of ``config.json``.
    """
    files = RunFiles(paths, keep=config.keep)
    if not config.trackers:
        return files
    flat = {**hyperparameters, **hyperparameters.get("run", {})}
    flat.pop("run", None)
    about = About(name=run_name(config, flat["world_size"], run_id), hyperparameters=flat, paths=paths)
    return Several(files, Followed([_sink(name, paths) for name in config.trackers], about))


def run_name(config: TrainConfig, world_size: int, run_id: str) -> str:
    """``convnet-mnist-2ranks-1c5ad2c6``; of a path, as in ``folder:PATH``, the last part."""
    model, dataset = (name.rstrip("/").rpartition("/")[2] for name in (config.model, config.dataset))
    return f"{model}-{dataset}-{world_size}ranks-{run_id}"


def _sink(name: str, paths: RunPaths) -> Sink:
    if name == "tensorboard":
        return TensorBoard()
    return WeightsAndBiases(paths) if name == "wandb" else JsonLines()
