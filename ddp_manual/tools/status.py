"""``ddp-manual status``: look at the run at rank 0's address from any third terminal; joins nothing."""

from __future__ import annotations

import asyncio
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import partial
from typing import Any

import msgspec

from ddp_manual.agent.name_lookup import look_up
from ddp_manual.agent.wait_for_rank_0 import find_rank_0, look_at
from ddp_manual.agent.waiting_rank_0s import hint
from ddp_manual.deadline import Waiting
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BadOption, DdpManualError, MasterLost, Stopped, from_dict
from ddp_manual.protocol.search_for_rank_0 import Search
from ddp_manual.protocol.verdict_words import error_for
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import Verdict
from ddp_manual.terminal import columns, log, log_to_stderr, stdout_width
from ddp_manual.text_wrapping import wrapped
from ddp_manual.wording import at, duration

LOOK_EVERY = 1.0
# Ranks; a larger run's table ends with how many more there are.
MOST_ROWS = 64
# Seconds: a wait in a collective is shown once it is that long; most steps take less.
WAITS_FOR = 2.0
# Seconds of silence after which what a rank did last is no longer shown as what it does.
SILENT_FOR = 10.0

# What to do where no rank 0 is found; ``status`` does not know how the run is started.
ADVICE = (
    "start rank 0, or give the --master_port that rank 0 or launch has printed; ddp-manual runs says why a run has "
    "ended, where it has a --run_dir"
)
# The columns to leave out, in this order, where a terminal has no room for them.
LEAST_FIRST = ("versions", "address", "since", "samples/s", "device", "epoch", "heard", "host", "pid", "line")


class _Patience(Waiting):
    """A wait that does not say what to type: ``status`` starts no rank."""

    def advise(self, commands: Sequence[str]) -> None:
        pass


async def watch(
    spec: WorldSpec, show: Callable[[dict[str, Any]], None], *, again: bool, stacks: bool, shrink: bool
) -> dict[str, Any]:
    """Ask rank 0 for the run as it is now, and show it; return what rank 0 said last.

    Args:
        again: wait for rank 0, for ``spec.join_timeout`` seconds, and ask every second until the run has ended.
        stacks: ask for the Python stacks of every rank too.
        shrink: have the run go on without the ranks that are missing.

    Raises:
        BadOption: there is nothing to shrink.
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: no run answers, and why.
        MasterLost: rank 0 is frozen, stopped, or gone. DdpManualError: the failure that ended a watched run.
    """
    token = user_variables.token(spec.token_file)
    log_to_stderr(None)
    waiting = _Patience(spec.join_timeout, log) if again else _Patience(0.0, lambda line: None)
    addresses = await look_up(spec.master_addr, waiting, lambda line: None, again=again)
    there = await find_rank_0(
        Search(spec, "status", machine.host_name(), ADVICE, hint=partial(hint, spec, of_any_size=True)),
        addresses,
        waiting,
    )
    waiting.ends()
    assert there.connection is not None
    where = at(there.address, spec.master_port)
    try:
        seen = await look_at(there, where, token, stacks=stacks, shrink=shrink)
        if shrink and not seen["shrunk"]:
            raise BadOption(
                "--shrink has nothing to do",
                why="all ranks are here" if not seen["missing"] else "the ranks have not met yet, so none was lost",
                next="look at the run without --shrink",
            )
        while again:
            if not seen["failure"]:  # which is raised at the end; by now ranks have begun to leave
                show(seen)
            await asyncio.sleep(LOOK_EVERY)
            try:
                seen = await look_at(there, where, token, stacks=stacks)
            except MasterLost:
                if not there.connection.closed:
                    raise
                if (error := _failure(seen, where)) is not None:
                    raise error from None
                return seen
        show(seen)
        return seen
    finally:
        there.connection.close()


def _failure(seen: Mapping[str, Any], where: str) -> DdpManualError | None:
    """Return the error that has ended the run, by what rank 0 said last; None if all ranks have left in order."""
    run, ended = seen["run"], seen.get("ended")
    if ended is None:
        return MasterLost(
            f"rank 0 ({run['host']}, pid {run['pid']}) is gone without a word",
            why=f"its agent at {where} has closed the connection, and has not said how the run ended",
            next=f"look at rank 0's last lines; if there are none it was killed, or {run['host']} is down",
        )
    in_order = ended["identifier"] == Stopped.identifier and not (seen["complete"] and seen["failure"])
    if "exit_code" not in ended or in_order:
        return None
    # In the words for a rank that had no part in the failure.
    if seen["complete"] and seen["failure"]:
        return error_for(-1, msgspec.convert(seen["failure"], Verdict))
    return from_dict(ended)


def last_line(seen: Mapping[str, Any]) -> str:
    """Say how a run that did not fail has ended."""
    ended = seen["ended"]
    return wrapped(f"the run {'was' if ended['identifier'] else 'has finished:'} {ended['what']}", stdout_width())


