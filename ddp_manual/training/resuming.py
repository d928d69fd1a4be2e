"""How a run goes on from a checkpoint: which one, whether it belongs to this run, and the same state on every rank.

Rank 0 alone needs the file, and its ``--resume`` counts. What it meets (no file, a damaged one, another run's) it
raises; the others learn it as its last words.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import BadOption, CheckpointMismatch
from ddp_manual.options import as_flags, option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_file, checkpoints
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.resume_option import AUTO, goes_on_in

if TYPE_CHECKING:
    from torch import nn

    from ddp_manual.training.checkpoint import History, Saved
    from ddp_manual.training.data import Split
    from ddp_manual.training.epoch_plan import Position
    from ddp_manual.training.loop import Trainer

logger = logging.getLogger(__name__)

# With another value of these it is another network, or it has seen other images, or not the samples that the checkpoint
# counts as seen.
MUST_MATCH = ("model", "dataset", "image_size", "normalization", "seed", "sync_bn")
# And what the data set made of its options; other images make another network too.
OF_THE_DATA = ("samples", "shape", "class_count")


@contextmanager
def run_folder(config: TrainConfig, paths: RunPaths) -> Iterator[None]:
    """The run's folder, made and kept for this process while the body runs; on rank 0.

    Raises:
        BadOption: it cannot be used, holds an earlier run, or another process trains into it.
    """
    resuming = goes_on_in(config.resume, paths.run_dir)
    paths.create(resuming=resuming)
    with paths.locked():
        paths.create(resuming=resuming)  # whoever held the lock until now may have begun a run there
        yield


def options_of(config: TrainConfig, train: Split, test: Split) -> dict[str, Any]:
    """What a checkpoint keeps of the options and the data: what makes the parameters, to be compared when a run goes on
    from it."""
    from ddp_manual.training import own_code

    kept = {
        field.name: getattr(config, field.name)
        for field in option_fields(TrainConfig)
        if field.metadata["shared"] and field.metadata["group"] in ("training", "data")
    }
    of_the_data = {"samples": len(train), "shape": list(train.shape), "class_count": len(train.classes)}
    sources = own_code.sources(model=config.model, dataset=config.dataset)
    return {**kept, **of_the_data, "data": train.digest, "test_data": test.digest, **sources}


def go_on(
    config: TrainConfig, paths: RunPaths, trainer: Trainer, network: nn.Module, options: Mapping[str, Any]
) -> tuple[Position, History] | None:
    """Give every rank the state of the checkpoint that rank 0 was told to go on from; None: there is none. A
    collective.

    Args:
        options: see ``options_of``.

    Raises:
        CheckpointMissing, CheckpointCorrupt, CheckpointMismatch, BadOption: on rank 0.
        CheckpointMismatch: on every rank, if the parameters do not fit the network. CheckpointCorrupt: the rest.
    """
    from ddp_manual.training import checkpoint

    found = find(config, paths) if trainer.rank == 0 else None
    path = found[0].path if found else Path("rank 0's checkpoint")
    if found:
        _compare(path, _unpacked(path, found[1]), config, trainer, options)
    content = checkpoint.share_bytes(found[1] if found else None, trainer.train.labels.device)
    if content is None:
        return None
    saved = _unpacked(path, content)
    _check_fit(path, saved, network)
    trainer.settle_buckets()
    try:
        checkpoint.restore(saved, network, trainer.optimizer)
    except checkpoint.Unreadable as error:
        raise checkpoint_file.corrupt(path, str(error)) from error
    position = saved.position
    logger.log(
        logging.INFO if trainer.rank == 0 else logging.DEBUG,
        "going on after step %d, %.2f epochs, from %s%s",
        *(position.step, trainer.epoch_plan.seen(position) / trainer.epoch_plan.samples, path),
        f", saved by {saved.world_size} rank(s)" if saved.world_size != trainer.world_size else "",
    )
    return position, saved.history


def find(config: TrainConfig, paths: RunPaths) -> tuple[checkpoint_file.Checkpoint, bytes] | None:
    """The checkpoint that ``--resume`` means, and its content; None: the run starts from the beginning.

    Raises:
        CheckpointMissing, CheckpointCorrupt: there is none, or it is damaged.
        BadOption: it cannot be read; or starting from the beginning would overwrite another run, or a complete one.
    """
    if config.resume is None:
        return None
    if config.resume != AUTO:
        return checkpoints.named(Path(config.resume))
    found = checkpoints.newest_whole(paths.checkpoints)
    if found is None:
        _refuse_to_overwrite(config, paths)
        logger.info("no checkpoint in %s yet: starting from the beginning", paths.run_dir)
    return found


def _refuse_to_overwrite(config: TrainConfig, paths: RunPaths) -> None:
    """A run without a checkpoint begins anew, over its own files but nobody else's."""
    try:
        there = json.loads(paths.config.read_bytes())
        differ = [name for name in MUST_MATCH if there.get(name, getattr(TrainConfig, name)) != getattr(config, name)]
    except FileNotFoundError:
        return
    except (OSError, ValueError, AttributeError):
        differ = ["config.json, which cannot be read"]
    complete = paths.summary.exists()
    if complete or differ:
        raise BadOption(
            f"--run_dir {paths.run_dir} holds {'a complete run' if complete else 'another run'}, without a checkpoint",
            why=f"{paths.summary} exists" if complete else f"{paths.config} differs in {', '.join(differ)}",
            next="choose another --run_dir: starting from the beginning here would overwrite its files",
        )


