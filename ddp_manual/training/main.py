"""The training life of one rank, whoever has started it: load -> build -> resume -> train, evaluate, save -> finish."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from ddp_manual import launchers, run_folder, signals, terminal
from ddp_manual.errors import Stopped
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import (
    checkpoint,
    checkpoint_files,
    collectives,
    models,
    own_code,
    prediction_files,
    results,
    trackers,
)
from ddp_manual.training.agreement import agree, compare_data
from ddp_manual.training.augment import unit_scale
from ddp_manual.training.checkpoint import History
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import PARTS, Data, check_shapes, warn_of_untrained
from ddp_manual.training.datasets import source_of
from ddp_manual.training.epoch_plan import Position
from ddp_manual.training.loop import Trainer
from ddp_manual.training.own_code import is_own_factory
from ddp_manual.training.run import Run
from ddp_manual.training.tracking import Tracker

if TYPE_CHECKING:
    from ddp_manual.worker.world import World

logger = logging.getLogger(__name__)

Shared = Mapping[str, tuple[Any, str]]
"""Option -> (value, source), for what the ranks must have in common."""


def check_own_code(config: TrainConfig, rank: int) -> Shared:
    """Import the user's own factories, and look at what takes no time, before the others are waited for.

    Returns:
        What the ranks must have in common of the factories: a digest of each one's source, and where it is.

    Raises:
        BadOption: one of them cannot be imported. DataMissing, DataCorrupt: on rank 0. What is wrong on one host alone
            the ranks tell one another once they have met.
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

    The files go to ``config.run_dir`` of rank 0, else to the ``run_dir`` given to ``join``, else to a new folder below
    ``runs``. While it trains, Ctrl-C and SIGTERM are noted, and stop all ranks after the same step.

    Returns:
        The summary, on every rank (the roster only on rank 0).

    Raises:
        BadOption: the world has ended, or an option cannot work.
        Stopped: a signal has stopped all ranks; the body of ``join`` is to let it pass.
        ConfigMismatch: the ranks' options differ; on every rank.
        DdpManualError: what else stops the run. Else what the model or the data raise.
    """
    world.check_open("train")
    config = checkpoint_files.with_torchrun_run_dir(config)
    if config.run_dir is None and world.run_dir_of_join is not None:
        config = dataclasses.replace(config, run_dir=str(world.run_dir_of_join))
    config.check_world(world.spec)
    if world.rank == 0:
        config.check_trackers()
        checkpoint_files.check_run_dir(config)
    agree(
        world,
        {**config.shared_options(), **check_own_code(config, world.rank)},
        config.run_dir or run_folder.unused_run_dir(world.run_id),
    )

    def go_on(paths: RunPaths) -> str:
        return (
            "start all ranks again, in any number, and train with\n"
            f"TrainConfig(..., run_dir={str(paths.run_dir)!r}, resume='auto')"
        )

    return train_as_agreed(world, config, go_on)


def train_as_agreed(world: World, config: TrainConfig, go_on: Callable[[RunPaths], str]) -> dict[str, Any]:
    """Train with options that the ranks have compared, into the folder that they have agreed on.

    Args:
        go_on: what to do to go on with the run in that folder, after a signal has stopped it.
    """
    assert world.run_dir is not None
    paths = RunPaths(world.run_dir)
    if restart := launchers.restart_count():
        paths.set_failure_aside(world.rank, restart - 1)
    folder = checkpoint.held_run_dir(config, paths) if world.rank == 0 else nullcontext()
    with folder, signals.ignore_save(), ExitStack() as closing:
        return _go(world, paths, config, _load(world, config), closing, go_on)


def _load(world: World, config: TrainConfig) -> Data:
    """The training and the test set, on the rank's device."""
    found = source_of(config)
    world.progress.phase = "loading"
    world.once_per_host(f"{found.verb} {config.dataset}", found.prepare, timeout=world.spec.join_timeout)
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
        warn_of_untrained(train, test)
    train, test = (dataclasses.replace(split, digest=digests[part]) for part, split in parts.items())
    normalise = found.normalise(train) if config.normalization == "dataset" else unit_scale(train.shape[0])
    return Data(train.to(world.device), test.to(world.device), normalise)


