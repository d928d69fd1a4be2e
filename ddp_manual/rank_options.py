"""WorldSpec: which rank a process is and where it meets the others, checked before torch is imported."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from ddp_manual.environment import launcher_variables, torchrun, user_variables
from ddp_manual.errors import BadOption
from ddp_manual.on_rank_loss import LEAVE, SHRINK, WAIT
from ddp_manual.option_fields import Options, number_below, option, option_fields

# Options that a process which only looks at a run does not have.
OF_ONE_RANK = ("rank", "local_rank")
# The ranks of a run need not agree on these.
identity = partial(option, group="identity", shared=False)
rendezvous = partial(option, group="rendezvous", shared=False)
loss = partial(option, group="lost ranks", shared=False)

# Seconds. In a script one rank may work while the others wait, such as to prepare data: it has as long as gloo's own
# time-out of a collective.
STALL_TIMEOUT, STALL_TIMEOUT_OF_SCRIPT = 300.0, 1800.0


@dataclass(frozen=True, kw_only=True)
class WorldSpec(Options):
    """Which rank this process is, and where it meets the others.

    Raises:
        BadOption: a value is out of its bounds, or two of them contradict each other.
    """

    world_size: int = identity(1, "How many ranks the run has in all.", minimum=1)
    rank: int = identity(0, "Which of them this process is: 0 to world_size - 1.", minimum=0)
    local_rank: int | None = identity(
        None, "Index of the GPU on this host (default: position among the ranks of the same host).", minimum=0
    )
    device: str = identity(
        "auto",
        "auto is cuda if each rank finds a GPU, cpu if no rank does; if only some ranks do, the run is refused.",
        choices=("auto", "cpu", "cuda"),
    )
    backend: str = identity("auto", "auto is nccl for cuda, gloo for cpu.", choices=("auto", "gloo", "nccl"))
    master_addr: str = rendezvous("127.0.0.1", "Rank 0's address: a host name or an IP address.")
    master_port: int = rendezvous(
        29500, "Rank 0's port. With 0, rank 0 takes any free port and says which.", minimum=0, maximum=65535
    )
    listen_addr: str | None = rendezvous(
        None,
        "Where rank 0 listens, if --master_addr is forwarded to it (default: at --master_addr; 0.0.0.0: everywhere).",
    )
    run_id: str | None = rendezvous(None, "Name of the run; rank 0's counts (default: eight random digits).")
    join_timeout: float = rendezvous(1800.0, "Seconds to wait for rank 0, and then for all ranks to join.", above=0)
    peer_timeout: float = rendezvous(
        60.0,
        "Seconds of silence after which a rank counts as lost (it is named after 10); rank 0's counts for all.",
        minimum=1,
    )
    stall_timeout: float | None = rendezvous(
        None,
        "Seconds that ranks may wait in a collective for one that lives but does not come; rank 0's counts for all "
        f"(default: {STALL_TIMEOUT:.0f}; of a script {STALL_TIMEOUT_OF_SCRIPT:.0f}).",
        minimum=1,
    )
    collectives: str = rendezvous(
        "check",
        "check compares what ranks call collectives with, and names what does not match; off leaves that out.",
        choices=("check", "off"),
    )
    token_file: str | None = rendezvous(
        None, "A file that holds the run's token, the same on every rank (or the variable DDP_MANUAL_TOKEN has it)."
    )
    allow_mismatch: bool = rendezvous(
        False, "Go on, with a warning, where code, versions or variables differ between ranks."
    )
    full_traceback: bool = rendezvous(False, "Show the frames of libraries too, where this rank's own code has raised.")
    on_loss: str = loss(
        LEAVE,
        "When a rank is lost: leave ends the run; wait keeps its seat until its command is typed again, and then goes "
        "on from the same step; shrink goes on without it. Rank 0's value is used.",
        choices=(LEAVE, WAIT, SHRINK),
    )
    rejoin_timeout: float = loss(1800.0, "Seconds that a lost rank's seat is kept; then the run ends.", above=0)
    shrink_after: float | None = loss(
        None, "With --on_loss wait: seconds after which the run goes on without a lost rank.", minimum=0
    )
    on_loss_of_own_code: bool = loss(False, "A rank whose own code raised counts as lost too; rank 0's value is used.")
    max_restarts: int = loss(
        3,
        "How often ranks are started again after one has failed: that rank alone with --on_loss_of_own_code, otherwise "
        "all by launch, our training from its newest checkpoint. Rank 0's value is used.",
        minimum=0,
    )
    standby_addr: str | None = loss(
        None, "HOST[:PORT] where ranks that have lost rank 0 look for it too, besides its address."
    )
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict, compare=False)
    """Option -> "flag" or "from VARIABLE"; an option that is missing here has its default or an argument."""

    def __post_init__(self) -> None:
        """Check each value by itself, then those that depend on one another."""
        self.check_bounds()
        if self.master_addr in ("0.0.0.0", "::"):
            raise BadOption(
                f"--master_addr {self.master_addr} is not an address that other ranks can connect to",
                why=f"{self.named('master_addr')}: it stands for all addresses of a host",
                next="give the host name or the IP address of rank 0's machine, the same on every rank\n"
                f"rank 0 may listen at all its addresses: --listen_addr {self.master_addr}",
            )
        if self.standby_addr is not None and self.standby is None:
            raise BadOption(
                f"--standby_addr {self.standby_addr!r} is no HOST or HOST:PORT",
                why=self.named("standby_addr"),
                next="name a host of the run, such as hostB or hostB:29500",
            )
        for name in ("shrink_after", "on_loss_of_own_code"):
            if getattr(self, name) and self.on_loss == LEAVE:
                raise BadOption(
                    f"--{name} needs --on_loss wait",
                    why="without that the loss of a rank ends the run",
                    next=f"add --on_loss wait, or leave --{name} out",
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
                next=number_below("rank", self.rank, "world_size", self.world_size, "ranks"),
            )
        if self.master_port == 0 and self.rank != 0:
            raise BadOption(
                f"rank {self.rank} cannot join at port 0",
                why=f"{self.named('master_port')}; port 0 lets rank 0 take any free port",
                next="give the --master_port that rank 0 printed",
            )

    @classmethod
    def from_environment(cls, *, is_rank: bool = True, **flags: Any) -> WorldSpec:
        """Take each option from ``flags`` unless it is None, otherwise from a launcher's variable or the default.

        Args:
            is_rank: whether this process becomes a rank, unlike one that only looks at a run. A rank that is given in
                ``flags`` was started by hand, and only the variables that people set too are read.

        Raises:
            BadOption: a value cannot work, a variable should hold a number and does not, or two launchers disagree.
        """
        if unknown := flags.keys() - WORLD_OPTIONS:
            raise TypeError(f"WorldSpec has no option {', '.join(unknown)}")
        typed = {name: value for name, value in flags.items() if value is not None}
        by_hand = not is_rank or "rank" in typed
        variables = user_variables.variables()
        names = {one: name for one, name in launcher_variables.TORCHRUN.items() if is_rank or one not in OF_ONE_RANK}
        of_hand = partial(launcher_variables.read, names)
        found = (of_hand if by_hand else launcher_variables.of_started_rank)(variables)
        values, sources = launcher_variables.with_flags(found, typed)
        rank = found.get("rank")
        if "world_size" not in values and rank is not None and rank.source != launcher_variables.TORCHRUN["rank"]:
            raise launcher_variables.nobody_says_of_how_many(rank)
        is_elsewhere = "master_addr" not in values and values.get("world_size", 1) != 1
        typed_rank = is_rank and by_hand
        if is_elsewhere and not typed_rank and (first := launcher_variables.first_pod()) is not None:
            values["master_addr"], sources["master_addr"] = first.value, f"from {first.source}"
        if not by_hand and "master_addr" not in typed:
            launcher_variables.check_rank_0_is_found(variables)
        return cls(**values, sources=sources)

    def of_script(self) -> WorldSpec:
        """Return the options for a rank of the user's own program, where stall_timeout has another default."""
        return dataclasses.replace(self, stall_timeout=self.stall_timeout or STALL_TIMEOUT_OF_SCRIPT)

    @property
    def stall_limit(self) -> float:
        """``stall_timeout``, or its default."""
        return self.stall_timeout or STALL_TIMEOUT

    @property
    def standby(self) -> tuple[str, int] | None:
        """Where ranks that have lost rank 0 look for it too; None if no address, or none that is valid, was given."""
        found = re.fullmatch(
            r"(?:([^][:\s]+)|\[([^][\s]+)\])(?::(\d{1,5}))?|([^][\s]*:[^][\s]*)", self.standby_addr or ""
        )
        if found is None or (port := int(found[3] or self.master_port)) > 65535:
            return None
        return found[1] or found[2] or found[4], port

    @property
    def from_variables(self) -> list[str]:
        """The options that a launcher's variables set, each with its source."""
        return [self.named(name) for name, source in self.sources.items() if source.startswith("from ")]

    @property
    def agent_store(self) -> bool:
        """Whether torchrun hosts the store, so that rank 0 is a client like the others."""
        return torchrun.store_at(self.master_addr, self.master_port)

    @property
    def started_by(self) -> str | None:
        """The launcher to type in front of a rank's own command, such as mpirun; None if a person starts ranks."""
        starter = launcher_variables.starter_of(self.source("rank").removeprefix("from "))
        return None if starter == "torchrun" and not self.agent_store else starter

    @property
    def launcher_pid(self) -> int | None:
        """The process of this host that has started this rank; None if a person or Slurm did, whose daemon stays when
        srun is killed."""
        if self.started_by in (None, "srun"):
            return None
        return launcher_variables.process_that_set(self.source("rank").removeprefix("from "))

    @property
    def alone(self) -> bool:
        """Whether world_size is 1 and nobody has chosen a port, so that rank 0 needs no fixed port."""
        is_default = self.master_port == WorldSpec.master_port and self.source("master_port") == "default"
        return self.world_size == 1 and is_default


WORLD_OPTIONS = frozenset(field.name for field in option_fields(WorldSpec))
