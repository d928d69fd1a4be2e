"""What each rank is doing, as it says itself with every heartbeat and as rank 0 tells whoever looks on."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

JOINING = "joining"
RUNNING = "running"
LEAVING = "leaving"
ENDED = "ended"
SAVING = "saving"
LONGEST_PLACE = 200


@dataclass
class Progress:
    """What this rank does now. The training loop writes it, the watchdog's thread reads it."""

    phase: str = JOINING
    """joining, loading, training, evaluating, saving, leaving or ended; running, in a script that does not say."""
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    """This rank's own work per step, without waiting for the others; 0 where nobody measures it."""


@dataclass(frozen=True, kw_only=True)
class Beat:
    """One heartbeat: what a rank does, and how far its collectives are."""

    phase: str = JOINING
    epoch: int = 0
    step: int = 0
    samples_per_second: float = 0.0
    step_seconds: float = 0.0
    collectives: Mapping[str, int] = field(default_factory=dict)
    """By process group: how many collectives this rank has begun."""
    inside: bool = False
    """Whether the thread that trains is inside a collective, or in a backward pass, which may hold one."""
    place: str = ""
    """The line of the user's program it is on."""

    @classmethod
    def of(cls, progress: Progress, collectives: Mapping[str, int], *, inside: bool, place: str) -> Beat:
        """Whatever a program has put there, a heartbeat is what ``from_message`` takes."""
        return cls(
            phase=_printable(str(progress.phase)),
            epoch=int(_number(progress.epoch)),
            step=int(_number(progress.step)),
            samples_per_second=round(_number(progress.samples_per_second), 1),
            step_seconds=round(_number(progress.step_seconds), 6),
            collectives=collectives,
            inside=inside,
            place=_printable(place),
        )

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> Beat:
        """A beat from the network.

        Raises:
            TypeError, ValueError: fields are missing, unknown or of the wrong type.
        """
        beat = cls(**message)
        numbers = (beat.epoch, beat.step, beat.samples_per_second, beat.step_seconds, *beat.collectives.values())
        if not all(type(number) in (int, float) for number in numbers):
            raise TypeError("a beat whose numbers are none")
        if not (isinstance(beat.phase, str) and isinstance(beat.place, str) and len(beat.place) <= LONGEST_PLACE):
            raise TypeError("a beat whose words are none")
        if not (beat.phase + beat.place).isprintable():
            raise ValueError("a beat that is not printable")
        return beat

    def at_step(self) -> str:
        """``training, at step 120 of epoch 2``; where nobody counts steps the phase alone."""
        return f"{self.phase}, at step {self.step} of epoch {self.epoch}" if self.step or self.epoch else self.phase


def _number(value: Any) -> float:
    """What is no finite number is 0. Nor is a tensor one: to read it could wait for a GPU that hangs."""
    return float(value) if isinstance(value, Real) and math.isfinite(value) else 0.0


def _printable(text: str) -> str:
    return "".join(letter if letter.isprintable() else "?" for letter in text[-LONGEST_PLACE:])
