"""``ddp-manual evaluate``: what a saved model makes of a test set, in one process and without other ranks."""

from __future__ import annotations

import logging
import textwrap
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMismatch, writing
from ddp_manual.options import as_flags
from ddp_manual.run_folder import PredictionPaths, RunPaths
from ddp_manual.tools import saved_model
from ddp_manual.tools.saved_model import SavedModel
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.own_code import is_own_factory

if TYPE_CHECKING:
    from torch import nn

    from ddp_manual.training.augment import Normalise
    from ddp_manual.training.data import Source, Split
    from ddp_manual.training.predicting import Predictions

logger = logging.getLogger(__name__)


def evaluate(checkpoint: Path, out_dir: Path | None, flags: Mapping[str, Any]) -> dict[str, Any]:
    """Evaluate the model at ``checkpoint`` and write the prediction files.

    Args:
        checkpoint: see ``saved_model.read``.
        out_dir: None for a folder named after the data set, in the run's.
        flags: those that were typed of model, normalization, dataset, image_size, classes and data_dir.

    Returns:
        checkpoint, model, dataset, samples, accuracy (a fraction), loss (nats), classes and files. Each class has a
        name, images, accuracy (None without images), and mistaken_for, a pair of the class that it was most often
        taken for and how often, or None.

    Raises:
        CheckpointMissing, CheckpointCorrupt, CheckpointMismatch: there is no model, or it is damaged, or another.
        DataMissing, DataCorrupt: of the data set. BadOption, DiskFull: a folder cannot be written, a flag is missing.
    """
    saved = saved_model.read(checkpoint)
    config = _config(saved, flags)
    folder = out_dir or saved.run.evaluation(config.dataset, saved.path.stem if saved.is_checkpoint else None)
    _spare_a_runs_own(folder)

    import torch

    from ddp_manual.training import prediction_files
    from ddp_manual.training.datasets import source_of
    from ddp_manual.training.predicting import evaluate_and_predict

    source = source_of(config)
    source.prepare(["test"])
    test = _fitting(saved, config, source.load("test"), flags)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    network = _network(saved, config, test).to(device)
    normalise = _normalise(saved, config, source, test, flags)
    with writing(folder, "--out_dir"):  # now rather than when there is something to lose
        folder.mkdir(parents=True, exist_ok=True)
    evaluation, predictions = evaluate_and_predict(network, test.to(device), normalise, rank=0, world_size=1)
    assert predictions is not None
    if not predictions.probabilities.isfinite().all():
        raise CheckpointCorrupt(
            f"the model in {saved.path} gives scores that are not numbers",
            why=f"its loss over the test set of {config.dataset} is {evaluation.loss}",
            next="evaluate a checkpoint from before its training diverged",
        )
    files = prediction_files.write(PredictionPaths(folder), predictions, option="--out_dir")
    return {
        "checkpoint": str(saved.path),
        "model": config.model,
        "dataset": config.dataset,
        "samples": evaluation.samples,
        "accuracy": evaluation.accuracy,
        "loss": evaluation.loss,
        "classes": _by_class(predictions),
        "files": [str(path) for path in files],
    }


def _config(saved: SavedModel, flags: Mapping[str, Any]) -> TrainConfig:
    """The run's options, and before them the flags."""
    path = saved.run.config
    known = TrainConfig.from_file(str(path)) if path.exists() else None
    missing = [name for name in ("model", "dataset") if known is None and name not in flags]
    if missing:
        raise BadOption(
            f"{saved.path} does not say which {' and '.join(missing)} it is of",
            why=f"there is no {path}, where a run writes that",
            next="say it, such as " + " ".join(f"--{name} {getattr(TrainConfig, name)}" for name in missing),
        )
    if known is None:
        return TrainConfig(**flags, sources=dict.fromkeys(flags, "flag"))
    _refuse_code_nobody_named(path, known, flags)
    config = TrainConfig.from_file(str(path), **flags)
    _warn_of_changed_code(saved, known, config)
    return config


def _refuse_code_nobody_named(path: Path, known: TrainConfig, flags: Mapping[str, Any]) -> None:
    """A folder that came from elsewhere must not choose what is imported and called here."""
    own = {name: getattr(known, name) for name in ("model", "dataset") if is_own_factory(getattr(known, name))}
    unnamed = {name: value for name, value in own.items() if name not in flags}
    if unnamed:
        raise BadOption(
            f"the {' and the '.join(unnamed)} of {path.parent} {'are' if len(unnamed) > 1 else 'is'} code, which is "
            "called only if you name it too",
            why=f"{path} names " + " and ".join(unnamed.values()),
            next=f"if you trust that code, add {as_flags(unnamed)}",
        )


def _warn_of_changed_code(saved: SavedModel, known: TrainConfig, config: TrainConfig) -> None:
    from ddp_manual.training import own_code

    then = saved.trained.sources if saved.trained is not None else {}
    for name, digest in own_code.sources(model=config.model, dataset=config.dataset).items():
        option = name.removesuffix("_source")
        if getattr(known, option) == getattr(config, option) and then.get(name, digest) != digest:
            logger.warning("the source of %s has changed since the run", getattr(config, option))


