"""The states of a rank's agent, and what it knows of the worker that it has at present."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from ddp_manual.errors import DdpManualError
from ddp_manual.ranks_and_runs import Beat, Ready


@dataclass(eq=False, kw_only=True)
class Work:
    """What one worker was told and has said: another worker has a record of its own, and this one counts no more."""

    started: float
    is_begun: bool = False
    """Whether the worker was told what to load."""
    ready: Ready | None = None
    """What it knows since it has loaded torch."""
    sent_beat: Beat = field(default_factory=Beat)
    """What rank 0 was told last that it does."""
    result: Any = None
    """What it has said of its work, if that is complete."""
    process_continues: bool = False
    """Whether the process continues without its agent, which it has told to end."""
    own_words: DdpManualError | None = None
    """What it has failed with."""
    is_replaced: bool = False
    """Whether its program has become another one by exec, and torch's store is gone with it."""
    has_broken: bool = False
    """Whether a broken collective is what it has failed with."""
    words_of_another: str | None = None
    """The identifier of what another rank has failed with, for a moment in which this worker may say the same."""


@dataclass(frozen=True)
class Searching:
    """The agent looks for rank 0 and says hello, for ``join_timeout`` at most."""


@dataclass(frozen=True, kw_only=True)
class Looking:
    """Rank 0 was lost: the agent keeps the state of the training, and looks for another rank 0 for ``rejoin_timeout``
    at most."""

    lost_at: float
    """When it was lost, before the ranks could go on."""


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """Rank 0 has admitted this rank, and others are missing or load torch. Rank 0 knows for how long; without a sign
    of rank 0 it is lost after ``silent_after``."""

    lost_at: float | None
    """When the rank 0 before this one was lost, if the ranks have not gone on since."""


class Replacing(Waiting):
    """As ``Waiting``, while the worker is ended, which is killed after a time, and another one is started."""


@dataclass(frozen=True)
class Placed:
    """The worker has its place among all ranks, and works or has worked."""


class Working(Placed):
    """The worker works, as long as it likes: rank 0 says if it stalls, and is lost itself after ``silent_after``."""


class Closing(Placed):
    """All ranks have done their work, and the worker closes the process group; rank 0 watches as before."""


class Alone(Placed):
    """The worker works or leaves, and nobody watches, so that it may take as long as it likes: rank 0 has left, or it
    has ``until`` to end by itself."""


class Leaving(Placed):
    """The worker has left. Rank 0 waits for the goodbyes of the others, which a program may make late as it likes."""


class Left(Placed):
    """Goodbye is said; what is missing is the worker's result or end, which comes once it knows that all is over."""


@dataclass(frozen=True, kw_only=True)
class Ended:
    """The rank has its result or its error: it says why, and ends the worker, which is killed after a time."""

    was: State


State = Searching | Looking | Waiting | Replacing | Working | Closing | Alone | Leaving | Left | Ended
