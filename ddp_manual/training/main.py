"""The training life of one rank: load, build, resume, (train, evaluate, save) per epoch, finish. See
``train_as_agreed``."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import ExitStack, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_manual import progress_bar, run_folder, signal_handlers
from ddp_manual.errors import Stopped
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_files, checkpoint_state, held_state, models, own_factory, write_run_files
from ddp_manual.training.data import PARTS, Data, check_shapes, warn_of_untrained
from ddp_manual.training.data_memory import bring_to
from ddp_manual.training.datasets import source_of
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.own_factory import is_own_factory
from ddp_manual.training.same_on_all_ranks import agree_on_options, compare_data
from ddp_manual.training.trackers import Trackers
from ddp_manual.training.trainer import Trainer
from ddp_manual.training.transforms import unit_scale
from ddp_manual.training.write_run_files import RunFiles
from ddp_manual.wording import as_ranges, counted, in_words

if TYPE_CHECKING:
    from ddp_manual.worker.world import World

logger = logging.getLogger(__name__)

Shared = Mapping[str, tuple[Any, str]]
"""Option -> (value, source), for options that the ranks must have in common."""


def check_own_code(config: TrainConfig, rank: int) -> Shared:
    """Import the user's own factories and look for the data, as far as that takes no time, before the ranks meet.

    Returns:
        For each factory the digest of its source, which must be the same on all ranks, and the path of its file.

    Raises:
        BadOption: a factory cannot be imported. DataMissing, DataCorrupt: on rank 0; the other ranks find out what is
            wrong on their own host once they have met.
    """
    found: dict[str, tuple[Any, str]] = {}
    for option in ("model", "dataset"):
        value = getattr(config, option)
        if is_own_factory(value):
            own_factory.factory(option, value)
            found[f"{option} source"] = own_factory.digest(option, value)
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
        DdpManualError: something else stops the run. Exceptions of the model or of the data come through.
    """
    world.check_open("train")
    config = checkpoint_files.with_torchrun_run_dir(config)
    if config.run_dir is None and world.run_dir_of_join is not None:
        config = replace(config, run_dir=str(world.run_dir_of_join))
    config.check_world(world.spec)
    if world.rank == 0:
        config.check_trackers(world.spec)
        checkpoint_files.check_run_dir(config)
    agree_on_options(
        world,
        {**config.shared_options(), **check_own_code(config, world.rank)},
        config.run_dir or run_folder.unused_run_dir("{run_id}" if world.rank else world.run_id),
        chosen=config.run_dir is not None,
    )
    again = f"TrainConfig(..., run_dir={str(world.run_dir)!r}, resume='auto')"
    return train_as_agreed(world, config, f"start all ranks again, in any number, and train with\n{again}")


def train_as_agreed(world: World, config: TrainConfig, how_to_resume: str, *, leaves: bool = False) -> dict[str, Any]:
    """Train with options that the ranks have compared, into the folder that they have agreed on.

    Args:
        how_to_resume: tells a person how to resume the run, after a signal has stopped it.
        leaves: whether this process leaves the run after the training, and then leaves signals to its agent.
    """
    assert world.run_dir is not None
    paths, on_rank_0 = RunPaths(world.run_dir), world.rank == 0
    level = logging.INFO if on_rank_0 else logging.DEBUG  # rank 0 logs what all ranks would log alike
    if world.generation and on_rank_0 and checkpoint_files.find(paths.checkpoints):
        config = config.with_flags(resume=checkpoint_files.AUTO)  # used if no rank holds a state
    folder = checkpoint_state.held_run_dir(config, paths, again=world.generation > 0) if on_rank_0 else nullcontext()
    with folder, signal_handlers.ignore_save(), ExitStack() as until_finished, ExitStack() as taking:
        if world.generation:  # after a loss a signal stops all ranks only once what they hold is in a checkpoint
            taking.enter_context(world.take_stops())
        trainer = _build(world, config, _load(world, config), paths, level, leaves=leaves)
        summary = _resume(world, trainer, paths)
        if trainer.ended:
            taking.close()  # no step follows that all could stop after
            logger.log(level, "the run is complete: it has trained for %s", counted(config.epochs, "epoch"))
            classes = len(trainer.data.train.classes)
            missing = summary is None or not write_run_files.predictions_are_there(paths.predictions, classes)
            if world.gather(missing)[0]:
                trainer.write_predictions(trainer.predict())
        else:
            # Take signals until the summary is written: otherwise a Ctrl-C before that fails a complete run.
            taking.enter_context(world.take_stops())
            (world.until_left if leaves else until_finished).enter_context(taking.pop_all())
            _train_to_the_end(world, trainer, paths, how_to_resume)
            world.stop_heeding_signals()
        if summary is None:
            summary = write_run_files.summary(world, paths, trainer)
            trainer.write(lambda files: files.finish(summary))
    return summary


