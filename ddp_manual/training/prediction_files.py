"""What a model made of each test image, as two tables and two pictures."""

from __future__ import annotations

import csv
import io
import itertools
import logging
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from ddp_manual import run_folder
from ddp_manual.errors import writing
from ddp_manual.run_folder import PredictionPaths
from ddp_manual.training.confusion import confusion_picture
from ddp_manual.training.pictures import prediction_grid
from ddp_manual.training.predicting import Predictions

logger = logging.getLogger(__name__)

# Classes, whose square is counted: 8 MB. With more of them nobody could read the table or the picture either.
MOST_CONFUSED = 1000

COLUMNS = ("id", "truth", "guess", "confidence", "correct")


def of(paths: PredictionPaths, classes: int) -> tuple[Path, ...]:
    """Those that ``write`` writes of so many classes."""
    return paths.all if classes <= MOST_CONFUSED else (paths.table, paths.picture)


def write(paths: PredictionPaths, predictions: Predictions, *, option: str) -> list[Path]:
    """Write all four and return them, none before all are on disk under temporary names. Where there are more than
    MOST_CONFUSED classes, those of the confusion are left out, which a line of the log says.

    Args:
        option: which one named the folder.

    Raises:
        DiskFull, BadOption: the folder cannot take them.
    """
    classes = predictions.split.classes
    contents: dict[Path, bytes | Iterable[bytes]] = {
        paths.table: table(predictions),
        paths.picture: prediction_grid(predictions),
    }
    if paths.confusion_table in of(paths, len(classes)):
        contents[paths.confusion_table] = confusion_table(predictions)
        contents[paths.confusion_picture] = confusion_picture(predictions.confusion, classes)
    else:
        logger.info("no %s and no picture of it: more than %d classes", paths.confusion_table, MOST_CONFUSED)
    with writing(paths.folder, option):
        run_folder.replace_files(contents)
    return list(contents)


def table(predictions: Predictions) -> Iterator[bytes]:
    """The lines of ``predictions.csv``: one for each image, in the predictions' order.

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


def confusion_table(predictions: Predictions) -> Iterator[bytes]:
    """The lines of ``confusion.csv``: one for each class, with how many of its images were taken for which."""
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
