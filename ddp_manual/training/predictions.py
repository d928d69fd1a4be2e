"""What a network predicts for each image of a test set: gathered on rank 0, written as two tables and two pictures."""

from __future__ import annotations

import csv
import io
import itertools
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ddp_manual import run_folder
from ddp_manual.errors import writing
from ddp_manual.run_folder import PredictionPaths
from ddp_manual.training import collectives, pictures
from ddp_manual.training.data import Split
from ddp_manual.training.evaluate import Evaluation, evaluate

logger = logging.getLogger(__name__)

# With 1,000 classes the confusion matrix takes 8 MB. Nobody could read the table or the picture of more.
MOST_CONFUSED = 1000

# Images in a tracker's table of predictions.
ROWS = 100

COLUMNS = ("id", "truth", "guess", "confidence", "correct")


@dataclass(frozen=True, eq=False)
class Predictions:
    """Probabilities for every image of a test set; all tensors are on the CPU.

    Args:
        probabilities: float32 [N, classes]; row i is sample i of ``split``.
        split: the N images with their labels.
    """

    probabilities: Tensor
    split: Split

    def __len__(self) -> int:
        return len(self.split)

    @property
    def truth(self) -> Tensor:
        """int64 [N]: what each image shows."""
        return self.split.labels

    @cached_property
    def guess(self) -> Tensor:
        """int64 [N]: the most probable class."""
        return self.probabilities.argmax(dim=1)

    @cached_property
    def confidence(self) -> Tensor:
        """float32 [N]: the probability of the guess."""
        return self.probabilities.amax(dim=1)

    @cached_property
    def correct(self) -> Tensor:
        """bool [N]: whether the guess is the truth."""
        return self.guess == self.truth

    @cached_property
    def order(self) -> Tensor:
        """int64 [N]: the mistakes, then the correct guesses; each group by falling confidence, ties by sample."""
        by_confidence = self.confidence.argsort(descending=True, stable=True)
        return by_confidence[self.correct[by_confidence].int().argsort(stable=True)]

    @cached_property
    def confusion(self) -> Tensor:
        """int64 [classes, classes]: how many images of each class (row) were taken for each class (column)."""
        classes = len(self.split.classes)
        return torch.bincount(self.truth * classes + self.guess, minlength=classes**2).view(classes, classes)


def predict(
    network: nn.Module, split: Split, normalise: Callable[[Tensor], Tensor], *, rank: int, world_size: int
) -> Predictions | None:
    """Return the predictions of ``evaluate_and_predict`` without its evaluation."""
    return evaluate_and_predict(network, split, normalise, rank=rank, world_size=world_size)[1]


