"""The commands that a person is told to type: to start another rank, or to resume a run."""

from __future__ import annotations

import shlex

from ddp_manual import launchers
from ddp_manual.options import as_flags
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

# Options that differ between ranks or runs; they are never copied from one rank's command line to another's.
PER_RANK_OPTIONS = {"world_size", "rank", "local_rank", "master_addr", "master_port", "run_id", "run_dir"}


def command_template(spec: WorldSpec, config: TrainConfig | None = None) -> str:
    """Return the command that starts another rank of this run, with ``{rank}`` and ``{master_port}`` in it."""
    program, arguments = launchers.typed_command()
    if arguments[:1] in (["train"], ["check"]):
        program.append(arguments[0])
    identity = f"--world_size {spec.world_size} --rank {{rank}}"
    rank_0 = f"--master_addr {shlex.quote(spec.master_addr)} --master_port {{master_port}}"
    given = {**spec.given_options(), **(config.given_options() if config else {})}
    rest = as_flags({name: value for name, value in given.items() if name not in PER_RANK_OPTIONS})
    return " ".join(part for part in (shlex.join(program), identity, rank_0, rest) if part)


def command_to_go_on(spec: WorldSpec, config: TrainConfig, rank: int) -> str:
    """Return the command that resumes a stopped run as this rank, with ``{run_dir}`` for the run's folder."""
    command = command_template(spec, config.resumed()).replace("{rank}", str(rank))
    return f"{command.replace('{master_port}', str(spec.master_port))} --run_dir {{run_dir}}"
