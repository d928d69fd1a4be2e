"""What a place that a run is followed from has to be able to keep."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from ddp_manual.run_folder import RunPaths

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


@dataclass(frozen=True, kw_only=True)
class About:
    """The run that is followed.

    Args:
        name: says model, data set and number of ranks.
        hyperparameters: the options and what followed from them; JSON values.
        paths: the run's folder; whatever a sink writes is below it.
        goes_on_after: the step of the checkpoint that the run goes on from; None: it begins.
    """

    name: str
    hyperparameters: Mapping[str, Any]
    paths: RunPaths
    goes_on_after: int | None = None


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A test image and what the model makes of it.

    Args:
        number: its place in the test split, from 0.
        image: uint8, [H, W] or [H, W, 3].
        scores: the probability of each class.
    """

    number: int
    image: NDArray[np.uint8]
    guess: str
    truth: str
    scores: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class PredictionTable:
    """Some samples, and the names of all classes in the order of the scores."""

    classes: Sequence[str]
    samples: Sequence[Sample]


class Sink(ABC):
    """Called from one thread only, ``open`` first; whatever a method raises is the end of it, but not of the run.

    ``step`` counts from 1, as in ``Metrics``; it never falls.
    """

    name: ClassVar[str]
    """As ``--track`` has it."""

    @abstractmethod
    def open(self, about: About) -> None:
        """Begin to keep what comes of the run, or go on with it."""

    @abstractmethod
    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Name -> value, such as ``train/loss``."""

    @abstractmethod
    def image(self, step: int, name: str, file: Path) -> None:
        """``file`` is a PNG."""

    @abstractmethod
    def table(self, step: int, name: str, table: PredictionTable) -> None:
        """Some test images with what the model makes of them."""

    @abstractmethod
    def result(self, summary: Mapping[str, Any]) -> None:
        """The run is complete; ``summary`` is that of ``summary.json``."""

    @abstractmethod
    def close(self, *, complete: bool) -> None:
        """Nothing more comes: the run is ``complete``, or has stopped or failed."""

    def abandon(self) -> None:  # noqa: B027  # nothing to do for one that starts none
        """It has raised, or hangs to the end: leave no process behind, within a second or two. From any thread."""

    def still_to_do(self) -> str:
        """What a user can do with what is there after it has been given up; may be empty."""
        return ""
