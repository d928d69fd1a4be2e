"""``commands``: what to type in each terminal of each host, for a run whose ranks a person starts."""

from __future__ import annotations

import dataclasses
import itertools
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual import launchers
from ddp_manual.errors import BadOption
from ddp_manual.launch.host_list import LOCAL, Host
from ddp_manual.options import as_flags
from ddp_manual.program import Program
from ddp_manual.world_spec import WorldSpec

# The setting of Linux from which the kernel takes the ports of probes, of torch's store, of gloo and of NCCL.
FREE_PORTS = "net.ipv4.ip_local_port_range"


@dataclass(frozen=True, kw_only=True)
class RankCommand:
    """What to type for one rank."""

    rank: int
    host: Host
    program: tuple[str, ...]
    """How this package was started here, such as ``python -m ddp_manual``."""
    words: tuple[str, ...]
    """What comes after that, from ``train`` or ``run`` on."""

    @property
    def line(self) -> str:
        return shlex.join([*self.program, *self.words])


@dataclass(frozen=True, kw_only=True)
class Commands:
    """The commands of all ranks of a run, rank 0's first."""

    spec: WorldSpec
    """The options of each rank, without its place in the world."""
    program: Program | None
    """None: our own training."""
    ranks: Sequence[RankCommand]

    @property
    def by_host(self) -> list[list[RankCommand]]:
        return [list(group) for _, group in itertools.groupby(self.ranks, lambda rank: rank.host)]

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
        elif launchers.token(None) is not None:
            has.append(f"the token in {launchers.TOKEN_VARIABLE}")
        return has

    def text(self) -> str:
        """Return what to type, host by host; all else is a shell's comment."""
        folder = "" if self.program is None else f", in the folder of {self.program.name}"
        lines = [f"# Type each line in a terminal of its own{folder}. Any order will do."]
        if len(self.by_host) > 1:
            port = f"port {self.spec.master_port} of {self.spec.master_addr}"
            lines.append(f"# Alike on each host: {', '.join(self.alike)}.")
            lines.append(f"# Open between the hosts: {port}, and on each the ports of {FREE_PORTS}.")
        for group in self.by_host:
            lines += ["", f"# {group[0].host.name}", *(rank.line for rank in group)]
        return "\n".join(lines)

    def as_dict(self) -> dict[str, Any]:
        return {
            "world_size": len(self.ranks),
            "master_addr": self.spec.master_addr,
            "master_port": self.spec.master_port,
            "alike": self.alike,
            "ranks": [
                {"rank": rank.rank, "host": rank.host.name, "command": rank.line, "words": [*rank.program, *rank.words]}
                for rank in self.ranks
            ],
        }


def is_here(host: Host) -> bool:
    """Return whether this is the host, of which ssh would ask nothing."""
    return host.name in (*LOCAL, launchers.host_name())


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
    if first in LOCAL and "master_addr" not in options and not all(map(is_here, hosts)):
        other = next(host for host in hosts if not is_here(host))
        raise BadOption(
            f"{other.name} cannot reach rank 0 at {first}",
            why=f"rank 0 is on the first host, and {first} is another host for each host",
            next="name the first host as the others know it, or give its address: --master_addr",
        )
    count = sum(host.slots for host in hosts)
    options = {"master_addr": first, **options}
    spec = WorldSpec(**options, world_size=count, rank=count - 1, sources=dict.fromkeys(options, "flag"))
    command, _ = launchers.typed_command()
    rest = [*(program.words if program is not None else training)]
    on = itertools.chain.from_iterable(itertools.repeat(host, host.slots) for host in hosts)
    ranks = []
    for rank, host in enumerate(on):
        given = {name: value for name, value in options.items() if name != "listen_addr" or rank == 0}
        flags = shlex.split(as_flags({"world_size": count, "rank": rank, **given, **own}))
        words = ("train" if program is None else "run", *flags, *rest)
        ranks.append(RankCommand(rank=rank, host=host, program=tuple(command), words=words))
    return Commands(spec=dataclasses.replace(spec, rank=0), program=program, ranks=ranks)
