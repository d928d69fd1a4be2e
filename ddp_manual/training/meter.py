"""What the ranks measure while they train, and the sync points where they share it.

A sync point is a single all-reduce. It sums the metrics, and it carries each rank's own numbers: whether a signal has
asked the rank to stop or to save, its first step with a loss that is not finite, and how long its steps took. All ranks
read the same numbers, so they decide alike. Between sync points the ranks exchange only gradients, and the buffers of a
model that needs the same ones on all ranks.
"""

from __future__ import annotations

import time
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from ddp_manual.errors import TrainingFailed
from ddp_manual.training import ddp


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """The means over all ranks since the previous line. ``step`` and ``epoch`` count from 1; ``loss`` is in nats.

    ``seconds`` counts all training since the run began, without evaluations and saves.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float
    lr: float
    samples_per_second: float
    seconds: float


@dataclass(frozen=True)
class Window:
    """The sums behind the next line of metrics, over all ranks: loss and correct predictions of ``count`` samples."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    seconds: float = 0.0


class Meter:
    """Sums loss, correct predictions and samples on the device, and notes the first step whose loss is not finite.

    Args:
        window: the sums in the checkpoint from which the run resumes.
        seconds: the seconds of training until that checkpoint.
    """

    def __init__(self, device: torch.device, window: Window | None = None, seconds: float = 0.0) -> None:
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)
        self._never = torch.iinfo(torch.int64).max
        self._first_bad_step = torch.full((), self._never, dtype=torch.int64, device=device)
        self.own_work = WorkClock(device)
        self.window = window or Window()
        """The sums until the last sync point; the same on all ranks, except for the seconds."""
        self.seconds = seconds
        """Seconds of training until the last sync point."""
        self.hold_seconds = self.slowest_hold = 0.0
        """Seconds that holding the state takes: on this rank, and on the slowest rank; the latter is known to all."""
        self.seconds_per_step = float("inf")
        """Those of the slowest rank, its waiting included; the same on all ranks since the last sync point."""

    def begin(self, step: int) -> None:
        """Start the clock, or start it again after an evaluation or a save: the time since ``sync`` does not count.

        Args:
            step: how many steps are done.
        """
        self._synced, self._synced_step = time.perf_counter(), step

    def add(self, step: int, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """Add a batch: ``loss`` is its mean, ``scores`` is [N, classes], ``labels`` is [N]."""
        loss = loss.detach()
        correct = (scores.detach().argmax(dim=1) == labels).sum()
        count = len(labels)
        self._totals += torch.stack([loss.double() * count, correct.double(), correct.new_full((), count).double()])
        bad = torch.where(loss.isfinite(), self._never, step)
        torch.minimum(self._first_bad_step, bad, out=self._first_bad_step)

    def sync(self, step: int, lr: float, *, save: bool = False) -> bool:
        """Add the metrics of all ranks to the window; a collective. Metrics are copied to the host only here.

        Args:
            save: whether this rank was asked for a checkpoint.

        Returns:
            Whether any rank was asked for one.

        Raises:
            TrainingFailed: the loss was not finite on some rank; raised on every rank.
        """
        # A GPU runs steps long after their launches have returned: read the clock once it has done them all.
        ddp.to_host(self._totals)
        seconds_per_step = (time.perf_counter() - self._synced) / max(1, step - self._synced_step)
        bad_step = torch.where(self._first_bad_step == self._never, 0, self._first_bad_step).double()
        own = [bad_step.new_tensor([save, seconds_per_step, self.hold_seconds]), bad_step[None]]
        # The sums, then a row for each rank's own numbers, which stay exact: the other ranks add zeros to them.
        shared = self._totals.new_zeros(3 + 4 * ddp.world_size())
        shared[:3] = self._totals
        shared[3:].view(-1, 4)[ddp.rank()] = torch.cat(own)
        ddp.all_reduce(shared)
        numbers = ddp.to_host(shared)
        (loss, correct, count), ranks = numbers[:3].tolist(), numbers[3:].view(-1, 4).tolist()
        now = time.perf_counter()
        seconds = now - self._synced
        self._synced, self._synced_step = now, step
        self._totals.zero_()
        self.own_work.read()
        if bad_steps := [bad for *_, bad in ranks if bad]:
            raise diverged(int(min(bad_steps)), lr)
        self.seconds += seconds
        self.seconds_per_step = max(seconds_per_step for _, seconds_per_step, *_ in ranks)
        self.slowest_hold = max(hold_seconds for *_, hold_seconds, _ in ranks)
        sums = zip(astuple(self.window), (loss, correct, count, seconds), strict=True)
        self.window = Window(*map(sum, sums))
        return any(save for save, *_ in ranks)

    def read(self, *, step: int, epoch: int, lr: float) -> Metrics:
        """Return the metrics of the window, which ends with the last sync point."""
        window = self.window
        return Metrics(
            step=step,
            epoch=epoch,
            loss=window.loss / window.count,
            accuracy=window.correct / window.count,
            lr=lr,
            samples_per_second=window.count / window.seconds,
            seconds=self.seconds,
        )


class WorkClock:
    """Measures the mean seconds of this rank's own work per step: from a step's start to the start of its backward
    pass, where it begins to wait for the others. On a GPU it records events, which it reads at the next sync point.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._spans: list[tuple[Any, Any]] = []
        self.mean = 0.0

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def start(self) -> None:
        self._began = self._now()

    def stop(self) -> None:
        self._spans.append((self._began, self._now()))

    def read(self) -> None:
        """Set ``mean`` for the steps since the last sync point; at a sync point, where the device's work is done."""
        seconds = [began.elapsed_time(end) / 1000 if self._cuda else end - began for began, end in self._spans]
        self.mean = sum(seconds) / max(1, len(seconds))
        self._spans.clear()


def diverged(step: int, lr: float, what: str = "the loss was") -> TrainingFailed:
    """Return the error that ``what``, such as "the loss was", is not finite; the learning rate was about ``lr``."""
    return TrainingFailed(
        f"{what} not finite at step {step}: training has diverged",
        why=f"the learning rate was about {lr:g}; parameters that are not numbers do not recover, "
        "so training stopped and what was saved before is kept",
        next="try a smaller --lr, a longer --warmup_epochs, or --lr_scaling sqrt",
    )
