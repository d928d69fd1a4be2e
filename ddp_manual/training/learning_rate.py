"""The learning rate at each step: a linear warm-up to the peak, then a decay to nothing.

It goes by the samples seen, not by steps: a run that goes on with another number of ranks takes other steps, but is as
far on its way.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class LearningRate:
    """Learning rate by progress, counted in samples.

    Args:
        peak: reached at the end of the warm-up.
        warmup: samples until then.
        total: samples of the whole run.
        shape: how it goes on from there: ``linear``, ``cosine`` or ``constant``.
    """

    peak: float
    warmup: float
    total: int
    shape: str

    def lr(self, seen: int, taking: int) -> float:
        """For a step that takes ``taking`` samples after ``seen`` others, over all ranks and epochs."""
        if seen < self.warmup:
            return self.peak * min(1.0, (seen + taking) / self.warmup)
        if self.shape == "constant":
            return self.peak
        progress = (seen - self.warmup) / max(1.0, self.total - self.warmup)
        if self.shape == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (1 - progress)
