"""The command lines: of one rank, as ``launch`` types it, and of the ``launch`` that goes on with a run."""

from __future__ import annotations

import shlex
import sys
from collections.abc import Sequence

from ddp_manual import checkpoints, environment
from ddp_manual.commands import PER_RANK_OPTIONS
from ddp_manual.errors import BadOption
from ddp_manual.rundir import RunPaths


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


def check_train_options(nproc: int, train_options: Sequence[str]) -> None:
    """Raises BadOption for what ``launch`` decides itself, and would otherwise be overruled in silence; and for a
    script, which every rank would refuse."""
    if train_options and not train_options[0].startswith("-"):
        program = train_options[0]
        raise BadOption(
            f"launch starts no program, and was given {program}",
            why="its ranks are those of this package's own training; what follows are options of train",
            next=f"leave {program} out\n"
            f"or, if it is a script of your own: torchrun --nproc-per-node {nproc} {shlex.quote(program)}\n"
            "or call ddp_manual.spawn in it, and start it with python",
        )
    for option in train_options:
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        if option.startswith("--") and name in PER_RANK_OPTIONS:
            raise BadOption(
                f"--{name} cannot be passed on by launch",
                why=f"launch gives every rank its --{name}",
                next="put --run_dir before the --" if name == "run_dir" else f"leave --{name} out",
            )


def resumes(train_options: Sequence[str]) -> bool:
    """Whether the ranks are to go on from a checkpoint."""
    return any(_is_resume(option) for option in train_options)


def from_the_newest(train_options: Sequence[str]) -> list[str]:
    """The options with which ranks go on from the newest checkpoint of their own run."""
    kept: list[str] = []
    options = iter(train_options)
    for option in options:
        if not _is_resume(option):
            kept.append(option)
        elif "=" not in option:
            next(options, None)
    return [*kept, "--resume", "auto"]


def options_to_go_on(train_options: Sequence[str], paths: RunPaths) -> list[str]:
    """The same, unless the run has no checkpoint yet and was to begin with that of another (``--resume FILE``)."""
    if resumes(train_options) and not checkpoints.find(paths.checkpoints):
        return list(train_options)
    return from_the_newest(train_options)


def launch_command(nproc: int, max_restarts: int, run_dir: str, train_options: Sequence[str]) -> str:
    """What to type for another ``launch`` in place of this one."""
    program, _ = environment.typed_command()
    restarts = ["--max_restarts", str(max_restarts)] if max_restarts else []
    return shlex.join(
        [*program, "launch", "--nproc", str(nproc), *restarts, "--run_dir", run_dir, "--", *train_options]
    )


def _is_resume(option: str) -> bool:
    return option.split("=")[0] == "--resume"
