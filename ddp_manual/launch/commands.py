"""``commands``: what to type in each terminal of each host, for a run whose ranks a person starts."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from typing import Any

from ddp_manual.agent.to_type import LISTENING, rank_command, with_port
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import BadOption
from ddp_manual.launch.host_list import LOCAL, Host
from ddp_manual.program import Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.terminal import stdout_width
from ddp_manual.text_wrapping import as_shell_words, wrapped

# The Linux setting with the range of ports that the kernel gives to probes, torch's store, gloo and NCCL.
FREE_PORTS = "net.ipv4.ip_local_port_range"


def list_commands(
    hosts: Sequence[Host],
    options: dict[str, Any],
    *,
    program: Program | None,
    training: Sequence[str] = (),
    own: dict[str, Any],
) -> dict[str, Any]:
    """Return where the ranks meet, what must be the same on all hosts, and the command of each rank; ranks are
    numbered host by host.

    Args:
        options: the options of WorldSpec that were typed.
        program: the user's own program; None: our training, with the options ``training``.
        own: further options of ``train`` or ``run``, for every rank.

    Raises:
        BadOption: the ranks could not meet with these options.
    """
    first = hosts[0].address
    others = [host.name for host in hosts if host.name not in (*LOCAL, machine.host_name())]
    if first in LOCAL and "master_addr" not in options and others:
        raise BadOption(
            f"{others[0]} cannot reach rank 0 at {first}",
            why=f"rank 0 is on the first host, and {first} is another host for each host",
            next="name the first host as the others know it, or give its address: --master_addr",
        )
    count = sum(host.slots for host in hosts)
    options = {"master_addr": first, **options}
    spec = WorldSpec(**options, world_size=count, rank=count - 1, sources=dict.fromkeys(options, "flag"))
    name, rest = ("train", training) if program is None else ("run", program.words)
    ranks = []
    for rank, host in enumerate(each for each in hosts for _ in range(each.slots)):
        besides = {**own, LISTENING: spec.listen_addr if rank == 0 else None}
        line = with_port(rank_command(spec, name, besides), spec).replace("{rank}", str(rank), 1)
        words, line = [*shlex.split(line), *rest], " ".join(filter(None, [line, as_shell_words(rest)]))
        ranks.append({"rank": rank, "host": host.name, "command": line, "words": words})
    meeting = {"world_size": count, "master_addr": spec.master_addr, "master_port": spec.master_port}
    return {**meeting, "alike": _alike(spec, program), "ranks": ranks}


def _alike(spec: WorldSpec, program: Program | None) -> list[str]:
    """Return what must be the same on all hosts."""
    has = ["ddp_manual", "Python's minor version", "torch"]
    has.append("the images of the data set" if program is None else f"{program.name} and what it imports")
    if spec.token_file is not None:
        has.append(f"the token in {spec.token_file}")
    elif user_variables.token(None) is not None:
        has.append(f"the token in {user_variables.TOKEN_VARIABLE}")
    return has


def text(found: dict[str, Any], program: Program | None) -> str:
    """Return the commands to type, host by host; all other lines are comments of the shell."""
    folder = "" if program is None else f", in the folder of {program.name}"
    lines = [f"# Type each line in a terminal of its own{folder}. Any order will do."]
    by_host = [(host, [*ranks]) for host, ranks in itertools.groupby(found["ranks"], lambda rank: rank["host"])]
    if len(by_host) > 1:
        port = f"port {found['master_port']} of {found['master_addr']}"
        lines.append(f"# Alike on each host: {', '.join(found['alike'])}.")
        lines.append(f"# Open between the hosts: {port}, and on each the ports of {FREE_PORTS}.")
    lines = [wrapped(line, stdout_width(), margin="# ") for line in lines]
    for host, ranks in by_host:
        lines += ["", f"# {host}", *(rank["command"] for rank in ranks)]
    return "\n".join(lines)
