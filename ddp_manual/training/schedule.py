"""The learning rate at each step: a linear warm-up to the peak, then a decay to nothing."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """Learning rate by step, steps counted from 0.

    Args:
        peak: reached at the end of the warm-up.
        shape: how it goes on from there: ``linear``, ``cosine`` or ``constant``.
    """

    peak: float
    warmup_steps: int
    total_steps: int
    shape: str

    def lr(self, step: int) -> float:
        if step < self.warmup_steps:
            return self.peak * (step + 1) / self.warmup_steps
        if self.shape == "constant":
            return self.peak
        progress = (step - self.warmup_steps) / max(1, self.total_steps - self.warmup_steps)
        if self.shape == "cosine":
            return self.peak * 0.5 * (1 + math.cos(math.pi * progress))
        return self.peak * (1 - progress)
