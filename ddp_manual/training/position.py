"""How far a run is, and at which steps it logs, saves and synchronises. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ddp_manual.training.options import TrainConfig

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
        batch: samples of a step, over all ranks; the last step of an epoch takes what is left.
    """

    config: TrainConfig
    samples: int
    batch: int

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

    def logs(self, position: Position) -> bool:
        """Tell whether a line of metrics is due."""
        return position.step % self.config.log_every == 0 or self.epoch_ended(position)

    def saves(self, position: Position) -> bool:
        """Tell whether a checkpoint is due by the number of steps."""
        every = self.config.checkpoint_steps
        return every > 0 and position.step % every == 0

    def saves_epoch(self, position: Position) -> bool:
        """Tell whether a checkpoint is due at ``position``, the end of an epoch."""
        if self.saves(position):
            return True
        every = self.config.checkpoint_every
        return every > 0 and (position.epoch % every == 0 or self.ended(position))


def steps_until_sync(seconds_per_step: float) -> int:
    """Return the steps until the next sync point: the same on all ranks, because they have agreed on the seconds."""
    return max(1, int(SYNC_EVERY / max(seconds_per_step, 1e-6)))
