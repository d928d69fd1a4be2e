"""Where else a run is followed: TensorBoard, Weights & Biases, a file of events.

Each is a ``Sink`` in a thread of its own; ``Followed`` tells them what happens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import escaped
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.trackers.followed import Followed
from ddp_manual.training.trackers.jsonl import JsonLines
from ddp_manual.training.trackers.sink import About, Sink
from ddp_manual.training.trackers.tensorboard import TensorBoard
from ddp_manual.training.trackers.wandb import WeightsAndBiases
from ddp_manual.training.tracking import RunFiles, Several, Tracker


def of_rank_0(
    config: TrainConfig,
    paths: RunPaths,
    hyperparameters: Mapping[str, Any],
    run_id: str,
    *,
    over: bool,
    afterwards: Callable[[Callable[[], None]], object],
) -> Tracker:
    """What rank 0 keeps of a run: the run's files, and whatever ``--track`` names.

    Args:
        hyperparameters: the content of ``config.json``.
        over: an earlier process has followed the run to its end, so that there is nothing to add.
        afterwards: has a function called once no other rank waits for this one.
    """
    files = RunFiles(paths, keep=config.keep)
    if over or not config.trackers:
        return files
    flat = {**hyperparameters, **hyperparameters.get("run", {})}
    flat.pop("run", None)
    shown = {name: escaped(value) if isinstance(value, str) else value for name, value in flat.items()}
    about = About(name=escaped(run_name(config, flat["world_size"], run_id)), hyperparameters=shown, paths=paths)
    sinks = [_sink(name, paths) for name in config.trackers]
    return Several(files, Followed(sinks, about, afterwards=afterwards))


def run_name(config: TrainConfig, world_size: int, run_id: str) -> str:
    """``convnet-mnist-2ranks-1c5ad2c6``; of a path, as in ``folder:PATH``, the last part."""
    model, dataset = (name.rstrip("/").rpartition("/")[2] for name in (config.model, config.dataset))
    return f"{model}-{dataset}-{world_size}ranks-{run_id}"


def _sink(name: str, paths: RunPaths) -> Sink:
    if name == "tensorboard":
        return TensorBoard()
    return WeightsAndBiases(paths) if name == "wandb" else JsonLines()
