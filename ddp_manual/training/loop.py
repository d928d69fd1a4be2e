"""The training loop. Per step nothing is copied from the device to the host: the metrics add up on the device, and the
ranks agree on them, and on what signals ask, at a sync point every second or so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ddp_manual.signals import Requests
from ddp_manual.training import data, models
from ddp_manual.training.augment import Augment, Normalise
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import Split
from ddp_manual.training.epoch_plan import EpochPlan, Position, steps_until_sync
from ddp_manual.training.learning_rate import LearningRate
from ddp_manual.training.metrics import Agreed, Meter, Metrics


@dataclass(frozen=True, kw_only=True)
class SyncPoint:
    """Where all ranks have agreed on how to go on. ``metrics`` where a line of them is due."""

    position: Position
    agreed: Agreed
    metrics: Metrics | None


@dataclass(frozen=True, kw_only=True)
class Trainer:
    """What stays the same over a run; ``train_epoch`` is what happens.

    Args:
        model: wrapped in DDP, on the device of ``train``.
        batch_size: samples per rank and step.
        fewest_samples: that the model can be trained on in a step. Where a rank has fewer, as in the last step of an
            epoch, it computes on others besides, which do not count.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    epoch_plan: EpochPlan
    train: Split
    normalise: Normalise
    rank: int
    world_size: int
    batch_size: int
    seed: int
    clip_grad_norm: float
    augment: Augment
    fewest_samples: int

    @classmethod
    def create(
        cls,
        *,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        train: Split,
        normalise: Normalise,
        rank: int,
        world_size: int,
        config: TrainConfig,
        fewest_samples: int = 1,
    ) -> Trainer:
        """A trainer for these options.

        Raises:
            BadOption: a rank's share of the training set does not fill one batch.
        """
        batch_size = config.batch_size_per_rank(world_size)
        data.check_batch_fits(len(train), batch_size, world_size)
        return cls(
            model=model,
            optimizer=optimizer,
            learning_rate=LearningRate(
                peak=config.peak_lr(world_size),
                warmup=config.warmup_epochs * len(train),
                total=config.epochs * len(train),
                shape=config.lr_schedule,
            ),
            epoch_plan=EpochPlan(
                samples=len(train),
                batch=world_size * batch_size,
                epochs=config.epochs,
                log_every=config.log_every,
                checkpoint_every=config.checkpoint_every,
                checkpoint_steps=config.checkpoint_steps,
            ),
            train=train,
            normalise=normalise,
            rank=rank,
            world_size=world_size,
            batch_size=batch_size,
            seed=config.seed,
            clip_grad_norm=config.most_grad_norm,
            augment=Augment(shift=config.shift, flip=config.flip),
            # Batch statistics of no samples are an error, unless they are those of all ranks.
            fewest_samples=0 if config.sync_bn and world_size > 1 else fewest_samples,
        )

    def train_epoch(
        self, position: Position, meter: Meter, requests: Requests, *, on_step: Callable[[Position], None]
    ) -> Iterator[SyncPoint]:
        """Train to the end of the epoch that ``position`` is in; yields wherever all ranks agree.

        Raises:
            TrainingFailed: the loss is not finite; or a step used not all of the parameters.
        """
        meter.begin(position.step)
        device = self.train.labels.device
        order = data.epoch_order(len(self.train), seed=self.seed, epoch=position.epoch).to(device)
        varied = self.augment.draw(len(self.train), seed=self.seed, epoch=position.epoch, device=device)
        sync_at = position.step + steps_until_sync(meter.seconds_per_step)
        while not self.epoch_plan.epoch_ended(position):
            meter.work.start()
            start, seen = position.taken, self.epoch_plan.seen(position)
            position = self.epoch_plan.after_a_step(position)
            taking = position.taken - start
            lr = self.learning_rate.lr(seen, taking)
            samples = data.share(order, start=start, stop=position.taken, rank=self.rank, world_size=self.world_size)
            counted = len(samples)
            if counted < self.fewest_samples:
                # Those that come next, from the beginning once more where the epoch is over.
                samples = torch.cat([samples, order.roll(-position.taken)[: self.fewest_samples - counted]])
            images = varied(self.train.images, samples)
            # Of none that counts the loss is taken all the same: DDP wants gradients, which its weight makes zeros.
            labels = self.train.labels[samples[: counted or None]]
            # DDP takes the mean over the ranks; their shares of the samples may differ.
            weight = counted * self.world_size / taking
            self._seed(seen)
            loss, scores = self._train_step(self.normalise(images), labels, lr, weight, meter)
            if counted:
                meter.add(position.step, loss, scores, labels)
            on_step(position)
            logs = self.epoch_plan.logs(position)
            if logs or self.epoch_plan.saves(position) or position.step >= sync_at:
                agreed = meter.sync(position.step, lr, requests)
                sync_at = position.step + steps_until_sync(meter.seconds_per_step)
                metrics = meter.read(step=position.step, epoch=position.epoch + 1, lr=lr) if logs else None
                yield SyncPoint(position=position, agreed=agreed, metrics=metrics)

    def _train_step(
        self, images: Tensor, labels: Tensor, lr: float, weight: float, meter: Meter
    ) -> tuple[Tensor, Tensor]:
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.zero_grad()
        try:
            scores = self.model(images).float()  # a model may compute in half precision
        except RuntimeError as error:
            if (unused := models.unused_parameters(self.model, error)) is not None:
                raise unused from error
            raise
        if len(scores) > len(labels):
            scores = scores[: len(labels)]
        loss = F.cross_entropy(scores, labels, reduction="mean" if len(labels) else "sum")
        meter.work.stop()
        (loss if weight == 1.0 else loss * weight).backward()
        if self.clip_grad_norm:
            # At 4 ranks' learning rate one seed in three diverged for a while without it, and ended below 98%.
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip_grad_norm)
        self.optimizer.step()
        return loss, scores

    def _seed(self, seen: int) -> None:
        """What a step draws, as dropout does, follows from the seed, the rank and the samples ``seen``.

        So each rank draws other numbers, and the same again where a run goes on from a checkpoint.
        """
        seed = (self.seed * 1_000_003 + seen * 4099 + self.rank) % 2**63
        torch.default_generator.manual_seed(seed)
        device = self.train.labels.device
        if device.type == "cuda":
            torch.cuda.default_generators[device.index].manual_seed(seed)

    def settle_buckets(self) -> None:
        """Have DDP lay out its gradient buckets as it does after the first step of a run.

        It orders them anew once it has seen a backward pass, and how three or more ranks' gradients are summed depends
        on where in a bucket they lie. A run that goes on from a checkpoint has to sum them as it would have without the
        pause. For before the state is restored: it moves batch statistics.
        """
        samples = torch.arange(max(1, self.fewest_samples), device=self.train.labels.device) % len(self.train)
        images = self.normalise(self.train.images[samples])
        F.cross_entropy(self.model(images).float(), self.train.labels[samples]).backward()
        self.optimizer.zero_grad()
