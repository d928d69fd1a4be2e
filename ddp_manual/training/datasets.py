"""The data sets that ``--dataset`` can name, except a user's own factory: their files, and how they are read."""

from __future__ import annotations

import gzip
import logging
import os
import struct
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TypeVar

import numpy
import torch
from PIL import Image, ImageOps
from torch import Tensor

from ddp_manual.environment import machine
from ddp_manual.errors import BadOption, DataCorrupt, DataMissing, DdpManualError, writing
from ddp_manual.memory_cgroup import memory_left
from ddp_manual.training import synthetic
from ddp_manual.training.data import DIGITS, PARTS, DataCache, Source, Split, digest_of_files
from ddp_manual.training.options import FOLDER_PREFIX, TrainConfig, is_folder
from ddp_manual.training.own_data import OwnData
from ddp_manual.training.pictures import as_tensor, eight_bit, is_grey

T = TypeVar("T")
logger = logging.getLogger(__name__)

FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
# One character of each row of hiragana, in Latin letters.
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
IDX_FILES = {
    part: (f"{prefix}-images-idx3-ubyte", f"{prefix}-labels-idx1-ubyte")
    for part, prefix in (("train", "train"), ("test", "t10k"))
}
CIFAR_FILES = ("batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch")
# Name -> torchvision's name for it, its folder below data_dir, mean and standard deviation, classes.
DOWNLOADED: dict[str, tuple[str, str, tuple[float, ...], tuple[float, ...], tuple[str, ...]]] = {
    "mnist": ("MNIST", "MNIST/raw", (0.1307,), (0.3081,), DIGITS),
    "fashion-mnist": ("FashionMNIST", "FashionMNIST/raw", (0.2860,), (0.3530,), FASHION),
    "kmnist": ("KMNIST", "KMNIST/raw", (0.1918,), (0.3483,), HIRAGANA),
    # torchvision knows its classes.
    "cifar10": ("CIFAR10", "cifar-10-batches-py", (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616), ()),
}
# The first four bytes of an IDX file of unsigned bytes are this, plus the number of its dimensions.
IDX_OF_BYTES = 0x0800
DOWNLOAD_AGAIN = "delete it and start again with a network, to download it anew"
IMAGE_ENDINGS = (
    *(".apng", ".avif", ".bmp", ".gif", ".jfif", ".jp2", ".jpe", ".jpeg", ".jpg"),
    *(".pbm", ".pgm", ".png", ".pnm", ".ppm", ".tga", ".tif", ".tiff", ".webp"),
)
DRAWN_COUNTS = {"train": 60_000, "test": 10_000}
DRAWN_SEEDS = {"train": 1, "test": 2}


def source_of(config: TrainConfig) -> Source:
    """Return the data set that ``--dataset`` names, with ``--classes`` as its classes."""
    if is_folder(config.dataset):
        return ImageFolder(config)
    if config.dataset in DOWNLOADED:
        return Downloaded(config)
    return Synthetic(config) if config.dataset == "synthetic" else OwnData(config)


class Synthetic(Source):
    """Digits drawn in code, like MNIST's and with its mean and std: a network trained on them reads MNIST's too."""

    mean, std = (0.1307,), (0.3081,)
    verb = "draw"

    def fetch(self) -> None:
        _make_data_dir(self.folder)

    def cache(self, part: str) -> DataCache:
        drawing = digest_of_files(self.folder, [], synthetic.DRAWING_VERSION, DRAWN_COUNTS[part], DRAWN_SEEDS[part])
        return DataCache(f"synthetic-{part}", self.folder, drawing)

    def read(self, part: str) -> Split:
        images, labels = synthetic.draw_digits(DRAWN_COUNTS[part], seed=DRAWN_SEEDS[part])
        return Split(images.unsqueeze(1), labels, DIGITS)


