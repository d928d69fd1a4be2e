"""How far a run is, and what each step takes: its samples, its learning rate, and whether it logs and saves."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.training.options import TrainConfig
from ddp_manual.wording import counted

# Seconds between two sync points, roughly: how long a signal may wait until the ranks agree on what to do.
SYNC_EVERY = 1.0


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is.

    Args:
        epoch: epochs that are done.
        taken: samples of the current epoch that all ranks together have trained on.
        step: steps done since the beginning of the run, with any number of ranks.
    """

    epoch: int = 0
    taken: int = 0
    step: int = 0

    def next_epoch(self) -> Position:
        return Position(epoch=self.epoch + 1, step=self.step)


@dataclass(frozen=True)
class EpochPlan:
    """The steps of a whole run.

    Args:
        samples: the number of samples in one epoch.
        batch_size: samples per rank and step; the last step of an epoch takes what is left.

    Raises:
        BadOption: a rank's share of the training set does not fill one batch.
    """

    config: TrainConfig
    samples: int
    world_size: int
    batch_size: int

    def __post_init__(self) -> None:
        share = self.samples // self.world_size
        if self.batch_size > share:
            raise BadOption(
                f"a batch of {self.batch_size} per rank is larger than a rank's share of the training set",
                why=f"{counted(self.samples, 'sample')} over {counted(self.world_size, 'rank')}: {share} for each",
                next=f"choose a --batch_size of at most {share}" if share else "start fewer ranks",
            )

    @property
    def batch(self) -> int:
        """Samples of a step, over all ranks."""
        return self.world_size * self.batch_size

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples / self.batch)

    def steps(self, position: Position) -> int:
        """Count the steps of the whole run, if it continues from ``position`` with this batch."""
        left = math.ceil((self.samples - position.taken) / self.batch) if not self.ended(position) else 0
        return position.step + left + max(0, self.config.epochs - position.epoch - 1) * self.steps_per_epoch

    def ended(self, position: Position) -> bool:
        return position.epoch >= self.config.epochs

    def epoch_ended(self, position: Position) -> bool:
        return position.taken >= self.samples

    def seen(self, position: Position) -> int:
        """Count the samples trained on until ``position``, over all epochs and ranks."""
        return position.epoch * self.samples + position.taken

    def after_a_step(self, position: Position) -> Position:
        taken = min(self.samples, position.taken + self.batch)
        return replace(position, taken=taken, step=position.step + 1)

    def order(self, epoch: int) -> Tensor:
        """Return the order in which an epoch goes through its samples: int64 [samples], drawn from seed and epoch."""
        return torch.randperm(self.samples, generator=torch.Generator().manual_seed(self.config.seed + epoch))

    def share(self, order: Tensor, start: int, stop: int, rank: int) -> Tensor:
        """Return the samples that ``rank`` takes in a step in which all ranks together take ``order[start:stop]``.

        As in torch.utils.data.DistributedSampler, that is every world_size-th sample; but no sample is taken twice:
        where there are not enough for all ranks, the shares differ by one sample or are empty. So any number of ranks
        can continue from ``stop``, and no sample is repeated or left out.
        """
        return order[start + rank : stop : self.world_size]

    @property
    def peak_lr(self) -> float:
        """The learning rate at the end of the warm-up: ``--lr`` scaled by the world size.

        Linear scaling keeps the update per sample constant as the global batch grows: Goyal et al., "Accurate, Large
        Minibatch SGD", https://arxiv.org/abs/1706.02677. A fixed global batch needs no scaling.
        """
        config = self.config
        if config.global_batch_size is not None or config.lr_scaling == "none":
            return config.lr
        return config.lr * (self.world_size if config.lr_scaling == "linear" else math.sqrt(self.world_size))

    def lr(self, seen: int, taking: int) -> float:
        """Return the rate of a step that takes ``taking`` samples after ``seen`` others, over all ranks and epochs: a
        linear warm-up to the peak, then a decay to zero.

        It depends on the samples seen, not on steps: a run that resumes with another number of ranks takes another
        number of steps, but stays where it was in its schedule.
        """
        warmup, total = self.config.warmup_epochs * self.samples, self.config.epochs * self.samples
        if seen < warmup:
            return self.peak_lr * min(1.0, (seen + taking) / warmup)
        if self.config.lr_schedule == "constant":
            return self.peak_lr
        progress = (seen - warmup) / max(1.0, total - warmup)
        if self.config.lr_schedule == "cosine":
            return self.peak_lr * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak_lr * (1 - progress)

    def logs(self, position: Position) -> bool:
        """Tell whether a line of metrics is due."""
        return position.step % self.config.log_every == 0 or self.epoch_ended(position)

    def saves(self, position: Position) -> bool:
        """Tell whether a checkpoint is due by the number of steps."""
        every = self.config.checkpoint_steps
        return every > 0 and position.step % every == 0

    def saves_epoch(self, position: Position) -> bool:
        """Tell whether a checkpoint is due at ``position``, the end of an epoch: at the last one if any is wanted."""
        every, steps = self.config.checkpoint_every, self.config.checkpoint_steps
        is_last = self.ended(position) and (every > 0 or steps > 0)
        return is_last or self.saves(position) or (every > 0 and position.epoch % every == 0)


def steps_until_sync(seconds_per_step: float) -> int:
    """Return the steps until the next sync point: the same on all ranks, because they have agreed on the seconds."""
    return max(1, int(SYNC_EVERY / max(seconds_per_step, 1e-6)))
