"""One rank's life: identify -> meet -> load -> train -> evaluate -> leave.

The only file that knows both how ranks meet and what they do then.
"""

from __future__ import annotations

import logging
import math
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual import console, rundir
from ddp_manual.config import TrainConfig, WorldSpec, command_template
from ddp_manual.errors import DdpManualError
from ddp_manual.rundir import RunPaths

if TYPE_CHECKING:
    from ddp_manual.rendezvous import World
    from ddp_manual.training.data import Split
    from ddp_manual.training.engine import Metrics, Trainer
    from ddp_manual.training.evaluation import Evaluation

logger = logging.getLogger(__name__)


def run(spec: WorldSpec, config: TrainConfig) -> dict[str, Any]:
    """Train as one rank of a run; returns the summary, on every rank (the roster only on rank 0).

    Raises:
        DdpManualError: what stops the run. Else what the model or the data raise.
    """
    console.log_to_stderr(spec.rank)
    config.batch_size_per_rank(spec.world_size)
    if spec.rank == 0 and config.run_dir is not None:
        RunPaths(Path(config.run_dir)).create()

    from ddp_manual.rendezvous import rendezvous
    from ddp_manual.rendezvous.lastwords import as_ours

    try:
        with rendezvous(
            spec,
            options={**config.shared_options(), "command": ("train", "command")},
            run_dir=config.run_dir or rundir.default_run_dir("{run_id}"),
            command=command_template(spec, config),
        ) as world:
            assert world.run_dir is not None
            if world.rank == 0 and config.run_dir is None:
                RunPaths(world.run_dir).create()
            train, test = _load(world, spec, config)
            return _train(world, RunPaths(world.run_dir), config, train, test)
    except DdpManualError:
        raise
    except Exception as error:
        raise as_ours(spec.rank, error) from error


def _load(world: World, spec: WorldSpec, config: TrainConfig) -> tuple[Split, Split]:
    """The training and the test set, on the rank's device."""
    from ddp_manual.training import data
    from ddp_manual.training.agreement import compare_data

    data_dir = Path(config.data_dir)
    verb = "draw" if config.dataset == "synthetic" else "download"

    def prepare() -> None:
        if not data.is_prepared(config.dataset, data_dir):
            logger.info("%sing %s into %s", verb, config.dataset, data_dir)
            data.prepare(config.dataset, data_dir)

    world.progress.phase = "loading"
    world.once_per_host(f"{verb} {config.dataset}", prepare, timeout=spec.join_timeout)
    train, test = (data.load(config.dataset, data_dir, part) for part in ("train", "test"))
    parts = {"train": train, "test": test}
    compare_data(parts, world.device, hosts=lambda: [line["host"] for line in world.roster()])
    return train.to(world.device), test.to(world.device)


def _train(world: World, paths: RunPaths, config: TrainConfig, train: Split, test: Split) -> dict[str, Any]:
    from ddp_manual.training import models
    from ddp_manual.training.engine import diverged
    from ddp_manual.training.evaluation import evaluate
    from ddp_manual.training.tracking import RunFiles, Tracker

    network = models.build(config.model, device=world.device, seed=config.seed, sync_bn=config.sync_bn)
    trainer = _trainer(world, config, models.wrap(network, world.device), train)
    tracker = RunFiles(paths) if world.rank == 0 else Tracker()
    tracker.started(_described(world, paths, config, trainer), train)
    logger.info(
        "training %s on %d images of %s: %d epochs of %d steps, %d samples per rank and step, learning rate %g",
        *(config.model, len(train), config.dataset, config.epochs, trainer.steps_per_epoch),
        *(trainer.batch_size, trainer.schedule.peak),
    )
    evaluations: list[Evaluation] = []
    train_seconds = 0.0
    steps = config.epochs * trainer.steps_per_epoch
    progress = world.progress
    with console.progress(steps, bar=world.rank == 0 and console.on_a_terminal()) as bar:

        def step_done() -> None:
            progress.step += 1
            bar.advance()

        for epoch in range(config.epochs):
            began = time.perf_counter()
            progress.phase, progress.epoch = "training", epoch + 1
            for metrics in trainer.train_epoch(epoch, on_step=step_done):
                progress.samples_per_second = metrics.samples_per_second
                tracker.trained(metrics)
                bar.say(_line(metrics, steps, config.epochs))
            train_seconds += time.perf_counter() - began
            progress.phase = "evaluating"
            models.share_buffers(network)
            result = evaluate(network, test, trainer.normalise, rank=world.rank, world_size=world.world_size)
            if not math.isfinite(result.loss):
                raise diverged((epoch + 1) * trainer.steps_per_epoch, trainer.schedule.peak)
            evaluations.append(result)
            progress.phase = "saving"
            tracker.evaluated(epoch + 1, result, network)
            logger.info(
                "epoch %d/%d: test accuracy %.2f%%, test loss %.4f, over %d images",
                *(epoch + 1, config.epochs, 100 * result.accuracy, result.loss, result.samples),
            )
    summary = _summary(world, paths, config, evaluations, train_seconds, trainer.samples_per_epoch)
    tracker.finished(summary)
    return summary


def _trainer(world: World, config: TrainConfig, model: Any, train: Split) -> Trainer:
    import torch

    from ddp_manual.training.data import SOURCES, Normalise
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
        train=train,
        normalise=Normalise(SOURCES[config.dataset]),
        rank=world.rank,
        world_size=world.world_size,
        config=config,
    )


def _described(world: World, paths: RunPaths, config: TrainConfig, trainer: Trainer) -> dict[str, Any]:
    """``config.json``: the options, and what followed from them."""
    return {
        **config.as_dict(),
        "run_dir": str(paths.run_dir),
        "run_id": world.run_id,
        "world_size": world.world_size,
        "batch_size_per_rank": trainer.batch_size,
        "peak_lr": trainer.schedule.peak,
        "steps_per_epoch": trainer.steps_per_epoch,
        "mean": trainer.normalise.mean,
        "std": trainer.normalise.std,
    }


def _summary(
    world: World,
    paths: RunPaths,
    config: TrainConfig,
    evaluations: list[Evaluation],
    train_seconds: float,
    samples_per_epoch: int,
) -> dict[str, Any]:
    import torch

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
        "train_seconds": train_seconds,
        "samples_per_second": config.epochs * samples_per_epoch / train_seconds,
        "torch_version": torch.__version__,
        "roster": world.roster() if world.rank == 0 else [],
    }


def _line(metrics: Metrics, steps: int, epochs: int) -> str:
    return (
        f"step {metrics.step}/{steps} epoch {metrics.epoch}/{epochs} loss {metrics.loss:.4f} "
        f"accuracy {100 * metrics.accuracy:.2f}% lr {metrics.lr:.4f} {metrics.samples_per_second:,.0f} samples/s"
    )


def result_text(summary: dict[str, Any]) -> str:
    """What rank 0 prints on stdout when the run is complete: the figures, and where the files are."""
    paths = RunPaths(Path(summary["run_dir"]))
    lines = [
        f"{summary['model']} on {summary['dataset']}: {100 * summary['final_test_accuracy']:.2f}% test accuracy "
        f"after {summary['epochs']} epochs on {summary['world_size']} rank(s) ({summary['backend']}, "
        f"{summary['device']}), {summary['samples_per_second']:,.0f} samples/s",
        *(
            f"  {path}"
            for path in (
                paths.summary,
                paths.model,
                paths.metrics,
                paths.accuracies,
                paths.samples,
                paths.config,
            )
        ),
    ]
    return "\n".join(lines)
