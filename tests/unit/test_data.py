"""The MNIST family, the digits drawn in code, and the cache that images are read into once."""

from __future__ import annotations

import gzip
import os
import resource
import shutil
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_manual.errors import DataCorrupt, DataDiffers, DataMissing
from ddp_manual.training import datasets
from ddp_manual.training.data import CACHE_FOLDER, PARTS, Split
from ddp_manual.training.same_on_all_ranks import compare_data, fingerprint
from tests.conftest import source


def write_idx(path: Path, shape: tuple[int, ...], content: bytes) -> None:
    header = struct.pack(f">I{len(shape)}I", 0x0800 + len(shape), *shape)
    path.parent.mkdir(parents=True, exist_ok=True)
    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "wb") as file:
        file.write(header + content)


@pytest.fixture
def tiny_mnist(tmp_path: Path) -> Path:
    """Three images of 2x2 as a whole MNIST, half of it compressed."""
    raw = tmp_path / "data" / "MNIST" / "raw"
    for prefix, suffix in (("train", ".gz"), ("t10k", "")):
        write_idx(raw / f"{prefix}-images-idx3-ubyte{suffix}", (3, 2, 2), bytes(range(12)))
        write_idx(raw / f"{prefix}-labels-idx1-ubyte{suffix}", (3,), bytes([7, 0, 9]))
    return tmp_path / "data"


def raw_file(data_dir: Path, name: str) -> Path:
    return data_dir / "MNIST" / "raw" / name


@pytest.mark.parametrize("part", PARTS)
def test_images_and_labels_are_read_compressed_or_not(tiny_mnist: Path, part: str) -> None:
    before = sorted(os.listdir(tiny_mnist / "MNIST" / "raw"))
    mnist = source("mnist", tiny_mnist)
    mnist.prepare()
    for split in (mnist.load(part), source("mnist", tiny_mnist).read(part)):
        assert split.images.dtype == torch.uint8
        assert split.images.flatten().tolist() == list(range(12))
        assert split.images.shape == (3, 1, 2, 2)
        assert split.labels.tolist() == [7, 0, 9]
    assert sorted(os.listdir(tiny_mnist / "MNIST" / "raw")) == before


@pytest.mark.parametrize(
    ("name", "damage"),
    [
        ("t10k-images-idx3-ubyte", lambda content: content[:5]),
        ("t10k-images-idx3-ubyte", lambda content: content[:27]),
        ("train-images-idx3-ubyte.gz", lambda content: content[:30]),
        ("t10k-images-idx3-ubyte", lambda content: struct.pack(">II", 0x0801, 3) + bytes(23)),
        ("t10k-images-idx3-ubyte", lambda content: b"<html>There is no such page</html>"),
    ],
)
def test_a_file_that_is_cut_off_or_of_another_kind_is_named(
    tiny_mnist: Path, name: str, damage: Callable[[bytes], bytes]
) -> None:
    path = raw_file(tiny_mnist, name)
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(DataCorrupt, match=f"{name} cannot be read"):
        source("mnist", tiny_mnist).prepare()


@pytest.mark.parametrize(
    ("labels", "said"), [([1, 2], "3 images and 2 labels"), ([1, 2, 10], "3 labels, the highest 10")]
)
def test_labels_that_do_not_belong_to_the_images_are_refused(tiny_mnist: Path, labels: list[int], said: str) -> None:
    write_idx(raw_file(tiny_mnist, "t10k-labels-idx1-ubyte"), (len(labels),), bytes(labels))
    with pytest.raises(DataCorrupt, match=said):
        source("mnist", tiny_mnist).prepare()


# -- the cache ------------------------------------------------------------------------------------------------------


def caches(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.cache"))


def pixels(data_dir: Path, part: str = "test") -> list[int]:
    """As the next start has them."""
    mnist = source("mnist", data_dir)
    mnist.prepare()
    found: list[int] = mnist.load(part).images.flatten().tolist()
    return found


def test_a_second_start_reads_the_cache(tiny_mnist: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source("mnist", tiny_mnist).prepare()
    monkeypatch.setattr(datasets.Downloaded, "read", lambda *_: pytest.fail("the files are read again"))
    assert [pixels(tiny_mnist, part) for part in PARTS] == [[*range(12)]] * 2


def test_a_file_that_is_replaced_is_read_even_if_its_size_and_its_time_are_the_same(tiny_mnist: Path) -> None:
    path = raw_file(tiny_mnist, "t10k-images-idx3-ubyte")
    assert pixels(tiny_mnist) == list(range(12))
    before = path.stat()
    write_idx(path.with_name("new"), (3, 2, 2), bytes(range(12, 24)))
    os.utime(path.with_name("new"), ns=(before.st_atime_ns, before.st_mtime_ns))
    path.with_name("new").rename(path)
    assert path.stat().st_mtime_ns == before.st_mtime_ns and path.stat().st_size == before.st_size
    assert pixels(tiny_mnist) == list(range(12, 24))


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-1],
        lambda content: content.replace(bytes(range(12)), bytes(range(11, -1, -1))),
        lambda content: content.replace(struct.pack("<3q", 7, 0, 9), struct.pack("<3q", 7, 1, 9)),
        lambda content: content.replace(b"X\x01\x00\x00\x007", b"X\x01\x00\x00\x00Z"),
    ],
)
def test_a_damaged_cache_is_named_and_made_anew(
    tiny_mnist: Path, caplog: pytest.LogCaptureFixture, damage: Callable[[bytes], bytes]
) -> None:
    assert pixels(tiny_mnist) == list(range(12))
    (path,) = (path for path in caches(tiny_mnist) if "test" in path.name)
    content = path.read_bytes()
    assert damage(content) != content
    path.write_bytes(damage(content))
    assert pixels(tiny_mnist) == list(range(12))
    assert f"the cache {path} is damaged and is made anew: " in caplog.text
    assert path.read_bytes() == content


