"""What a person is told to type: the command of another rank, or the one that goes on with a run."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ddp_manual import launchers
from ddp_manual.errors import BadOption
from ddp_manual.options import as_flags
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

# What differs from rank to rank or from run to run, and is never copied from one rank's command line to another's.
PER_RANK_OPTIONS = {"world_size", "rank", "local_rank", "master_addr", "master_port", "run_id", "run_dir"}


def command_to_go_on(spec: WorldSpec, config: TrainConfig, rank: int) -> str:
    """What to type as a rank of a run that was stopped, to go on with it in its folder ``{run_dir}``."""
    command = command_template(spec, config.resumed()).replace("{rank}", str(rank))
    return f"{command.replace('{master_port}', str(spec.master_port))} --run_dir {{run_dir}}"


def command_template(spec: WorldSpec, config: TrainConfig | None = None) -> str:
    """The command that starts another rank of this run, with ``{rank}`` and ``{master_port}`` for the numbers."""
    program, arguments = launchers.typed_command()
    if arguments[:1] in (["train"], ["check"]):
        program.append(arguments[0])
    identity = f"--world_size {spec.world_size} --rank {{rank}}"
    meeting = f"--master_addr {shlex.quote(spec.master_addr)} --master_port {{master_port}}"
    given = {**spec.given_options(), **(config.given_options() if config else {})}
    rest = as_flags({name: value for name, value in given.items() if name not in PER_RANK_OPTIONS})
    return " ".join(part for part in (shlex.join(program), identity, meeting, rest) if part)


def command_to_go_on_with_launch(nproc: int, max_restarts: int, run_dir: Path, typed: Sequence[str]) -> str:
    """What to type for another ``launch`` in the place of one that was typed with these training options."""
    program, _ = launchers.typed_command()
    restarts = ["--max_restarts", str(max_restarts)] if max_restarts else []
    words = [*program, "launch", "--nproc", str(nproc), *restarts, "--run_dir", str(run_dir), "--"]
    return shlex.join([*words, *from_the_newest(typed)])


def check_train_options(nproc: int, typed: Sequence[str]) -> None:
    """Raises BadOption for what ``launch`` decides itself, and would otherwise be overruled in silence; and for a
    script, which is none of this package's training."""
    if typed and not typed[0].startswith("-"):
        program = typed[0]
        raise BadOption(
            f"launch starts no program, and was given {program}",
            why="its ranks are those of this package's own training; what follows are options of train",
            next=f"leave {program} out\n"
            f"or, if it is a script of your own: torchrun --nproc-per-node {nproc} {shlex.quote(program)}\n"
            "or call ddp_manual.spawn in it, and start it with python",
        )
    for option in typed:
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        if option.startswith("--") and name in PER_RANK_OPTIONS:
            raise BadOption(
                f"--{name} cannot be passed on by launch",
                why=f"launch gives every rank its --{name}",
                next="put --run_dir before the --" if name == "run_dir" else f"leave --{name} out",
            )


def from_the_newest(typed: Sequence[str]) -> list[str]:
    """The options with which ranks go on from the newest checkpoint of their own run."""
    kept: list[str] = []
    options = iter(typed)
    for option in options:
        if option.split("=")[0] != "--resume":
            kept.append(option)
        elif "=" not in option:
            next(options, None)
    return [*kept, "--resume", "auto"]
