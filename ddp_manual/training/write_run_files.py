"""The files of a run, which rank 0 writes: settings, metrics, checkpoints, model, predictions and the summary."""

from __future__ import annotations

import csv
import io
import json
import logging
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from ddp_manual import atomic_files, terminal
from ddp_manual.errors import DdpManualError, DiskFull, writing
from ddp_manual.run_folder import PredictionPaths, RunPaths
from ddp_manual.training import checkpoint_files, own_factory, pictures
from ddp_manual.training.checkpoint_state import History, on_cpu, pack
from ddp_manual.training.data import Split
from ddp_manual.training.evaluation import Predictions
from ddp_manual.training.meter import Metrics
from ddp_manual.training.position import Position
from ddp_manual.training.trackers import Trackers

if TYPE_CHECKING:
    from ddp_manual.training.trainer import Trainer
    from ddp_manual.worker.world import World

logger = logging.getLogger(__name__)

# Names for the trackers, which get the other metrics under their names in metrics.jsonl.
TRACKED_NAMES = {"loss": "train/loss", "accuracy": "train/accuracy"}
# With 1,000 classes the confusion matrix takes 8 MB. Nobody could read the table or the picture of more.
MOST_CONFUSED = 1000


class RunFiles:
    """Writes each file as soon as its content is known, so that a run that stops early leaves what it had; then tells
    the trackers.

    Every method raises DiskFull or BadOption when the folder cannot take a file, except for the pictures and the
    predictions, which ``ddp-manual evaluate`` can make again, and for metrics on a full disk: without them the run goes
    on.

    Args:
        keep: how many of the newest checkpoints stay.
        trackers: told of everything once ``start`` has opened them; this object does not close them.
    """

    def __init__(self, paths: RunPaths, *, keep: int, trackers: Trackers) -> None:
        self._paths = paths
        self._keep = keep
        self._trackers = trackers
        self._disk_was_full = False

    def start(self, settings: Mapping[str, Any], train: Split, *, complete: bool = False) -> None:
        """Write ``config.json`` and the picture of the first images; then open the trackers, unless the run is
        ``complete``: an earlier process's have followed it to its end."""
        atomic_files.write_json(self._paths.config, settings)
        with _not_worth_the_run(self._paths.samples):
            atomic_files.write_bytes(self._paths.samples, pictures.image_grid(train))
        if not complete:
            self._trackers.open(settings, self._paths)

    def rewind(self, position: Position, history: History, network: nn.Module, *, complete: bool) -> None:
        """Bring the files back to what they were at ``position``, where the run resumes or was ``complete``."""
        accuracies = [evaluation.accuracy for evaluation in history.evaluations]
        at_the_end_of_an_epoch = position.epoch > 0 and not position.taken
        with writing(self._paths.run_dir, "--run_dir"):
            atomic_files.sweep(self._paths.run_dir, re.compile(r"[a-z]+\.(json|jsonl|pt|png|csv)"))
            checkpoint_files.rewind(self._paths.checkpoints, position.step)
            if not complete:
                for written_at_the_end in (self._paths.summary, *self._paths.predictions.all):
                    written_at_the_end.unlink(missing_ok=True)
            if not at_the_end_of_an_epoch and self._accuracies_on_disk() != accuracies:
                self._paths.model.unlink(missing_ok=True)  # it is of an epoch that will be trained again
        atomic_files.keep_json_lines(self._paths.metrics, lambda line: line["step"] <= position.step)
        atomic_files.write_json(self._paths.accuracies, accuracies)
        if at_the_end_of_an_epoch:
            self._write_model(network)

    def _accuracies_on_disk(self) -> Any:
        """Return the accuracies of all epochs up to ``model.pt``'s, or one more; [] without a file, None if damaged."""
        try:
            return json.loads(self._paths.accuracies.read_bytes())
        except FileNotFoundError:
            return []
        except ValueError:
            return None

    def add_metrics(self, metrics: Metrics) -> None:
        values = asdict(metrics)
        try:
            atomic_files.append_json_line(self._paths.metrics, values)
        except DiskFull as error:  # without metrics the run goes on
            if not self._disk_was_full:
                logger.warning("%s: metrics are missing there until there is room", error.what)
            self._disk_was_full = True
        step = values.pop("step")
        self._trackers.scalars(step, {TRACKED_NAMES.get(name, name): value for name, value in values.items()})

    def add_evaluation(self, trainer: Trainer) -> None:
        """Write the accuracies, and the model of the epoch that has ended."""
        # In this order: if a kill came between, a model without its accuracy would pass for that of the epoch before.
        atomic_files.write_json(self._paths.accuracies, [evaluation.accuracy for evaluation in trainer.evaluations])
        self._write_model(trainer.network)
        last = trainer.evaluations[-1]
        self._trackers.scalars(trainer.position.step, {"test/loss": last.loss, "test/accuracy": last.accuracy})

    def _write_model(self, network: nn.Module) -> None:
        content = io.BytesIO()
        # Plain contiguous tensors on the CPU, which any script can load.
        state = on_cpu(network.state_dict())
        state.update({name: value.contiguous() for name, value in state.items() if isinstance(value, Tensor)})
        torch.save(state, content)
        atomic_files.write_bytes(self._paths.model, content.getvalue())

    def save_checkpoint(self, trainer: Trainer) -> None:
        position, epoch_plan = trainer.position, trainer.epoch_plan
        accuracies = [evaluation.accuracy for evaluation in trainer.evaluations]
        description = {
            "epochs": round(epoch_plan.seen(position) / epoch_plan.samples, 4),
            "epochs_done": position.epoch,
            "samples_taken_of_next_epoch": position.taken,
            "samples_per_epoch": epoch_plan.samples,
            "test_accuracy": accuracies[-1] if accuracies and not position.taken else None,
            "test_accuracies": accuracies,
            "world_size": trainer.world_size,
            "options": trainer.options,
        }
        path = checkpoint_files.write(self._paths.checkpoints, position.step, pack(trainer), description)
        checkpoint_files.prune(self._paths.checkpoints, self._keep)
        logger.info("saved %s", path)

    def write_predictions(self, position: Position, predictions: Predictions) -> None:
        with _not_worth_the_run(self._paths.predictions.table):
            write_predictions(self._paths.predictions, predictions, option="--run_dir")
        self._trackers.predictions(position.step, predictions)

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Write ``summary.json``: the run is complete."""
        atomic_files.write_json(self._paths.summary, summary)
        self._trackers.summary = summary


@contextmanager
def _not_worth_the_run(file: Path) -> Iterator[None]:
    """Warn, and raise nothing, if the body cannot draw or write ``file`` or another of its kind."""
    try:
        yield
    except Exception as error:  # such as Pillow's about a font, a strange image or too little memory
        why = f"{error.what}; {error.why}" if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
        logger.warning("no %s: %s", file, why)


def write_predictions(paths: PredictionPaths, predictions: Predictions, *, option: str) -> list[Path]:
    """Write the prediction files and return their paths; none gets its final name before all of them are on disk.

    With more than MOST_CONFUSED classes the confusion matrix is left out, and a log line says so.

    Args:
        option: the option that named the folder, for an error message.

    Raises:
        DiskFull, BadOption: the folder cannot take the files.
    """
    classes = predictions.split.classes
    contents: dict[Path, bytes | Iterable[bytes]] = {
        paths.table: table(predictions),
        paths.picture: pictures.prediction_grid(predictions),
    }
    if len(classes) <= MOST_CONFUSED:
        contents[paths.confusion_table] = confusion_table(predictions)
        contents[paths.confusion_picture] = pictures.confusion_picture(predictions.confusion, classes)
    else:
        logger.info("no %s and no picture of it: more than %d classes", paths.confusion_table, MOST_CONFUSED)
    with writing(paths.folder, option):
        atomic_files.replace_files(contents)
    return list(contents)


def predictions_are_there(paths: PredictionPaths, classes: int) -> bool:
    """Tell whether all files that ``write_predictions`` writes for so many classes exist."""
    return all(path.exists() for path in (paths.all if classes <= MOST_CONFUSED else (paths.table, paths.picture)))


def table(predictions: Predictions) -> Iterator[bytes]:
    """Yield the lines of ``predictions.csv``: one for each image, in the predictions' order.

    ``id`` is the sample's index in the test set, counted from 0; ``correct`` is 1 or 0; ``p_<class>`` is the
    probability of that class, to six digits.
    """
    classes = predictions.split.classes
    line = _csv_line()
    yield line(["id", "truth", "guess", "confidence", "correct", *(f"p_{name}" for name in classes)])
    columns = (predictions.truth, predictions.guess, predictions.correct.int(), predictions.probabilities)
    # A thousand samples at a time: Python's numbers and texts take much more memory than a tensor.
    for chosen in predictions.order.split(1000):
        rows = zip(chosen.tolist(), *(column[chosen].tolist() for column in columns), strict=True)
        for index, truth, guess, correct, probabilities in rows:
            texts = [f"{value:.6g}" for value in probabilities]
            yield line([index, classes[truth], classes[guess], texts[guess], correct, *texts])


def confusion_table(predictions: Predictions) -> Iterator[bytes]:
    """Yield the lines of ``confusion.csv``: for each class, how many of its images were taken for each class."""
    classes = predictions.split.classes
    line = _csv_line()
    yield line(["truth \\ guess", *classes])
    for name, counts in zip(classes, predictions.confusion.tolist(), strict=True):
        yield line([name, *counts])


def _csv_line() -> Callable[[Sequence[object]], bytes]:
    """Return a function that makes a line of CSV from a row: ``writerow`` returns what the file's ``write`` returns."""
    file = SimpleNamespace(write=str.encode)
    return csv.writer(file, lineterminator="\n").writerow


