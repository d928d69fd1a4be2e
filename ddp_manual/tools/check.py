"""``check``: meet the other ranks, probe and measure, do not train."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from contextlib import suppress
from typing import Any

from ddp_manual import launchers, terminal
from ddp_manual.agent.address import resolve
from ddp_manual.agent.commands import command_template
from ddp_manual.agent.join import Task
from ddp_manual.agent.network_interface import own_address
from ddp_manual.agent.tasks import agent_in_this_terminal
from ddp_manual.errors import MasterUnresolvable
from ddp_manual.messages import Step
from ddp_manual.world_spec import WorldSpec

# Seconds to wait for the other ranks, unless --join_timeout says otherwise: somebody is looking at the screen.
CHECK_JOIN_TIMEOUT = 30.0
SLOW_LOOKUP = 0.5


def check(spec: WorldSpec) -> dict[str, Any]:
    """Meet the other ranks, probe, measure; do not train.

    Returns:
        What was found out: ``findings`` (errors, as in ``failure-rank<k>.json``; none if all is well), ``rank``,
        ``host``, ``settings`` (name, value, source), ``variables``, ``steps`` (name, seconds, outcome, detail), and on
        rank 0 of a complete run ``roster``, ``ranks`` (the reports of all) and ``measured``.
    """
    terminal.log_to_stderr(spec.rank)
    if spec.source("join_timeout") == "default":
        spec = dataclasses.replace(spec, join_timeout=CHECK_JOIN_TIMEOUT)
    report: dict[str, Any] = {
        "rank": spec.rank,
        "host": launchers.host_name(),
        "settings": [[name, value, spec.source(name)] for name, value in spec.values().items()],
        "variables": launchers.network_variables(),
    }
    started = time.monotonic()
    agent = agent_in_this_terminal(spec, checking(spec), print_error=lambda error: None)
    # What is raised is found again below, after all that this host can know by itself.
    with suppress(MasterUnresolvable), agent.steps.step("names") as step:
        look_up_names(spec, step)
    ended = asyncio.run(agent.run())
    result = dict(ended.result or {})
    report["findings"] = [ended.error.as_dict()] if ended.error is not None else []
    report["steps"] = [*agent.steps.as_dicts(), *result.pop("steps", [])]
    return {**report, **result, "seconds": time.monotonic() - started}


def checking(spec: WorldSpec) -> Task:
    """Meet, probe and measure."""
    # A rank that trains and one that checks must not meet.
    options = {"command": ("check", "command")}
    return Task(start={}, options=options, command=command_template(spec), wait_until_ready=True)


def look_up_names(spec: WorldSpec, step: Step) -> None:
    """Time a look-up by address, as ``check`` does: torch asks for the name of every peer that connects.

    Raises:
        MasterUnresolvable: rank 0's address.
    """
    mine = own_address()
    asked = dict.fromkeys([*resolve(spec.master_addr), *([mine] if mine else [])])
    found = [(address, *_looked_up(address)) for address in asked]
    step.detail = ", ".join(f"{address} is {name or 'nameless'} ({took:.2f} s)" for address, took, name in found)
    if max(took for _, took, _ in found) > SLOW_LOOKUP:
        step.warn(f"slow: {step.detail}; the name server in /etc/resolv.conf does not answer")


def _looked_up(address: str) -> tuple[float, str | None]:
    """Seconds that looking up an address's name took, and the name if it has one."""
    started, name = time.monotonic(), None
    with suppress(OSError):
        name = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
    return time.monotonic() - started, name
