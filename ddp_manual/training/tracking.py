"""What a run leaves on disk. Rank 0 has a RunFiles; the others have a Tracker, which does nothing."""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from ddp_manual import rundir
from ddp_manual.rundir import RunPaths
from ddp_manual.training.data import Split
from ddp_manual.training.engine import Metrics
from ddp_manual.training.evaluation import Evaluation
from ddp_manual.training.pictures import image_grid


class Tracker:
    """Keeps nothing."""

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        """The run is about to train with these settings on this data."""

    def trained(self, metrics: Metrics) -> None:
        """Some steps are done."""

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        """An epoch (counted from 1) is done and ``model``, without its DDP wrapper, has been evaluated."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is complete."""


class RunFiles(Tracker):
    """Writes each of them as soon as it is known, so that a run that stops early leaves what it had.

    Every method raises DiskFull or BadOption when the folder cannot take the file.
    """

    def __init__(self, paths: RunPaths) -> None:
        self._paths = paths
        self._accuracies: list[float] = []

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        rundir.write_json(self._paths.config, config)
        rundir.write_bytes(self._paths.samples, image_grid(train))

    def trained(self, metrics: Metrics) -> None:
        rundir.append_json_line(self._paths.metrics, asdict(metrics))

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        content = io.BytesIO()
        # Plain contiguous tensors on the CPU: what any script can load.
        torch.save({name: value.cpu().contiguous() for name, value in model.state_dict().items()}, content)
        rundir.write_bytes(self._paths.model, content.getvalue())
        self._accuracies.append(evaluation.accuracy)
        rundir.write_json(self._paths.accuracies, self._accuracies)

    def finished(self, summary: Mapping[str, Any]) -> None:
        rundir.write_json(self._paths.summary, summary)
