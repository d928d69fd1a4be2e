"""Ranks that are started by hand: what their workers do, and an agent in this terminal for each rank."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from ddp_manual import run_folder, terminal
from ddp_manual.agent.main import Agent
from ddp_manual.agent.program_source import check_program
from ddp_manual.agent.rank_result import Ended
from ddp_manual.agent.start_worker import Forker, Starter, check_torch_is_installed
from ddp_manual.agent.to_type import LISTENING, rank_command, status_of_run, typed_again
from ddp_manual.agent.what_to_run import Task
from ddp_manual.environment import command_line, torchrun, user_variables
from ddp_manual.errors import DdpManualError
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.option_fields import as_flags
from ddp_manual.program import MODULE, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training import checkpoint_files, own_factory
from ddp_manual.training.options import TrainConfig
from ddp_manual.wording import duration

TRAINING = Program(
    kind=MODULE, name="ddp_manual.training", prepare="ddp_manual.training.program:prepare", ends_at_once=True
)


def training_task(spec: WorldSpec, config: TrainConfig, launched: str | None = None) -> Task:
    """Return the task of training as one rank, after all checks that need no torch.

    Args:
        launched: the command that resumes the run, if ``launch`` starts its ranks.

    Raises:
        BadOption: an option cannot work; or, on rank 0, a package is missing or a folder cannot be used.
    """
    config = checkpoint_files.with_torchrun_run_dir(config)
    check_options(spec, config)
    given = config.given_options()
    is_seen_elsewhere = spec.rank and launched is None and spec.source("rank") == "flag"  # in rank 0's terminal
    told = {"config": config.values(), "sources": dict(config.sources), "launched": launched}
    told["status"] = status_of_run(spec, watch=True) if is_seen_elsewhere else ""
    return Task(
        program=dataclasses.replace(TRAINING, arguments=(json.dumps(told),)),
        resumes=True,
        options={**config.shared_options(), "command": ("train", "command")},
        run_dir=config.run_dir or run_folder.default_run_dir("{run_id}"),
        chose_folder=config.run_dir is not None,
        command=rank_command(spec, "train", {**given, "run_dir": config.run_dir, "resume": None}),
        for_rank_0=as_flags({LISTENING: spec.listen_addr, "resume": config.resume}),
        go_on=typed_again() if launched is None and not spec.from_variables else None,
        launched=launched,
    )


def program_task(
    spec: WorldSpec,
    program: Program,
    *,
    run_dir: str | None = None,
    may_differ: Sequence[str] = (),
    launched: str | None = None,
    restarts: tuple[int, int] = (0, 0),
) -> Task:
    """Return the task of running a user's own program as one rank.

    Args:
        run_dir: the folder into which each rank that fails writes why; None: no rank writes a file.
        launched: the command that starts all ranks again, if ``launch`` starts them.
        restarts: how often the ranks were started again, and how often they may be started again.
    """
    return Task(
        options={"command": ("run", "command")},
        run_dir=run_dir,
        command=rank_command(
            spec, "run", {"run_dir": run_dir, "may_differ": ",".join(may_differ) or None}, program.typed
        ),
        launched=launched,
        program=program,
        source=program,
        name=program.name,
        restarts=restarts,
        may_differ=may_differ,
    )


def run_by_hand(spec: WorldSpec, program: Program, run_dir: str | None, may_differ: Sequence[str]) -> Ended:
    """Run a user's own program as one rank in this terminal, and print the error that ends it.

    Raises:
        BadOption: there is no such program, or this user may not read it.
    """
    check_program(program)
    terminal.log_to_stderr(spec.rank)
    spec = spec.of_script()
    if spec.source("world_size") == "default":
        if behind := command_line.option_in(program.arguments, "world_size", "rank"):
            name = program.name
            terminal.log(f"{behind} comes after {name} and goes to it; if it is meant for run, put it before {name}")
        terminal.log("no --world_size was given: this is the only rank (of two, one has --world_size 2 --rank 0)")
    _say_rank_0_by_default(spec)
    most_restarts = user_variables.count("TORCHELASTIC_MAX_RESTARTS")
    restarts = (torchrun.restart_count(), most_restarts) if spec.agent_store else (0, 0)
    task = program_task(spec, program, run_dir=run_dir, may_differ=may_differ, restarts=restarts)
    return in_this_terminal(spec, task)


def check_options(spec: WorldSpec, config: TrainConfig) -> None:
    """Raise BadOption if an option cannot work or, on rank 0, if a package or the run's folder cannot be used; raise
    CheckpointMissing if --resume names no checkpoint."""
    config.check_world(spec)
    for option in ("model", "dataset"):
        if own_factory.is_own_factory(value := getattr(config, option)):
            own_factory.check_module(option, value)
    if spec.rank == 0:
        config.check_trackers(spec)
        checkpoint_files.check_run_dir(config, may_go_on=spec.on_loss != LEAVE)


def train_by_hand(spec: WorldSpec, config: TrainConfig) -> Ended:
    """Train as one rank in this terminal, and print the error that ends it.

    Raises:
        BadOption: see ``training_task``.
    """
    terminal.log_to_stderr(spec.rank, over_bar=True)
    task = training_task(spec, config)
    if config.no_ddp:  # there are no other ranks, which would have to know the port
        spec = dataclasses.replace(spec, master_port=0)
    if spec.source("world_size") == "default" and not config.no_ddp:
        terminal.log("no --world_size was given: this rank trains alone (of two, one has --world_size 2 --rank 0)")
    _say_rank_0_by_default(spec)
    return in_this_terminal(spec, task)


def _say_rank_0_by_default(spec: WorldSpec) -> None:
    """Say that this is rank 0 if no option names its rank; it prints the others' commands once it waits for them."""
    if spec.world_size > 1 and spec.source("rank") == "default":
        others = "--rank 1" if spec.world_size == 2 else f"--rank 1 to {spec.world_size - 1}"
        terminal.log(f"no --rank was given: this is rank 0 of {spec.world_size}; the others have {others}")


def in_this_terminal(spec: WorldSpec, task: Task) -> Ended:
    """Run one rank, and print how it ends."""
    assert task.program is not None
    began = time.monotonic()
    starter = Starter(task.program)
    if task.resumes and spec.on_loss != LEAVE:
        check_torch_is_installed()
        # It imports torch beforehand: a worker that replaces another one is then only a fork of that process.
        starter = Forker(task.program)

    def print_error(error: DdpManualError) -> None:
        terminal.print_error(error, time.monotonic() - began)

    with closing(starter):
        ended = asyncio.run(agent_in_this_terminal(spec, task, starter, print_error).run())
    if ended.error is None:
        terminal.log(f"{task.name or 'training'} finished after {duration(time.monotonic() - began)}")
    return ended


def agent_in_this_terminal(
    spec: WorldSpec, task: Task, starter: Starter, print_error: Callable[[DdpManualError], None]
) -> Agent:
    start_worker = partial(starter.start, spec.rank, spec.world_size)
    return Agent(spec, task, start_worker=start_worker, log=terminal.log, print_error=print_error)
