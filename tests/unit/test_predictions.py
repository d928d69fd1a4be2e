from __future__ import annotations

import csv
import errno
import io
import json
import logging
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch
from PIL import Image
from torch import nn

from ddp_manual import atomic_files
from ddp_manual.errors import DiskFull, writing
from ddp_manual.run_folder import PredictionPaths, RunPaths
from ddp_manual.training import ddp, pictures
from ddp_manual.training.data import Split
from ddp_manual.training.evaluation import Predictions, evaluate
from ddp_manual.training.meter import Metrics
from ddp_manual.training.position import Position
from ddp_manual.training.trackers import Trackers
from ddp_manual.training.transforms import unit_scale
from ddp_manual.training.write_run_files import RunFiles, confusion_table, table, write_predictions

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


def test_predictions_are_ordered_mistakes_first_then_by_confidence(five: Predictions) -> None:
    assert five.guess.tolist() == [0, 1, 2, 1, 0]
    assert five.correct.tolist() == [False, True, True, False, True]
    assert five.order.tolist() == [3, 0, 1, 2, 4]


def test_the_tables_have_the_truth_in_rows_and_the_probability_of_each_class(five: Predictions) -> None:
    assert five.confusion.tolist() == [[1, 0, 0], [1, 1, 0], [0, 1, 1]]
    rows = list(csv.reader(io.StringIO(b"".join(confusion_table(five)).decode())))
    assert rows[0] == ["truth \\ guess", *CLASSES]
    assert rows[2] == ["automobile", "1", "1", "0"]
    lines = list(csv.DictReader(io.StringIO(b"".join(table(five)).decode())))
    assert [line["id"] for line in lines] == ["3", "0", "1", "2", "4"]
    said = {"id": "3", "truth": "bird, or not", "guess": "automobile", "confidence": "0.9", "correct": "0"}
    assert lines[0] == {**said, "p_airplane": "0.05", "p_automobile": "0.9", "p_bird, or not": "0.05"}


def files_of_a_run(folder: Path) -> RunFiles:
    return RunFiles(RunPaths(folder), keep=1, trackers=Trackers(()))


def test_the_training_goes_on_without_metrics_for_which_the_disk_has_no_room_and_a_line_says_so_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file, files = RunPaths(tmp_path).metrics, files_of_a_run(tmp_path)
    file.symlink_to("/dev/full")
    shown = {"loss": 0.5, "accuracy": 0.9, "lr": 0.1, "samples_per_second": 100.0, "seconds": 1.0}
    for step in (10, 20):
        files.add_metrics(Metrics(step=step, epoch=1, **shown))
    assert caplog.messages == [f"no space left to write {file}: metrics are missing there until there is room"]
    file.unlink()
    files.add_metrics(Metrics(step=30, epoch=1, **shown))
    assert json.loads(file.read_text())["step"] == 30


def test_a_picture_that_cannot_be_drawn_is_a_warning(
    five: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pictures, "font_for", Mock(side_effect=MemoryError("of mine")))
    files = files_of_a_run(tmp_path)
    files.start({}, five.split, complete=True)
    files.write_predictions(Position(), five)
    assert "samples.png: MemoryError: of mine" in caplog.text and "predictions.csv: MemoryError" in caplog.text
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_the_confusion_matrix_of_more_than_1000_classes_is_left_out(tmp_path: Path) -> None:
    """A single label of 60,000 would make a matrix of 29 GB."""
    split = split_of([0, 60_000], classes=tuple(map(str, range(60_001))))
    predictions = Predictions(torch.full((2, 60_001), 1 / 60_001), split)
    files = write_predictions(PredictionPaths(tmp_path), predictions, option="--run_dir")
    assert {path.name for path in files} == {path.name for path in tmp_path.iterdir()}
    assert {path.name for path in files} == {"predictions.csv", "mistakes.png"}


def test_a_rank_without_test_images_never_calls_the_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ddp, "all_reduce", lambda totals: totals.add_(2))
    nothing_to_call, split = nn.Module(), split_of([0, 1])
    evaluation, predictions = evaluate(nothing_to_call, split, unit_scale(1), rank=5, world_size=6, predict=True)
    assert evaluation.samples == 2 and predictions is None


def test_probabilities_have_their_own_dtype_whatever_the_default_of_a_users_code_is() -> None:
    network, split = nn.Sequential(nn.Flatten(), nn.Linear(784, 3)), split_of([0, 1])
    torch.set_default_dtype(torch.float64)
    try:
        _, predictions = evaluate(network, split, unit_scale(1), rank=0, world_size=1, predict=True)
    finally:
        torch.set_default_dtype(torch.float32)
    assert predictions is not None and predictions.probabilities.dtype == torch.float32


@pytest.mark.parametrize(("side", "batches"), [(32, [1000, 200]), (640, [2, 1]), (1100, [1, 1])])
def test_batches_of_large_images_are_smaller(side: int, batches: list[int]) -> None:
    sizes: list[int] = []

    class Counting(nn.Module):
        def forward(self, images: torch.Tensor) -> torch.Tensor:
            sizes.append(len(images))
            return torch.zeros(len(images), 3)

    images = torch.zeros(1, 3, side, side, dtype=torch.uint8).expand(sum(batches), -1, -1, -1)
    evaluate(Counting(), Split(images, torch.zeros(sum(batches)).long(), CLASSES), unit_scale(3), rank=0, world_size=1)
    assert sizes == batches


def test_a_file_that_does_not_fit_on_the_disk_is_named_and_the_run_goes_on_without_it(
    five: Predictions, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_room(*_: object) -> Iterator[bytes]:
        yield b"id,"
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("ddp_manual.training.write_run_files.table", no_room)
    files = RunFiles(RunPaths(tmp_path), keep=1, trackers=Trackers(()))
    with caplog.at_level(logging.WARNING):
        files.write_predictions(Position(), five)
    assert f"No space left on device: {tmp_path / 'predictions.csv'}" in caplog.text
    assert not list(tmp_path.iterdir())
    with pytest.raises(DiskFull, match=r"predictions\.csv"), writing(tmp_path, "--run_dir"):
        atomic_files.replace_files({tmp_path / "predictions.csv": no_room()})
