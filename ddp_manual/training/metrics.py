"""What the ranks tell each other while they train: the one place where they agree, and what they measure between.

A sync point is a single all-reduce. It adds up the metrics and carries, each rank in places of its own, whether a
signal has asked it to stop or to save, its first step with a loss that is not finite, and how long its steps took. All
ranks read the same numbers, so they decide alike. Nothing else passes between them in a step but the gradients, and the
buffers of a model that needs them to be the same.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_manual.errors import TrainingFailed
from ddp_manual.signals import Requests
from ddp_manual.training import collectives


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Over all ranks, since the metrics before. ``step`` counts from 1, ``epoch`` from 1; ``loss`` in nats.

    ``seconds`` are those of all training since the run began; evaluations and saves are left out.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float
    lr: float
    samples_per_second: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Window:
    """What adds up to the next line of metrics, over all ranks: the loss and the correct of ``count`` samples."""

    loss: float = 0.0
    correct: float = 0.0
    count: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Agreed:
    """What signals have asked of any rank.

    Args:
        stop: the number of the signal, or 0.
        save: whether a checkpoint is asked for.
    """

    stop: int
    save: bool


def exchange(totals: Tensor, mine: Tensor) -> tuple[list[float], list[list[float]]]:
    """Sum ``totals`` over the ranks and let each know the numbers of all others; one collective, one copy to the host.

    Args:
        totals, mine: float64 vectors on the process group's device.

    Returns:
        The sums, and for each rank its numbers. Adding zeros is exact, so these are what that rank has given.
    """
    first = len(totals) + collectives.rank() * len(mine)
    shared = totals.new_zeros(len(totals) + collectives.world_size() * len(mine))
    shared[: len(totals)] = totals
    shared[first : first + len(mine)] = mine
    collectives.all_reduce(shared)
    numbers = shared.tolist()
    sums, rest = numbers[: len(totals)], numbers[len(totals) :]
    return sums, [rest[start : start + len(mine)] for start in range(0, len(rest), len(mine))]


def agree(requests: Requests, device: torch.device) -> Agreed:
    """What signals have asked of any rank; a collective."""
    mine = torch.tensor([requests.stop, requests.take_save()], dtype=torch.float64, device=device)
    _, ranks = exchange(mine.new_zeros(0), mine)
    return Agreed(stop=int(max(stop for stop, _ in ranks)), save=any(save for _, save in ranks))


class Meter:
    """Adds up loss, correct samples and samples on the device; remembers the first step whose loss is not finite.

    Args:
        window: what had been added up where the run goes on from.
        seconds: of training until there.
    """

    def __init__(self, device: torch.device, window: Window | None = None, seconds: float = 0.0) -> None:
        self._totals = torch.zeros(3, dtype=torch.float64, device=device)
        self._never = torch.iinfo(torch.int64).max
        self._first_bad_step = torch.full((), self._never, dtype=torch.int64, device=device)
        self._window = window or Window()
        self._synced = time.perf_counter()
        self._window_began = self._synced - self._window.seconds
        self._synced_step = 0
        self.work = WorkClock(device)
        self.seconds = seconds
        """Of training, until the last sync point."""
        self.seconds_per_step = float("inf")
        """Of the slowest rank, waiting included, as all ranks know it since the last sync point."""

    def begin(self, step: int) -> None:
        """Training starts, or goes on after an evaluation or a save; ``step`` steps are done, the last a sync point."""
        seconds = self.window.seconds
        self._synced, self._synced_step = time.perf_counter(), step
        self._window_began = self._synced - seconds
        self.work.reset()

    def add(self, step: int, loss: Tensor, scores: Tensor, labels: Tensor) -> None:
        """``loss``: the batch's mean, ``scores`` [N, classes], ``labels`` [N]."""
        loss = loss.detach()
        correct = (scores.detach().argmax(dim=1) == labels).sum()
        count = len(labels)
        self._totals += torch.stack([loss.double() * count, correct.double(), correct.new_full((), count).double()])
        bad = torch.where(loss.isfinite(), self._never, step)
        torch.minimum(self._first_bad_step, bad, out=self._first_bad_step)

    def sync(self, step: int, lr: float, requests: Requests) -> Agreed:
        """Add the metrics of all ranks to the window, and agree; a collective, and the only copy to the host.

        Raises:
            TrainingFailed: the loss was not finite on some rank; on every rank alike.
        """
        own = (time.perf_counter() - self._synced) / max(1, step - self._synced_step)
        bad_step = torch.where(self._first_bad_step == self._never, 0, self._first_bad_step).double()
        asked = torch.tensor([own, requests.stop, requests.take_save()], dtype=torch.float64, device=bad_step.device)
        sums, ranks = exchange(self._totals, torch.cat([bad_step[None], asked]))
        now = time.perf_counter()
        self.seconds += now - self._synced
        self._synced, self._synced_step = now, step
        self._totals.zero_()
        self.work.read()
        bad_steps = [bad for bad, *_ in ranks if bad]
        if bad_steps:
            raise diverged(int(min(bad_steps)), lr)
        self.seconds_per_step = max(seconds for _, seconds, *_ in ranks)
        loss, correct, count = sums
        self._window = Window(
            loss=self._window.loss + loss, correct=self._window.correct + correct, count=self._window.count + count
        )
        return Agreed(stop=int(max(stop for *_, stop, _ in ranks)), save=any(save for *_, save in ranks))

    @property
    def window(self) -> Window:
        """What has been added up until the last sync point; the same on all ranks but for the seconds."""
        return replace(self._window, seconds=self._synced - self._window_began)

    def read(self, *, step: int, epoch: int, lr: float) -> Metrics:
        """The metrics since the last time, as of the sync point before; a new window begins."""
        window, self._window, self._window_began = self.window, Window(), self._synced
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
    """Mean seconds of this rank's own work per step: from a step's start to the start of its backward pass, which is
    where it begins to wait for the others. On a GPU by events that are read at the next sync point.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self.mean = 0.0
        self.reset()

    def reset(self) -> None:
        self._seconds = 0.0
        self._steps = 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def start(self) -> None:
        if self._cuda:
            began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            began.record()
            self._events.append((began, ended))
        else:
            self._began = time.perf_counter()

    def stop(self) -> None:
        self._steps += 1
        if self._cuda:
            self._events[-1][1].record()
        else:
            self._seconds += time.perf_counter() - self._began

    def read(self) -> None:
        """At a sync point, where all work of the device is done: ``mean`` is that of the steps since the last."""
        self._seconds += sum(began.elapsed_time(ended) for began, ended in self._events) / 1000
        self.mean = self._seconds / max(1, self._steps)
        self.reset()


def diverged(step: int, lr: float, what: str = "the loss was") -> TrainingFailed:
    """``what`` not finite after ``step`` steps, with about this learning rate."""
    return TrainingFailed(
        f"{what} not finite at step {step}: training has diverged",
        why=f"the learning rate was about {lr:g}; parameters that are not numbers do not recover, "
        "so training stopped and what was saved before is kept",
        next="try a smaller --lr, a longer --warmup_epochs, or --lr_scaling sqrt",
    )
