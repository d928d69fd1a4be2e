"""A rank as somebody has typed it, or as a launch has started it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from ddp_manual.agent import main
from ddp_manual.errors import DdpManualError
from ddp_manual.protocol import states
from ddp_manual.protocol.coordinator import CoordinatorProtocol
from tests.simulation.network import Host
from tests.simulation.virtual_time import Process
from tests.simulation.worker import HeldState, Program, SimulatedWorker

if TYPE_CHECKING:
    from tests.simulation.run import Run

# Seconds after which a lost rank is typed again, at most.
TYPED_AGAIN_WITHIN = 6.0


@dataclass(eq=False)
class Rank:
    """A rank as somebody has typed it: one agent, with its workers."""

    number: int
    host: Host
    process: Process
    run: Run
    world_size: int
    typed: float
    agent: main.Agent | None = None
    lines: list[tuple[float, str]] = field(default_factory=list)
    errors: list[DdpManualError] = field(default_factory=list)
    ended: float | None = None
    exit_code: int | None = None
    generation: int = -1
    """The last generation in which one of its workers was placed; -1: none was."""
    worked_since: float = math.inf
    """When its agent first told a worker its place, whether or not that worker lived to take it."""
    killed: bool = False
    """Whether it has ended without a word, with its host or by a signal that nobody handles."""
    belongs: bool = True
    """Whether it is one of the ranks that the plan types, or one of those typed again; not a second or a wrong one."""
    detail: str = ""
    held: HeldState | None = None
    workers: list[SimulatedWorker] = field(default_factory=list)
    signals: list[tuple[float, int]] = field(default_factory=list)
    """For each signal to its agent: when it came, and the last step that the run had done."""
    insists: bool = False
    """Whether a second signal has come while it still worked."""

    @property
    def has_token(self) -> bool:
        return "token" not in self.detail if self.run.plan.token else True

    @property
    def who(self) -> str:
        return f"rank {self.number} on {self.host.name}"

    @property
    def host_is_frozen(self) -> bool:
        return self.host.number in self.run.frozen_hosts

    @property
    def coordinator(self) -> CoordinatorProtocol | None:
        """What decides on rank 0, once its agent has its port."""
        shell = self.agent.join.coordinator if self.agent is not None else None
        return shell.protocol if shell is not None else None

    @property
    def program(self) -> Program | None:
        return self.workers[-1]._program if self.workers else None

    @property
    def runs(self) -> bool:
        return self.ended is None and not self.killed

    @property
    def has_seat(self) -> bool:
        """Whether it is one of the run's ranks, by its plan or by rank 0's word: a second process may come first."""
        admitted = self.agent is not None and isinstance(self.agent.rank.state, (states.Waiting, states.Placed))
        return self.belongs or admitted

    @property
    def leaves(self) -> bool:
        """Whether its agent has its result or its error."""
        return self.agent is not None and isinstance(self.agent.rank.state, states.Ended)
