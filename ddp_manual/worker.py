"""One rank's life: identify -> meet -> load -> train -> evaluate -> leave.

The only file that knows both how ranks meet and what they do then.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual import checkpoints, console, environment, extras, outcome, resuming, rundir, signals
from ddp_manual.commands import command_template, command_to_go_on
from ddp_manual.config import TrainConfig, is_own_factory
from ddp_manual.errors import DdpManualError, Stopped
from ddp_manual.rundir import RunPaths
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    from ddp_manual.rendezvous import World
    from ddp_manual.training.data import Data
    from ddp_manual.training.engine import Trainer

logger = logging.getLogger(__name__)

Shared = Mapping[str, tuple[Any, str]]
"""Option -> (value, source), for what the ranks must have in common."""


def run(spec: WorldSpec, config: TrainConfig) -> dict[str, Any]:
    """Train as one rank of a run: meet the others, train, leave.

    Returns:
        The summary, on every rank (the roster only on rank 0).

    Raises:
        DdpManualError: what stops the run, or what the model or the data raise.
    """
    console.log_to_stderr(spec.rank)
    config = resuming.in_the_agents_run_dir(config)
    config.check_world(spec)
    if spec.rank == 0:
        _check_trackers(config)
        resuming.check_run_dir(config)
    if spec.source("world_size") == "default" and not config.no_ddp:
        logger.info("no --world_size was given: this rank trains alone (of two, one has --world_size 2 --rank 0)")

    own_code = _own_code(config)
    if spec.rank == 0:  # what is wrong on one host alone the ranks tell one another once they have met
        from ddp_manual.training.sources import source_of

        source_of(config).check()
    from ddp_manual.rendezvous.lastwords import as_ours

    def go_on(paths: RunPaths) -> str:
        return "go on, with any number of ranks:\n" + command_to_go_on(spec, config, spec.rank, str(paths.run_dir))

    try:
        # Signals are noted until here: one that comes while the ranks leave undoes no stop they have agreed on.
        with (
            signals.without_saving(),
            ExitStack() as afterwards,
            ExitStack() as noting,
            _world(spec, config, own_code) as world,
        ):
            return _train(world, config, noting, afterwards.callback, go_on)
    except DdpManualError:
        raise
    except Exception as error:
        raise as_ours(spec.rank, error) from error


def _world(spec: WorldSpec, config: TrainConfig, own_code: Shared) -> AbstractContextManager[World]:
    from ddp_manual.rendezvous import alone, rendezvous

    run_dir = config.run_dir or rundir.default_run_dir("{run_id}")
    if config.no_ddp:
        return alone(spec, run_dir=run_dir)
    return rendezvous(
        spec,
        options={**config.shared_options(), **own_code, "command": ("train", "command")},
        run_dir=run_dir,
        command=command_template(spec, config),
    )


def train(world: World, config: TrainConfig) -> dict[str, Any]:
    """Train as one rank of a rendezvous, in a script of the user's own; every rank calls it.

    The files go to ``config.run_dir`` of rank 0, else to the ``run_dir`` of the rendezvous, else to a new folder below
    ``runs``. While it trains, Ctrl-C and SIGTERM are noted, and stop all ranks after the same step.

    Returns:
        The summary, on every rank (the roster only on rank 0).

    Raises:
        BadOption: the rendezvous has ended, or an option cannot work.
        Stopped: a signal has stopped all ranks; the body of the rendezvous is to let it pass.
        ConfigMismatch: the ranks' options differ; on every rank.
        DdpManualError: what else stops the run. Else what the model or the data raise.
    """
    world.check_open("train")
    config = resuming.in_the_agents_run_dir(config)
    if config.run_dir is None and world.run_dir_of_rendezvous is not None:
        config = dataclasses.replace(config, run_dir=str(world.run_dir_of_rendezvous))
    config.check_world(world.spec)
    if world.rank == 0:
        _check_trackers(config)
        resuming.check_run_dir(config)
    world.agree({**config.shared_options(), **_own_code(config)}, config.run_dir or rundir.unused_run_dir(world.run_id))

    def go_on(paths: RunPaths) -> str:
        return (
            "start all ranks again, in any number, and train with\n"
            f"TrainConfig(..., run_dir={str(paths.run_dir)!r}, resume='auto')"
        )

    with signals.without_saving(), ExitStack() as noting:
        return _train(world, config, noting, world.after_leaving, go_on)


Afterwards = Callable[[Callable[[], None]], object]
"""Has a function called once no other rank waits for this one."""


def _train(
    world: World, config: TrainConfig, noting: ExitStack, afterwards: Afterwards, go_on: Callable[[RunPaths], str]
) -> dict[str, Any]:
    """Signals are noted from the first step until ``noting`` is closed.

    Args:
        afterwards: is given the wait for the trackers to finish, once ``noting`` is closed.
        go_on: what to do to go on with the run in that folder, after a signal has stopped it.
    """
    assert world.run_dir is not None
    paths = RunPaths(world.run_dir)
    if restart := environment.restart_count():
        paths.set_failure_aside(world.rank, restart - 1)
    with resuming.run_folder(config, paths) if world.rank == 0 else nullcontext():
        return _go(world, paths, config, _load(world, config), noting, afterwards, go_on)


def _own_code(config: TrainConfig) -> Shared:
    """What the ranks must have in common of the user's own factories: a digest of each one's source, and where it is.

    Raises:
        BadOption: one of them cannot be imported. Better known before the others are waited for.
    """
    from ddp_manual.training import own

    environment.quiet_torch_warnings()  # before the user's module imports it
    found: dict[str, tuple[Any, str]] = {}
    for option in ("model", "dataset"):
        value = getattr(config, option)
        if is_own_factory(value):
            own.factory(option, value)
            found[f"{option} source"] = own.digest(option, value)
    return found


def _check_trackers(config: TrainConfig) -> None:
    """On rank 0, which alone has any: raises BadOption where a package for ``--track`` is missing."""
    for name in config.trackers:
        if name in extras.PACKAGES:
            extras.require(name, f"--track {name}")


def _load(world: World, config: TrainConfig) -> Data:
    """The training and the test set, on the rank's device."""
    from ddp_manual.training.agreement import compare_data
    from ddp_manual.training.data import Data, check_shapes, warn_of_untrained
    from ddp_manual.training.images import unit_scale
    from ddp_manual.training.sources import PARTS, prepare, source_of

    data_dir = Path(config.data_dir)
    found = source_of(config)
    world.progress.phase = "loading"
    world.once_per_host(
        f"{found.preparing} {config.dataset}", lambda: prepare(found, data_dir), timeout=world.spec.join_timeout
    )
    train, test = (found.load(data_dir, part) for part in PARTS)
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
    noting: ExitStack,
    afterwards: Afterwards,
    go_on: Callable[[RunPaths], str],
) -> dict[str, Any]:
    """To the end, or to the step where all stop."""
    from ddp_manual.training import collectives, models, prediction_files, trackers
    from ddp_manual.training.checkpoint import History
    from ddp_manual.training.course import Position
    from ddp_manual.training.run import Run
    from ddp_manual.training.tracking import Tracker

    shape, classes = data.train.shape, len(data.train.classes)
    network = models.build(
        config.model, device=world.device, seed=config.seed, shape=shape, classes=classes, sync_bn=config.sync_bn
    )
    fewest = models.fewest_samples(config.model, network, world.device, shape, classes, with_ddp=not config.no_ddp)
    trainer = _trainer(world, config, network if config.no_ddp else models.wrap(network, world.device), data, fewest)
    course = trainer.course
    options = resuming.options_of(config, data.train, data.test)
    gone_on = resuming.go_on(config, paths, trainer, network, options)
    position, history = gone_on or (Position(), History())
    described = outcome.described(world, paths, config, trainer, position)
    summary = outcome.earlier_summary(paths, config.epochs) if course.ended(position) and world.rank == 0 else None
    tracker = Tracker()
    if world.rank == 0:
        tracker = trackers.of_rank_0(
            config, paths, described, world.run_id, over=summary is not None, afterwards=afterwards
        )
    # Before the signals are noted: by then they end the wait for an upload.
    noting.callback(tracker.closed)
    if config.resume is not None:
        tracker.resumed(position, history, network, complete=course.ended(position))
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
    if gone_on and world.rank == 0 and not checkpoints.holds(paths.checkpoints, position.step):
        run.save()  # it began with another run's, and may end before its next one
    if course.ended(position):
        logger.info("the run is complete: all its %d epochs are done", config.epochs)
    if summary is None or not paths.config.exists():
        tracker.started(described, data.train)
    if not course.ended(position):
        logger.info(
            "training %s on %d images of %s: %d epochs of %d steps, %d samples per rank and step, learning rate %g",
            *(config.model, len(data.train), config.dataset, config.epochs, course.steps_per_epoch),
            *(trainer.batch_size, trainer.schedule.peak),
        )
        wishes = noting.enter_context(
            signals.noted(
                lambda number, heeded: _leave_at_once(world, paths, number, heeded), while_blocked=not config.no_ddp
            )
        )
        bar = world.rank == 0 and console.on_a_terminal()
        try:
            with console.progress(course.steps(position), done=position.step, bar=bar) as progress:
                number = run.go(progress, wishes)
        finally:
            wishes.heeded = False
        if number:
            raise _stopped(number, run.position.step, paths, go_on(paths))
    else:
        files = prediction_files.of(paths.predictions, classes)
        if collectives.says_rank_0(summary is None or not all(file.exists() for file in files), world.device):
            run.predict()
    if summary is None:
        summary = outcome.summary(world, paths, config, run)
        tracker.finished(summary)
    return summary


def _trainer(world: World, config: TrainConfig, model: Any, data: Data, fewest_samples: int) -> Trainer:
    import torch

    from ddp_manual.training.engine import Trainer

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


def _leave_at_once(world: World, paths: RunPaths, number: int, heeded: bool) -> None:
    """A second signal: the main thread may be blocked for good, so it is not asked."""
    world.leave_at_once(
        Stopped(
            number,
            "at once, by a second signal",
            why="the ranks had not yet agreed on a step to stop after: what was trained since the last save is lost"
            if heeded
            else "this rank had done its part, and was leaving: the others may still have needed its store",
            # No command: the other ranks show this too, and each has one of its own.
            next=f"start all ranks again; with --run_dir {paths.run_dir} --resume auto they go on from the last one",
        )
    )
