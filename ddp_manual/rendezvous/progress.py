"""What each rank is doing and how long ago it was heard, for whoever looks on.

Each rank says it once a second. Rank 0 reads all of them in one go and keeps the time by its own clock, so the clocks
of the hosts need not agree.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.rendezvous.store import RunStore

logger = logging.getLogger(__name__)

BEAT_EVERY = 1.0
JOINING = "joining"


@dataclass
class Progress:
    """What this rank does now. The training loop writes it, the watchdog's thread reads it."""

    phase: str = JOINING
    """joining, loading, training, evaluating, saving or leaving."""
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    """Mean of this rank's own work per step since the last sync point, without waiting for others."""

    def beat(self, number: int) -> list[Any]:
        return [number, self.phase, self.epoch, self.step, round(self.samples_per_second, 1)]


class Heartbeat:
    """Says what this rank does and, on rank 0, gathers what all do. Used by one thread."""

    def __init__(self, store: RunStore, rank: int, world_size: int, progress: Progress) -> None:
        self._store = store
        self._rank = rank
        self._world_size = world_size
        self._progress = progress
        self._number = 0
        self._next = 0.0
        self._heard: list[tuple[int, float]] = []

    def beat_if_due(self) -> None:
        now = time.monotonic()
        if now < self._next:
            return
        self._next = now + BEAT_EVERY
        self._number += 1
        self._store.set_beat(self._rank, self._progress.beat(self._number))
        if self._rank == 0:
            try:
                self._store.set_progress(self._gather(self._store.beats(self._world_size), now))
            except (ValueError, TypeError) as error:
                logger.warning("a stranger put something unreadable among the heartbeats: %s", error)

    def _gather(self, beats: Sequence[Sequence[Any]], now: float) -> list[dict[str, Any]]:
        if not self._heard:
            self._heard = [(-1, now)] * self._world_size
        gathered = []
        for rank, (number, phase, epoch, step, samples_per_second) in enumerate(beats):
            if number != self._heard[rank][0]:
                self._heard[rank] = (number, now)
            gathered.append(
                {
                    "rank": rank,
                    "phase": phase,
                    "epoch": epoch,
                    "step": step,
                    "samples_per_second": samples_per_second,
                    "silent_seconds": round(now - self._heard[rank][1], 1),
                }
            )
        return gathered