def _spare_a_runs_own(folder: Path) -> None:
    there = next((path for path in (RunPaths(folder).config, RunPaths(folder).checkpoints) if path.exists()), None)
    if there is not None:
        raise BadOption(
            f"--out_dir {folder} is the folder of a run",
            why=f"{there} exists; the run's own predictions would be replaced",
            next="choose another --out_dir, or leave the option out for a new one in the run's",
        )


def _fitting(saved: SavedModel, config: TrainConfig, test: Split, flags: Mapping[str, Any]) -> Split:
    """``test``, with the labels of the training where its classes have the same names in another order.

    Raises:
        CheckpointMismatch: it has other images, or another number of classes.
    """
    trained = saved.trained
    if trained is None or trained.shape is None or trained.classes is None:
        return test
    has = f"{_shape(test.shape)} images of {len(test.classes)} classes"
    wants = f"{_shape(trained.shape)} images of {len(trained.classes)} classes"
    if has != wants:
        raise CheckpointMismatch(
            f"{saved.path} is a model for other images than those of {config.dataset}",
            why=f"it was trained on {wants}; {config.dataset} has {has}",
            next=_what_fits(trained.shape, test.shape),
        )
    if test.classes != trained.classes:
        if "classes" not in flags and sorted(test.classes) == sorted(trained.classes):
            logger.info("the classes of %s are put into the order they had in training", config.dataset)
            return test.in_the_order_of(trained.classes)
        different = [(one, other) for one, other in zip(trained.classes, test.classes, strict=True) if one != other]
        logger.warning(
            "the classes have other names than those the model was trained on: %s",
            ", ".join(f"{other} instead of {one}" for one, other in different[:5]),
        )
    return test


def _what_fits(wanted: tuple[int, int, int], has: tuple[int, int, int]) -> str:
    """What to do about other channels, another size or another number of classes; nothing converts colours."""
    channels, height, width = wanted
    if channels != has[0]:
        kind = {1: "grey", 3: "colour"}.get(channels, f"{channels}-channel")
        return f"give a --dataset of {kind} images; or the model of a run that was trained on images like these"
    resized = f"; those of folder:PATH can be resized with --image_size {height}" if height == width else ""
    return f"give a --dataset of such images{resized if wanted != has else ''}"


def _network(saved: SavedModel, config: TrainConfig, test: Split) -> nn.Module:
    import torch

    from ddp_manual.training import models

    network = models.build(
        config.model, device=torch.device("cpu"), seed=0, shape=test.shape, classes=len(test.classes)
    )
    try:
        network.load_state_dict(dict(saved.parameters))
    except Exception as error:  # torch words each misfit in its own way
        fitting = [name for name in models.MODELS if name != config.model and _fits(saved, name, test)]
        raise CheckpointMismatch(
            f"{saved.path} is no {config.model} for {_shape(test.shape)} images of {len(test.classes)} classes",
            why=textwrap.shorten(str(error).partition(":")[2], 300, placeholder=" ..."),
            next=f"it fits --model {fitting[0]}" if fitting else "give the --model and the --dataset it was trained on",
        ) from error
    return network


def _fits(saved: SavedModel, name: str, test: Split) -> bool:
    import torch

    from ddp_manual.training import models
    from ddp_manual.training.checkpoint import shapes

    try:
        with torch.device("meta"):
            built = models.MODELS[name](shape=test.shape, classes=len(test.classes)).state_dict()
    except Exception:  # the images may be too small for it
        return False
    return shapes(built) == shapes(saved.parameters)


def _normalise(
    saved: SavedModel, config: TrainConfig, source: Source, test: Split, flags: Mapping[str, Any]
) -> Normalise:
    """As in the run; where that is not known, or a flag says otherwise, as a run on this data set would."""
    from ddp_manual.training.augment import Normalise, unit_scale

    if saved.trained is not None and "normalization" not in flags:
        return Normalise(saved.trained.mean, saved.trained.std)
    if config.normalization == "none":
        return unit_scale(test.shape[0])
    return source.normalise(source.load("train"))


def _by_class(predictions: Predictions) -> list[dict[str, Any]]:
    classes = predictions.split.classes
    found = []
    for index, name in enumerate(classes):  # the matrix of all has no room where there are very many
        guesses = predictions.guess[predictions.truth == index].tolist()
        images, right = len(guesses), guesses.count(index)
        mistakes = Counter(sorted(guess for guess in guesses if guess != index)).most_common(1)
        found.append(
            {
                "name": name,
                "images": images,
                "accuracy": right / images if images else None,
                "mistaken_for": [classes[mistakes[0][0]], mistakes[0][1]] if mistakes else None,
            }
        )
    return found


def _shape(shape: tuple[int, int, int]) -> str:
    return "x".join(map(str, shape))
