"""What an agent says to its worker: ``FromAgent`` is the whole list, with what it passes on as rank 0 has said it. What
the worker says, and how messages of both are sent, is in ``from_worker``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ddp_manual.messages import AskStep, Close, Message, Placed, StopAfter
from ddp_manual.program import Program
from ddp_manual.ranks_and_runs import LastWords
from ddp_manual.wire import Read, local_reader_of


class Start(Message):
    """Load what the work needs; sent at once, on rank 0 once its coordinator listens."""

    spec: Mapping[str, Any]
    """The options of ``WorldSpec``."""
    sources: Mapping[str, str]
    path: str
    """The first entry of ``sys.path``, where the user's own code is found."""
    started: float
    """When the agent began, on the monotonic clock of this machine."""
    store_address: str | None
    """On rank 0 the address at which the worker hosts torch's store; otherwise None."""
    program: Program | None = None
    """What to run; None: the script that has started its agent itself."""
    restarts: tuple[int, int] = (0, 0)
    """How often the ranks were started again, and how often they may be."""


class TakePlace(Message):
    """All ranks are here: begin to work at this place among them."""

    placed: Placed
    """As the coordinator has sent it, but with the path of the run's folder on this rank."""
    own: bool
    """Whether this rank writes its failure into that folder."""
    interfaces: Mapping[str, str]
    """The variables for gloo and NCCL that name the network interface."""
    wrong_for_nccl: str | None = None
    """Why NCCL must be told the interface: by itself it would listen on the wrong one; None if it would not."""


class Save(Message):
    """Save a checkpoint at the next step that all ranks agree on: SIGUSR1 has asked for it."""


class Over(Message):
    """This rank has left the run, and if it is rank 0, nobody needs torch's store any more: end."""


class BeQuiet(Message):
    """Write what is in buffers, and nothing more: the agent has the last word. ``IsQuiet`` is the reply."""


class BeforeTheEnd(Message):
    """Say whether a checkpoint is being written, and say so when it is written: the worker is about to be killed."""


class RunEnds(Message):
    """Why the run ends, to a user's own script, which raises it and ends by itself."""

    words: LastWords
    own: bool
    """Whether the script itself has raised this error."""


class Exit(Message):
    """End at once: the script was told why the run ends, and has not noticed it in time."""


FromAgent = (
    Start | TakePlace | AskStep | StopAfter | Save | Close | Over | BeQuiet | BeforeTheEnd | RunEnds | Exit
)  # fmt: skip

read: Read[FromAgent] = local_reader_of(FromAgent)
