"""Data sets beside the MNIST family: folders of images, CIFAR-10, and what a user's own factory returns."""

from __future__ import annotations

import hashlib
import importlib
import os
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from PIL import Image
from torchvision.datasets import CIFAR10

from ddp_manual.errors import BadOption, DataCorrupt, DataMissing
from ddp_manual.training import models, own_factory
from ddp_manual.training.data import PARTS, Split, check_shapes
from ddp_manual.training.main import check_own_code
from ddp_manual.training.options import TrainConfig
from tests.conftest import CIFAR_CLASSES, source
from tests.memory import memory_group

Write = Callable[[str], str]


def draw(path: Path, *, size: tuple[int, int] = (8, 8), mode: str = "RGB", colour: object = 0) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)
    return path


@pytest.fixture
def animals(tmp_path: Path) -> Path:
    """Three cats and two dogs to train on, a dog to test on; and what is hidden, or no image."""
    folder = tmp_path / "animals"
    for part, name, count in (("train", "cat", 3), ("train", "dog", 2), ("test", "dog", 1)):
        for number in range(count):
            draw(folder / part / name / f"{number}.png", colour=(number, 100, 200))
    (folder / "train" / "cat" / "notes.txt").write_text("no image")
    (folder / "train" / ".cache").mkdir()
    draw(folder / "train" / "cat" / ".ipynb_checkpoints" / "0-checkpoint.png")
    (folder / "train" / "cat" / "album.jpg").mkdir()
    return folder


def load(folder: Path, part: str = "train", *, image_size: int | None = None) -> Split:
    return source(f"folder:{folder}", image_size=image_size).load(part)


def test_class_folders_are_read_with_their_names(animals: Path) -> None:
    os.rename(animals / "train" / "cat", animals / "train" / "c\nat\udcff")  # which would break a table
    train, test = (load(animals, part) for part in PARTS)
    assert train.classes == test.classes == ("c\\nat\\udcff", "dog")
    assert train.labels.tolist() == [0, 0, 0, 1, 1]
    assert test.labels.tolist() == [1]
    assert train.images.shape == (5, 3, 8, 8) and train.images.dtype == torch.uint8
    assert train.images[2, :, 0, 0].tolist() == [2, 100, 200]


def test_images_of_other_sizes_are_named_or_resized(animals: Path) -> None:
    odd = draw(animals / "train" / "dog" / "odd.jpg", size=(12, 20))
    with pytest.raises(BadOption, match="differ in size") as caught:
        load(animals)
    assert f"{odd} 12x20" in caught.value.why and "--image_size" in (caught.value.next or "")
    assert load(animals, image_size=6).images.shape == (6, 3, 6, 6)


@pytest.mark.parametrize(
    ("break_it", "named"),
    [
        (lambda folder: os.rename(folder / "test" / "dog", folder / "test" / "cow"), "does not have: cow"),
        (lambda folder: (folder / "train" / "eel").mkdir(), "eel has no images"),
        (lambda folder: [path.unlink() for path in (folder / "test").rglob("*.png")], "test has no images"),
        (lambda folder: (folder / "train" / "dog" / "1.png").write_bytes(b"\x89PNG\r\n"), "1.png cannot be read"),
        (lambda folder: (folder / "train" / "dog" / "9.png").symlink_to("nowhere"), "9.png cannot be read"),
        (lambda folder: draw(folder / "train" / "dog" / "9.tiff", mode="F", colour=0.5), "9.tiff cannot be read"),
    ],
)
def test_what_is_wrong_with_a_folder_is_named(animals: Path, break_it: Callable[[Path], object], named: str) -> None:
    break_it(animals)
    with pytest.raises((DataMissing, DataCorrupt), match=named):
        [load(animals, part) for part in PARTS]


