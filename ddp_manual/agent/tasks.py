"""What agents have their workers do: train with these options, or check. What needs no torch is looked at here."""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from ddp_manual import console, environment, extras, resume_option, rundir
from ddp_manual.agent import host
from ddp_manual.agent.joining import Task
from ddp_manual.agent.main import Agent, Ended
from ddp_manual.agent.worker_process import start_process
from ddp_manual.commands import command_template, command_to_go_on
from ddp_manual.config import TrainConfig
from ddp_manual.errors import DdpManualError, MasterUnresolvable
from ddp_manual.world_spec import WorldSpec

# Seconds to wait for the other ranks, unless --join_timeout says otherwise: somebody is looking at the screen.
CHECK_JOIN_TIMEOUT = 30.0


def training(spec: WorldSpec, config: TrainConfig, launched: str | None = None) -> Task:
    """Train as one rank.

    Args:
        launched: what goes on with the run, if ``launch`` starts its ranks.

    Raises:
        BadOption: an option cannot work; on rank 0 also a missing package, or a folder that cannot be used.
    """
    config = resume_option.in_the_agents_run_dir(config)
    config.check_world(spec)
    if spec.rank == 0:
        extras.check_trackers(config)
        resume_option.check_run_dir(config)
    return Task(
        start={
            **_of(spec),
            "config": config.values(),
            "config_sources": dict(config.sources),
            "go_on": launched or command_to_go_on(spec, config, spec.rank),
            "alone": config.no_ddp,
        },
        options={**config.shared_options(), "command": ("train", "command")},
        run_dir=config.run_dir or rundir.default_run_dir("{run_id}"),
        command=command_template(spec, config),
        launched=launched,
    )


def checking(spec: WorldSpec) -> Task:
    """Meet, probe and measure."""
    # A rank that trains and one that checks must not meet.
    options = {"command": ("check", "command")}
    return Task(start=_of(spec), options=options, command=command_template(spec), wait_until_ready=True)


def _of(spec: WorldSpec) -> dict[str, Any]:
    return {"spec": spec.values(), "sources": dict(spec.sources), "path": sys.path[0]}


def say(line: str) -> None:
    console.LOGGER.info("%s", line)


def train_by_hand(spec: WorldSpec, config: TrainConfig) -> Ended:
    """One rank of a training, in this terminal; what ends it is printed.

    Raises:
        BadOption: see ``training``.
    """
    console.log_to_stderr(spec.rank)
    task = training(spec, config)
    if spec.source("world_size") == "default" and not config.no_ddp:
        say("no --world_size was given: this rank trains alone (of two, one has --world_size 2 --rank 0)")
    return asyncio.run(_agent(spec, task, console.print_error, alone=config.no_ddp).run())


def _agent(spec: WorldSpec, task: Task, tell: Callable[[DdpManualError], None], *, alone: bool = False) -> Agent:
    return Agent(
        spec,
        task,
        start_worker=lambda: start_process(spec.rank, spec.world_size),
        say=say,
        tell=tell,
        alone=alone,
        attempt=f"{environment.restart_count()}.0",
    )


def check(spec: WorldSpec) -> dict[str, Any]:
    """Meet the other ranks, probe, measure; do not train.

    Returns:
        What was found out: ``findings`` (errors, as in ``failure-rank<k>.json``; none if all is well), ``rank``,
        ``host``, ``settings`` (name, value, source), ``variables``, ``steps`` (name, seconds, outcome, detail), and on
        rank 0 of a complete run ``roster``, ``ranks`` (the reports of all) and ``measured``.
    """
    console.log_to_stderr(spec.rank)
    if spec.source("join_timeout") == "default":
        spec = dataclasses.replace(spec, join_timeout=CHECK_JOIN_TIMEOUT)
    report: dict[str, Any] = {
        "rank": spec.rank,
        "host": environment.host_name(),
        "settings": [[name, value, spec.source(name)] for name, value in spec.values().items()],
        "variables": environment.network_variables(),
    }
    started = time.monotonic()
    agent = _agent(spec, checking(spec), tell=lambda error: None)
    # What is raised is found again below, after all that this host can know by itself.
    with suppress(MasterUnresolvable), agent.steps.step("names") as step:
        host.look_up_names(spec, step)
    ended = asyncio.run(agent.run())
    result = dict(ended.result or {})
    report["findings"] = [ended.error.as_dict()] if ended.error is not None else []
    report["steps"] = [*agent.steps.as_dicts(), *result.pop("steps", [])]
    return {**report, **result, "seconds": time.monotonic() - started}
