"""What a run says of itself: ``config.json``, ``summary.json``, and the text at its end."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from ddp_manual import terminal
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.config import TrainConfig

if TYPE_CHECKING:
    from ddp_manual.training.epoch_plan import Position
    from ddp_manual.training.loop import Trainer
    from ddp_manual.training.run import Run
    from ddp_manual.worker.world import World


def described(
    world: World, paths: RunPaths, config: TrainConfig, trainer: Trainer, position: Position
) -> dict[str, Any]:
    """``config.json``: the options, and below ``run`` what followed from them, and ``position``, where it goes on."""
    from ddp_manual.training import own_code

    return {
        **config.values(),
        "run": {
            "run_id": world.run_id,
            "run_dir": str(paths.run_dir),
            "world_size": world.world_size,
            "device": world.device.type,
            "batch_size_per_rank": trainer.batch_size,
            "goes_on_after_step": position.step,
            "peak_lr": trainer.learning_rate.peak,
            "steps_per_epoch": trainer.epoch_plan.steps_per_epoch,
            "mean": trainer.normalise.mean,
            "std": trainer.normalise.std,
            "shape": trainer.train.shape,
            "classes": trainer.train.classes,
            **own_code.sources(model=config.model, dataset=config.dataset),
        },
    }


def summary(world: World, paths: RunPaths, config: TrainConfig, run: Run) -> dict[str, Any]:
    """``summary.json``; ``train_seconds`` are those of all processes that had a part in the run, but for lost steps,
    ``samples_per_second`` those of the last."""
    import torch

    evaluations = run.evaluations
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
        "train_seconds": run.train_seconds,
        "samples_per_second": run.samples_per_second,
        "torch_version": torch.__version__,
        "roster": world.roster() if world.rank == 0 else [],
    }


def earlier_summary(paths: RunPaths, epochs: int) -> dict[str, Any] | None:
    """That of a run which is complete after ``epochs``; None if it was ended before it could be written, or what is
    there cannot be read or is of another end."""
    try:
        found = {**json.loads(paths.summary.read_bytes()), "run_dir": str(paths.run_dir)}
        terminal.result_text(found)
    except (OSError, ValueError, TypeError, LookupError, ArithmeticError, RecursionError):
        return None
    return found if found["epochs"] == epochs else None
