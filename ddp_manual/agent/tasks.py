"""Ranks that are started by hand: what their workers do, which commands a person is told to type, and an agent in this
terminal for each rank."""

from __future__ import annotations

import asyncio
import shlex
from collections.abc import Callable
from functools import partial

from ddp_manual import launchers, run_folder, terminal
from ddp_manual.agent.ending import Ended
from ddp_manual.agent.join import Task
from ddp_manual.agent.main import Agent
from ddp_manual.agent.worker_process import start_process
from ddp_manual.errors import DdpManualError
from ddp_manual.options import as_flags
from ddp_manual.training import checkpoint_files
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


def training_task(spec: WorldSpec, config: TrainConfig, launched: str | None = None) -> Task:
    """Return the task of training as one rank; what needs no torch is checked here.

    Args:
        launched: the command that resumes the run, if ``launch`` starts its ranks.

    Raises:
        BadOption: an option cannot work; on rank 0 also a package is missing, or a folder cannot be used.
    """
    config = checkpoint_files.with_torchrun_run_dir(config)
    config.check_world(spec)
    if spec.rank == 0:
        config.check_trackers(spec)
        checkpoint_files.check_run_dir(config)
    return Task(
        start={
            "config": config.values(),
            "config_sources": dict(config.sources),
            "go_on": launched or command_to_go_on(spec, config, spec.rank),
            "alone": config.no_ddp,
        },
        options={**config.shared_options(), "command": ("train", "command")},
        run_dir=config.run_dir or run_folder.default_run_dir("{run_id}"),
        command=command_template(spec, config),
        launched=launched,
    )


def train_by_hand(spec: WorldSpec, config: TrainConfig) -> Ended:
    """Train as one rank in this terminal, and print the error that ends it.

    Raises:
        BadOption: see ``training_task``.
    """
    terminal.log_to_stderr(spec.rank)
    task = training_task(spec, config)
    if spec.source("world_size") == "default" and not config.no_ddp:
        terminal.log("no --world_size was given: this rank trains alone (of two, one has --world_size 2 --rank 0)")
    return asyncio.run(agent_in_this_terminal(spec, task, terminal.print_error).run())


def agent_in_this_terminal(spec: WorldSpec, task: Task, print_error: Callable[[DdpManualError], None]) -> Agent:
    start_worker = partial(start_process, spec.rank, spec.world_size)
    return Agent(spec, task, start_worker=start_worker, log=terminal.log, print_error=print_error)