def settings(world: World, paths: RunPaths, trainer: Trainer) -> dict[str, Any]:
    """Return the content of ``config.json``: the options, and below ``run`` what follows from them, and the step after
    which the run begins or resumes."""
    config, data, plan = trainer.config, trainer.data, trainer.epoch_plan
    return {
        **config.values(),
        "run": {
            "run_id": world.run_id,
            "run_dir": str(paths.run_dir),
            "world_size": world.world_size,
            "device": world.device.type,
            "batch_size_per_rank": plan.batch_size,
            "goes_on_after_step": trainer.position.step,
            "peak_lr": plan.peak_lr,
            "steps_per_epoch": plan.steps_per_epoch,
            "mean": data.normalise.mean,
            "std": data.normalise.std,
            "shape": data.train.shape,
            "classes": data.train.classes,
            **own_factory.sources(model=config.model, dataset=config.dataset),
        },
    }


def summary(world: World, paths: RunPaths, trainer: Trainer) -> dict[str, Any]:
    """Return the content of ``summary.json``. ``train_seconds`` counts all processes that trained the run, except for
    steps that were lost; ``samples_per_second`` is the last process's."""
    config, evaluations = trainer.config, trainer.evaluations
    return {
        "run_id": world.run_id,
        "run_dir": str(paths.run_dir),
        "world_size": world.world_size,
        "backend": world.backend,
        "device": world.device.type,
        "dataset": config.dataset,
        "model": config.model,
        "epochs": config.epochs,
        "final_test_accuracy": evaluations[-1].accuracy,
        "best_test_accuracy": max(evaluation.accuracy for evaluation in evaluations),
        "final_test_loss": evaluations[-1].loss,
        "rendezvous_seconds": world.rendezvous_seconds,
        "train_seconds": trainer.meter.seconds,
        "samples_per_second": trainer.samples_per_second,
        **({"losses": world.losses["count"], "lost_seconds": world.losses["seconds"]} if world.losses else {}),
        "torch_version": torch.__version__,
        "roster": world.roster() if world.rank == 0 else [],
    }


def earlier_summary(paths: RunPaths, epochs: int) -> dict[str, Any] | None:
    """Return the summary of a run that is complete after ``epochs``; None if it is not there, cannot be read, or is of
    another number of epochs."""
    try:
        found = {**json.loads(paths.summary.read_bytes()), "run_dir": str(paths.run_dir)}
        terminal.result_text(found)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    return found if found["epochs"] == epochs else None
