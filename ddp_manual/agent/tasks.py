"""Ranks that are started by hand: what their workers do, which commands a person is told to type, and an agent in this
terminal for each rank."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import shlex
import time
from collections.abc import Callable, Sequence
from contextlib import closing
from functools import partial

from ddp_manual import launchers, run_folder, terminal
from ddp_manual.agent.ending import Ended
from ddp_manual.agent.launched_worker import Forker
from ddp_manual.agent.main import Agent
from ddp_manual.agent.program_source import check_program
from ddp_manual.agent.task import Task
from ddp_manual.agent.worker_process import check_torch_is_installed, start_process
from ddp_manual.errors import DdpManualError
from ddp_manual.identity import OWN_NAME
from ddp_manual.on_loss import LEAVE
from ddp_manual.options import as_flags
from ddp_manual.program import MODULE, Program
from ddp_manual.training import checkpoint_files
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

# Options that differ between ranks or runs; they are never copied from one rank's command line to another's.
PER_RANK_OPTIONS = {"world_size", "rank", "local_rank", "master_addr", "master_port", "run_id", "run_dir"}
# Options of which rank 0's value is used; where a run goes on, others take their place.
OF_RANK_0 = ("run_dir", "resume")
# Where rank 0 listens: an address of its own host, which another rank's command has no use for.
LISTENING = "listen_addr"


PrintError = Callable[[DdpManualError], None]
TRAINING = Program(kind=MODULE, name="ddp_manual.training")
# What it imports besides torch, which a process that forks workers has before.
TRAINING_IMPORTS = ("ddp_manual.training.program",)


def command_template(
    spec: WorldSpec, config: TrainConfig | None = None, program: Program | None = None, may_differ: Sequence[str] = ()
) -> str:
    """Return the command that starts another rank of this run, with ``{rank}`` and ``{master_port}`` in it; where a
    launcher starts all ranks together, the command that does so; in a pod, the command that shows why a pod is missing.

    Of ranks that ``launch`` has started on this host a single one on another host may be started by hand too.
    """
    typed, arguments = launchers.typed_command()
    if spec.started_by:
        return f"{spec.started_by} ... {shlex.join([*typed, *arguments])}"
    if spec.source("master_addr") == f"from {OWN_NAME}":
        job, label = spec.master_addr.partition(".")[0].removesuffix("-0"), "batch.kubernetes.io/job-"
        return f"kubectl describe pods --selector {label}name={job},{label}completion-index={{rank}}"
    if arguments[:1] in (["launch"], ["hosted"]):
        typed.append("train" if program is None else "run")
    if arguments[:1] in (["train"], ["check"], ["run"]):
        typed.append(arguments[0])
    words = [shlex.join(typed), f"--world_size {spec.world_size} --rank {{rank}}"]
    if spec.master_addr != WorldSpec.master_addr:
        words.append(f"--master_addr {shlex.quote(spec.master_addr)}")
    if spec.master_port != WorldSpec.master_port:
        words.append("--master_port {master_port}")
    given = {**spec.given_options(), **(config.given_options() if config else {})}
    left_out = {*PER_RANK_OPTIONS, *OF_RANK_0, LISTENING}
    rest = as_flags({name: value for name, value in given.items() if name not in left_out})
    names = as_flags({"may_differ": ",".join(may_differ) or None})
    return " ".join(filter(None, [*words, rest, names, program.typed if program else ""]))


def typed_again() -> str:
    """Return the command that was typed in this terminal, without the options with which it is to go on."""
    program, arguments = launchers.typed_command()
    return shlex.join([*program, *without_options(arguments, OF_RANK_0)])


def without_options(typed: Sequence[str], names: Sequence[str]) -> list[str]:
    """Return what was typed, without these options and their values."""
    kept: list[str] = []
    words = iter(typed)
    for word in words:
        option, equals, _ = word.replace("-", "_").partition("=")
        if option not in [f"__{name}" for name in names]:
            kept.append(word)
        elif not equals:
            next(words, None)
    return kept


def training_task(spec: WorldSpec, config: TrainConfig, launched: str | None = None) -> Task:
    """Return the task of training as one rank; what needs no torch is checked here.

    Args:
        launched: the command that resumes the run, if ``launch`` starts its ranks.

    Raises:
        BadOption: an option cannot work; on rank 0 also a package is missing, or a folder cannot be used.
    """
    config = checkpoint_files.with_torchrun_run_dir(config)
    check_options(spec, config)
    told = {"config": config.values(), "sources": dict(config.sources), "launched": launched}
    return Task(
        program=dataclasses.replace(TRAINING, arguments=(json.dumps(told),)),
        prepare=f"{TRAINING_IMPORTS[0]}:prepare",
        options={**config.shared_options(), "command": ("train", "command")},
        run_dir=config.run_dir or run_folder.default_run_dir("{run_id}"),
        chose_folder=config.run_dir is not None,
        command=command_template(spec, config),
        for_rank_0=as_flags({LISTENING: spec.listen_addr, **{name: getattr(config, name) for name in OF_RANK_0}}),
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
        run_dir: where the run leaves why a rank has failed; None: nowhere.
        launched: the command that starts all ranks again, if ``launch`` starts them.
        restarts: how often the ranks were started again, and how often they may be.
    """
    return Task(
        options={"command": ("run", "command")},
        run_dir=run_dir,
        command=command_template(spec, program=program, may_differ=may_differ),
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
        if behind := program.argument("world_size", "rank"):
            name = program.name
            terminal.log(f"{behind} comes after {name} and goes to it; if it is meant for run, put it before {name}")
        terminal.log("no --world_size was given: this is the only rank (of two, one has --world_size 2 --rank 0)")
    restarts = launchers.torchrun_restarts() if spec.agent_store else (0, 0)
    task = program_task(spec, program, run_dir=run_dir, may_differ=may_differ, restarts=restarts)
    return in_this_terminal(spec, task)


def check_options(spec: WorldSpec, config: TrainConfig) -> None:
    """Raise BadOption if an option cannot work, or on rank 0 a package or the run's folder cannot be used; also
    CheckpointMissing if --resume names no checkpoint."""
    config.check_world(spec)
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
    if config.no_ddp:  # it has no others, for which a port would have to be known
        spec = dataclasses.replace(spec, master_port=0)
    if spec.source("world_size") == "default" and not config.no_ddp:
        terminal.log("no --world_size was given: this rank trains alone (of two, one has --world_size 2 --rank 0)")
    return in_this_terminal(spec, task)


def in_this_terminal(spec: WorldSpec, task: Task) -> Ended:
    """Run one rank, and print how it ends."""
    began = time.monotonic()

    def print_error(error: DdpManualError) -> None:
        terminal.print_error(error, time.monotonic() - began)

    ended = _run_in_this_terminal(spec, task, print_error)
    if ended.error is None:
        terminal.log(f"{task.name or 'training'} finished after {terminal.duration(time.monotonic() - began)}")
    return ended


def _run_in_this_terminal(spec: WorldSpec, task: Task, print_error: PrintError) -> Ended:
    if spec.on_loss == LEAVE or not task.prepare:
        return asyncio.run(agent_in_this_terminal(spec, task, print_error).run())
    check_torch_is_installed()
    # It has torch when a worker has to be replaced, which then takes a fork.
    with closing(Forker(1, task.program, TRAINING_IMPORTS, in_terminal=True)) as spare:
        start_worker = partial(spare.start, spec.rank, spec.world_size)
        agent = Agent(spec, task, start_worker=start_worker, log=terminal.log, print_error=print_error)
        return asyncio.run(agent.run())


def agent_in_this_terminal(spec: WorldSpec, task: Task, print_error: PrintError) -> Agent:
    start_worker = partial(start_process, spec.rank, spec.world_size, program=task.program)
    return Agent(spec, task, start_worker=start_worker, log=terminal.log, print_error=print_error)
