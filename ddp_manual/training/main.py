"""The training life of one rank: load, build, resume, (train, evaluate, save) per epoch, finish. See
``train_as_agreed``."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ddp_manual import launchers, run_folder, signals, terminal
from ddp_manual.errors import Stopped
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import (
    checkpoint,
    checkpoint_files,
    collectives,
    models,
    own_code,
    results,
)
from ddp_manual.training.agreement import agree_on_options, compare_data
from ddp_manual.training.augment import unit_scale
from ddp_manual.training.checkpoint import History
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import PARTS, Data, check_shapes, warn_of_untrained
from ddp_manual.training.datasets import source_of
from ddp_manual.training.ddp import wrap_in_ddp
from ddp_manual.training.epoch_plan import Position
from ddp_manual.training.learning_rate import peak_lr
from ddp_manual.training.loop import Run, Trainer
from ddp_manual.training.metrics import agree_on_requests
from ddp_manual.training.own_code import is_own_factory
from ddp_manual.training.predictions import files_of
from ddp_manual.training.results import RunFiles
from ddp_manual.training.trackers import Trackers

if TYPE_CHECKING:
    from ddp_manual.worker.world import World

logger = logging.getLogger(__name__)

Shared = Mapping[str, tuple[Any, str]]
"""Option -> (value, source), for options that the ranks must have in common."""


def check_own_code(config: TrainConfig, rank: int) -> Shared:
    """Import the user's own factories and look for the data, as far as that takes no time, before the ranks meet.

    Returns:
        For each factory a digest of its source, and where that is: the ranks must have the same.

    Raises:
        BadOption: a factory cannot be imported. DataMissing, DataCorrupt: on rank 0; the other ranks find out what is
            wrong on their own host once they have met.
    """
    found: dict[str, tuple[Any, str]] = {}
    for option in ("model", "dataset"):
        value = getattr(config, option)
        if is_own_factory(value):
            own_code.factory(option, value)
            found[f"{option} source"] = own_code.digest(option, value)
    if rank == 0:
        source_of(config).check()
    return found


def train(world: World, config: TrainConfig) -> dict[str, Any]:
    """Train as one rank of a joined world, in a script of the user's own; every rank calls it.

    The files go to ``config.run_dir`` of rank 0, otherwise to the ``run_dir`` given to ``join``, otherwise to a new
    folder below ``runs``. While it trains, Ctrl-C and SIGTERM stop all ranks after the same step.

    Returns:
        The summary, on every rank (the roster only on rank 0).

    Raises:
        BadOption: the world has ended, or an option cannot work.
        Stopped: a signal has stopped all ranks; let it pass through the body of ``join``.
        ConfigMismatch: the ranks' options differ; on every rank.
        DdpManualError: something else stops the run. Otherwise what the model or the data raise.
    """
    world.check_open("train")
    config = checkpoint_files.with_torchrun_run_dir(config)
    if config.run_dir is None and world.run_dir_of_join is not None:
        config = dataclasses.replace(config, run_dir=str(world.run_dir_of_join))
    config.check_world(world.spec)
    if world.rank == 0:
        config.check_trackers(world.spec)
        checkpoint_files.check_run_dir(config)
    agree_on_options(
        world,
        {**config.shared_options(), **check_own_code(config, world.rank)},
        config.run_dir or run_folder.unused_run_dir(world.run_id),
    )
    again = f"TrainConfig(..., run_dir={str(world.run_dir)!r}, resume='auto')"
    return train_as_agreed(world, config, f"start all ranks again, in any number, and train with\n{again}")


def train_as_agreed(world: World, config: TrainConfig, how_to_resume: str) -> dict[str, Any]:
    """Train with options that the ranks have compared, into the folder that they have agreed on.

    Args:
        how_to_resume: tells a person how to resume the run, after a signal has stopped it.
    """
    assert world.run_dir is not None
    paths = RunPaths(world.run_dir)
    if restart := launchers.restart_count():
        paths.set_failure_aside(world.rank, restart - 1)
    folder = checkpoint.held_run_dir(config, paths) if world.rank == 0 else nullcontext()
    with folder, signals.ignore_save(), ExitStack() as until_finished:
        # Load.
        data = _load(world, config)

        # Build.
        shape, classes = data.train.shape, len(data.train.classes)
        network = models.build(
            config.model, device=world.device, seed=config.seed, shape=shape, classes=classes, sync_bn=config.sync_bn
        )
        trainer = _trainer(world, config, network, data)
        plan = trainer.epoch_plan

        # Resume.
        options = checkpoint.options_of(config, data.train, data.test)
        resumed = checkpoint.resume(config, paths, trainer, network, options)
        position, history = resumed or (Position(), History())
        was_complete = plan.ended(position)
        summary = results.earlier_summary(paths, config.epochs) if was_complete and world.rank == 0 else None
        files = None
        if world.rank == 0:
            # An earlier process has followed a run with a summary to its end.
            trackers = Trackers(config.trackers if summary is None else ())
            # No rank waits for an upload: by then all have left.
            world.after_leaving(trackers.close)
            files = RunFiles(paths, keep=config.keep, trackers=trackers)
        run = Run(
            network=network,
            trainer=trainer,
            test=data.test,
            position=position,
            history=history,
            options=options,
            files=files,
            progress=world.progress,
        )
        if files is not None:
            if config.resume is not None:
                files.rewind(position, history, network, complete=was_complete)
            if resumed and not checkpoint_files.holds(paths.checkpoints, position.step):
                run.save()  # the run begins with another run's checkpoint, and may end before its own next one
            if summary is None or not paths.config.exists():
                files.start(results.settings(world, paths, config, trainer, position), data.train)

        if was_complete:
            logger.log(_level(world), "the run is complete: all its %d epochs are done", config.epochs)
            missing = not all(file.exists() for file in files_of(paths.predictions, classes))
            if collectives.rank_0_decides(summary is None or missing, world.device):
                run.write_predictions(run.predict())
        else:
            # Train, evaluate, save.
            logger.log(
                _level(world),
                "training %s on %d images of %s: %d epochs of %d steps, %d samples per rank and step, learning rate %g",
                *(config.model, len(data.train), config.dataset, config.epochs, plan.steps_per_epoch),
                *(trainer.batch_size, trainer.learning_rate.peak),
            )
            # Until the summary is written: a Ctrl-C meanwhile would fail a complete run.
            requests = until_finished.enter_context(world.collect_signals())
            with terminal.progress(plan.steps(position), done=position.step, shown=world.rank == 0) as lines:
                while not plan.ended(run.position):
                    asked = run.train_epoch(requests, lines)
                    if not plan.epoch_ended(run.position):
                        raise _stopped(asked.stop, run.position.step, paths, how_to_resume)
                    predictions = run.evaluate()
                    since = agree_on_requests(requests, world.device)
                    stop = asked.stop or since.stop
                    # Write the checkpoint first: every other file can be rebuilt from it.
                    if stop or asked.save or since.save or plan.saves_epoch(run.position):
                        run.save()
                    run.write_evaluation()
                    run.write_predictions(predictions)
                    if stop and not plan.ended(run.position):
                        collectives.wait_for_all_ranks(world.device)  # until rank 0 has saved
                        raise _stopped(stop, run.position.step, paths, how_to_resume)
            world.stop_heeding_signals()

        # Finish.
        if summary is None:
            summary = results.summary(world, paths, config, run)
            if files is not None:
                with run.saving():
                    files.finish(summary)
    return summary


def _load(world: World, config: TrainConfig) -> Data:
    """Load the training and the test set onto the rank's device, and check that all ranks have the same."""
    found = source_of(config)
    world.progress.phase = "loading"
    # Reading a large folder of images takes longer than ranks take to join.
    timeout = max(world.spec.join_timeout, world.spec.stall_timeout)
    world.once_per_host(f"{found.verb} {config.dataset}", found.prepare, timeout=timeout)
    train, test = (found.load(part) for part in PARTS)
    parts = {"train": train, "test": test}
    digests = compare_data(
        parts,
        world.device,
        hosts=lambda: [line["host"] for line in world.roster()],
        own_factory=is_own_factory(config.dataset),
    )
    check_shapes(config.dataset, train, test)
    if world.rank == 0:
        warn_of_untrained(train)
    train, test = (dataclasses.replace(split, digest=digests[part]) for part, split in parts.items())
    normalise = found.normalise(train) if config.normalization == "dataset" else unit_scale(train.shape[0])
    return Data(train.to(world.device), test.to(world.device), normalise)


def _trainer(world: World, config: TrainConfig, network: nn.Module, data: Data) -> Trainer:
    """Wrap the network in DDP, unless ``--no_ddp``, and create its optimizer and trainer."""
    shape, classes = data.train.shape, len(data.train.classes)
    fewest = models.fewest_samples(config.model, network, world.device, shape, classes, with_ddp=not config.no_ddp)
    model = network if config.no_ddp else wrap_in_ddp(network, world.device)
    return Trainer(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(),
            lr=peak_lr(config, world.world_size),
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
        ),
        train=data.train,
        normalise=data.normalise,
        rank=world.rank,
        world_size=world.world_size,
        config=config,
        fewest_samples=fewest,
    )


def _level(world: World) -> int:
    """Return the log level of what all ranks would say alike: rank 0 says it."""
    return logging.INFO if world.rank == 0 else logging.DEBUG


def _stopped(number: int, step: int, paths: RunPaths, how_to_resume: str) -> Stopped:
    return Stopped(
        number,
        f"after step {step}, like all ranks of the run",
        why=f"the signal came to this rank or another; rank 0 has saved a checkpoint in {paths.checkpoints}",
        next=how_to_resume,
    )
