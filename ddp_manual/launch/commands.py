"""``commands``: what to type in each terminal of each host, for a run whose ranks a person starts."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.agent.to_type import LISTENING, rank_command
from ddp_manual.environment import machine, settings
from ddp_manual.errors import BadOption
from ddp_manual.launch.host_list import LOCAL, Host
from ddp_manual.program import Program
from ddp_manual.world_spec import WorldSpec

# The setting of Linux from which the kernel takes the ports of probes, of torch's store, of gloo and of NCCL.
FREE_PORTS = "net.ipv4.ip_local_port_range"


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands of all ranks of a run, rank 0's first."""

    spec: WorldSpec
    """The options of each rank, without its place in the world."""
    program: Program | None
    """None: our own training."""
    ranks: Sequence[tuple[Host, str]]
    """The host of each, and what to type there."""

    @property
    def alike(self) -> list[str]:
        """What all hosts must have."""
        has = ["ddp_manual", "Python's minor version", "torch"]
        if self.program is None:
            has.append("the images of the data set")
        else:
            has.append(f"{self.program.name} and what it imports")
        if self.spec.token_file is not None:
            has.append(f"the token in {self.spec.token_file}")
        elif settings.token(None) is not None:
            has.append(f"the token in {settings.TOKEN_VARIABLE}")
        return has

    def text(self) -> str:
        """Return what to type, host by host; all else is a shell's comment."""
        folder = "" if self.program is None else f", in the folder of {self.program.name}"
        lines = [f"# Type each line in a terminal of its own{folder}. Any order will do."]
        if len({host for host, _ in self.ranks}) > 1:
            port = f"port {self.spec.master_port} of {self.spec.master_addr}"
            lines.append(f"# Alike on each host: {', '.join(self.alike)}.")
            lines.append(f"# Open between the hosts: {port}, and on each the ports of {FREE_PORTS}.")
        for host, ranks in itertools.groupby(self.ranks, lambda rank: rank[0]):
            lines += ["", f"# {host.name}", *(line for _, line in ranks)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "world_size": len(self.ranks),
            "master_addr": self.spec.master_addr,
            "master_port": self.spec.master_port,
            "alike": self.alike,
            "ranks": [
                {"rank": rank, "host": host.name, "command": line, "words": shlex.split(line)}
                for rank, (host, line) in enumerate(self.ranks)
            ],
        }


def list_commands(
    hosts: Sequence[Host],
    options: dict[str, Any],
    *,
    program: Program | None,
    training: Sequence[str] = (),
    own: dict[str, Any],
) -> Commands:
    """Return the command of each rank, the ranks of a host in a row.

    Args:
        options: those of WorldSpec that were typed.
        program: the user's own program; None: our training, with the options ``training``.
        own: the options of ``train`` or ``run`` that each rank has besides.

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
        line = rank_command(spec, name, besides, shlex.join(rest)).replace("{rank}", str(rank), 1)
        ranks.append((host, line.replace("{master_port}", str(spec.master_port), 1)))
    return Commands(spec=spec, program=program, ranks=ranks)
