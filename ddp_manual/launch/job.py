"""Job: what many ranks are to run, the same for all of them; and Hosts: which ranks each host has."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.environment import command_line, user_variables
from ddp_manual.errors import BadOption
from ddp_manual.option_fields import number_below
from ddp_manual.program import Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.secret_arguments import without_secrets
from ddp_manual.text_wrapping import as_shell_words
from ddp_manual.training.options import TrainConfig


@dataclass(frozen=True, kw_only=True)
class Job:
    """What all ranks of a run have in common. Either ``program`` or ``config`` is given."""

    spec: WorldSpec
    """The options of each rank, without its place in the world."""
    run_id: str
    run_dir: str | None
    """Where logs, failures and results go; None: nowhere."""
    go_on: str
    """The command that starts the run again; our own training then goes on from its newest checkpoint."""
    program: Program | None = None
    """The user's own program."""
    config: TrainConfig | None = None
    """The options of our own training."""
    may_differ: Sequence[str] = ()
    """The arguments of the program that may differ between ranks."""
    forks: bool = True
    """Whether workers are forks of a process that has imported torch."""
    chose_folder: bool = True
    """Whether the user has chosen the run's folder, which is then kept."""

    @property
    def max_restarts(self) -> int:
        """How often ``launch`` may start all ranks again; 0 if that was not chosen. With ``on_loss_of_own_code`` it is
        0 too: there the option limits how often single ranks are started again, and rank 0 counts that."""
        chosen = self.spec.source("max_restarts") != "default" and not self.spec.on_loss_of_own_code
        return self.spec.max_restarts if chosen else 0

    def at(self, **address: Any) -> Job:
        """Return the job of ranks that meet at this ``master_addr`` and ``master_port``."""
        sources = {**self.spec.sources, **dict.fromkeys(address, "flag")}
        return dataclasses.replace(self, spec=dataclasses.replace(self.spec, **address, sources=sources))


def command_to_go_on(after: Sequence[str], *, run_dir: str | None, variables: Iterable[str] = ()) -> str:
    """Return the command that was typed, without a program's secrets, since logs keep it and all who look at the run
    see it; it starts the run again, or resumes it if it is our own training.

    Args:
        after: what was typed after the options of ``launch``: the script and its arguments, or training options.
        run_dir: the folder of our own training; None for a program.
        variables: the names of the variables that are passed on to other hosts.
    """
    command, typed = command_line.typed_command()
    # It names variables without their values.
    before = command_line.without_options(typed[: len(typed) - len(after)], "export")
    names = ",".join(name for name in variables if name != user_variables.TOKEN_VARIABLE)
    before = [*command, *before[:1], *(["--export", names] if names else []), *before[1:]]
    if run_dir is None:
        return as_shell_words([*before, *without_secrets(after)])
    launch = command_line.without_options(before, "run_dir")
    training = [*command_line.without_options(after, "resume"), "--resume", "auto"]
    return as_shell_words([*launch, "--run_dir", run_dir, "--", *training])


@dataclass(frozen=True)
class Hosts:
    """How many ranks each host of a run has, in order, and which of the hosts this is."""

    slots: Sequence[int]
    node_rank: int = 0
    by_ssh: bool = False
    """Whether one terminal has started the ranks of all hosts, and shows what they say."""

    @property
    def world_size(self) -> int:
        return sum(self.slots)

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        first = sum(self.slots[: self.node_rank])
        return range(first, first + self.slots[self.node_rank])

    def check(self, spec: WorldSpec) -> None:
        """Raise BadOption if ``node_rank`` is too high, or several hosts have no address of rank 0 to meet at."""
        nnodes = len(self.slots)
        if self.node_rank >= nnodes:
            raise BadOption(
                f"--node_rank {self.node_rank} does not exist among {nnodes} hosts",
                why=f"--nnodes is {nnodes}; hosts count from 0",
                next=number_below("node_rank", self.node_rank, "nnodes", nnodes, "hosts"),
            )
        if nnodes > 1 and spec.source("master_addr") == "default":
            raise BadOption(
                f"launch on {nnodes} hosts needs the address of the first one",
                why="no --master_addr was given, and 127.0.0.1 is another host on each",
                next="give --master_addr with the name or the IP address of the host with --node_rank 0",
            )
        if nnodes > 1 and not spec.master_port:
            raise BadOption(
                f"launch on {nnodes} hosts needs a port to meet at",
                why=f"{spec.named('master_port')}: rank 0 would take any free one, which the other hosts do not know",
                next="give a --master_port that is free on the host with --node_rank 0, the same on each host",
            )
