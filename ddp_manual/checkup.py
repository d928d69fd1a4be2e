"""``ddp-manual check``: one rank's life as far as the process group, with the time of each step, and then measurements.

It goes the way of a real run, so what stops a run stops the check, and is its finding.
"""

from __future__ import annotations

import dataclasses
import time
from contextlib import suppress
from typing import Any

from ddp_manual import console, environment
from ddp_manual.commands import command_template
from ddp_manual.errors import DdpManualError, MasterUnresolvable
from ddp_manual.options import option_fields
from ddp_manual.world_spec import WorldSpec

# Seconds to wait for the other ranks, unless --join_timeout says otherwise: somebody is looking at the screen.
JOIN_TIMEOUT = 30.0


def check(spec: WorldSpec) -> dict[str, Any]:
    """Meet the other ranks, probe, measure; do not train.

    Returns:
        What was found out: ``findings`` (errors, as in ``failure-rank<k>.json``; none if all is well), ``rank``,
        ``host``, ``settings`` (name, value, source), ``variables``, ``steps`` (name, seconds, outcome, detail), and on
        rank 0 of a complete run ``roster``, ``ranks`` (the reports of all) and ``measured``.
    """
    console.log_to_stderr(spec.rank)
    if spec.source("join_timeout") == "default":
        spec = dataclasses.replace(spec, join_timeout=JOIN_TIMEOUT)

    from ddp_manual.rendezvous import rendezvous
    from ddp_manual.rendezvous.lastwords import as_ours
    from ddp_manual.rendezvous.preflight import look_up_addresses
    from ddp_manual.rendezvous.steps import Steps

    variables = environment.network_variables()
    environment.bound_reverse_lookups()
    steps = Steps()
    names = [field.name for field in option_fields(WorldSpec)]
    report: dict[str, Any] = {
        "findings": [],
        "rank": spec.rank,
        "host": environment.host_name(),
        "settings": [[name, getattr(spec, name), spec.source(name)] for name in names],
        "variables": variables,
    }
    started = time.monotonic()
    try:
        with suppress(MasterUnresolvable):  # found again below, after all that this host can know by itself
            look_up_addresses(spec, steps)
        # A rank that trains and one that checks must not meet.
        common = {"command": ("check", "command")}
        with rendezvous(spec, options=common, command=command_template(spec), steps=steps) as world:
            world.progress.phase = "measuring"
            measured = _measure(world.device, steps)
            ranks = world.gather({"rank": world.rank, "host": world.host, "steps": _as_dicts(steps)})
            if world.rank == 0:
                report |= {"roster": world.roster(), "ranks": ranks, "measured": measured}
    except DdpManualError as error:
        report["findings"].append(error.as_dict())
    except Exception as error:
        report["findings"].append(as_ours(spec.rank, error).as_dict())
    report["steps"] = _as_dicts(steps)
    report["seconds"] = time.monotonic() - started
    return report


def _measure(device: Any, steps: Any) -> dict[str, Any]:
    from ddp_manual.rendezvous import measuring

    with steps.step("barrier"):
        barrier = measuring.barrier_seconds(device)
    with steps.step("all-reduce"):
        reduced = measuring.all_reduces(device)
    with steps.step("round trips"):
        pairs = measuring.round_trips(device)
    return {
        "barrier_seconds": barrier,
        "all_reduce": [dataclasses.asdict(one) for one in reduced],
        "round_trips": [{"rank": first, "other": second, "seconds": seconds} for first, second, seconds in pairs],
    }


def _as_dicts(steps: Any) -> list[dict[str, Any]]:
    return [dataclasses.asdict(step) for step in steps]