def test_what_is_outdated_or_half_written_stays_a_week_since_ranks_of_other_hosts_may_have_mapped_it(
    tiny_mnist: Path,
) -> None:
    assert pixels(tiny_mnist) == list(range(12))
    earlier = caches(tiny_mnist)
    for path in earlier:
        os.utime(path, (0, 0))
    assert pixels(tiny_mnist) == list(range(12))  # a start that uses them: their week begins anew
    left = [path.with_name(f".{path.name}.1.tmp") for path in earlier]
    for path in left:
        path.write_bytes(b"half")
    write_idx(raw_file(tiny_mnist, "t10k-images-idx3-ubyte"), (3, 2, 2), bytes(range(12, 24)))
    assert pixels(tiny_mnist) == list(range(12, 24))
    assert len(caches(tiny_mnist)) == 4 and all(path.exists() for path in left)
    for path in (*earlier, *left):
        os.utime(path, (0, 0))
    write_idx(raw_file(tiny_mnist, "t10k-images-idx3-ubyte"), (3, 2, 2), bytes(12))
    assert pixels(tiny_mnist) == [0] * 12
    assert len(caches(tiny_mnist)) == 4 and not any(path.exists() for path in (*earlier, *left))


def test_where_the_folder_of_the_data_cannot_be_written_the_cache_is_in_the_users(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    other = tmp_path / "other"
    shutil.copytree(tiny_mnist, other, copy_function=os.link)
    for folder in (tiny_mnist, other):  # the same files in another place have another cache
        (folder / CACHE_FOLDER).touch()  # root, whom tests may run as, can write to a folder without permissions
        assert pixels(folder) == list(range(12))
    assert len(caches(tmp_path / "mine" / "ddp_manual")) == 2 * len(PARTS)
    monkeypatch.setattr(datasets.Downloaded, "read", lambda *_: pytest.fail("the files are read again"))
    assert pixels(tiny_mnist) == pixels(other) == list(range(12))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


# -- whether all ranks have read the same ----------------------------------------------------------------------------


SPLIT = Split(torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2), torch.tensor([0, 1]), ("cat", "dog"))


def compare(others: Split, hosts: list[str], *, own_factory: bool = False) -> None:
    """As rank 0 of two sees it, whose test part is the same as the other's."""
    world: Any = SimpleNamespace(
        gather=lambda mine: [mine, [fingerprint(others), fingerprint(SPLIT)]],
        roster=lambda: [{"host": host} for host in hosts],
    )
    compare_data(world, SPLIT, SPLIT, own_factory=own_factory)


def test_what_to_do_about_other_data_depends_on_what_returned_them() -> None:
    other = replace(SPLIT, labels=torch.tensor([1, 0]), digest="")
    for own_factory, then in ((False, "copy rank 0's --data_dir"), (True, "have the factory return the same data")):
        with pytest.raises(DataDiffers, match=r"the data on b are not those of rank 0") as caught:
            compare(other, ["a", "b"], own_factory=own_factory)
        assert then in (caught.value.next or "")
    assert "train: rank 1" in caught.value.why and "test: " not in caught.value.why


def test_missing_files_are_listed_with_the_way_out(tmp_path: Path) -> None:
    with pytest.raises(DataMissing) as caught:
        source("kmnist", tmp_path).load("train")
    assert "train-images-idx3-ubyte" in caught.value.why
    assert "--dataset synthetic" in caught.value.next


def test_on_a_full_disk_the_images_are_read_without_a_cache(
    tiny_mnist: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "mine"))
    found, before = source("mnist", tiny_mnist), resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, before[1]))  # bytes: fewer than a cache has
        found.prepare()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert [len(found.load(part)) for part in PARTS] == [3, 3]
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert len(warnings) == len(PARTS) and "no cache can be written" in warnings[0] and str(tiny_mnist) in warnings[0]
    assert not [path for path in tmp_path.rglob("*") if path.suffix in (".tmp", ".cache")]
