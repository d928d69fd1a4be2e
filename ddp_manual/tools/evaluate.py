"""``ddp-manual evaluate``: test a saved model in one process, without other ranks."""

from __future__ import annotations

import io
import json
import logging
import textwrap
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch import nn

from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMismatch, CheckpointMissing, writing
from ddp_manual.option_fields import as_flags
from ddp_manual.run_folder import PredictionPaths, RunPaths
from ddp_manual.terminal import columns, stdout_width
from ddp_manual.text_wrapping import wrapped
from ddp_manual.training import checkpoint_files, models, own_factory
from ddp_manual.training.data import Split
from ddp_manual.training.data_memory import bring_to
from ddp_manual.training.datasets import source_of
from ddp_manual.training.evaluation import Predictions
from ddp_manual.training.evaluation import evaluate as evaluate_network
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.own_factory import is_own_factory
from ddp_manual.training.transforms import Normalise, unit_scale
from ddp_manual.training.write_run_files import write_predictions
from ddp_manual.wording import counted

logger = logging.getLogger(__name__)

# An entry of a state dict need not be a tensor if its name ends with this.
EXTRA_STATE = "_extra_state"


def evaluate(checkpoint: Path, out_dir: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the model at ``checkpoint`` and write the prediction files.

    Args:
        checkpoint: see ``read_model``.
        out_dir: None for a folder inside the run's, named after the data set.
        flags: those of model, normalization, dataset, image_size, classes and data_dir that were typed.

    Returns:
        checkpoint, model, dataset, samples, accuracy (a fraction), loss (nats), classes and files. Each class has its
        name, images, accuracy (None without images) and mistaken_for: the class it was most often taken for and how
        often, or None.

    Raises:
        CheckpointMissing, CheckpointCorrupt, CheckpointMismatch: there is no model, it is damaged, or does not fit.
        DataMissing, DataCorrupt: from the data set. BadOption, DiskFull: a folder cannot be written, a flag is missing.
    """
    path, parameters = read_model(checkpoint)
    run = RunPaths(checkpoint_files.run_dir_of(checkpoint))
    config = _config(run.config, path, flags)
    trained = _read_trained(run.config, config)
    step = path.stem if checkpoint_files.NAME.fullmatch(path.name) else None
    folder = out_dir or run.evaluation(config.dataset, step)
    _check_is_no_run(folder)
    source = source_of(config)
    source.prepare(["test"])
    test = source.load("test")
    if trained is not None:
        test = _fitting(path, trained, config, test, named_by_hand="classes" in flags)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = _network(path, parameters, config, test).to(device)
    if trained is not None and "normalization" not in flags:
        normalise = Normalise(trained.mean, trained.std)
    elif config.normalization == "none":
        normalise = unit_scale(test.shape[0])
    else:
        normalise = source.normalise(source.load("train"))
    with writing(folder, "--out_dir"):  # before the evaluation, whose result would otherwise be lost
        folder.mkdir(parents=True, exist_ok=True)
    [test] = bring_to(device, [test])
    evaluation, predictions = evaluate_network(network, test, normalise, rank=0, world_size=1, predict=True)
    assert predictions is not None
    if not predictions.probabilities.isfinite().all():
        raise CheckpointCorrupt(
            f"the model in {path} gives scores that are not numbers",
            why=f"its loss over the test set of {config.dataset} is {evaluation.loss}",
            next="evaluate a checkpoint from before its training diverged",
        )
    return {
        "checkpoint": str(path),
        "model": config.model,
        "dataset": config.dataset,
        **asdict(evaluation),
        "classes": _by_class(predictions),
        "files": list(map(str, write_predictions(PredictionPaths(folder), predictions, option="--out_dir"))),
    }


def _check_is_no_run(folder: Path) -> None:
    if (there := RunPaths(folder).begun) is not None:
        raise BadOption(
            f"--out_dir {folder} is the folder of a run",
            why=f"{there} exists; the run's own predictions would be replaced",
            next="choose another --out_dir, or leave the option out for a new one in the run's",
        )


def text(report: Mapping[str, Any]) -> str:
    """Format what ``evaluate`` returns: a line for each class and each file."""
    rows = [["class", "images", "accuracy", "most often taken for"]]
    for found in report["classes"]:
        accuracy = "-" if found["accuracy"] is None else f"{100 * found['accuracy']:.2f}%"
        mistaken = "{} ({})".format(*found["mistaken_for"]) if found["mistaken_for"] else "-"
        rows.append([found["name"], str(found["images"]), accuracy, mistaken])
    return "\n".join(
        [
            wrapped(
                f"{report['model']} of {report['checkpoint']} on {report['dataset']}: {100 * report['accuracy']:.2f}% "
                f"test accuracy, test loss {report['loss']:.4f}, over {counted(report['samples'], 'image')}",
                stdout_width(),
            ),
            *columns(rows),
            *(f"  {path}" for path in report["files"]),
        ]
    )


def read_model(path: Path) -> tuple[Path, dict[str, Any]]:
    """Read the model at ``path``: a ``model.pt``, a checkpoint, any file with a state dict, or the folder of a run.

    In a run's folder it is the ``model.pt``, or the newest checkpoint that is whole if the run has no model yet.

    Returns:
        The path of the file, and its state dict on the CPU, without DDP's prefix.

    Raises:
        CheckpointMissing: nothing is there.
        CheckpointCorrupt: the file holds no model, or its content has changed since it was written.
        BadOption: the file cannot be read.
    """
    if path.is_dir() and (model := RunPaths(path).model).exists():
        path = model
    try:
        if path.is_dir() or checkpoint_files.NAME.fullmatch(path.name):
            checkpoint, content = checkpoint_files.named(path)
            return checkpoint.path, _parameters(checkpoint.path, content)
        if path.exists() and not path.is_file():
            raise OSError(0, "it is no regular file", str(path))
        return path, _parameters(path, path.read_bytes())
    except (FileNotFoundError, CheckpointMissing):
        raise CheckpointMissing(
            f"no model at {path}",
            why="there is no such file, or a folder with neither model.pt nor checkpoints",
            next="name a run's folder, such as runs/<start time>-<run_id>, or a file in it",
        ) from None
    except OSError as error:
        raise BadOption(
            f"--checkpoint {path} cannot be read",
            why=f"{error.strerror}: {path}",
            next="name a model.pt, a checkpoint or a run's folder that this user may read",
        ) from None


def _parameters(path: Path, content: bytes) -> dict[str, Any]:
    """Return the state dict, alone or within a checkpoint; a parameter may have the name of a checkpoint's part."""
    try:
        read = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        within = isinstance(read.get("model"), Mapping) and not isinstance(read.get("position"), torch.Tensor)
        found: dict[str, Any] = read["model"] if within else read
        why = f"it holds {', '.join(map(str, [*found][:5])) or 'nothing'}, where tensors are wanted"
    except Exception as error:  # torch.load raises many kinds, depending on the first wrong byte
        # Not torch's own message: it advises weights_only=False, which would run code from the file.
        found, why = {}, f"torch.load with weights_only=True cannot read it: {type(error).__name__}"
    tensors = [value for name, value in found.items() if not str(name).endswith(EXTRA_STATE)]
    if not tensors or not all(isinstance(value, torch.Tensor) for value in tensors):
        raise CheckpointCorrupt(
            f"{path} holds no model",
            why=why,
            next="name a run's folder, its model.pt, one of its checkpoints, or a file that torch.save has written of "
            "a model's state_dict()",
        )
    return found


def _config(path: Path, model: Path, flags: Mapping[str, Any]) -> TrainConfig:
    """Take the options from the run's ``config.json`` at ``path``; flags override them.

    A folder that came from elsewhere must not choose the code that is imported and called here: the run's own factories
    have to be named by flags too.
    """
    unsaid = [name for name in ("model", "dataset") if name not in flags]
    if not path.exists():
        if unsaid:
            raise BadOption(
                f"{model} does not say which {' and '.join(unsaid)} it is of",
                why=f"there is no {path}, where a run writes that",
                next="say it, such as " + " ".join(f"--{name} {getattr(TrainConfig, name)}" for name in unsaid),
            )
        return TrainConfig(**flags, sources=dict.fromkeys(flags, "flag"))
    config = TrainConfig.from_file(str(path), **flags)
    unnamed = {name: getattr(config, name) for name in unsaid if is_own_factory(getattr(config, name))}
    if unnamed:
        raise BadOption(
            f"the {' and the '.join(unnamed)} of {path.parent} {'are' if len(unnamed) > 1 else 'is'} code, which is "
            "called only if you name it too",
            why=f"{path} names " + " and ".join(unnamed.values()),
            next=f"if you trust that code, add {as_flags(unnamed)}",
        )
    return config


class Trained(msgspec.Struct, frozen=True):
    """The images that a run's model was trained on, as its ``config.json`` describes them below ``run``."""

    mean: tuple[float, ...]
    std: tuple[float, ...]
    shape: tuple[int, int, int]
    """Channels, height and width of an image."""
    classes: tuple[str, ...]

    def __post_init__(self) -> None:
        if not (len(self.mean) == len(self.std) == self.shape[0] and all(self.std) and self.classes):
            raise ValueError(f"mean is {self.mean}, std {self.std}, shape {self.shape}, classes {self.classes}")


def _read_trained(path: Path, config: TrainConfig) -> Trained | None:
    """Read the record that a run adds to its options; None without it, such as in a hand-written file of options.

    Logs a warning where the source of the user's own model or data set has changed since.
    """
    described = json.loads(path.read_bytes()) if path.exists() else {}
    if (run := described.get("run")) is None:
        return None
    try:
        trained = msgspec.convert(run, Trained)
    except msgspec.ValidationError as error:
        raise CheckpointCorrupt(
            f"{path} is not what a run has written",
            why=f"run: {error}",
            next="fix it; or move the model to a folder of its own, and say what it is by --model and --dataset",
        ) from None
    for name, digest in own_factory.sources(model=config.model, dataset=config.dataset).items():
        factory = getattr(config, name.removesuffix("_source"))
        if factory == described.get(name.removesuffix("_source")) and run.get(name, digest) != digest:
            logger.warning("the source of %s has changed since the run", factory)
    return trained


def _fitting(path: Path, trained: Trained, config: TrainConfig, test: Split, *, named_by_hand: bool) -> Split:
    """Return ``test``; if it has the training's classes in another order, put them into the training's order.

    Raises:
        CheckpointMismatch: it has other images, or another number of classes.
    """
    has, wants = _images(test), _images(trained)
    if has != wants:
        raise CheckpointMismatch(
            f"{path} is a model for other images than those of {config.dataset}",
            why=f"it was trained on {wants}; {config.dataset} has {has}",
            next="give a --dataset of such images; those of folder:PATH can be resized with --image_size",
        )
    if not named_by_hand and test.classes != trained.classes and sorted(test.classes) == sorted(trained.classes):
        logger.info("the classes of %s are put into the order they had in training", config.dataset)
        return test.in_the_order_of(trained.classes)
    renamed = [f"{new} instead of {old}" for old, new in zip(trained.classes, test.classes, strict=True) if old != new]
    if renamed:
        logger.warning("the classes have other names than those the model was trained on: %s", ", ".join(renamed[:5]))
    return test


def _network(path: Path, parameters: Mapping[str, Any], config: TrainConfig, test: Split) -> nn.Module:
    classes = len(test.classes)
    network = models.build(config.model, device=torch.device("cpu"), seed=0, shape=test.shape, classes=classes)
    try:
        network.load_state_dict(parameters)
    except Exception as error:  # torch words each misfit in its own way
        raise CheckpointMismatch(
            f"{path} is no {config.model} for {_images(test)}",
            why=textwrap.shorten(str(error).split(":\n", 1)[-1], 300, placeholder=" ...") or type(error).__name__,
            next="give the --model and the --dataset it was trained on",
        ) from error
    return network


def _by_class(predictions: Predictions) -> list[dict[str, Any]]:
    classes = predictions.split.classes
    found = []
    for index, name in enumerate(classes):  # not from the confusion matrix: of very many classes it fills the memory
        guesses = Counter(sorted(predictions.guess[predictions.truth == index].tolist()))
        images, right = guesses.total(), guesses.pop(index, 0)
        mistaken_for = next(([classes[guess], count] for guess, count in guesses.most_common(1)), None)
        accuracy = right / images if images else None
        found.append({"name": name, "images": images, "accuracy": accuracy, "mistaken_for": mistaken_for})
    return found


def _images(of: Split | Trained) -> str:
    return f"{'x'.join(map(str, of.shape))} images of {len(of.classes)} classes"
