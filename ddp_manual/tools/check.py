"""``ddp-manual check``: meet the other ranks, probe and measure, do not train."""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_manual import terminal
from ddp_manual.agent.by_hand import agent_in_this_terminal
from ddp_manual.agent.name_lookup import resolve
from ddp_manual.agent.network_interface import own_address
from ddp_manual.agent.start_worker import Starter
from ddp_manual.agent.to_type import LISTENING, rank_command
from ddp_manual.agent.what_to_run import Task
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import MasterUnresolvable, from_dict
from ddp_manual.join_steps import Step
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.option_fields import as_flags
from ddp_manual.program import MODULE, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.terminal import columns, stdout_width
from ddp_manual.text_wrapping import labelled, wrapped
from ddp_manual.tools.status import roster
from ddp_manual.wording import byte_size

# Seconds to wait for the other ranks, unless --join_timeout says otherwise: somebody is looking at the screen.
CHECK_JOIN_TIMEOUT = 30.0
DEFAULT_OF_CHECK = "check's default"
SLOW_LOOKUP = 0.5
# The program of each rank.
MEASURE = Program(
    kind=MODULE, name="ddp_manual.tools.measure", prepare="ddp_manual.tools.measure:prepare", ends_at_once=True
)
MARKS = {"ok": "\N{CHECK MARK}", "warning": "!", "failed": "\N{BALLOT X}"}


def check(spec: WorldSpec) -> dict[str, Any]:
    """Meet the other ranks, probe, measure; do not train.

    Returns:
        ``findings`` (errors, as in ``failure-rank<k>.json``; empty if all is well), ``rank``, ``host``, ``settings``
        (name, value, source), ``variables``, ``steps`` (name, seconds, outcome, detail), and on rank 0 of a complete
        run ``roster``, ``ranks`` (the reports of all) and ``measured``.
    """
    terminal.log_to_stderr(spec.rank)
    spec = dataclasses.replace(spec, on_loss=LEAVE)  # a check has no state to hold
    sources = {name: spec.source(name) for name in spec.values()}
    if sources["join_timeout"] == "default":
        spec = dataclasses.replace(spec, join_timeout=CHECK_JOIN_TIMEOUT)
        # Only in this report: an option with a source would become a part of the commands that errors suggest.
        sources["join_timeout"] = DEFAULT_OF_CHECK
    variables = user_variables.network_variables()  # the user's own: the agent sets others
    started = time.monotonic()
    checking = Task(
        program=MEASURE,
        # Ranks that train do not have this option, so that ranks that check cannot join them.
        options={"command": ("check", "command")},
        command=rank_command(spec, "check"),
        for_rank_0=as_flags({LISTENING: spec.listen_addr}),
        wait_until_ready=True,
    )
    agent = agent_in_this_terminal(spec, checking, Starter(MEASURE), print_error=lambda error: None)
    # Suppressed: the agent raises the same error below, once this host has found out all it can by itself.
    with suppress(MasterUnresolvable), agent.steps.step("names") as step:
        look_up_names(spec, step)
    ended = asyncio.run(agent.run())
    result = dict(ended.result or {})
    return {
        "rank": spec.rank,
        "host": machine.host_name(),
        "settings": [[name, value, sources[name]] for name, value in spec.values().items()],
        "variables": variables,
        "findings": [ended.error.as_dict()] if ended.error is not None else [],
        "steps": [*agent.steps.as_dicts(), *result.pop("steps", [])],
        **result,
        "seconds": time.monotonic() - started,
    }


def look_up_names(spec: WorldSpec, step: Step) -> None:
    """Time how long looking up a host's name by its address takes: torch does so for every peer that connects.

    Raises:
        MasterUnresolvable: rank 0's host name has no address.
    """
    mine = own_address()
    addresses = dict.fromkeys([*resolve(spec.master_addr), *([mine] if mine else [])])
    looked_up = []
    for address in addresses:
        started, name = time.monotonic(), None
        with suppress(OSError):
            name = socket.getnameinfo((address, 0), socket.NI_NAMEREQD)[0]
        looked_up.append((time.monotonic() - started, f"{address} is {name}" if name else f"{address} has no name"))
    step.detail = ", ".join(f"{found} ({took:.2f} s)" for took, found in looked_up)
    if max(looked_up)[0] > SLOW_LOOKUP:
        step.warn(f"slow: {step.detail}; the name server in /etc/resolv.conf does not answer")