def evaluate_and_predict(
    network: nn.Module, split: Split, normalise: Callable[[Tensor], Tensor], *, rank: int, world_size: int
) -> tuple[Evaluation, Predictions | None]:
    """Evaluate ``network`` and keep its predictions, in one pass over the images; a collective.

    Args:
        network: without its DDP wrapper, and with the same parameters on all ranks.
        split: on the network's device.

    Returns:
        The evaluation, on every rank, and the predictions, on rank 0 (None elsewhere).
    """
    scores = [torch.zeros(0, len(split.classes), device=split.labels.device)]
    evaluation = evaluate(network, split, normalise, rank=rank, world_size=world_size, all_scores=scores)
    mine = torch.cat(scores).softmax(dim=1)
    # The ranks' shares differ by one sample, and gather needs the same number of rows from each.
    padded = mine.new_zeros(-(-len(split) // world_size), mine.shape[1])
    padded[: len(mine)] = mine
    gathered = collectives.gather(padded)
    if not gathered:
        return evaluation, None
    # Row i of rank r is sample i * world_size + r.
    probabilities = torch.stack(gathered, dim=1).flatten(0, 1)[: len(split)]
    return evaluation, Predictions(probabilities.cpu(), split.to(torch.device("cpu")))


def files_of(paths: PredictionPaths, classes: int) -> tuple[Path, ...]:
    """Return the files that ``write_files`` writes for so many classes."""
    return paths.all if classes <= MOST_CONFUSED else (paths.table, paths.picture)


def write_files(paths: PredictionPaths, predictions: Predictions, *, option: str) -> list[Path]:
    """Write the files and return their paths; no file takes its name before all of them are on disk.

    With more than MOST_CONFUSED classes the confusion matrix is left out, and a log line says so.

    Args:
        option: the option that named the folder, for an error message.

    Raises:
        DiskFull, BadOption: the folder cannot take the files.
    """
    classes = predictions.split.classes
    contents: dict[Path, bytes | Iterable[bytes]] = {
        paths.table: table(predictions),
        paths.picture: pictures.prediction_grid(predictions),
    }
    if paths.confusion_table in files_of(paths, len(classes)):
        contents[paths.confusion_table] = confusion_table(predictions)
        contents[paths.confusion_picture] = pictures.confusion_picture(predictions.confusion, classes)
    else:
        logger.info("no %s and no picture of it: more than %d classes", paths.confusion_table, MOST_CONFUSED)
    with writing(paths.folder, option):
        run_folder.replace_files(contents)
    return list(contents)


def table(predictions: Predictions) -> Iterator[bytes]:
    """Yield the lines of ``predictions.csv``: one for each image, in the predictions' order.

    ``id`` is the sample's index in the test set, counted from 0; ``correct`` is 1 or 0; ``p_<class>`` is the
    probability of that class, to six digits.
    """
    classes = predictions.split.classes
    return _csv([*COLUMNS, *(f"p_{name}" for name in classes)], _rows(predictions))


def _rows(predictions: Predictions) -> Iterator[Sequence[object]]:
    """Convert a thousand samples at a time: Python's numbers and texts take much more memory than a tensor."""
    classes = predictions.split.classes
    columns = (predictions.truth, predictions.guess, predictions.correct.int(), predictions.probabilities)
    for chosen in predictions.order.split(1000):
        rows = zip(chosen.tolist(), *(column[chosen].tolist() for column in columns), strict=True)
        for index, truth, guess, correct, probabilities in rows:
            texts = [f"{value:.6g}" for value in probabilities]
            yield [index, classes[truth], classes[guess], texts[guess], correct, *texts]


def confusion_table(predictions: Predictions) -> Iterator[bytes]:
    """Yield the lines of ``confusion.csv``: for each class, how many of its images were taken for each class."""
    classes = predictions.split.classes
    rows = ([name, *counts] for name, counts in zip(classes, predictions.confusion.tolist(), strict=True))
    return _csv(["truth \\ guess", *classes], rows)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> Iterator[bytes]:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    for row in itertools.chain([header], rows):
        writer.writerow(row)
        yield text.getvalue().encode()
        text.seek(0)
        text.truncate()


class PredictedImage(NamedTuple):
    """A test image and the prediction for it."""

    number: int
    """Its place in the test set, from 0."""
    image: Tensor
    """uint8 on the CPU, [H, W] or [H, W, 3]."""
    guess: str
    truth: str
    scores: Mapping[str, float]
    """Class -> probability."""


def first_images(predictions: Predictions, rows: int = ROWS) -> list[PredictedImage]:
    """Return the first images in the order of ``predictions``: mistakes first."""
    split, classes = predictions.split, predictions.split.classes
    found = []
    for number in predictions.order[:rows].tolist():
        image = split.images[number].cpu()
        found.append(
            PredictedImage(
                number=number,
                image=image[0] if len(image) == 1 else image.permute(1, 2, 0),
                guess=classes[int(predictions.guess[number])],
                truth=classes[int(predictions.truth[number])],
                scores=dict(zip(classes, predictions.probabilities[number].tolist(), strict=True)),
            )
        )
    return found
