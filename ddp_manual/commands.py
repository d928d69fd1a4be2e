"""What a person is told to type: the command of another rank, or the one that goes on with a run."""

from __future__ import annotations

import shlex

from ddp_manual import environment
from ddp_manual.config import TrainConfig
from ddp_manual.options import as_flags
from ddp_manual.world_spec import WorldSpec

# What differs from rank to rank or from run to run, and is never copied from one rank's command line to another's.
PER_RANK_OPTIONS = {"world_size", "rank", "local_rank", "master_addr", "master_port", "run_id", "run_dir"}


def command_to_go_on(spec: WorldSpec, config: TrainConfig, rank: int) -> str:
    """What to type as a rank of a run that was stopped, to go on with it in its folder ``{run_dir}``."""
    command = command_template(spec, config.resumed()).replace("{rank}", str(rank))
    return f"{command.replace('{master_port}', str(spec.master_port))} --run_dir {{run_dir}}"


def command_template(spec: WorldSpec, config: TrainConfig | None = None) -> str:
    """The command that starts another rank of this run, with ``{rank}`` and ``{master_port}`` for the numbers."""
    program, arguments = environment.typed_command()
    if arguments[:1] in (["train"], ["check"]):
        program.append(arguments[0])
    identity = f"--world_size {spec.world_size} --rank {{rank}}"
    meeting = f"--master_addr {shlex.quote(spec.master_addr)} --master_port {{master_port}}"
    given = {**spec.given_options(), **(config.given_options() if config else {})}
    rest = as_flags({name: value for name, value in given.items() if name not in PER_RANK_OPTIONS})
    return " ".join(part for part in (shlex.join(program), identity, meeting, rest) if part)
