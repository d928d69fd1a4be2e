"""What ``--resume`` and ``--run_dir`` mean together, as far as that is known before the ranks have met."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from ddp_manual import launchers, run_folder
from ddp_manual.errors import BadOption
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import checkpoint_file, checkpoints
from ddp_manual.training.config import TrainConfig

AUTO = "auto"


def in_the_agents_run_dir(config: TrainConfig) -> TrainConfig:
    """Under torchrun ``--resume auto`` needs no ``--run_dir``: all that one torchrun starts has the same."""
    agent = launchers.agent_identity()
    if config.resume != AUTO or config.run_dir is not None or agent is None:
        return config
    return dataclasses.replace(config, run_dir=run_folder.run_dir_of_agent(agent))


def check_run_dir(config: TrainConfig) -> None:
    """On rank 0, before the others are met: make the folder, if its name is known by now.

    Raises:
        CheckpointMissing: there is nothing at the path of ``--resume``.
        BadOption: it cannot be used; or ``--resume auto`` without a folder to look in.
    """
    if config.resume not in (None, AUTO):
        checkpoints.exists(Path(str(config.resume)))
    if config.run_dir is not None:
        RunPaths(Path(config.run_dir)).create(resuming=goes_on_in(config.resume, Path(config.run_dir)))
    elif config.resume == AUTO:
        raise BadOption(
            "--resume auto needs a --run_dir to look in",
            why="without --run_dir each start has a new folder, which holds no checkpoint",
            next="give the --run_dir of the run that is to go on; or a checkpoint: --resume runs/.../checkpoints/...",
        )


def goes_on_in(resume: str | None, run_dir: Path) -> bool:
    """Whether the run in ``run_dir`` goes on, rather than a new one with what another had learnt."""
    if resume is None or resume == AUTO:
        return resume == AUTO
    return checkpoint_file.run_dir_of(Path(resume)).resolve() == run_dir.resolve()
