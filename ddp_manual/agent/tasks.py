"""Ranks that are started by hand: what their workers are to do, and an agent in this terminal for each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from ddp_manual import run_folder, terminal
from ddp_manual.agent.commands import command_template, command_to_go_on
from ddp_manual.agent.ending import Ended
from ddp_manual.agent.join import Task
from ddp_manual.agent.main import Agent
from ddp_manual.agent.worker_process import start_process
from ddp_manual.errors import DdpManualError
from ddp_manual.training import checkpoint_files
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec


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
    return Agent(
        spec,
        task,
        start_worker=lambda: start_process(spec.rank, spec.world_size),
        log=terminal.log,
        print_error=print_error,
    )