def text(seen: Mapping[str, Any]) -> str:
    """Format what ``watch`` shows: the run, a line for each rank, who is missing, stacks and failure."""
    run, progress, width = seen["run"], seen["progress"] or (), stdout_width()
    since = f"{datetime.fromtimestamp(run['since']):%Y-%m-%d %H:%M:%S}"
    state = "all ranks are here" if seen["complete"] else f"{seen['here']} of {run['world_size']} ranks are here"
    header = f"run {run['run_id']}: rank 0 on {run['host']} (pid {run['pid']}) since {since}; {state}"
    lines = [wrapped(header, width)]
    if run["run_dir"]:
        lines.append(f"files: {run['run_dir']}")
    if rate := sum(now["samples_per_second"] for now in progress if now["silent_seconds"] < SILENT_FOR):
        lines.append(f"speed: {rate:,.0f} samples/s, of all ranks together")
    if left := [now["seconds_left"] for now in progress if now["seconds_left"] is not None]:
        lines.append(f"left: about {duration(max(left))}")
    lines += ["", *roster(seen["ranks"], progress)]
    said = [*seen.get("stopped", ()), *filter(None, (seen.get("waiting"), seen.get("lost")))]
    lines += [f"\n{wrapped(line, width)}" for line in said]
    if seen["missing"] and not seen.get("lost"):
        lines += _with_command("missing: {}; to start one:", seen["missing"], run["command"])
    if seen.get("left_out"):
        lines += _with_command("going on without: {}; to bring one back:", seen["left_out"], run["command"])
    before = [*seen["refused"], *seen["gone"]] if not seen["complete"] or seen.get("left_out") else []
    if notes := [*before, *seen["warnings"]]:
        lines += ["", *notes]
    if "stacks" in seen and not progress:
        lines += ["", "no stacks yet: the ranks have not met"]
    for line in seen["ranks"] if "stacks" in seen and progress else ():
        stack = seen["stacks"].get(str(line["rank"]), "gave no answer: it has left, or is stopped or frozen")
        lines += ["", f"rank {line['rank']} on {line['host']} (pid {line['pid']}):"]
        lines += [f"  {part}" for part in stack.splitlines()]
    if seen["failure"] and not seen.get("ended"):  # otherwise it is what the watch ends with
        lines += ["", from_dict(seen["failure"]).render()]
    return "\n".join(lines)


def _with_command(said: str, ranges: Sequence[tuple[int, int]], command: str) -> list[str]:
    """Name ranks, and what to type for the first of them."""
    ranks = [str(rank) for first, last in ranges for rank in range(first, last + 1)]
    return ["", said.format(", ".join(ranks[:MOST_ROWS])), f"  {command.replace('{rank}', ranks[0], 1)}"]


def roster(ranks: Sequence[Mapping[str, Any]], progress: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    """Format one line for each rank, without the columns that matter least where stdout has no room for them.

    Args:
        progress: what each rank does; empty before the ranks have met. None: the table has no such columns.
    """
    phase = ["phase"] if progress is not None else []
    doing = ["epoch", "step", "loss", "samples/s", "heard", "line"] if progress else []
    rows = [["rank", "host", "pid", "device", "address", "since", *phase, *doing, "versions"]]
    for line in ranks[:MOST_ROWS]:
        device = f"{line['device']} {line['gpu']}" if "gpu" in line else line["device"] or "-"
        since = f"{datetime.fromtimestamp(line['since']):%H:%M:%S}"
        row = [str(line["rank"]), line["host"], str(line["pid"]), device, line["address"], since]
        if progress:
            now = progress[line["rank"]]
            is_silent = now["silent_seconds"] >= SILENT_FOR
            rate = f"{now['samples_per_second']:,.0f}" if now["samples_per_second"] and not is_silent else "-"
            # A script tells its epoch and step only with world.progress.
            counted = (now["epoch"], f"{now['step']}/{now['steps']}" if now["steps"] else now["step"])
            steps = [str(count) if now["step"] or now["epoch"] else "-" for count in counted]
            loss = "-" if now["loss"] is None else f"{now['loss']:.4g}"
            waits = f", waits for {now['waits_seconds']:.0f} s" if now["waits_seconds"] >= WAITS_FOR else ""
            does = f"silent, was {now['phase']}" if is_silent else now["phase"] + waits + " (slow)" * now["slow"]
            row += [does, *steps, loss, rate]
            row += [f"{now['silent_seconds']:.0f} s ago", now["place"] or "-"]
        elif progress is not None:
            row.append("ready" if line["device"] else "loading torch")
        # Without torch's build, such as +cu128: a rank that has not loaded torch does not know it.
        rows.append([*row, re.sub(r"\+\w+", "", line["versions"])])
    said = [any(cell != "-" for cell in column[1:]) for column in zip(*rows, strict=True)]
    if ranks:  # a column of which no rank has anything to say is left out
        rows = [[*itertools.compress(row, said)] for row in rows]
    more = [f"  ... and {len(ranks) - MOST_ROWS} more"] if len(ranks) > MOST_ROWS else []
    return [*columns(rows, width=stdout_width(), least_first=LEAST_FIRST), *more]
