from __future__ import annotations

import csv
import io
from pathlib import Path

import numpy
import pytest
import torch
from PIL import Image

from ddp_manual.errors import BadOption
from ddp_manual.rundir import PredictionPaths
from ddp_manual.training import pictures, prediction_files
from ddp_manual.training.confusion import confusion_picture
from ddp_manual.training.data import Split
from ddp_manual.training.predicting import Predictions

CLASSES = ("airplane", "automobile", "bird, or not")


def split_of(labels: list[int], *, channels: int = 1, side: int = 28, classes: tuple[str, ...] = CLASSES) -> Split:
    images = torch.randint(0, 256, (len(labels), channels, side, side), dtype=torch.uint8)
    return Split(images, torch.tensor(labels), classes)


@pytest.fixture
def five() -> Predictions:
    """Samples 0 and 3 are mistakes; 1 and 2 are right and equally sure."""
    probabilities = [[0.6, 0.3, 0.1], [0.1, 0.8, 0.1], [0.0, 0.2, 0.8], [0.05, 0.9, 0.05], [0.5, 0.25, 0.25]]
    return Predictions(torch.tensor(probabilities), split_of([1, 1, 2, 2, 0]))


def opened(png: bytes) -> Image.Image:
    return Image.open(io.BytesIO(png))


def test_mistakes_come_first_and_of_each_kind_the_most_confident(five: Predictions) -> None:
    assert five.guess.tolist() == [0, 1, 2, 1, 0]
    assert five.correct.tolist() == [False, True, True, False, True]
    assert five.order.tolist() == [3, 0, 1, 2, 4]


def test_the_confusion_matrix_has_the_truth_in_its_rows(five: Predictions) -> None:
    assert five.confusion.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    rows = list(csv.reader(io.StringIO(b"".join(prediction_files.confusion_table(five)).decode())))
    assert rows[0] == ["truth \\ guess", *CLASSES]
    assert rows[2] == ["automobile", "1", "1", "0"]


def test_a_line_of_the_table_says_what_was_guessed_how_surely_and_each_classs_probability(five: Predictions) -> None:
    lines = list(csv.DictReader(io.StringIO(b"".join(prediction_files.table(five)).decode())))
    assert [line["id"] for line in lines] == ["3", "0", "1", "2", "4"]
    assert list(lines[0].items()) == [
        ("id", "3"),
        ("truth", "bird, or not"),
        ("guess", "automobile"),
        ("confidence", "0.9"),
        ("correct", "0"),
        ("p_airplane", "0.05"),
        ("p_automobile", "0.9"),
        ("p_bird, or not", "0.05"),
    ]


def test_a_class_whose_name_is_not_utf_8_does_not_spoil_the_files(tmp_path: Path) -> None:
    """As a folder's may be."""
    name = b"b\xe4r".decode("utf-8", "surrogateescape")
    split = split_of([0, 1], classes=(name, "猫"))
    prediction_files.write(PredictionPaths(tmp_path), Predictions(torch.eye(2), split), option="--run_dir")
    assert "b\\udce4r" in (tmp_path / "predictions.csv").read_text(encoding="utf-8")


def test_files_that_cannot_be_written_are_a_bad_option(five: Predictions, tmp_path: Path) -> None:
    with pytest.raises(BadOption, match="--out_dir"):
        prediction_files.write(PredictionPaths(tmp_path / "nothing"), five, option="--out_dir")


@pytest.mark.parametrize("channels", [1, 3])
def test_the_picture_shows_the_images_themselves_in_the_predictions_order(channels: int) -> None:
    split = split_of([1, 0, 2, 2], channels=channels)
    # Sample 2 alone is a mistake; then 3, 1, 0.
    probabilities = torch.tensor([[0.2, 0.6, 0.2], [0.7, 0.2, 0.1], [0.4, 0.3, 0.3], [0.0, 0.1, 0.9]])
    predictions = Predictions(probabilities, split)
    picture = opened(pictures.prediction_grid(predictions))
    assert picture.mode == "RGB"
    pixels = torch.from_numpy(numpy.array(picture)).permute(2, 0, 1)
    scale = round(pictures.SIDE / 28)
    places = []
    for index in predictions.order.tolist():
        expected = split.images[index].expand(3, -1, -1).repeat_interleave(scale, 1).repeat_interleave(scale, 2)
        found = [
            left
            for left in range(pixels.shape[2] - 84 + 1)
            if torch.equal(expected, pixels[:, 32:116, left:][..., :84])
        ]
        places += found
    assert len(places) == 4 and places == sorted(places)


@pytest.mark.parametrize(
    ("side", "classes"),
    [(1, ("a", "b", "c")), (28, tuple("012")), (32, CLASSES), (500, ("a name of a class " * 9, "ä" * 99, ""))],
)
@pytest.mark.parametrize("count", [1, 3, 12])
def test_images_of_any_size_and_names_of_any_length_keep_the_picture_small(
    side: int, classes: tuple[str, ...], count: int
) -> None:
    split = split_of([index % 3 for index in range(count)], channels=3, side=side, classes=classes)
    for png in (pictures.image_grid(split), pictures.prediction_grid(Predictions(torch.rand(count, 3), split))):
        width, height = opened(png).size
        assert min(10, count) * 80 <= width <= 1800
        assert 90 <= height <= 500


def test_a_grid_shows_every_class_of_data_that_are_sorted_by_class() -> None:
    split = split_of([0] * 50 + [1] * 50 + [2] * 50)
    chosen = pictures.spread(split, 9)
    assert split.labels[chosen].tolist() == [0, 0, 0, 1, 1, 1, 2, 2, 2]
    assert pictures.spread(split, 1000) == list(range(150))


@pytest.mark.parametrize("classes", [1, 10, 300])
def test_a_confusion_matrix_of_few_or_many_classes_is_drawn_with_the_right_ones_on_its_diagonal(classes: int) -> None:
    confusion = 1000 * torch.eye(classes, dtype=torch.int64)
    picture = opened(confusion_picture(confusion, [f"class {index}" for index in range(classes)]))
    blue = (24, 100, 171)
    colours = {colour: count for count, colour in picture.getcolors(1 << 20)}
    assert max(picture.size) <= 4400
    assert colours[blue] >= classes * 64
