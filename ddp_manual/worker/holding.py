"""``hold`` and ``held`` for a script's own loop: its state outlives the process; the next process goes on from it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from ddp_manual.errors import BadOption
from ddp_manual.from_worker import FromWorker, Holds, Progress
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.messages import Placed
from ddp_manual.training import held_state
from ddp_manual.training.held_state import Holder

logger = logging.getLogger(__name__)

Tell = Callable[[FromWorker], None]
# The first entry of a state: what belongs to this rank alone.
OWN = "per_rank"


class Holding:
    """What this process holds, as a rank that ``ddp-manual run`` has started.

    Args:
        placed: what rank 0 said once all ranks had joined.
        tell: sends a message to the agent.
        progress: what the script says of its steps.
    """

    def __init__(self, memory: HeldMemory, placed: Placed, tell: Tell, progress: Progress) -> None:
        self.memory, self.tell, self.progress = memory, tell, progress
        self.source = placed.state_from
        self.is_quiet = placed.place.rank != 0  # ranks may share a terminal
        self.holder = Holder(memory, placed.generation, 1, placed.place)
        self.calls, self.step, self.counts_calls = 0, 0, True
        self.has_asked = False
        """Whether the script has called ``held``; a script that does not begins anew, whatever is held."""

    def hold(self, state: Any) -> None:
        self.holder.hold(self.step, state, counts_calls=self.counts_calls)


here: Holding | None = None
"""What ``hold`` and ``held`` use; None in a run that does not keep the seats of lost ranks. ``script`` sets it."""


def hold(
    model: nn.Module, optimizer: Optimizer | None = None, extra: Any = None, *, per_rank: Any = None, every: int = 1
) -> None:
    """Hold the state of a training after a step, in memory that outlives this process; all ranks call it alike.

    Outside of ``ddp-manual run --on_loss wait`` (or ``shrink``) it does nothing. Once the machine lacks the memory,
    it holds nothing any more, and a log line says so.

    Args:
        model: with or without its DDP wrapper.
        extra: what else the loop needs to go on, such as ``{"epoch": 1, "step": 20}`` or a scheduler's state_dict():
            numbers, texts, tensors, and lists, tuples and dictionaries of them. After a loss all ranks get the
            ``extra`` of one rank.
        per_rank: such values that belong to this rank alone, such as ``torch.get_rng_state()``.
        every: hold at each n-th call only, where the model is large.

    Raises:
        BadOption: ``every`` is below 1, or something cannot be held.
    """
    if every < 1:
        raise BadOption(f"hold was called with every={every}", why="it holds at each n-th call", next="give 1 or more")
    if here is None:
        return
    if not (here.has_asked or here.calls or here.is_quiet):
        logger.warning("this script calls hold() without held(): after a loss it begins again from its beginning")
    here.calls += 1
    here.step = max(here.step + 1, here.progress.whole_step)  # a later state must have a larger number
    here.counts_calls &= not here.progress.whole_step
    here.holder.every = every
    if not here.holder.is_due(here.step, here.calls):
        return
    here.hold(
        {
            OWN: per_rank,
            "calls": here.calls,
            "step": here.step,
            "counts_calls": here.counts_calls,
            "model": _without_ddp(model).state_dict(),
            "optimizer": optimizer.state_dict() if optimizer is not None else None,
            "extra": extra,
        }
    )


def held(
    model: nn.Module, optimizer: Optimizer | None = None, *, per_rank: Callable[[Any], object] | None = None
) -> Any:
    """Give model and optimizer the newest state that any rank of the run holds, and return its ``extra``.

    It is a collective of the default process group: all ranks call it, after ``init_process_group``.

    Args:
        per_rank: a function, such as ``torch.set_rng_state``, called with the ``per_rank`` that this rank held last,
            maybe one step earlier. It is not called on a rank that has held nothing, such as a newcomer to the seat of
            a rank whose agent was lost too.

    Returns:
        None if there is no such state: the training begins.
    """
    if here is None:
        return None
    here.has_asked = True
    here.tell(Holds())  # at once, not only at the first hold()
    if here.source is None:
        return None
    own = held_state.read_first(here.memory, OWN)
    state = held_state.share(here.memory, here.source, next(model.parameters()).device) | {OWN: own}
    here.calls, here.step, here.counts_calls = state["calls"], state["step"], state["counts_calls"]
    _without_ddp(model).load_state_dict(state["model"])
    if optimizer is not None:
        optimizer.load_state_dict(state["optimizer"])
    if per_rank is not None and own is not None:
        per_rank(own)
    # Hold it here too: the rank that it came from may be lost before the next step.
    here.hold(state)
    return state["extra"]


def _without_ddp(model: nn.Module) -> nn.Module:
    return model.module if isinstance(model, DistributedDataParallel) else model
