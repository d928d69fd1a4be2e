"""What a run leaves on disk. Rank 0 has a RunFiles; the others have a Tracker, which does nothing."""

from __future__ import annotations

import io
import json
import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ddp_manual import run_folder
from ddp_manual.errors import DdpManualError, writing
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_files
from ddp_manual.training.checkpoint import History, Saved, on_cpu, pack
from ddp_manual.training.data import Split
from ddp_manual.training.epoch_plan import EpochPlan, Position
from ddp_manual.training.evaluate import Evaluation
from ddp_manual.training.metrics import Metrics
from ddp_manual.training.pictures import image_grid
from ddp_manual.training.predictions import Predictions, write_files

logger = logging.getLogger(__name__)


class Tracker:
    """Keeps nothing."""

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        """The run is about to train with these settings on this data."""

    def resumed(self, position: Position, history: History, model: nn.Module, *, complete: bool) -> None:
        """The run goes on from ``position``, or is ``complete``; ``model`` is as it was there."""

    def trained(self, metrics: Metrics) -> None:
        """Some steps are done."""

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        """An epoch (counted from 1) is done and ``model``, without its DDP wrapper, has been evaluated."""

    def predicted(self, predictions: Predictions) -> None:
        """The last epoch is done, and this is what the model makes of each test image."""

    def checkpoint(self, take: Callable[[], Saved], epoch_plan: EpochPlan) -> None:
        """Save what ``take`` returns."""

    def finished(self, summary: Mapping[str, Any]) -> None:
        """The run is complete."""

    def closed(self) -> None:
        """This process is done with the run, which may have stopped or failed; the last call, and always made."""


class Several(Tracker):
    """All of these, one after the other."""

    def __init__(self, *trackers: Tracker) -> None:
        self._trackers = trackers

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        for tracker in self._trackers:
            tracker.started(config, train)

    def resumed(self, position: Position, history: History, model: nn.Module, *, complete: bool) -> None:
        for tracker in self._trackers:
            tracker.resumed(position, history, model, complete=complete)

    def trained(self, metrics: Metrics) -> None:
        for tracker in self._trackers:
            tracker.trained(metrics)

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        for tracker in self._trackers:
            tracker.evaluated(epoch, evaluation, model)

    def predicted(self, predictions: Predictions) -> None:
        for tracker in self._trackers:
            tracker.predicted(predictions)

    def checkpoint(self, take: Callable[[], Saved], epoch_plan: EpochPlan) -> None:
        for tracker in self._trackers:
            tracker.checkpoint(take, epoch_plan)

    def finished(self, summary: Mapping[str, Any]) -> None:
        for tracker in self._trackers:
            tracker.finished(summary)

    def closed(self) -> None:
        for tracker in self._trackers:
            tracker.closed()


class RunFiles(Tracker):
    """Writes each of them as soon as it is known, so that a run that stops early leaves what it had.

    Every method raises DiskFull or BadOption when the folder cannot take the file; without the pictures and the
    predictions, which ``ddp-manual evaluate`` makes anew, the run goes on.

    Args:
        keep: how many of the newest checkpoints stay.
    """

    def __init__(self, paths: RunPaths, *, keep: int) -> None:
        self._paths = paths
        self._keep = keep
        self._accuracies: list[float] = []

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        run_folder.write_json(self._paths.config, config)
        with _not_worth_the_run(self._paths.samples):
            run_folder.write_bytes(self._paths.samples, image_grid(train))

    def resumed(self, position: Position, history: History, model: nn.Module, *, complete: bool) -> None:
        """The files become what they were at ``position``."""
        self._accuracies = [evaluation.accuracy for evaluation in history.evaluations]
        at_the_end_of_an_epoch = position.epoch > 0 and not position.taken
        with writing(self._paths.run_dir, "--run_dir"):
            run_folder.sweep(self._paths.run_dir, re.compile(r"[a-z]+\.(json|jsonl|pt|png|csv)"))
            checkpoint_files.rewind(self._paths.checkpoints, position.step)
            if not complete:
                for told_at_the_end in (self._paths.summary, *self._paths.predictions.all):
                    told_at_the_end.unlink(missing_ok=True)
            if not at_the_end_of_an_epoch and self._accuracies_there() != self._accuracies:
                self._paths.model.unlink(missing_ok=True)  # it is of an epoch that has yet to come
        run_folder.keep_json_lines(self._paths.metrics, lambda line: line["step"] <= position.step)
        run_folder.write_json(self._paths.accuracies, self._accuracies)
        if at_the_end_of_an_epoch:
            self._write_model(model)

    def _accuracies_there(self) -> Any:
        """Of each epoch until that of ``model.pt``, or one more; [] where none has ended, None if damaged."""
        try:
            return json.loads(self._paths.accuracies.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError:
            return None

    def trained(self, metrics: Metrics) -> None:
        run_folder.append_json_line(self._paths.metrics, asdict(metrics))

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        # In this order: a model of more epochs than there are accuracies would be taken for that of the epoch before.
        self._accuracies.append(evaluation.accuracy)
        run_folder.write_json(self._paths.accuracies, self._accuracies)
        self._write_model(model)

    def _write_model(self, model: nn.Module) -> None:
        content = io.BytesIO()
        # Plain contiguous tensors on the CPU: what any script can load.
        state = {
            name: value.contiguous() if isinstance(value, Tensor) else value
            for name, value in on_cpu(model.state_dict()).items()
        }
        torch.save(state, content)
        run_folder.write_bytes(self._paths.model, content.getvalue())

    def checkpoint(self, take: Callable[[], Saved], epoch_plan: EpochPlan) -> None:
        saved = take()
        position, history = saved.position, saved.history
        accuracies = [evaluation.accuracy for evaluation in history.evaluations]
        about = {
            "epochs": round(epoch_plan.seen(position) / epoch_plan.samples, 4),
            "epochs_done": position.epoch,
            "samples_taken_of_next_epoch": position.taken,
            "samples_per_epoch": epoch_plan.samples,
            "test_accuracy": accuracies[-1] if accuracies and not position.taken else None,
            "test_accuracies": accuracies,
            "world_size": saved.world_size,
            "options": dict(saved.options),
        }
        path = checkpoint_files.write(self._paths.checkpoints, position.step, pack(saved), about)
        checkpoint_files.prune(self._paths.checkpoints, self._keep)
        logger.info("saved %s", path)

    def predicted(self, predictions: Predictions) -> None:
        with _not_worth_the_run(self._paths.predictions.table):
            write_files(self._paths.predictions, predictions, option="--run_dir")

    def finished(self, summary: Mapping[str, Any]) -> None:
        run_folder.write_json(self._paths.summary, summary)


@contextmanager
def _not_worth_the_run(file: Path) -> Iterator[None]:
    """Warn where ``file``, or another of its kind, cannot be written or drawn."""
    try:
        yield
    except DdpManualError as error:
        logger.warning("no %s: %s; %s", file, error.what, error.why)
    except Exception as error:  # what a font, a strange image or no more memory make of Pillow
        logger.warning("no %s: %s: %s", file, type(error).__name__, error)
