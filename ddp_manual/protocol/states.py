"""The states of a rank's agent, and what it knows of the worker that it has at present."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_manual.errors import DdpManualError
from ddp_manual.ranks_and_runs import Beat, Ready


@dataclass(eq=False, kw_only=True)
class Work:
    """What one worker was told and has said. The next worker has a record of its own; then this one does not count."""

    started: float
    is_begun: bool = False
    """Whether the worker was told what to load."""
    ready: Ready | None = None
    """What the worker knows since it has loaded torch."""
    sent_beat: Beat = field(default_factory=Beat)
    """The last heartbeat about the worker that rank 0 was sent."""
    result: Any = None
    """The result of the worker's work, if that is complete."""
    process_continues: bool = False
    """Whether the worker's process goes on without its agent, which it has started itself."""
    own_words: DdpManualError | None = None
    """The error that the worker has failed with."""
    is_replaced: bool = False
    """Whether its program has become another one by exec, and torch's store is gone with it."""
    has_broken: bool = False
    """Whether the worker has failed because a collective broke."""
    words_of_another: str | None = None
    """The identifier of what another rank has failed with, for a moment in which this worker may say the same."""


@dataclass(frozen=True)
class Searching:
    """The agent looks for rank 0 and says hello, for ``join_timeout`` at most."""


@dataclass(frozen=True)
class WithoutRank0:
    """The time since rank 0 was lost, until all ranks go on."""

    since: float
    """When rank 0 was lost; the first time, if it was lost again before the ranks could go on."""
    looked: float = 0.0
    """The seconds in which the agent has looked for rank 0, without the present search."""


@dataclass(frozen=True, kw_only=True)
class Looking:
    """Rank 0 was lost: the agent keeps the state of the training, and looks for another rank 0 for ``rejoin_timeout``
    at most, also if one that it finds is lost again at once."""

    lost: WithoutRank0
    began: float
    """When it began to look, once its worker was replaced."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Rank 0 has admitted this rank, and other ranks are missing or load torch. Rank 0 knows how long to wait; if it is
    silent, it is lost after ``silent_after``."""

    lost: WithoutRank0 | None
    """The loss of the rank 0 before this one, if the ranks have not gone on since."""


class Replacing(Waiting):
    """As ``Waiting``, while the worker is ended (killed if it takes too long) and another one is started."""


@dataclass(frozen=True)
class Placed:
    """The worker has its place among all ranks, and works or has worked."""


class Working(Placed):
    """The worker works, as long as it likes. Rank 0 says if it stalls; a silent one is lost after ``silent_after``."""


class Closing(Placed):
    """All ranks have done their work, and the worker closes the process group; rank 0 watches as before."""


class Alone(Placed):
    """The worker works or leaves for as long as it likes, and nobody watches: rank 0 is gone, or the worker has time
    until ``until`` to end by itself."""


class Leaving(Placed):
    """The worker has left. Rank 0 waits for the goodbyes of the others, which may take as long as their programs."""


class Left(Placed):
    """Goodbye is said; the worker, which is told that the run is over, has yet to send its result or to end."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The rank has its result or its error: it prints why, and ends the worker (kills it if it takes too long)."""

    was: State


State = Searching | Looking | Waiting | Replacing | Working | Closing | Alone | Leaving | Left | Ended
