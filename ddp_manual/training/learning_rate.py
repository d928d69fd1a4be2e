"""The learning rate at each step: a linear warm-up to the peak, then a decay to zero. No torch.

It depends on the samples seen, not on steps: a run that resumes with another number of ranks takes another number of
steps, but stays where it was in its schedule.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_manual.training.options import TrainConfig


@dataclass(frozen=True)
class LearningRate:
    """The learning rate by the number of samples seen.

    Args:
        samples: the number of samples in one epoch.
    """

    config: TrainConfig
    world_size: int
    samples: int

    @property
    def peak(self) -> float:
        """The rate at the end of the warm-up: ``--lr`` scaled by the world size.

        Linear scaling keeps the update per sample constant as the global batch grows: Goyal et al., "Accurate, Large
        Minibatch SGD", https://arxiv.org/abs/1706.02677. A fixed global batch needs no scaling.
        """
        config = self.config
        if config.global_batch_size is not None or config.lr_scaling == "none":
            return config.lr
        return config.lr * (self.world_size if config.lr_scaling == "linear" else math.sqrt(self.world_size))

    def lr(self, seen: int, taking: int) -> float:
        """Return the rate of a step that takes ``taking`` samples after ``seen`` others, over all ranks and epochs."""
        warmup, total = self.config.warmup_epochs * self.samples, self.config.epochs * self.samples
        if seen < warmup:
            return self.peak * min(1.0, (seen + taking) / warmup)
        if self.config.lr_schedule == "constant":
            return self.peak
        progress = (seen - warmup) / max(1.0, total - warmup)
        if self.config.lr_schedule == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (1 - progress)