class Downloaded(Source):
    """MNIST and its relatives, or CIFAR-10, in the files and folders that torchvision keeps them in."""

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self._torchvision, below, self.mean, self.std, self._own_classes = DOWNLOADED[self.name]
        self._raw = self.folder / below
        self._names = CIFAR_FILES if self.name == "cifar10" else (*IDX_FILES["train"], *IDX_FILES["test"])
        self.verb = "read" if all(map(self._found, self._names)) else "download"

    def fetch(self) -> None:
        if self.verb == "read":
            return
        _make_data_dir(self.folder)
        with writing(self.folder, "--data_dir"):
            tempfile.TemporaryFile(dir=self.folder).close()
        logger.info("downloading %s into %s", self.name, self.folder)
        from torchvision import datasets  # here, because it takes 1.6 s

        try:
            getattr(datasets, self._torchvision)(root=str(self.folder), download=True)
        except (RuntimeError, OSError) as error:
            said = "\n".join(line for line in str(error).splitlines() if line.strip())
            raise self._missing(f"it could not be downloaded:\n{said}") from error
        self.verb = "read"

    def cache(self, part: str) -> DataCache:
        files = digest_of_files(self.folder, filter(None, map(self._found, self._names)))
        return DataCache(f"{self.name}-{part}", self.folder, files)

    def read(self, part: str) -> Split:
        if not all(map(self._found, self._names)):
            raise self._missing("they are not all there")
        return self._read_cifar10(part) if self.name == "cifar10" else self._read_mnist(part)

    def _read_mnist(self, part: str) -> Split:
        images_file, labels_file = (self._found(name) or self._raw for name in IDX_FILES[part])
        images, labels = _read_idx(images_file, dimensions=3), _read_idx(labels_file, dimensions=1).long()
        if not 0 < len(images) == len(labels) or int(labels.max()) >= len(self._own_classes):
            highest = f", the highest {int(labels.max())}" if len(labels) else ""
            raise DataCorrupt(
                f"the {part} part of {self.name} has {len(images)} images and {len(labels)} labels{highest}",
                why=f"{images_file} and {labels_file.name} do not belong together, or are of another data set",
                next=f"delete {self._raw} and start again with a network, to download it anew",
            )
        return Split(images.unsqueeze(1), labels, self._own_classes)

    def _read_cifar10(self, part: str) -> Split:
        from torchvision.datasets import CIFAR10

        with _naming(self._raw, "CIFAR-10", DOWNLOAD_AGAIN):
            # torchvision unpickles the files only if their digests are the original's.
            found = CIFAR10(root=str(self.folder), train=part == "train")
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(found.targets), tuple(found.classes))

    def _found(self, name: str) -> Path | None:
        """Return the path of a file, unpacked or not: torchvision keeps both, and people copy only one of them."""
        return next((path for path in (self._raw / name, self._raw / f"{name}.gz") if path.is_file()), None)

    def _missing(self, reason: str) -> DataMissing:
        return DataMissing(
            f"{self.name} is not in {self._raw.absolute()}",
            why=f"looked for {', '.join(name for name in self._names if not self._found(name))}\n{reason}",
            next="give the folder that has them as --data_dir, or use digits drawn in code: --dataset synthetic",
        )


class ImageFolder(Source):
    """``folder:PATH``: anyone's own images, in PATH/train and PATH/test with a folder for each class.

    The class folders of ``train``, sorted by name, are the classes. Images are grey if all images of both parts are,
    otherwise in colour. Files of other kinds, hidden files and those in hidden folders are passed over.

    With ``--image_size`` images are resized to so many pixels along the shorter side, and the square in the middle is
    cut out; otherwise all must have the same size already.
    """

    def __init__(self, config: TrainConfig) -> None:
        super().__init__(config)
        self.folder, self._size = Path(self.name.removeprefix(FOLDER_PREFIX)), config.image_size

    def check(self) -> None:
        for part in PARTS:
            self._class_folders(part)
        self._class_names()

    def cache(self, part: str) -> DataCache:
        return DataCache(f"folder-{self._size or 'unresized'}-{part}", self.folder, self._files_digest)

    @cached_property
    def _files_digest(self) -> str:
        """The digest of the files of both parts: one coloured image in a part makes the other part coloured too."""
        parts = [self.folder / part for part in PARTS if os.path.isdir(self.folder / part)]
        return digest_of_files(self.folder, (path for part in parts for path in _files_below(part)))

    def read(self, part: str) -> Split:
        samples = self._samples(part)
        classes, labels = self._class_names(), [label for _, label in samples]
        empty = sorted(set(range(len(classes))) - set(labels))
        if not labels or (empty and part == "train"):
            folder = self.folder / part / (classes[empty[0]] if part == "train" else "")
            raise DataMissing(
                f"{folder} has no images",
                why=f"looked for files that end in {' '.join(IMAGE_ENDINGS)}",
                next="put images there, or delete the folder of a class that has none",
            )
        return Split(self._pixels([path for path, _ in samples]), torch.tensor(labels), classes)

    def _class_names(self) -> tuple[str, ...]:
        """Return the class folders of the training part, or of the test part if there is no training part."""
        train, test = (self.folder / part for part in PARTS)
        if not train.is_dir():
            return self._class_folders("test")
        classes = self._class_folders("train")
        if strange := sorted(set(self._class_folders("test")) - set(classes)) if test.is_dir() else []:
            raise DataCorrupt(
                f"{test} has a class that {train} does not have: {', '.join(strange)}",
                why=f"the classes to learn are {', '.join(classes)}",
                next="give both the same class folders",
            )
        return classes

    def _class_folders(self, part: str) -> tuple[str, ...]:
        folder = self.folder / part
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
            if not names:
                raise OSError(0, "it has no class folders", str(folder))
        except OSError as error:
            raise DataMissing(
                f"{folder} cannot be read as a folder of images",
                why=f"{error.strerror}: {error.filename}",
                next="give --dataset folder:PATH where PATH has train/ and test/, each with one folder per class",
            ) from None
        return tuple(names)

    def _samples(self, part: str) -> list[tuple[Path, int]]:
        """Return the path and the label of each image, in the order of classes and paths."""
        folder, own = self.folder / part, self._class_folders(part)
        labels = {name: label for label, name in enumerate(self._class_names()) if name in own}
        files = [(path, label) for name, label in labels.items() for path in _files_below(folder / name)]
        return [(path, label) for path, label in files if path.suffix.lower() in IMAGE_ENDINGS]

    @cached_property
    def _channels(self) -> int:
        parts = [part for part in PARTS if (self.folder / part).is_dir()]
        files = [path for part in parts for path, _ in self._samples(part)]
        return 1 if all(_in_threads(lambda path: _opened(path, is_grey), files)) else 3

    def _pixels(self, files: Sequence[Path]) -> Tensor:
        """Read the files as uint8 [N, C, H, W]."""
        width, height = (self._size, self._size) if self._size else _opened(files[0], lambda image: image.size)
        shape = (len(files), self._channels, height, width)
        size, available = torch.Size(shape).numel(), memory_left()
        if size > available:
            raise BadOption(
                f"the {len(files)} images of {self.folder} do not fit into memory",
                why=f"as {'x'.join(map(str, shape[1:]))} they take {size >> 20} MB, {available >> 20} MB are free",
                next="make them smaller with --image_size, or give fewer of them",
            )
        images = torch.empty(shape, dtype=torch.uint8)

        def read(index: int) -> None:
            image = _opened(files[index], eight_bit)
            if self._size:
                image = ImageOps.fit(image, (width, height), Image.Resampling.BILINEAR)
            if image.size != (width, height):
                raise BadOption(
                    f"the images of {self.folder} differ in size",
                    why=f"{files[0]} has {width}x{height} pixels, {files[index]} {image.width}x{image.height}",
                    next="make them all alike: --image_size 64",
                )
            images[index] = as_tensor(image.convert("L" if self._channels == 1 else "RGB"))

        _in_threads(read, range(len(files)))
        return images


