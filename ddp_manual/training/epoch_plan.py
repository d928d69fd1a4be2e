"""Where a run is on its way through the epochs, and at which steps its ranks have to agree."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

# Seconds, about: how long a signal may wait until the ranks agree on what to do.
SYNC_EVERY = 1.0


@dataclass(frozen=True, kw_only=True)
class Position:
    """How far a run is.

    Args:
        epoch: epochs done.
        taken: samples of the next epoch's order that all ranks together have taken.
        step: steps done, since the beginning of the run and whatever the number of ranks was.
    """

    epoch: int = 0
    taken: int = 0
    step: int = 0

    def next_epoch(self) -> Position:
        return Position(epoch=self.epoch + 1, step=self.step)


@dataclass(frozen=True, kw_only=True)
class EpochPlan:
    """The whole way.

    Args:
        samples: of an epoch.
        batch: samples of a step, over all ranks; the last step of an epoch takes what is left.
        log_every, checkpoint_steps: steps; checkpoint_every: epochs. 0 is never.
    """

    samples: int
    batch: int
    epochs: int
    log_every: int
    checkpoint_every: int
    checkpoint_steps: int

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.samples / self.batch)

    def steps(self, position: Position) -> int:
        """Steps of the whole run, if it goes on from ``position`` with this batch."""
        left = math.ceil((self.samples - position.taken) / self.batch) if position.epoch < self.epochs else 0
        return position.step + left + max(0, self.epochs - position.epoch - 1) * self.steps_per_epoch

    def ended(self, position: Position) -> bool:
        return position.epoch >= self.epochs

    def epoch_ended(self, position: Position) -> bool:
        return position.taken >= self.samples

    def seen(self, position: Position) -> int:
        """Samples, over all epochs and ranks."""
        return position.epoch * self.samples + position.taken

    def after_a_step(self, position: Position) -> Position:
        taken = min(self.samples, position.taken + self.batch)
        return replace(position, taken=taken, step=position.step + 1)

    def logs(self, position: Position) -> bool:
        """Whether a line of metrics is due."""
        return position.step % self.log_every == 0 or self.epoch_ended(position)

    def saves(self, position: Position) -> bool:
        """Whether a checkpoint is due by the number of steps."""
        return self.checkpoint_steps > 0 and position.step % self.checkpoint_steps == 0

    def saves_epoch(self, position: Position) -> bool:
        """Whether a checkpoint is due at ``position``, the end of an epoch."""
        if self.saves(position):
            return True
        return self.checkpoint_every > 0 and (position.epoch % self.checkpoint_every == 0 or self.ended(position))


def steps_until_sync(seconds_per_step: float) -> int:
    """Steps until the ranks agree again; the same on all of them, since they have agreed on the seconds."""
    return max(1, int(SYNC_EVERY / max(seconds_per_step, 1e-6)))
