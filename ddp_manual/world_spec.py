"""Which rank a process is and how it meets the others, as a frozen value that is valid from the moment it exists.

Each field is one option of the command line. A value that cannot work raises BadOption before torch is imported.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_manual import launchers
from ddp_manual.errors import BadOption
from ddp_manual.options import Options, option, option_fields


@dataclass(frozen=True, kw_only=True)
class WorldSpec(Options):
    """Which rank this process is, and where it meets the others.

    Raises:
        BadOption: a value is out of its bounds, or two of them contradict each other.
    """

    world_size: int = option(1, "How many ranks the run has in all.", group="identity", minimum=1, shared=False)
    rank: int = option(
        0, "Which of them this process is: 0 to world_size - 1.", group="identity", minimum=0, shared=False
    )
    local_rank: int | None = option(
        None,
        "Index of the GPU on this host (default: position among the ranks of the same host).",
        group="identity",
        minimum=0,
        shared=False,
    )
    device: str = option(
        "auto",
        "auto is cuda where there is a GPU, cpu elsewhere.",
        group="identity",
        choices=("auto", "cpu", "cuda"),
        shared=False,
    )
    backend: str = option(
        "auto",
        "auto is nccl for cuda, gloo for cpu.",
        group="identity",
        choices=("auto", "gloo", "nccl"),
        shared=False,
    )
    master_addr: str = option(
        "127.0.0.1", "Rank 0's address: a host name or an IP address.", group="rendezvous", shared=False
    )
    master_port: int = option(
        29500,
        "Rank 0's port. With 0, rank 0 takes any free port and says which.",
        group="rendezvous",
        minimum=0,
        maximum=65535,
        shared=False,
    )
    run_id: str | None = option(
        None, "Name of the run; rank 0's counts (default: eight random digits).", group="rendezvous", shared=False
    )
    join_timeout: float = option(
        1800.0,
        "Seconds to wait for rank 0, and then for all ranks to join (check: 30).",
        group="rendezvous",
        above=0,
        shared=False,
    )
    peer_timeout: float = option(
        10.0,
        "Seconds without a sign of life after which a rank counts as lost; rank 0's counts for all.",
        group="rendezvous",
        minimum=1,
        shared=False,
    )
    stall_timeout: float = option(
        300.0,
        "Seconds that ranks may wait in a collective for one that lives but does not come; rank 0's counts for all.",
        group="rendezvous",
        minimum=1,
        shared=False,
    )
    token_file: str | None = option(
        None,
        "A file that holds the run's token, the same on every rank (or the variable DDP_MANUAL_TOKEN has it).",
        group="rendezvous",
        shared=False,
    )
    allow_mismatch: bool = option(
        False,
        "Go on, with a warning, where code or versions differ between ranks.",
        group="rendezvous",
        shared=False,
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Option -> "flag" or "from VARIABLE"; what is not in it is a default."""

    def __post_init__(self) -> None:
        self.check_bounds()
        if not self.master_addr.strip():
            raise BadOption(
                "--master_addr is empty",
                why=self.named("master_addr"),
                next="give the host name or the IP address of rank 0's machine",
            )
        if self.master_addr in ("0.0.0.0", "::"):
            raise BadOption(
                f"--master_addr {self.master_addr} is no address that other ranks could connect to",
                why=f"{self.named('master_addr')}: it stands for all addresses of a host",
                next="give the host name or the IP address of rank 0's machine, the same on every rank",
            )
        if self.run_id is not None and not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", self.run_id):
            raise BadOption(
                f"--run_id {self.run_id!r} cannot name a run",
                why="it becomes a part of file names",
                next="use up to 64 letters, digits, dots, dashes and underscores",
            )
        if self.rank >= self.world_size:
            raise BadOption(
                f"--rank {self.rank} does not exist in a world of {self.world_size}",
                why=f"{self.named('rank')}, {self.named('world_size')}; ranks count from 0",
                next=f"choose a --rank from 0 to {self.world_size - 1}"
                if self.world_size > 1
                else f"say how many ranks there are: --world_size {self.rank + 1} or more",
            )
        if self.master_port == 0 and self.rank != 0:
            raise BadOption(
                f"rank {self.rank} cannot join at port 0",
                why=f"{self.named('master_port')}; port 0 lets rank 0 take any free port",
                next="give the --master_port that rank 0 printed",
            )

    @classmethod
    def from_environment(cls, **flags: Any) -> WorldSpec:
        """Flags given as keyword arguments, then the launcher's variables, then the defaults.

        A flag that is None counts as not given.

        Raises:
            BadOption: see the class; also when a variable that should be a number is not.
        """
        found = {}
        for field in option_fields(cls):
            setting = launchers.identity(field.name, flags.pop(field.name, None))
            if setting is not None:
                found[field.name] = setting
        if flags:
            raise TypeError(f"WorldSpec has no option {', '.join(flags)}")
        values: dict[str, Any] = {name: setting.value for name, setting in found.items()}
        return cls(**values, sources={name: setting.source for name, setting in found.items()})

    @property
    def from_variables(self) -> list[str]:
        """The options whose values a launcher's variables gave, each with its source."""
        return [self.named(name) for name, source in self.sources.items() if source.startswith("from ")]

    @property
    def agent_store(self) -> bool:
        """Whether torchrun's agent hosts the store; rank 0 is then a client like the others."""
        return launchers.agent_store_serves(self.master_addr, self.master_port)

    @property
    def alone(self) -> bool:
        """A world of one that nobody was told how to find: it needs no fixed port."""
        is_default = self.master_port == WorldSpec.master_port and self.source("master_port") == "default"
        return self.world_size == 1 and is_default


WORLD_OPTIONS = frozenset(field.name for field in option_fields(WorldSpec))
