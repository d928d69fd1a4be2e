"""What a model made of each test image, as two tables and two pictures."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Iterator, Sequence

from ddp_manual import rundir
from ddp_manual.errors import writing
from ddp_manual.rundir import PredictionPaths
from ddp_manual.training.confusion import confusion_picture
from ddp_manual.training.pictures import prediction_grid
from ddp_manual.training.predicting import Predictions

COLUMNS = ("id", "truth", "guess", "confidence", "correct")


def write(paths: PredictionPaths, predictions: Predictions, *, option: str) -> None:
    """Write all four, none before all are on disk under temporary names.

    Args:
        option: which one named the folder.

    Raises:
        DiskFull, BadOption: the folder cannot take them.
    """
    contents = {
        paths.table: table(predictions),
        paths.picture: prediction_grid(predictions),
        paths.confusion_table: confusion_table(predictions),
        paths.confusion_picture: confusion_picture(predictions.confusion, predictions.split.classes),
    }
    with writing(paths.folder, option):
        rundir.replace_files(contents)


def table(predictions: Predictions) -> bytes:
    """``predictions.csv``: one line for each image, in the predictions' order.

    ``id`` is the sample's place in the test set, counted from 0; ``correct`` is 1 or 0; ``p_<class>`` is the
    probability of that class, to six digits.
    """
    classes = predictions.split.classes
    return _csv([*COLUMNS, *(f"p_{name}" for name in classes)], _rows(predictions))


def _rows(predictions: Predictions) -> Iterator[Sequence[object]]:
    """A thousand samples at a time: as Python's numbers and texts they take much more room than as a tensor."""
    classes = predictions.split.classes
    for some in predictions.order.split(1000):
        columns = (
            some.tolist(),
            predictions.truth[some].tolist(),
            predictions.guess[some].tolist(),
            predictions.correct[some].int().tolist(),
            predictions.probabilities[some].tolist(),
        )
        for index, truth, guess, correct, probabilities in zip(*columns, strict=True):
            texts = [f"{value:.6g}" for value in probabilities]
            yield [index, classes[truth], classes[guess], texts[guess], correct, *texts]


def confusion_table(predictions: Predictions) -> bytes:
    """``confusion.csv``: one line for each class, with how many of its images were taken for which."""
    classes = predictions.split.classes
    rows = ([name, *counts] for name, counts in zip(classes, predictions.confusion.tolist(), strict=True))
    return _csv(["truth \\ guess", *classes], rows)


def _csv(header: Sequence[str], rows: Iterable[Sequence[object]]) -> bytes:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(rows)
    # The name of a folder, and so of a class, may be anything but UTF-8.
    return text.getvalue().encode("utf-8", "backslashreplace")
