"""``ddp-manual status``: look at the run at rank 0's address from any third terminal; joins nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from ddp_manual import launchers
from ddp_manual.agent.address import resolve
from ddp_manual.agent.network_interface import at
from ddp_manual.agent.probe import find_rank_0, look_at
from ddp_manual.agent.verdicts import error_for
from ddp_manual.errors import MasterLost, from_dict
from ddp_manual.terminal import Waiting, columns
from ddp_manual.world_spec import WorldSpec

LOOK_EVERY = 1.0
# Ranks; a larger run's table ends with how many more there are.
MOST_ROWS = 64


def watch(spec: WorldSpec, show: Callable[[dict[str, Any]], None], *, again: bool, stacks: bool) -> None:
    """Show the run as it is now, and with ``again`` every second until it has ended.

    Raises:
        DdpManualError: see ``look``.
    """

    async def show_each() -> None:
        async for seen in look(spec, again=again, stacks=stacks):
            show(seen)

    asyncio.run(show_each())


async def look(spec: WorldSpec, *, again: bool, stacks: bool = False) -> AsyncIterator[dict[str, Any]]:
    """Ask rank 0 for the run, and with ``again`` once more every second until the run has ended.

    Args:
        stacks: ask for the Python stacks of every rank too.

    Raises:
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: no run answers, and why.
        MasterLost: rank 0 is frozen or stopped. DdpManualError: the failure that ended a watched run.
    """
    start_rank_0 = (
        f"ddp-manual train --world_size N --rank 0 --master_addr {spec.master_addr} --master_port {spec.master_port}"
    )
    token, waiting = launchers.token(spec.token_file), Waiting(0.0, lambda line: None)
    there = await find_rank_0(spec, resolve(spec.master_addr), waiting, start_rank_0, who="status")
    assert there.connection is not None
    where = at(there.address, spec.master_port)
    try:
        seen = await look_at(there, where, token, stacks=stacks)
        yield seen
        while again:
            await asyncio.sleep(LOOK_EVERY)
            try:
                seen = await look_at(there, where, token, stacks=stacks)
            except MasterLost:
                if not there.connection.closed:
                    raise
                if seen["failure"]:
                    raise error_for(-1, seen["failure"]) from None  # as a rank without a part in it would say it
                return
            yield seen
    finally:
        there.connection.close()


def text(seen: Mapping[str, Any]) -> str:
    """Format what ``look`` yields: the run, a line for each rank, who is missing, stacks and failure."""
    run = seen["run"]
    since = f"{datetime.fromtimestamp(run['since']):%Y-%m-%d %H:%M:%S}"
    state = "all ranks are here" if seen["complete"] else f"{seen['here']} of {run['world_size']} ranks are here"
    lines = [f"run {run['run_id']}: rank 0 on {run['host']} (pid {run['pid']}) since {since}; {state}"]
    if run["run_dir"]:
        lines.append(f"files: {run['run_dir']}")
    lines += ["", *roster(seen["ranks"], seen["progress"])]
    missing = [rank for first, last in seen["missing"] for rank in range(first, last + 1)]
    if missing:
        lines += ["", f"missing: {', '.join(map(str, missing[:MOST_ROWS]))}; to start one:"]
        lines.append(f"  {run['command'].replace('{rank}', str(missing[0]))}")
    if notes := [*seen["refused"], *seen["gone"], *seen["warnings"]]:
        lines += ["", *notes]
    if "stacks" in seen and not seen["progress"]:
        lines += ["", "no stacks yet: the ranks have not met"]
    for line in seen["ranks"] if "stacks" in seen and seen["progress"] else ():
        stack = seen["stacks"].get(str(line["rank"]), "gave no answer: it has left, or is stopped or frozen")
        lines += ["", f"rank {line['rank']} on {line['host']} (pid {line['pid']}):"]
        lines += [f"  {part}" for part in stack.splitlines()]
    if seen["failure"]:
        lines += ["", from_dict(seen["failure"]).render()]
    return "\n".join(lines)


def roster(ranks: Sequence[Mapping[str, Any]], progress: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    """Format one line for each rank; with ``progress`` also what each rank does."""
    doing = ["phase", "epoch", "step", "samples/s", "heard"] if progress else []
    rows = [["rank", "host", "pid", "device", "address", "since", *doing, "versions"]]
    for line in ranks[:MOST_ROWS]:
        device = f"{line['device']} {line['gpu']}" if "gpu" in line else line["device"]
        since = f"{datetime.fromtimestamp(line['since']):%H:%M:%S}"
        row = [str(line["rank"]), line["host"], str(line["pid"]), device, line["address"], since]
        if progress:
            now = progress[line["rank"]]
            rate = f"{now['samples_per_second']:,.0f}" if now["samples_per_second"] else "-"
            row += [now["phase"] + " (slow)" * now["slow"], str(now["epoch"]), str(now["step"]), rate]
            row.append(f"{now['silent_seconds']:.0f} s ago")
        rows.append([*row, line["versions"]])
    more = [f"  ... and {len(ranks) - MOST_ROWS} more"] if len(ranks) > MOST_ROWS else []
    return [*columns(rows), *more]