def _check_fit(path: Path, saved: Saved, network: nn.Module) -> None:
    from ddp_manual.training.checkpoint import shapes

    then, now = shapes(saved.model), shapes(network.state_dict())
    wrong = [
        f"{name}: {then.get(name, 'not')} in the checkpoint / {now.get(name, 'not')} here"
        for name in {**now, **then}
        if then.get(name) != now.get(name)
    ]
    if wrong:
        raise CheckpointMismatch(
            f"{path} is of another network",
            why="\n".join(wrong[:5]),
            next="train the model and the data it was saved with; or start a new run, without --resume",
        )


def _unpacked(path: Path, content: bytes) -> Saved:
    from ddp_manual.training import checkpoint

    try:
        return checkpoint.unpack(content)
    except checkpoint.Unreadable as error:
        raise checkpoint_file.corrupt(path, str(error)) from error


def _options_again(path: Path, then: Mapping[str, Any], done: int, config: TrainConfig) -> str:
    """What to type for the run of that checkpoint to go on: its own file of options, and where it is not there any
    more, what the checkpoint says of them.

    Args:
        done: epochs begun or done.
    """
    run = RunPaths(checkpoint_file.run_dir_of(path))
    planned = then.get("epochs")
    epochs = {"epochs": max(done, planned if isinstance(planned, int) else done)}
    if run.config.exists():
        again = as_flags({"config": run.config, "run_dir": run.run_dir, "resume": AUTO})
        return f"{again} {as_flags(epochs)}" if done > config.epochs else again
    options = {
        field.name: then[field.name]
        for field in option_fields(TrainConfig)
        if field.name in then and (field.name in MUST_MATCH or then[field.name] != field.default)
    }
    return as_flags({**options, **epochs})


def _compare(path: Path, saved: Saved, config: TrainConfig, trainer: Trainer, now: Mapping[str, Any]) -> None:
    """Refuse another run's checkpoint, and say which other options have changed."""
    then = saved.options
    wrong = [
        f"{name}: {then[name]} in the checkpoint / {now[name]} here"
        + (f" ({config.source(name)})" if name in MUST_MATCH else "")
        for name in (*MUST_MATCH, *OF_THE_DATA)
        if name in then and then[name] != now[name]  # a checkpoint may be older than what it would have to say
    ]
    done = saved.position.epoch + (saved.position.taken > 0)
    if done > config.epochs:
        wrong.append(f"epochs: {done} begun or done in the checkpoint / {config.epochs} here")
    if wrong:
        raise CheckpointMismatch(
            f"{path} is of another run",
            why="\n".join(wrong),
            next=f"give the options it was saved with: {_options_again(path, then, done, config)}\n"
            "or start a new run, without --resume",
        )
    if then.get("data", now["data"]) != now["data"]:  # a checkpoint from before they were compared has no digest
        raise CheckpointMismatch(
            f"{path} is of a run on other data",
            why=f"the training images and labels of --dataset {config.dataset} have the digest {then['data']} in the "
            f"checkpoint / {now['data']} here",
            next="bring back the data that the run began with; a factory has to return the same each time\n"
            "or start a new run, without --resume",
        )
    if not (0 <= saved.position.taken < trainer.epoch_plan.samples and saved.position.step >= 0):
        raise checkpoint_file.corrupt(path, f"it is at sample {saved.position.taken} of {trainer.epoch_plan.samples}")
    for name, value in now.items():
        if name not in then or then[name] == value:  # an option that is newer than the checkpoint was at its default
            continue
        if name.endswith("_source"):
            logger.warning("the source of %s has changed since the checkpoint", now[name.removesuffix("_source")])
        elif name == "test_data":
            logger.warning(
                "the test images of %s have changed since the checkpoint: accuracies before and after are of others",
                config.dataset,
            )
        else:
            logger.info("from here on with --%s %s; it was %s", name, value, then[name])