def _load(world: World, config: TrainConfig) -> Data:
    """Load the training and the test set onto the rank's device, and check that all ranks have the same."""
    found = source_of(config)
    world.progress.phase = "loading"
    # Reading a large folder of images takes longer than ranks take to join.
    timeout = max(world.spec.join_timeout, world.spec.stall_limit)
    prepare = partial(found.prepare, ranks=world.local_world_size)
    world.once_per_host(f"{found.verb} {config.dataset}", prepare, timeout=timeout)
    train, test = (found.load(part) for part in PARTS)
    compare_data(world, train, test, own_factory=is_own_factory(config.dataset))
    check_shapes(config.dataset, train, test)
    if world.rank == 0:
        warn_of_untrained(train)
    normalise = found.normalise(train) if config.normalization == "dataset" else unit_scale(train.shape[0])
    train, test = bring_to(world.device, [train, test])
    return Data(train, test, normalise)


def _build(world: World, config: TrainConfig, data: Data, paths: RunPaths, level: int, *, leaves: bool) -> Trainer:
    """Build the network, and on rank 0 what writes the run's files and follows it."""
    files = None
    if world.rank == 0:
        trackers = Trackers(config.trackers)
        # After this rank has left, so that no rank waits for an upload.
        world.until_left.callback(trackers.close)
        files = RunFiles(paths, keep=config.keep, trackers=trackers)
    if leaves:  # called before trackers.close: a signal during an upload must not make the run a failure
        world.until_left.callback(signal_handlers.leave_signals_to_the_agent)
    shape, classes = data.train.shape, len(data.train.classes)
    network = models.build(
        config.model, device=world.device, seed=config.seed, shape=shape, classes=classes, sync_bn=config.sync_bn
    )
    fewest = models.fewest_samples(config.model, network, world.device, shape, classes, with_ddp=not config.no_ddp)
    trainer = Trainer(world, config, network, data, fewest_samples=fewest, files=files)
    batch = trainer.epoch_plan.batch
    if config.global_batch_size not in (None, batch):
        shared = f"--global_batch_size {config.global_batch_size} cannot be divided over {world.world_size} ranks"
        logger.log(level, "%s: a step takes %s until all are here again", shared, counted(batch, "sample"))
    return trainer


def _resume(world: World, trainer: Trainer, paths: RunPaths) -> dict[str, Any] | None:
    """Go on from the state that a rank holds, or from a checkpoint, if there is one; begin the run's files, or go on
    with them.

    Returns:
        On rank 0 the summary of a run that was complete before, if it is there.
    """
    config, files, plan, on_rank_0 = trainer.config, trainer.files, trainer.epoch_plan, world.rank == 0
    if world.held is not None and world.state_from is not None:
        resumed = trainer.go_on(held_state.share(world.held, world.state_from, world.device))
    else:
        resumed = checkpoint_state.resume(paths, trainer)
    if world.run_dir_is_own:  # now that rank 0 has locked the folder, and goes on with its content
        paths.set_failures_aside(world.spec.rank, world.spec.world_size if on_rank_0 else None)
    summary = write_run_files.earlier_summary(paths, config.epochs) if trainer.ended and on_rank_0 else None
    if files is not None:
        if config.resume is not None or world.generation:
            files.rewind(trainer.position, trainer.history, trainer.network, complete=trainer.ended)
        # Save if the run begins with another run's checkpoint, or a rank was lost before the epoch's was written.
        at_an_end = not trainer.position.taken and plan.saves_epoch(trainer.position)
        saves = resumed and (at_an_end or not world.generation)
        if saves and not checkpoint_files.holds(paths.checkpoints, trainer.position.step):
            trainer.save()
        if summary is None or not paths.config.exists():
            settings = write_run_files.settings(world, paths, trainer)
            files.start(settings, trainer.data.train, complete=summary is not None)
    return summary


def _train_to_the_end(world: World, trainer: Trainer, paths: RunPaths, how_to_resume: str) -> None:
    """Say what is trained, and train, with a progress bar on rank 0.

    Raises:
        Stopped: a signal has stopped all ranks after the same step.
    """
    config, plan, on_rank_0 = trainer.config, trainer.epoch_plan, world.rank == 0
    logger.log(
        logging.INFO if on_rank_0 and world.state_from is None else logging.DEBUG,
        "training %s on %s of %s: %s of %s, %s per rank and step, learning rate %g",
        *(config.model, counted(len(trainer.data.train), "image"), config.dataset),
        *(counted(config.epochs, "epoch"), counted(plan.steps_per_epoch, "step")),
        *(counted(plan.batch_size, "sample"), plan.peak_lr),
    )
    steps, done = plan.steps(trainer.position), trainer.position.step
    with progress_bar.progress(steps, done=done, shown=on_rank_0) as lines:
        if not trainer.train(lines):
            raise _stopped(world, trainer, paths, how_to_resume)


def _stopped(world: World, trainer: Trainer, paths: RunPaths, how_to_resume: str) -> Stopped:
    stop = world.stop
    assert stop is not None
    where, step = "", f"after step {trainer.position.step}"
    if len(stop.ranks) < trainer.world_size:
        where, step = f"on {in_words(as_ranges(stop.ranks))} ", f"{step}, like all ranks of the run"
    elif trainer.world_size > 1:
        where = "on all ranks "
    this_one = "that is this rank; " * ([*stop.ranks] == [world.spec.rank] and trainer.world_size > 1)
    return Stopped(
        stop.number,
        where + step,
        why=f"{this_one}rank 0 has saved a checkpoint in {paths.checkpoints}",
        next=how_to_resume,
    )