def _go(
    world: World,
    paths: RunPaths,
    config: TrainConfig,
    data: Data,
    closing: ExitStack,
    go_on: Callable[[RunPaths], str],
) -> dict[str, Any]:
    """To the end, or to the step where all stop; signals are noted from the first step until ``closing``."""
    shape, classes = data.train.shape, len(data.train.classes)
    network = models.build(
        config.model, device=world.device, seed=config.seed, shape=shape, classes=classes, sync_bn=config.sync_bn
    )
    fewest = models.fewest_samples(config.model, network, world.device, shape, classes, with_ddp=not config.no_ddp)
    trainer = _trainer(world, config, network if config.no_ddp else models.wrap(network, world.device), data, fewest)
    plan = trainer.epoch_plan
    options = checkpoint.options_of(config, data.train, data.test)
    gone_on = checkpoint.resume(config, paths, trainer, network, options)
    position, history = gone_on or (Position(), History())
    described = results.described(world, paths, config, trainer, position)
    summary = results.earlier_summary(paths, config.epochs) if plan.ended(position) and world.rank == 0 else None
    tracker = Tracker()
    if world.rank == 0:
        tracker = trackers.of_rank_0(
            config, paths, described, world.run_id, over=summary is not None, afterwards=world.after_leaving
        )
    # After the signals are no longer noted: by then they end the wait for an upload.
    closing.callback(tracker.closed)
    if config.resume is not None:
        tracker.resumed(position, history, network, complete=plan.ended(position))
    run = Run(
        network=network,
        trainer=trainer,
        test=data.test,
        tracker=tracker,
        position=position,
        history=history,
        options=options,
        doing=world.progress,
    )
    if gone_on and world.rank == 0 and not checkpoint_files.holds(paths.checkpoints, position.step):
        run.save()  # it began with another run's, and may end before its next one
    if plan.ended(position) and world.rank == 0:
        logger.info("the run is complete: all its %d epochs are done", config.epochs)
    if summary is None or not paths.config.exists():
        tracker.started(described, data.train)
    if not plan.ended(position):
        # What all ranks would say alike, rank 0 says.
        terminal.LOGGER.log(
            logging.INFO if world.rank == 0 else logging.DEBUG,
            "training %s on %d images of %s: %d epochs of %d steps, %d samples per rank and step, learning rate %g",
            *(config.model, len(data.train), config.dataset, config.epochs, plan.steps_per_epoch),
            *(trainer.batch_size, trainer.learning_rate.peak),
        )
        requests = closing.enter_context(world.noting_signals())
        told = world.rank == 0
        bar = told and terminal.on_a_terminal()
        try:
            with terminal.progress(plan.steps(position), done=position.step, bar=bar, lines=told) as progress:
                number = run.go(progress, requests)
        finally:
            world.no_longer_heeds()
        if number:
            raise _stopped(number, run.position.step, paths, go_on(paths))
    else:
        files = prediction_files.of(paths.predictions, classes)
        if collectives.says_rank_0(summary is None or not all(file.exists() for file in files), world.device):
            run.predict()
    if summary is None:
        summary = results.summary(world, paths, config, run)
        with run.saving():
            tracker.finished(summary)
    return summary


def _trainer(world: World, config: TrainConfig, model: Any, data: Data, fewest_samples: int) -> Trainer:
    peak_lr = config.peak_lr(world.world_size)
    return Trainer.create(
        model=model,
        optimizer=torch.optim.SGD(
            model.parameters(),
            lr=peak_lr,
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
        ),
        train=data.train,
        normalise=data.normalise,
        rank=world.rank,
        world_size=world.world_size,
        config=config,
        fewest_samples=fewest_samples,
    )


def _stopped(number: int, step: int, paths: RunPaths, go_on: str) -> Stopped:
    return Stopped(
        number,
        f"after step {step}, like all ranks of the run",
        why=f"the signal came to this rank or another; rank 0 has saved a checkpoint in {paths.checkpoints}",
        next=go_on,
    )
