from __future__ import annotations

import gzip
import struct
from pathlib import Path

import pytest
import torch

from ddp_manual.errors import BadOption, DataCorrupt, DataMissing
from ddp_manual.training.data import Split, warn_of_untrained
from ddp_manual.training.sources import drawn, source


def write_idx(path: Path, shape: tuple[int, ...], content: bytes, *, magic: int | None = None) -> None:
    header = struct.pack(f">I{len(shape)}I", magic or 0x0800 + len(shape), *shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + content)


@pytest.fixture
def tiny_mnist(tmp_path: Path) -> Path:
    """Three images of 2x2 as a whole MNIST, half of it compressed."""
    raw = tmp_path / "MNIST" / "raw"
    for prefix, suffix in (("train", ".gz"), ("t10k", "")):
        write_idx(raw / f"{prefix}-images-idx3-ubyte{suffix}", (3, 2, 2), bytes(range(12)))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte{suffix}", (3,), bytes([7, 0, 9]))
    return tmp_path


@pytest.mark.parametrize("part", ["train", "test"])
def test_images_and_labels_are_read_compressed_or_not(tiny_mnist: Path, part: str) -> None:
    split = source("mnist").load(tiny_mnist, part)
    assert split.images.dtype == torch.uint8
    assert split.images.flatten().tolist() == list(range(12))
    assert split.images.shape == (3, 1, 2, 2)
    assert split.labels.tolist() == [7, 0, 9]


def test_files_that_are_there_are_not_downloaded_again(tiny_mnist: Path) -> None:
    assert source("mnist").is_prepared(tiny_mnist)
    source("mnist").prepare(tiny_mnist)


@pytest.mark.parametrize("keep", [0, 5, 20, 27])
def test_a_truncated_file_is_named(tiny_mnist: Path, keep: int) -> None:
    path = tiny_mnist / "MNIST" / "raw" / "t10k-images-idx3-ubyte"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataCorrupt, match="t10k-images-idx3-ubyte"):
        source("mnist").load(tiny_mnist, "test")


@pytest.mark.parametrize("keep", [0, 5, 30])
def test_a_truncated_archive_is_named(tiny_mnist: Path, keep: int) -> None:
    path = tiny_mnist / "MNIST" / "raw" / "train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(DataCorrupt, match=r"train-images-idx3-ubyte\.gz"):
        source("mnist").load(tiny_mnist, "train")


def test_a_file_of_another_kind_is_named(tiny_mnist: Path) -> None:
    raw = tiny_mnist / "MNIST" / "raw"
    (raw / "t10k-images-idx3-ubyte").write_bytes((raw / "t10k-labels-idx1-ubyte").read_bytes() + bytes(20))
    with pytest.raises(DataCorrupt) as caught:
        source("mnist").load(tiny_mnist, "test")
    assert "begins with the number 2049, not 2051" in caught.value.why


def test_labels_that_do_not_belong_to_the_images_are_refused(tiny_mnist: Path) -> None:
    labels = tiny_mnist / "MNIST" / "raw" / "t10k-labels-idx1-ubyte"
    write_idx(labels, (2,), bytes([1, 2]))
    with pytest.raises(DataCorrupt, match="3 images and 2 labels"):
        source("mnist").load(tiny_mnist, "test")
    write_idx(labels, (3,), bytes([1, 2, 10]))
    with pytest.raises(DataCorrupt, match="label 10"):
        source("mnist").load(tiny_mnist, "test")


def test_missing_files_are_listed_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        source("kmnist").load(tmp_path, "train")
    assert "train-images-idx3-ubyte" in caught.value.why
    assert "--dataset synthetic" in caught.value.next


@pytest.mark.parametrize("dataset", ["mnist", "synthetic"])
def test_a_data_dir_that_cannot_be_written_is_a_bad_option(tmp_path: Path, dataset: str) -> None:
    occupied = tmp_path / "file"
    occupied.touch()
    with pytest.raises(BadOption, match="--data_dir"):
        source(dataset).prepare(occupied / "below")


def test_synthetic_digits_are_drawn_once_and_read_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drawn, "COUNTS", {"train": 30, "test": 20})
    source("synthetic").prepare(tmp_path)
    split = source("synthetic").load(tmp_path, "test")
    assert split.images.shape == (20, 1, 28, 28)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "synthetic").iterdir()}
    source("synthetic").prepare(tmp_path)
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "synthetic").iterdir()}


def test_a_damaged_cache_of_synthetic_digits_is_named(small_data: Path, tmp_path: Path) -> None:
    folder = tmp_path / "synthetic"
    folder.mkdir()
    for path in (small_data / "synthetic").iterdir():
        (folder / path.name).write_bytes(path.read_bytes()[:1000])
    with pytest.raises(DataCorrupt, match="train-60000"):
        source("synthetic").load(tmp_path, "train")


def test_the_real_mnist_has_its_known_shape(mnist: Path) -> None:
    train, test = (source("mnist").load(mnist, part) for part in ("train", "test"))
    assert (len(train), len(test)) == (60_000, 10_000)
    assert torch.bincount(test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]


@pytest.mark.parametrize(
    ("train", "test", "said"),
    [
        ([0, 1, 2], [0], []),
        (
            [1, 2],
            [1, 2],
            ["no training image of class ant (of 3)", "if the labels are numbered from 1, count them from 0"],
        ),
        ([0, 0], [2], ["no training image of classes bee, cat (of 3)", "tested but never trained on: class cat"]),
    ],
)
def test_a_class_without_an_image_to_train_on_is_named(
    train: list[int], test: list[int], said: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    def part(labels: list[int]) -> Split:
        images = torch.zeros(len(labels), 1, 2, 2, dtype=torch.uint8)
        return Split(images, torch.tensor(labels), ("ant", "bee", "cat"))

    warn_of_untrained(part(train), part(test))
    assert caplog.messages == said