def text(report: Mapping[str, Any], *, verbose: bool = False) -> str:
    """Format what ``check`` returns: rank 0's whole table, or another rank's own line; the findings last.

    Args:
        verbose: whether to show the options that have their defaults too.
    """
    width = stdout_width()
    steps, findings = report["steps"], report["findings"]
    who, seconds = f"rank {report['rank']} on {report['host']}", f"{report['seconds']:.1f} s"
    lines = []
    if report["rank"] == 0 or findings or verbose:
        lines = [*_steps(steps), *_of_all_ranks(report), *_settings(report, verbose=verbose), ""]
    lines += [
        wrapped(f"warning: {step['name']}: {step['detail']}", width) for step in steps if step["outcome"] == "warning"
    ]
    if findings:
        return "\n".join(
            [*lines, f"{who}: found a problem, in {seconds}", *(from_dict(found).render(width) for found in findings)]
        )
    return "\n".join([*lines, f"{who}: all is well, {len(steps)} steps in {seconds}"])


def _of_all_ranks(report: Mapping[str, Any]) -> list[str]:
    """Return what rank 0 knows of the others, if all are here."""
    lines = []
    for other in report.get("ranks", [])[1:]:
        odd = [step for step in other["steps"] if step["outcome"] != "ok"]
        if odd:
            lines += [f"rank {other['rank']} on {other['host']}:", *_steps(odd)]
    if "roster" in report:
        lines += ["", *roster(report["roster"])]
    if "measured" in report:
        lines += ["", *_measured(report["measured"], len(report["roster"]))]
    return lines


def _settings(report: Mapping[str, Any], *, verbose: bool) -> list[str]:
    """Return the options that somebody has chosen, or all of them, and the variables that change how ranks talk."""
    settings = [
        [name, "not set" if value is None else str(value), f"({source})"]
        for name, value, source in report["settings"]
        if verbose or source not in ("default", DEFAULT_OF_CHECK)
    ]
    chosen = "settings:" if verbose else "settings that are not the default:"
    sections = {chosen: settings, "variables in force:": [*report["variables"].items()]}
    lines = [line for heading, rows in sections.items() if rows for line in (heading, *columns(rows))]
    return ["", *lines] if lines else []


def _steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    named = columns([[MARKS[step["outcome"]], step["name"], f"{step['seconds']:.2f} s"] for step in steps])
    place = max(map(len, named), default=0) + 2
    rows = zip(named, steps, strict=True)
    return [labelled(line.ljust(place), step["detail"], stdout_width()).rstrip() for line, step in rows]


def _measured(measured: Mapping[str, Any], ranks: int) -> list[str]:
    lines = [f"barrier: {1e6 * measured['barrier_seconds']:.0f} us"]
    rows = [["all-reduce", "time", "bus bandwidth"]]
    for one in measured["all_reduce"]:
        bandwidth = f"{byte_size(one['bus_bandwidth'], unit=1000)}/s" if ranks > 1 else "-"
        rows.append([byte_size(one["bytes"]), f"{1e3 * one['seconds']:.2f} ms", bandwidth])
    lines += columns(rows)
    times = {(pair["rank"], pair["other"]): f"{1e6 * pair['seconds']:.0f}" for pair in measured["round_trips"]}
    if not times:
        return lines
    lines.append("round trips in us:")
    if len(times) < ranks * (ranks - 1) // 2:  # of many ranks only the round trips of rank 0 are measured
        return lines + columns([[f"0 - {other}", time] for (_, other), time in times.items()])
    rows = [
        [str(rank), *(times.get((min(rank, other), max(rank, other)), "-") for other in range(ranks))]
        for rank in range(ranks)
    ]
    return lines + columns([["rank", *map(str, range(ranks))], *rows])
