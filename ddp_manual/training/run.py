"""A run from where it is to its end, or to the step at which a signal has all ranks stop: train, evaluate, save."""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, Protocol

from torch import nn

from ddp_manual.errors import TrainingFailed
from ddp_manual.signals import Requests
from ddp_manual.terminal import ProgressLines as Bar
from ddp_manual.training import checkpoint, collectives, models
from ddp_manual.training.checkpoint import History
from ddp_manual.training.data import Split
from ddp_manual.training.epoch_plan import Position
from ddp_manual.training.evaluate import Evaluation, evaluate
from ddp_manual.training.loop import SyncPoint, Trainer
from ddp_manual.training.metrics import Meter, agree, diverged
from ddp_manual.training.predictions import Predictions, evaluate_and_predict, predict
from ddp_manual.training.tracking import Tracker

logger = logging.getLogger(__name__)


class Doing(Protocol):
    """What this rank does now, for whoever looks on."""

    phase: str
    epoch: int
    step: int
    samples_per_second: float
    step_seconds: float
    saving: bool


class Run:
    """The state that changes while a run goes on.

    Args:
        network: the model without its DDP wrapper.
        position, history: where it begins, or goes on from a checkpoint.
        options: what a checkpoint keeps of them.
        doing: kept up to date.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        trainer: Trainer,
        test: Split,
        tracker: Tracker,
        position: Position,
        history: History,
        options: Mapping[str, Any],
        doing: Doing,
    ) -> None:
        self._network = network
        self._trainer = trainer
        self._test = test
        self._tracker = tracker
        self._options = options
        self._doing = doing
        self._device = test.labels.device
        self._meter = Meter(self._device, history.window, history.train_seconds)
        self.position = position
        self.evaluations = list(history.evaluations)
        self._steps = trainer.epoch_plan.steps(position)
        self._began, self._seconds_before = position, history.train_seconds

    @property
    def train_seconds(self) -> float:
        return self._meter.seconds

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, since it began here or went on; over the whole run where nothing has been trained since."""
        plan = self._trainer.epoch_plan
        samples = plan.seen(self.position) - plan.seen(self._began)
        if not samples:
            return plan.seen(self.position) / self.train_seconds
        return samples / (self.train_seconds - self._seconds_before)

    def go(self, bar: Bar, requests: Requests) -> int:
        """Train to the end and return 0; or stop with all other ranks and return the number of the signal that asked.

        A run that stops has saved a checkpoint, and every rank returns only when it is on disk. A signal during the
        last evaluation changes nothing: the run is complete.

        Raises:
            TrainingFailed: training has diverged, or the test loss is not finite; on every rank.
            DiskFull: a file could not be written; on rank 0.
        """
        plan = self._trainer.epoch_plan
        while not plan.ended(self.position):
            stop, save = self._train_epoch(bar, requests)
            if stop and not plan.epoch_ended(self.position):
                return stop
            result, predictions = self._evaluate()
            since = agree(requests, self._device)
            stop = stop or since.stop
            # What is lost with a file that cannot be written grows less: of a checkpoint all others can be made anew.
            if save or stop or since.save or plan.saves_epoch(self.position):
                self.save()
            with self.saving():
                self._tracker.evaluated(self.position.epoch, result, self._network)
                if predictions is not None:
                    self._tracker.predicted(predictions)
            if stop and not plan.ended(self.position):
                collectives.meet(self._device)  # rank 0 has saved when it gets here
                return stop
        return 0

    def _train_epoch(self, bar: Bar, requests: Requests) -> tuple[int, bool]:
        """What remains of the epoch; returns the signal that asked to stop, and whether a save is still to be done."""
        plan = self._trainer.epoch_plan
        self._doing.phase, self._doing.epoch = "training", self.position.epoch + 1
        self._doing.step_seconds = 0.0

        def step_done(position: Position) -> None:
            self._doing.step = position.step
            bar.advance()

        for sync in self._trainer.train_epoch(self.position, self._meter, requests, on_step=step_done):
            self.position = sync.position
            self._tell(sync, bar)
            if plan.epoch_ended(self.position):
                return sync.agreed.stop, sync.agreed.save
            if sync.agreed.stop or sync.agreed.save or plan.saves(self.position):
                self.save()
                collectives.meet(self._device)  # rank 0 has saved when it gets here
                self._meter.begin(self.position.step)
            if sync.agreed.stop:
                return sync.agreed.stop, False
        raise AssertionError("the last step of an epoch is a sync point")

    def _tell(self, sync: SyncPoint, bar: Bar) -> None:
        self._doing.step_seconds = self._meter.work.mean
        if sync.metrics is None:
            return
        metrics = sync.metrics
        self._doing.samples_per_second = metrics.samples_per_second
        self._tracker.trained(metrics)
        bar.say(
            f"step {metrics.step}/{self._steps} epoch {metrics.epoch}/{self._trainer.epoch_plan.epochs} "
            f"loss {metrics.loss:.4f} accuracy {100 * metrics.accuracy:.2f}% lr {metrics.lr:.4f} "
            f"{metrics.samples_per_second:,.0f} samples/s"
        )

    def _evaluate(self) -> tuple[Evaluation, Predictions | None]:
        """Evaluate what the epoch has made of the network; the predictions after the last one, on rank 0."""
        trainer = self._trainer
        self._doing.phase = "evaluating"
        models.share_buffers(self._network)
        rank, world_size = trainer.rank, trainer.world_size
        predictions: Predictions | None = None
        if trainer.epoch_plan.ended(self.position.next_epoch()):
            result, predictions = evaluate_and_predict(
                self._network, self._test, trainer.normalise, rank=rank, world_size=world_size
            )
        else:
            result = evaluate(self._network, self._test, trainer.normalise, rank=rank, world_size=world_size)
        if not math.isfinite(result.loss):
            self._check_parameters()
            raise TrainingFailed(
                f"the test loss is {result.loss} after epoch {self.position.epoch + 1}",
                why="the loss of training was finite, and so are all parameters: it comes of the scores that the model "
                "gives of some test images, or in eval() mode only",
                next="look in the model's forward for a logarithm of 0 or a division by it; where its numbers grow too "
                "large instead, try a smaller --lr",
            )
        self.position = self.position.next_epoch()
        self.evaluations.append(result)
        logger.log(
            logging.INFO if trainer.rank == 0 else logging.DEBUG,
            "epoch %d/%d: test accuracy %.2f%%, test loss %.4f, over %d images",
            *(self.position.epoch, trainer.epoch_plan.epochs, 100 * result.accuracy, result.loss, result.samples),
        )
        return result, predictions

    def predict(self) -> None:
        """Show the tracker what the network of a run that was complete already makes of each test image; a collective.

        ``go`` has shown it where it has trained the last epoch.
        """
        trainer = self._trainer
        self._doing.phase = "evaluating"
        predictions = predict(
            self._network, self._test, trainer.normalise, rank=trainer.rank, world_size=trainer.world_size
        )
        if predictions is not None:
            with self.saving():
                self._tracker.predicted(predictions)

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Rank 0 writes files, and finishes what it has begun where the run ends meanwhile; the others have nothing to
        lose."""
        self._doing.phase = "saving"
        self._doing.saving = self._trainer.rank == 0
        try:
            yield
        finally:
            self._doing.saving = False

    def save(self) -> None:
        """Have the tracker save a checkpoint of where the run is.

        Raises:
            TrainingFailed: training has diverged; on every rank.
        """
        self._check_parameters()
        history = History(
            evaluations=tuple(self.evaluations), window=self._meter.window, train_seconds=self.train_seconds
        )

        def take() -> checkpoint.Saved:
            return checkpoint.take(
                self._network,
                self._trainer.optimizer,
                self.position,
                history,
                self._options,
                self._trainer.world_size,
            )

        with self.saving():
            self._tracker.checkpoint(take, self._trainer.epoch_plan)
        self._doing.phase = "training"

    def _check_parameters(self) -> None:
        """The loss of the last step may have been finite where the parameters after it are not; the same on all ranks.

        Raises:
            TrainingFailed: training has diverged.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in self._network.parameters()):
            raise diverged(self.position.step, self._trainer.learning_rate.peak, "the parameters were")
