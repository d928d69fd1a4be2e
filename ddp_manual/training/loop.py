"""The training loop: ``Trainer`` takes the steps, ``Run`` trains, evaluates and saves an epoch with it.

A step copies nothing from the device to the host: the metrics add up on the device, and the ranks share them, and what
signals ask for, at a sync point every second or so.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual import messages, terminal
from ddp_manual.errors import TrainingFailed
from ddp_manual.signals import Requests
from ddp_manual.training import checkpoint, collectives, data, ddp
from ddp_manual.training.augment import Augmentation, Normalise
from ddp_manual.training.checkpoint import History
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import Split
from ddp_manual.training.epoch_plan import EpochPlan, Position, steps_until_sync
from ddp_manual.training.evaluate import evaluate
from ddp_manual.training.learning_rate import LearningRate, peak_lr
from ddp_manual.training.metrics import AgreedRequests, Meter, Metrics, diverged
from ddp_manual.training.predictions import Predictions, evaluate_and_predict, predict
from ddp_manual.training.results import RunFiles

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class Step:
    """A step that is done.

    Args:
        requests: what signals have asked for, where the step was a sync point; otherwise None.
        metrics: where a line of metrics is due; otherwise None.
    """

    position: Position
    requests: AgreedRequests | None = None
    metrics: Metrics | None = None


class Trainer:
    """What a training step needs, and what stays the same over a run.

    Args:
        model: wrapped in DDP, on the device of ``train``.
        fewest_samples: the least that the model can be trained on in a step. A rank that has fewer, as in the last step
            of an epoch, adds other samples, which do not count.

    Raises:
        BadOption: a rank's share of the training set does not fill one batch.
    """

    def __init__(
        self,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: Split,
        normalise: Normalise,
        rank: int,
        world_size: int,
        config: TrainConfig,
        fewest_samples: int = 1,
    ) -> None:
        self.model = model
        self.optimizer = optimizer
        self.train = train
        self.normalise = normalise
        self.rank = rank
        self.world_size = world_size
        self.batch_size = config.batch_size_per_rank(world_size)
        """Samples per rank and step."""
        data.check_batch_fits(len(train), self.batch_size, world_size)
        self.learning_rate = LearningRate(
            peak=peak_lr(config, world_size),
            warmup=config.warmup_epochs * len(train),
            total=config.epochs * len(train),
            shape=config.lr_schedule,
        )
        self.epoch_plan = EpochPlan(
            samples=len(train),
            batch=world_size * self.batch_size,
            epochs=config.epochs,
            log_every=config.log_every,
            checkpoint_every=config.checkpoint_every,
            checkpoint_steps=config.checkpoint_steps,
        )
        # Batch statistics of no samples are an error, unless they are computed over all ranks.
        self._fewest_samples = 0 if config.sync_bn and world_size > 1 else fewest_samples
        self._shift, self._flip = config.shift, config.flip
        self._clip_grad_norm = config.most_grad_norm
        self._run_seed = config.seed

    def train_epoch(self, position: Position, meter: Meter, requests: Requests) -> Iterator[Step]:
        """Train from ``position`` to the end of its epoch, and yield each step; the last one is a sync point.

        Raises:
            TrainingFailed: the loss is not finite, or a step did not use all parameters.
        """
        meter.begin(position.step)
        device = self.train.labels.device
        count, epoch = len(self.train), position.epoch
        order = data.epoch_order(count, seed=self._run_seed, epoch=epoch).to(device)
        augmented = Augmentation.draw(
            count, shift=self._shift, flip=self._flip, seed=self._run_seed, epoch=epoch, device=device
        )
        sync_at = position.step + steps_until_sync(meter.seconds_per_step)
        while not self.epoch_plan.epoch_ended(position):
            meter.own_work.start()
            start, seen = position.taken, self.epoch_plan.seen(position)
            position = self.epoch_plan.after_a_step(position)
            taking = position.taken - start
            lr = self.learning_rate.lr(seen, taking)
            samples = data.share(order, start=start, stop=position.taken, rank=self.rank, world_size=self.world_size)
            counted = len(samples)
            if counted < self._fewest_samples:
                # Add the samples that come next, or at the end of the epoch those from its beginning.
                samples = torch.cat([samples, order.roll(-position.taken)[: self._fewest_samples - counted]])
            images = augmented(self.train.images, samples)
            # A rank without samples still computes a loss, because DDP needs its gradients; weight 0 cancels them.
            labels = self.train.labels[samples[: counted or None]]
            # DDP takes the mean over the ranks, whose shares of the samples may differ.
            weight = counted * self.world_size / taking
            self._seed(seen)
            loss, scores = self._train_step(self.normalise(images), labels, lr, weight, meter)
            if counted:
                meter.add(position.step, loss, scores, labels)
            logs = self.epoch_plan.logs(position)
            if logs or self.epoch_plan.saves(position) or position.step >= sync_at:
                agreed = meter.sync(position.step, lr, requests)
                sync_at = position.step + steps_until_sync(meter.seconds_per_step)
                metrics = meter.read(step=position.step, epoch=position.epoch + 1, lr=lr) if logs else None
                yield Step(position=position, requests=agreed, metrics=metrics)
            else:
                yield Step(position=position)

    def _train_step(
        self, images: Tensor, labels: Tensor, lr: float, weight: float, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        try:
            scores = self.model(images).float()  # a model may compute in half precision
        except RuntimeError as error:
            if (unused := ddp.unused_parameters(self.model, error)) is not None:
                raise unused from error
            raise
        if len(scores) > len(labels):
            scores = scores[: len(labels)]
        loss = F.cross_entropy(scores, labels, reduction="mean" if len(labels) else "sum")
        meter.own_work.stop()
        (loss if weight == 1.0 else loss * weight).backward()
        if self._clip_grad_norm:
            # Without it, at 4 ranks' learning rate, one seed in three diverged for a while and ended below 98%.
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_grad_norm)
        self.optimizer.step()
        return loss, scores

    def _seed(self, seen: int) -> None:
        """Seed what a step draws, as dropout does, from the seed, the rank and the samples ``seen``.

        So each rank draws other numbers, and a run that resumes from a checkpoint draws the same ones again.
        """
        seed = (self._run_seed * 1_000_003 + seen * 4099 + self.rank) % 2**63
        torch.default_generator.manual_seed(seed)
        device = self.train.labels.device
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)

    def settle_buckets(self) -> None:
        """Have DDP lay out its gradient buckets as it does after the first step of a run.

        DDP orders them anew after its first backward pass, and the place in a bucket decides how the gradients of three
        or more ranks are summed. A run that resumes has to sum them as it would have without the pause. Call this
        before the state is restored: it moves batch statistics.
        """
        samples = torch.arange(max(1, self._fewest_samples), device=self.train.labels.device) % len(self.train)
        images = self.normalise(self.train.images[samples])
        F.cross_entropy(self.model(images).float(), self.train.labels[samples]).backward()
        self.optimizer.zero_grad()


class Run:
    """The state that changes while a run goes on.

    Args:
        network: the model without its DDP wrapper.
        position, history: where the run begins or resumes.
        options: what a checkpoint keeps of them.
        files: the run's files, on rank 0; None on the others.
        progress: what this rank does now; the run keeps it up to date.
    """

    def __init__(
        self,
        *,
        network: nn.Module,
        trainer: Trainer,
        test: Split,
        position: Position,
        history: History,
        options: Mapping[str, Any],
        files: RunFiles | None,
        progress: messages.Progress,
    ) -> None:
        self._network = network
        self._trainer = trainer
        self._test = test
        self._options = options
        self._files = files
        self._progress = progress
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
        """Over all ranks, since the run began or resumed; over the whole run if it has not trained since."""
        plan = self._trainer.epoch_plan
        samples = plan.seen(self.position) - plan.seen(self._began)
        if not samples:
            return plan.seen(self.position) / self.train_seconds
        return samples / (self.train_seconds - self._seconds_before)

    def train_epoch(self, requests: Requests, lines: terminal.ProgressLines) -> AgreedRequests:
        """Train to the end of the epoch, or to the step where a signal stops all ranks; a checkpoint is then on disk.

        Returns:
            What signals have asked for and is still to be done.
        """
        plan = self._trainer.epoch_plan
        self._progress.phase, self._progress.epoch = "training", self.position.epoch + 1
        self._progress.step_seconds = 0.0
        for step in self._trainer.train_epoch(self.position, self._meter, requests):
            self._progress.step = step.position.step
            lines.advance()
            if step.requests is None:
                continue
            self.position = step.position
            self._progress.step_seconds = self._meter.own_work.mean
            if step.metrics is not None:
                self._report(step.metrics, lines)
            if plan.epoch_ended(self.position):
                return step.requests
            if step.requests.stop or step.requests.save or plan.saves(self.position):
                self.save()
                collectives.wait_for_all_ranks(self._device)  # until rank 0 has saved
                self._meter.begin(self.position.step)
            if step.requests.stop:
                return step.requests
        raise AssertionError("the last step of an epoch is a sync point")

    def _report(self, metrics: Metrics, lines: terminal.ProgressLines) -> None:
        self._progress.samples_per_second = metrics.samples_per_second
        if self._files is not None:
            self._files.add_metrics(metrics)
        lines.say(
            f"step {metrics.step}/{self._steps} epoch {metrics.epoch}/{self._trainer.epoch_plan.epochs} "
            f"loss {metrics.loss:.4f} accuracy {100 * metrics.accuracy:.2f}% lr {metrics.lr:.4f} "
            f"{metrics.samples_per_second:,.0f} samples/s"
        )

    def evaluate(self) -> Predictions | None:
        """Evaluate the network at the end of an epoch; a collective.

        Returns:
            The predictions, on rank 0 after the last epoch; otherwise None.

        Raises:
            TrainingFailed: training has diverged, or the test loss is not finite; on every rank.
        """
        trainer = self._trainer
        self._progress.phase = "evaluating"
        ddp.share_buffers(self._network)
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
                why="the training loss was finite, and so are all parameters: it comes from the scores that the model "
                "gives for some test images, or in eval() mode only",
                next="look in the model's forward for a logarithm of 0 or a division by it; where its numbers grow too "
                "large instead, try a smaller --lr",
            )
        self.position = self.position.next_epoch()
        self.evaluations.append(result)
        logger.log(
            logging.INFO if rank == 0 else logging.DEBUG,
            "epoch %d/%d: test accuracy %.2f%%, test loss %.4f, over %d images",
            *(self.position.epoch, trainer.epoch_plan.epochs, 100 * result.accuracy, result.loss, result.samples),
        )
        return predictions

    def predict(self) -> Predictions | None:
        """Predict the test set with the network of a run that was complete already; a collective. On rank 0."""
        trainer = self._trainer
        self._progress.phase = "evaluating"
        return predict(self._network, self._test, trainer.normalise, rank=trainer.rank, world_size=trainer.world_size)

    def write_evaluation(self) -> None:
        """Write the files of the epoch that has just been evaluated; on rank 0."""
        with self.saving():
            if self._files is not None:
                self._files.add_evaluation(self.position, self.evaluations[-1], self._network)

    def write_predictions(self, predictions: Predictions | None) -> None:
        """Write what ``evaluate`` or ``predict`` has returned, if it has."""
        if self._files is not None and predictions is not None:
            with self.saving():
                self._files.write_predictions(self.position, predictions)

    def save(self) -> None:
        """Save a checkpoint of where the run is; on rank 0.

        Raises:
            TrainingFailed: training has diverged; on every rank. DiskFull: the file could not be written; on rank 0.
        """
        self._check_parameters()
        with self.saving():
            if self._files is not None:
                trainer = self._trainer
                history = History(
                    evaluations=tuple(self.evaluations), window=self._meter.window, train_seconds=self.train_seconds
                )
                where = (self.position, history, self._options, trainer.world_size)
                self._files.save_checkpoint(
                    checkpoint.take(self._network, trainer.optimizer, *where), trainer.epoch_plan
                )
        self._progress.phase = "training"

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Write files in the body: if the run ends meanwhile, rank 0 finishes them first."""
        self._progress.phase = "saving"
        self._progress.saving = self._files is not None
        try:
            yield
        finally:
            self._progress.saving = False

    def _check_parameters(self) -> None:
        """Raise TrainingFailed if training has diverged; the same on all ranks.

        The loss of the last step may have been finite where the parameters after it are not.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in self._network.parameters()):
            raise diverged(self.position.step, self._trainer.learning_rate.peak, "the parameters were")
