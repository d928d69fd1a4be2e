"""The training loop: ``Trainer`` takes the steps of an epoch, evaluates after it, and saves checkpoints.

A step copies nothing from the device to the host: the metrics add up on the device, and the ranks share them, and the
requests of signals, at a sync point about every second.
"""

from __future__ import annotations

import logging
import math
import random
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import msgspec
import numpy
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual import progress_bar
from ddp_manual.errors import TrainingFailed
from ddp_manual.training import checkpoint_state, ddp
from ddp_manual.training.check_replicas import check_replicas
from ddp_manual.training.checkpoint_state import History
from ddp_manual.training.data import Data
from ddp_manual.training.evaluation import Evaluation, Predictions, evaluate
from ddp_manual.training.held_state import Holder
from ddp_manual.training.meter import Meter, Metrics, Window, diverged
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.own_factory import is_own_factory
from ddp_manual.training.position import EpochPlan, Position, steps_until_sync
from ddp_manual.training.transforms import Augmentation
from ddp_manual.training.write_run_files import RunFiles

if TYPE_CHECKING:
    from ddp_manual.worker.world import World

logger = logging.getLogger(__name__)


class Trainer:
    """Trains one rank's copy of a network, from ``position`` on.

    Args:
        network: on the world's device, like the data; without its DDP wrapper.
        fewest_samples: the fewest on which the network can be trained in a step. A rank with fewer, as in the last step
            of an epoch, adds other samples, which do not count.
        files: the run's files, on rank 0; None on the others.

    Raises:
        BadOption: a rank's share of the training set does not fill one batch.
    """

    def __init__(
        self,
        world: World,
        config: TrainConfig,
        network: nn.Module,
        data_sets: Data,
        *,
        fewest_samples: int = 1,
        files: RunFiles | None = None,
    ) -> None:
        self.config, self.network, self.data, self.files = config, network, data_sets, files
        self.rank, self.world_size, self.device = world.rank, world.world_size, data_sets.train.device
        self.model = network if config.no_ddp else ddp.wrap_in_ddp(network, self.device)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(),
            lr=config.lr,  # each step sets its own
            momentum=config.momentum,
            weight_decay=config.weight_decay,
            nesterov=config.momentum > 0,
            # Launches fewer kernels, but needs a gradient of each parameter from the first step on; so does DDP.
            fused=self.device.type != "cpu" and not (config.no_ddp or any(map(torch.is_complex, network.parameters()))),
        )
        has_shrunk = self.world_size < world.spec.world_size
        batch_size = config.batch_size_per_rank(self.world_size, has_shrunk=has_shrunk)
        self.epoch_plan = EpochPlan(config, len(data_sets.train), self.world_size, batch_size)
        self.options = checkpoint_state.options_of(config, data_sets.train, data_sets.test)
        # Batch statistics of no samples are an error, unless sync_bn computes them over all ranks. A network of the
        # user's own may fail for other reasons, such as a view(len(images), -1).
        takes_none = config.sync_bn and self.world_size > 1 and not is_own_factory(config.model)
        self._fewest_samples = 0 if takes_none else fewest_samples
        self._world, self._progress = world, world.progress
        self.is_stopped = False
        """Whether a signal stops all ranks after the step that was done last."""
        held, every = world.held, config.hold_every
        self._holder = Holder(held, world.generation, every, world) if held is not None else None
        self.resume(Position(), History())

    def resume(self, position: Position, history: History) -> None:
        """Go on at ``position``, with what the run has measured until there."""
        self.position = self._began = position
        self._training_loss: float | None = None
        """The training loss in the last line of metrics."""
        self.evaluations = list(history.evaluations)
        self.meter = Meter(self.device, history.window, history.train_seconds)
        self._seconds_before = history.train_seconds

    def go_on(self, held: Mapping[str, Any]) -> bool:
        """Go on from a state that ``hold`` has held, on this rank or another one; all ranks call it. Returns True."""
        saved = msgspec.convert(held, checkpoint_state.Saved)
        self.settle_buckets()
        checkpoint_state.restore_state(saved, self.network, self.optimizer)
        self.resume(saved.position, saved.history)
        self.hold(at_once=True)  # the rank that has held it may be lost before the next step
        return True

    @property
    def history(self) -> History:
        """What the run has measured so far."""
        evaluations = tuple(self.evaluations)
        return History(evaluations=evaluations, window=self.meter.window, train_seconds=self.meter.seconds)

    def hold(self, *, at_once: bool = False) -> None:
        """Hold the state, so that it outlives this process, if it is due after this step, or at the end of an epoch, or
        if ``at_once``.

        Measurements since the last sync point are not held, because each rank has summed only its own.
        """
        position = self.position
        at_once = at_once or not position.taken or self.epoch_plan.epoch_ended(position)
        if self._holder is None or not (self._holder.is_due(position.step) or at_once):
            return
        began = time.perf_counter()
        state = {**checkpoint_state.state_of(self), "options": {}}  # all ranks know them
        self._holder.hold(position.step, state)
        seconds = time.perf_counter() - began
        # The least of all times: the first two holds also allocate memory, which is no reason to hold less often.
        self.meter.hold_seconds = min(seconds, self.meter.hold_seconds or seconds)

    @property
    def ended(self) -> bool:
        return self.epoch_plan.ended(self.position)

    @property
    def samples_per_second(self) -> float:
        """Over all ranks, since the run began or resumed; over the whole run if it has not trained since."""
        seen = self.epoch_plan.seen(self.position)
        samples = seen - self.epoch_plan.seen(self._began)
        return samples / (self.meter.seconds - self._seconds_before) if samples else seen / self.meter.seconds

    def train(self, lines: progress_bar.ProgressLines) -> bool:
        """Train, evaluate and save, epoch after epoch; return False if a signal has stopped all ranks before the end.

        Raises:
            TrainingFailed, ReplicasDiffer: as ``train_epoch``.
        """
        while not self.ended:
            save = self.train_epoch(lines)
            if not self.epoch_plan.epoch_ended(self.position):
                return False
            predictions = self.evaluate()
            save |= any(self._world.gather(self._world.save_is_asked()))
            # Write the checkpoint first: all other files can be rebuilt from it.
            if self.is_stopped or save or self.epoch_plan.saves_epoch(self.position):
                self.save()
            self.write(lambda files: files.add_evaluation(self))
            self.write_predictions(predictions)
            if self.is_stopped and not self.ended:
                self._world.gather(None)  # until rank 0 has saved
                return False
        return True

    def train_epoch(self, lines: progress_bar.ProgressLines) -> bool:
        """Train to the end of the epoch, or to the step where a signal stops all ranks; a checkpoint is then on disk.

        Returns:
            Whether a signal has asked for a checkpoint, which is still to be saved.

        Raises:
            TrainingFailed: the loss is not finite, or a step did not use all parameters. ReplicasDiffer: the ranks'
                parameters or optimizer states differ, and ``check_replicas`` is given; on every rank.
        """
        config, plan, meter, position = self.config, self.epoch_plan, self.meter, self.position
        if plan.epoch_ended(position):  # a rank was lost before the evaluation, and is back
            return False
        self._progress(phase="training", epoch=position.epoch + 1, steps=plan.steps(position))
        self._progress.step_seconds = 0.0
        meter.begin(position.step)
        order, augmented = self._draw_epoch(position.epoch)
        sync_at = position.step + steps_until_sync(meter.seconds_per_step)
        while True:
            meter.own_work.start()
            start, seen = position.taken, plan.seen(position)
            position = plan.after_a_step(position)
            taking = position.taken - start
            lr = plan.lr(seen, taking)
            images, labels, counted = self._share_of_step(order, augmented, start, position.taken)
            self._seed(seen)
            # DDP takes the mean over the ranks; the weight makes it the mean over the samples, where shares differ, and
            # 0 for a rank without samples.
            loss, scores = self._train_step(images, labels, lr, counted * self.world_size / taking)
            self.position = position
            self.hold()
            if counted:
                meter.add(position.step, loss, scores, labels)
            logs, saves = plan.logs(position), plan.saves(position)
            stops = self.is_stopped = self._world.stop_after_this_step()
            syncs = logs or saves or stops or position.step >= sync_at
            save = meter.sync(position.step, lr, save=self._world.save_is_asked()) if syncs else False
            self._progress.step = position.step
            lines.advance()
            saves |= stops or save
            ends_or_saves = saves or (syncs and plan.epoch_ended(position))
            if config.check_replicas and (ends_or_saves or position.step % config.check_replicas == 0):
                # Also before a checkpoint, so that none is written while the states of the ranks differ.
                check_replicas(self.model, self.optimizer, step=position.step)
            if not syncs:
                continue
            sync_at = position.step + steps_until_sync(meter.seconds_per_step)
            if self._holder is not None:
                self._holder.choose(meter.slowest_hold, meter.seconds_per_step)
            self._progress.step_seconds = meter.own_work.mean
            self._say_metrics(lines, lr, logs=logs)
            if plan.epoch_ended(position):
                return save
            if saves:
                self.save()
                self._world.gather(None)  # until rank 0 has saved
                meter.begin(position.step)
            if stops:
                return False

    def _draw_epoch(self, epoch: int) -> tuple[Tensor, Augmentation]:
        """Return the order of the samples in an epoch, and how each is changed; all ranks draw the same."""
        train, order = self.data.train, self.epoch_plan.order(epoch)
        return order.to(train.images.device), Augmentation.draw(self.config, epoch, len(train), self.device)

    def _share_of_step(
        self, order: Tensor, augmented: Augmentation, start: int, stop: int
    ) -> tuple[Tensor, Tensor, int]:
        """Return this rank's images and labels of the samples that all ranks take from ``start`` to ``stop``, and how
        many of them count: without any it still computes a loss, because DDP needs its gradients."""
        samples = self.epoch_plan.share(order, start, stop, self.rank)
        counted = len(samples)
        if (missing := self._fewest_samples - counted) > 0:  # take those that follow, or the epoch's first ones
            samples = torch.cat([samples, order.roll(-stop)[:missing]])
        images, labels, samples = self.data.train.batch(samples)
        return self.data.normalise(augmented(images, samples)), labels[: counted or None], counted

    def _say_metrics(self, lines: progress_bar.ProgressLines, lr: float, *, logs: bool) -> None:
        """Show what was measured since the last line of metrics; with ``logs`` this is such a line."""
        position, meter = self.position, self.meter
        metrics = meter.read(step=position.step, epoch=position.epoch + 1, lr=lr)
        lines.say(self._in_words(metrics), passes=not logs)
        if logs:
            meter.window = Window()
            self._training_loss = metrics.loss
            self._progress.samples_per_second = metrics.samples_per_second / self.world_size
            if self.files is not None:
                self.files.add_metrics(metrics)

    def _train_step(self, images: Tensor, labels: Tensor, lr: float, weight: float) -> tuple[Tensor, Tensor]:
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
        self.meter.own_work.stop()
        (loss if weight == 1.0 else loss * weight).backward()
        if most := self.config.most_grad_norm:
            # Without it, at 4 ranks' learning rate, one seed in three diverged for a while and ended below 98%.
            nn.utils.clip_grad_norm_(self.model.parameters(), most)
        self.optimizer.step()
        return loss, scores

    def _seed(self, seen: int) -> None:
        """Seed what a step draws, as dropout does, from the seed, the rank and the samples ``seen``.

        So each rank draws other numbers, and a run that resumes from a checkpoint draws the same ones again.
        """
        seed = (self.config.seed * 1_000_003 + seen * 4099 + self.rank) % 2**63
        random.seed(seed)
        numpy.random.seed(seed % 2**32)  # numpy takes no larger seed
        torch.default_generator.manual_seed(seed)
        if self.device.type == "cuda":
            torch.cuda.default_generators[self.device.index].manual_seed(seed)

    def _in_words(self, metrics: Metrics) -> str:
        return (
            f"step {metrics.step}/{self._progress.steps} epoch {metrics.epoch}/{self.config.epochs} "
            f"loss {metrics.loss:.4f} accuracy {100 * metrics.accuracy:.2f}% lr {metrics.lr:.4f} "
            f"{metrics.samples_per_second:,.0f} samples/s"
        )

    def settle_buckets(self) -> None:
        """Have DDP lay out its gradient buckets as it does after the first step of a run.

        DDP orders them anew after its first backward pass, and the place in a bucket decides how the gradients of three
        or more ranks are summed. A run that resumes has to sum them as it would have without the pause. Call this
        before the state is restored: it changes batch statistics.
        """
        train = self.data.train
        samples = torch.arange(max(1, self._fewest_samples), device=train.images.device) % len(train)
        images, labels, _ = train.batch(samples)
        F.cross_entropy(self.model(self.data.normalise(images)).float(), labels).backward()
        self.optimizer.zero_grad()

    def evaluate(self) -> Predictions | None:
        """Evaluate the network at the end of an epoch; a collective.

        Returns:
            The predictions, on rank 0 after the last epoch; otherwise None.

        Raises:
            TrainingFailed: training has diverged, or the test loss is not finite; on every rank.
        """
        self._progress.phase = "evaluating"
        ddp.share_buffers(self.network)
        after = self.position.next_epoch()
        result, predictions = self._evaluate(predict=self.epoch_plan.ended(after))
        if not math.isfinite(result.loss):
            self._check_parameters()
            raise TrainingFailed(
                f"the test loss is {result.loss} after epoch {after.epoch}",
                why="the training loss was finite, and so are all parameters: it comes from the scores that the model "
                "gives for some test images, or in eval() mode only",
                next="look in the model's forward for a logarithm of 0 or a division by it; where its numbers grow too "
                "large instead, try a smaller --lr",
            )
        self.position = after
        self.evaluations.append(result)
        self.hold()
        logger.log(
            logging.INFO if self.rank == 0 else logging.DEBUG,
            "epoch %d/%d: test accuracy %.2f%%, test loss %.4f%s",
            *(after.epoch, self.config.epochs, 100 * result.accuracy, result.loss),
            "" if self._training_loss is None else f", training loss {self._training_loss:.4f}",
        )
        return predictions

    def predict(self) -> Predictions | None:
        """Return the predictions of a run that was complete already, on rank 0, otherwise None; a collective."""
        self._progress.phase = "evaluating"
        return self._evaluate(predict=True)[1]

    def _evaluate(self, *, predict: bool) -> tuple[Evaluation, Predictions | None]:
        test, normalise = self.data.test, self.data.normalise
        return evaluate(self.network, test, normalise, rank=self.rank, world_size=self.world_size, predict=predict)

    def save(self) -> None:
        """Save a checkpoint of where the run is; all ranks call this, rank 0 writes.

        Raises:
            TrainingFailed: training has diverged; on every rank. DiskFull: the file could not be written; on rank 0.
        """
        self._check_parameters()
        self.hold(at_once=True)  # so that no held state is older than the checkpoint
        self.write(lambda files: files.save_checkpoint(self))
        self._progress.phase = "training"

    def write(self, write: Callable[[RunFiles], None]) -> None:
        """Write files, on rank 0. If the run ends meanwhile, this process finishes them first."""
        if self.files is not None:
            with self._world.saving():
                write(self.files)

    def write_predictions(self, predictions: Predictions | None) -> None:
        if predictions is not None:
            self.write(lambda files: files.write_predictions(self.position, predictions))

    def _check_parameters(self) -> None:
        """Raise TrainingFailed if training has diverged; the same on all ranks.

        The loss of the last step may have been finite where the parameters after it are not.
        """
        if not all(bool(parameter.isfinite().all()) for parameter in self.network.parameters()):
            raise diverged(self.position.step, self.epoch_plan.peak_lr, "the parameters were")