def _files_below(folder: Path) -> Iterator[Path]:
    """Yield the files of a folder and those of the folders in it, in an order that every host has; none that is hidden,
    or behind a link to a folder that the link is in.

    Raises:
        DataMissing: a folder cannot be read.
    """

    def fail(error: OSError) -> None:
        with _naming(Path(error.filename), "a folder of images", ""):
            raise error

    found = []
    for below, folders, names in os.walk(folder, onerror=fail, followlinks=True):
        # Jupyter keeps copies of files in hidden folders, .ipynb_checkpoints.
        folders[:] = [name for name in folders if name[0] != "." and not _leads_around(Path(below, name))]
        found.append((below, sorted(name for name in names if name[0] != ".")))
    for below, names in sorted(found):
        yield from (Path(below, name) for name in names)


def _leads_around(folder: Path) -> bool:
    """Return whether a folder is a link to one that it is in, or to one around that."""
    return os.path.islink(folder) and any(one.resolve().is_relative_to(folder.resolve()) for one in folder.parents)


def _make_data_dir(data_dir: Path) -> None:
    with writing(data_dir, "--data_dir"):
        # Not its parents: a folder whose parent is not there is more likely mistyped than wanted.
        data_dir.mkdir(exist_ok=True)


def _in_threads(action: Callable[..., T], items: Sequence[object]) -> list[T]:
    """Run ``action`` on each item, on all cores: Pillow decodes without Python's lock."""
    with ThreadPoolExecutor(machine.usable_cores()) as pool:
        return list(pool.map(action, items))


def _opened(path: Path, action: Callable[[Image.Image], T]) -> T:
    with _naming(path, "an image", "fix or delete that file"), Image.open(path) as image:
        return action(image)


def _read_idx(path: Path, *, dimensions: int) -> Tensor:
    """Read a file of the MNIST family, compressed or not: unsigned bytes behind a header with their shape."""
    with _naming(path, "a data set", DOWNLOAD_AGAIN):
        content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        kind, *shape = struct.unpack_from(f">{1 + dimensions}I", content)
        if kind != IDX_OF_BYTES + dimensions:
            raise ValueError(f"it begins with {kind:#010x}")
        values = numpy.frombuffer(content, numpy.uint8, offset=4 + 4 * dimensions)
        return torch.from_numpy(values.reshape(shape).copy())


@contextmanager
def _naming(path: Path, kind: str, then: str) -> Iterator[None]:
    """Turn what a damaged file raises, which may be anything, into an error that names the file."""
    try:
        yield
    except (DdpManualError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, OSError) and error.errno:  # the system's: the file may be whole
            raise DataMissing(f"{path} cannot be read", why=str(error), next="fix that, then start again") from error
        raise DataCorrupt(
            f"{path} cannot be read as {kind}", why=f"{type(error).__name__}: {error}", next=then
        ) from error