def test_a_folder_that_cannot_be_read_is_named_and_a_link_to_one_that_it_is_in_is_not_followed(
    animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw(animals / "elsewhere" / "more" / "9.png")
    (animals / "train" / "dog" / "linked").symlink_to(animals / "elsewhere")
    (animals / "elsewhere" / "more" / "again").symlink_to(animals / "train" / "dog")
    (animals / "train" / "cat" / "all").symlink_to(animals)
    (animals / "train" / "cat" / "loop").symlink_to("loop")  # which is neither a folder nor an image
    assert load(animals).labels.tolist() == [0, 0, 0, 1, 1, 1]
    monkeypatch.chdir(animals / "train" / "cat")
    for _ in range(17):  # until the path is too long, which is an error also to root
        os.mkdir("d" * 250)
        os.chdir("d" * 250)
    with pytest.raises(DataMissing, match=r"/d{250} cannot be read") as caught:
        load(animals)
    assert "File name too long" in caught.value.why


def test_images_to_test_on_of_another_size_are_refused(animals: Path) -> None:
    draw(animals / "test" / "dog" / "0.png", size=(12, 20))
    with pytest.raises(BadOption, match="the images to train on and to test on differ in shape"):
        check_shapes("folder:animals", *(load(animals, part) for part in PARTS))


def test_rank_0_finds_before_the_ranks_meet_that_there_is_no_test_set(animals: Path) -> None:
    shutil.rmtree(animals / "test")
    config = TrainConfig(dataset=f"folder:{animals}")
    check_own_code(config, rank=1)  # which may have other files
    with pytest.raises(DataMissing, match="test cannot be read as a folder of images"):
        check_own_code(config, rank=0)


def test_16_bits_are_scaled_to_8_and_what_is_transparent_is_black(animals: Path) -> None:
    cat = animals / "train" / "cat"
    Image.new("I;16", (8, 8), 0x1234).save(cat / "0.png")
    half = Image.new("RGBA", (8, 8), (200, 100, 50, 255))
    half.paste((255, 255, 255, 0), (4, 0, 8, 8))
    half.save(cat / "1.png")
    images = load(animals).images
    assert images[0].unique().tolist() == [0x12]
    assert images[1, :, 0, 0].tolist() == [200, 100, 50] and not images[1, :, :, 4:].any()


def test_more_images_than_memory_holds_are_refused_before_they_are_read(
    animals: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = type("Memory", (), {"available": 900})()
    monkeypatch.setattr("psutil.virtual_memory", lambda: memory)
    with pytest.raises(BadOption, match="do not fit into memory"):
        load(animals)


def test_images_that_the_memory_of_a_container_does_not_hold_are_refused(animals: Path, tmp_path: Path) -> None:
    for number in range(40):
        draw(animals / "train" / "cat" / f"{number}.png")
    command = f"{sys.executable} -m ddp_manual show-data --image_size 4096 --dataset folder:{animals}".split()
    with memory_group(2 << 30, tmp_path / "cgroup") as group:
        done = subprocess.run(list(map(str, group.command(command))), capture_output=True, text=True)
    assert "they take 2016 MB, " in done.stderr


def test_cifar_10_is_read_from_torchvisions_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of noise in torchvision's form: their digests take the place of those of the real ones."""
    with pytest.raises(DataMissing, match="cifar10 is not in"):
        source("cifar10", tmp_path).load("test")
    images = torch.randint(256, (54, 3, 32, 32), dtype=torch.uint8)
    names = [*(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
    content = {"batches.meta": pickle.dumps({"label_names": list(CIFAR_CLASSES)})}
    for name, part in zip(names, images.split(9), strict=True):
        content[name] = pickle.dumps({"data": part.flatten(1).numpy(), "labels": [*range(9)]})
    folder = tmp_path / "cifar-10-batches-py"
    folder.mkdir()
    for name, written in content.items():
        (folder / name).write_bytes(written)
    with pytest.raises(DataCorrupt, match="cifar-10-batches-py cannot be read"):
        source("cifar10", tmp_path).load("train")
    digests = {name: hashlib.md5(written).hexdigest() for name, written in content.items()}
    monkeypatch.setattr(CIFAR10, "train_list", [[name, digests[name]] for name in names[:5]])
    monkeypatch.setattr(CIFAR10, "test_list", [["test_batch", digests["test_batch"]]])
    monkeypatch.setattr(CIFAR10, "meta", {**CIFAR10.meta, "md5": digests["batches.meta"]})
    train, test = (source("cifar10", tmp_path).load(part) for part in PARTS)
    assert train.classes == CIFAR_CLASSES and train.labels.tolist() == [*range(9)] * 5
    assert torch.equal(train.images, images[:45]) and torch.equal(test.images, images[45:])


PREAMBLE = """
import torch
from PIL import Image
from torch.utils.data import TensorDataset
images = torch.arange(4 * 3 * 8 * 8, dtype=torch.int64).remainder(256).to(torch.uint8).view(4, 3, 8, 8)
labels = torch.tensor([0, 1, 0, 1])
part = (images, labels)
class Pictures:
    classes = ("cat", "dog")
    def __len__(self): return 4
    def __getitem__(self, index):
        return Image.new("RGB", (8, 8), (index, 100, 200)), int(labels[index])
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> Write:
    """Write a module of the user's into the current folder; returns its name, a new one for each."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    count = 0

    def module(body: str) -> str:
        nonlocal count
        count += 1
        name = f"mine_{abs(hash(request.node.name))}_{count}"
        (tmp_path / f"{name}.py").write_text(PREAMBLE + textwrap.dedent(body))
        return name

    return module


@pytest.mark.parametrize(
    ("body", "classes"),
    [
        ("def made(data_dir): return part, part", ("0", "1")),
        ("def made(): return [TensorDataset(images, labels), TensorDataset(images, labels)]", ("0", "1")),
        ("def made(data_dir=None): return Pictures(), Pictures()", ("cat", "dog")),
        ("def made(): return (images[:, 0], labels), (images[:, 0], labels.int())", ("0", "1")),
        ("def made(): return (images.numpy()[:, ::-1], labels.numpy()), (images.numpy(), [0, 1, 0, 1])", ("0", "1")),
    ],
)
def test_a_factory_returns_tensors_or_datasets(module: Write, body: str, classes: tuple[str, ...]) -> None:
    name = module(body)
    found = source(f"{name}:made")
    train, test = (found.load(part) for part in PARTS)
    assert len(train) == len(test) == 4 and train.labels.tolist() == [0, 1, 0, 1]
    assert train.images.dtype == torch.uint8 and train.images.shape[2:] == (8, 8)
    assert train.classes == classes


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("def made(): return (images / 255, labels), part", "leave ToTensor and Normalize out"),
        ("def made(): return part, (images.permute(0, 2, 3, 1), labels)", r"images.permute\(0, 3, 1, 2\)"),
        ("def made(): return (images, ['cat'] * 4), part", "a train part that is not tensors"),
        ("def made(): return (images, labels * 10**11), part", "labels up to 100000000000 for 8 images"),
        ("def made(): return 1, part", "returned a int as its train part"),
        ("def made(): return part, (images, labels - 1)", "a test label -1"),
        ("def made(): return part, [(images[0], 0), (images[0, :, :4], 0)]", r"a strange item 1 .* \[3, 4, 8\]"),
        ("def made(): return part, [(images[0], 0.5)]", "a strange item 0 of its test part .its label is float32"),
        ("def made(): return part, [(Image.new('F', (8, 8)), 0)]", "pixels of mode F"),
        ("class Few(Pictures): classes = ('cat',)\ndef made(): return Few(), Few()", "a label 1"),
        ("class Few(Pictures): classes = ('dog', 'cat')\ndef made(): return Few(), Pictures()", "dog, cat and"),
        ("made = 5", "has no function or class made"),
    ],
)
def test_what_is_wrong_with_what_a_data_factory_returns_is_named(module: Write, body: str, named: str) -> None:
    name = module(body)
    with pytest.raises(BadOption, match=f"--dataset {name}:made") as caught:
        source(f"{name}:made").load("train")
    assert re.search(named, f"{caught.value.what}\n{caught.value.next}\n{caught.value}")


SCALARS = "class Made(torch.nn.Linear):\n    def forward(self, x): return super().forward(x.flatten(1)).squeeze()\n"
FIXED = "class Made(torch.nn.Module):\n    def forward(self, x): return x[:, :2, 0, 0]\n"


@pytest.mark.parametrize(
    ("body", "named"),
    [
        ("def made(): return torch.nn.Flatten()", r"gives \[2, 192\] for 2 images"),
        (SCALARS + "def made(): return Made(192, 2)", r"gives \[2\] for 1 image\n"),
        ("def made(): return torch.nn.Linear(3, 2)", "fails on images float32 .2, 3, 8, 8.: RuntimeError"),
        (FIXED + "def made(): return Made()", "has no parameter to train"),
        ("made = torch.nn.Linear(192, 2)", "is a network, not a function that makes one"),
        ("def made(width, depth=3): return None", r"cannot be called: missing a required argument: .width"),
    ],
)
def test_what_is_wrong_with_what_a_model_factory_returns_is_named(module: Write, body: str, named: str) -> None:
    name = module(body)
    with pytest.raises(BadOption, match=named):
        models.build(f"{name}:made", device=torch.device("cpu"), seed=0, shape=(3, 8, 8), classes=2)


def test_a_misspelt_function_or_module_is_answered_with_what_was_meant(module: Write) -> None:
    name = module("def network(): pass\ndef train(): pass\n" + "from os.path import *\n")
    meant = {"netwrok": "name one of its functions or classes", ".py:network": "name the module, not its file"}
    for typed, advice in meant.items():
        with pytest.raises(BadOption) as caught:
            own_factory.factory("model", f"{name}{typed}" if ":" in typed else f"{name}:{typed}")
        assert caught.value.next == f"{advice}: --model {name}:network"
    with pytest.raises(BadOption, match="has no function or class x") as caught:
        own_factory.factory("model", f"{name}:x")
    assert caught.value.why.endswith(" defines Pictures, network, train")


def test_the_digest_is_that_of_the_source_that_was_imported_a_module_or_all_of_its_package(
    module: Write, tmp_path: Path
) -> None:
    name = module("def made(): ...")
    imported = own_factory.factory("model", f"{name}:made")
    digest = own_factory.digest("model", f"{name}:made")
    assert digest[1] == str(tmp_path / f"{name}.py")
    (tmp_path / f"{name}.py").write_text("def made(): return 2")
    assert own_factory.digest("model", f"{name}:made") == digest
    importlib.reload(sys.modules[imported.__module__])
    assert own_factory.digest("model", f"{name}:made") != digest

    (tmp_path / "pack" / "below").mkdir(parents=True)
    files = [tmp_path / "pack" / file for file in ("__init__.py", "layers.py", "below/__init__.py", "below/layers.py")]
    digests = set()
    for changed in (None, *files):  # the same text in another file is another package
        for file in files:
            file.write_text("changed = True" if file is changed else "")
        sys.modules.pop("pack.below.layers", None)
        digests.add(own_factory.digest("model", "pack.below.layers:made")[0])
    assert len(digests) == 5


def test_a_download_that_fails_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(root: str, download: bool) -> None:
        raise RuntimeError("no network")

    monkeypatch.setattr("torchvision.datasets.CIFAR10", fails)
    with pytest.raises(DataMissing, match="cifar10 is not in") as caught:
        source("cifar10", tmp_path / "new").prepare()
    assert caught.value.why.endswith("it could not be downloaded:\nno network")
