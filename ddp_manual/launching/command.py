"""The command line of one rank, as ``launch`` types it."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from ddp_manual.config import PER_RANK_OPTIONS
from ddp_manual.errors import BadOption


def rank_command(
    rank: int, world_size: int, port: int, run_id: str, run_dir: str, train_options: Sequence[str]
) -> list[str]:
    """This Python, this package, this rank."""
    identity = {
        "world_size": world_size,
        "rank": rank,
        "master_addr": "127.0.0.1",
        "master_port": port,
        "run_id": run_id,
        "run_dir": run_dir,
    }
    flags = [f"--{name}={value}" for name, value in identity.items()]
    return [sys.executable, "-m", "ddp_manual", "train", *flags, *train_options]


def check_train_options(train_options: Sequence[str]) -> None:
    """Raises BadOption for what ``launch`` decides itself, and would otherwise be overruled in silence."""
    for option in train_options:
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        if option.startswith("--") and name in PER_RANK_OPTIONS:
            raise BadOption(
                f"--{name} cannot be passed on by launch",
                why=f"launch gives each rank its own --{name}",
                next="put --run_dir before the --" if name == "run_dir" else f"leave --{name} out",
            )
