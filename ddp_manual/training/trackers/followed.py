"""From what happens in a run to what its sinks keep."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import StopSignal
from ddp_manual.training.trackers.background import Background
from ddp_manual.training.trackers.sink import About, PredictionTable, Sample, Sink
from ddp_manual.training.tracking import Tracker

if TYPE_CHECKING:
    from torch import nn

    from ddp_manual.training.checkpoint import History
    from ddp_manual.training.data import Split
    from ddp_manual.training.epoch_plan import Position
    from ddp_manual.training.evaluate import Evaluation
    from ddp_manual.training.metrics import Metrics
    from ddp_manual.training.predictions import Predictions

logger = logging.getLogger(__name__)

# Seconds for all sinks together to finish: an upload after a complete run; a user who has pressed Ctrl-C waits less.
FINISH_WITHIN = 30.0
STOP_WITHIN = 5.0
# Seconds after which the wait is said.
QUIET = 1.0
# Rows of the table of predictions.
ROWS = 100

# The others keep the names they have in metrics.jsonl.
TRAINING_NAMES = {"loss": "train/loss", "accuracy": "train/accuracy"}


class Followed(Tracker):
    """Feeds some sinks; it comes after RunFiles, whose ``samples.png`` they show.

    Args:
        about: as the run would begin.
        afterwards: has the wait for them called once no other rank waits for this one.
    """

    def __init__(
        self, sinks: Sequence[Sink], about: About, *, afterwards: Callable[[Callable[[], None]], object]
    ) -> None:
        self._sinks = sinks
        self._about = about
        self._afterwards = afterwards
        self._opened: list[Background] = []
        self._step = 0
        self._complete = False

    def resumed(self, position: Position, history: History, model: nn.Module, *, complete: bool) -> None:
        self._step = position.step
        self._about = replace(self._about, goes_on_after=position.step)

    def started(self, config: Mapping[str, Any], train: Split) -> None:
        step, file = self._step, self._about.paths.samples
        self._tell(lambda sink: sink.image(step, "samples", file))

    def trained(self, metrics: Metrics) -> None:
        self._step = metrics.step
        values = {TRAINING_NAMES.get(name, name): value for name, value in asdict(metrics).items() if name != "step"}
        self._tell(partial(_scalars, step=metrics.step, values=values))

    def evaluated(self, epoch: int, evaluation: Evaluation, model: nn.Module) -> None:
        values = {"test/loss": evaluation.loss, "test/accuracy": evaluation.accuracy}
        self._tell(partial(_scalars, step=self._step, values=values))

    def predicted(self, predictions: Predictions) -> None:
        step, table = self._step, table_of(predictions)
        self._tell(lambda sink: sink.table(step, "predictions", table))

    def finished(self, summary: Mapping[str, Any]) -> None:
        self._complete = True
        self._tell(lambda sink: sink.result(summary))

    def closed(self) -> None:
        """The sinks finish from now on, for a bounded time."""
        if not self._opened:
            return
        complete = self._complete
        within = FINISH_WITHIN if complete else STOP_WITHIN
        self._tell(lambda sink: sink.close(complete=complete))
        for background in self._opened:
            background.put(None)
        deadline = time.monotonic() + within
        self._afterwards(lambda: self._wait(deadline, f"it did not finish within {within:g} s"))

    def _wait(self, deadline: float, why: str) -> None:
        """For the sinks to finish; a signal that comes meanwhile ends the wait."""
        try:
            for background in self._opened:
                if not background.wait(min(QUIET, deadline - time.monotonic())):
                    left = max(0.0, deadline - time.monotonic())
                    logger.info(
                        "waiting for %s to finish, for up to %.0f s; Ctrl-C ends that", background.sink.name, left
                    )
                    background.wait(left)
        except (StopSignal, KeyboardInterrupt):
            why = "a signal came before it had finished"
        for background in self._opened:
            background.give_up(why)

    def _tell(self, job: Callable[[Sink], None]) -> None:
        if not self._opened:
            about = self._about
            self._opened = [Background(sink) for sink in self._sinks]
            for background in self._opened:
                background.put(lambda sink: sink.open(about))
        for background in self._opened:
            background.put(job)


def _scalars(sink: Sink, *, step: int, values: Mapping[str, float]) -> None:
    sink.scalars(step, values)


def table_of(predictions: Predictions, rows: int = ROWS) -> PredictionTable:
    """The first samples in the order of ``predictions``, copied: the tensors may be on a GPU that training uses."""
    split, classes = predictions.split, predictions.split.classes
    samples = []
    for number in predictions.order[:rows].tolist():
        image = split.images[number].cpu()
        samples.append(
            Sample(
                number=number,
                image=(image[0] if len(image) == 1 else image.permute(1, 2, 0)).numpy().copy(),
                guess=classes[int(predictions.guess[number])],
                truth=classes[int(predictions.truth[number])],
                scores=tuple(predictions.probabilities[number].tolist()),
            )
        )
    return PredictionTable(classes=classes, samples=samples)
