"""Images in memory: what a data set is, and which of its images a rank takes at each step.

A data set is two tensors, uint8 images and int64 labels. A batch is gathered by indexing them on the device, all of
its samples at once; nothing is decoded or transformed one sample at a time.
"""

from __future__ import annotations

import logging
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.terminal import escaped
from ddp_manual.training.augment import Normalise
from ddp_manual.training.config import is_folder
from ddp_manual.training.data_cache import DataCache

if TYPE_CHECKING:
    from PIL.Image import Image

logger = logging.getLogger(__name__)

PARTS = ("train", "test")
DIGITS = tuple("0123456789")
MOST_CLASSES_NAMED = 5
# Unicode's categories of control characters, and of separators of lines and paragraphs.
UNPRINTABLE = {"Cc", "Zl", "Zp"}
SIXTEEN_BITS = {"I;16", "I;16B", "I;16L", "I;16N"}
GREY_MODES = {"1", "L", "LA", "I"} | SIXTEEN_BITS
# In these formats, pixels that older versions of Pillow read as 32 bits have 16.
WIDENED = {"PNG", "PPM"}


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set.

    Args:
        images: uint8 [N, C, H, W]; C is 1 for grey images, 3 for red, green and blue.
        labels: int64 [N], each an index into ``classes``.
        classes: their names; a byte that is not UTF-8, as in the name of a folder, becomes an escape.
        digest: see ``data_cache.digest_of``; empty if it has not been computed.

    Raises:
        BadOption: the name of a class would break the line of a table.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(map(escaped, self.classes)))
        for name in self.classes:
            if any(unicodedata.category(letter) in UNPRINTABLE for letter in name):
                raise BadOption(
                    f"a class is named {name!r}",
                    why="names of classes stand in tables, files and pictures, each on one line",
                    next="give that class another name",
                )

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def in_the_order_of(self, classes: tuple[str, ...]) -> Split:
        """Renumber the labels as indices into ``classes``: the same names in another order."""
        places = {name: place for place, name in enumerate(classes)}
        renumbered = torch.tensor([places[name] for name in self.classes])
        return replace(self, labels=renumbered[self.labels], classes=classes, digest="")

    def to(self, device: torch.device) -> Split:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Data:
    """What a run trains and tests on, and how its images are normalised."""

    train: Split
    test: Split
    normalise: Normalise


class Source(ABC):
    """A data set as ``--dataset`` names it: brings its images to this machine, and reads them once into a cache.

    Args:
        name: the value of ``--dataset``.
        folder: where its files are; the cache is beside them.
        classes: names to show instead of the data set's own.
    """

    mean: tuple[float, ...] | None = None
    """Of the training set's pixels by channel, on the scale 0 to 1, as everybody rounds it; None: it is computed."""
    std: tuple[float, ...] | None = None
    verb = "read"
    """What ``prepare`` does, for the line of a rank that waits for it."""

    def __init__(self, name: str, folder: Path, classes: tuple[str, ...] | None) -> None:
        self.name, self.folder, self._classes = name, folder, classes
        self._in_memory: dict[str, Split] = {}

    def check(self) -> None:  # noqa: B027  # most data sets have nothing to check
        """Check what takes no time, before the other ranks are waited for; raises what ``prepare`` would."""

    def fetch(self) -> None:  # noqa: B027  # a user's own files are there, or not
        """Download the files that are not there yet."""

    @abstractmethod
    def read(self, part: str) -> Split:
        """Read the images of ``part`` from the files themselves."""

    def cache(self, part: str) -> DataCache | None:
        """Return the cache for ``part`` of the files as they are now; None: it has none."""
        return None

    def prepare(self, parts: Sequence[str] = PARTS) -> None:
        """Fetch the files and fill the cache, as far as that has not been done; one rank of each host calls this.

        Raises:
            DataMissing, DataCorrupt: files are missing and cannot be downloaded, or are damaged.
            BadOption: a folder cannot be written, or the images do not fit together or into memory.
        """
        self.fetch()
        caches = {part: self.cache(part) for part in parts}
        missing = [part for part, cache in caches.items() if cache is None or cache.load() is None]
        if missing:
            logger.info("%sing %s", self.verb, self.name)
        for part in missing:
            split, cache = self.read(part), caches[part]
            if cache is None or not cache.save(split.images, split.labels, split.classes):
                self._in_memory[part] = split

    def load(self, part: str) -> Split:
        """Return ``train`` or ``test``, on the CPU; fast once it is prepared. Raises what ``prepare`` raises."""
        split = self._in_memory.get(part)
        if split is None:
            cache = self.cache(part)
            cached = cache.load() if cache else None
            split = Split(*cached) if cached else self.read(part)
        if self._classes is None:
            return split
        if len(self._classes) != len(split.classes):
            raise BadOption(
                f"--classes gives {len(self._classes)} names, {self.name} has {len(split.classes)} classes",
                why=f"they are {', '.join(split.classes)}",
                next="give one name for each class, in this order, with commas between them",
            )
        return replace(split, classes=self._classes)

    def normalise(self, train: Split) -> Normalise:
        """Return what maps the pixels of ``train`` to mean 0 and variance 1."""
        if self.mean is not None and self.std is not None:
            return Normalise([255 * value for value in self.mean], [255 * value for value in self.std])
        values = torch.arange(256, dtype=torch.float64)
        means, stds = [], []
        for channel in range(train.images.shape[1]):
            # Counts are exact, so every rank gets the same numbers however many threads it has.
            counts = torch.bincount(train.images[:, channel].flatten(), minlength=256).double()
            mean = (counts @ values) / counts.sum()
            means.append(float(mean))
            stds.append(float(((counts @ (values - mean).square()) / counts.sum()).sqrt()) or 1.0)
        return Normalise(means, stds)


def is_grey(image: Image) -> bool:
    return image.mode in GREY_MODES


def eight_bit(image: Image) -> Image:
    """Convert to mode L or RGB: 16-bit pixels keep the upper byte, and what is transparent is laid over black.

    Raises:
        ValueError: nobody knows how bright the numbers of its pixels are.
    """
    if image.mode in SIXTEEN_BITS or (image.mode == "I" and image.format in WIDENED):
        # convert("L") alone would make each number above 255 white.
        return image.convert("I").point(lambda value: value * (1 / 256)).convert("L")
    if image.mode in ("I", "F"):
        raise ValueError(f"pixels of mode {image.mode} have no known range: save them with 8 or 16 bits each")
    mode = "L" if is_grey(image) else "RGB"
    if image.mode in ("LA", "PA", "RGBA", "RGBa") or "transparency" in image.info:
        from PIL import Image as pillow

        # Black, like what --shift brings in from outside; convert() would show the colours that are hidden.
        opaque = pillow.new("RGBA", image.size, (0, 0, 0, 255))
        opaque.alpha_composite(image.convert("RGBA"))
        return opaque.convert(mode)
    return image.convert(mode)


def as_tensor(image: Image) -> Tensor:
    """Return uint8 [C, H, W] of an image in mode L or RGB."""
    width, height = image.size
    return torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8).view(height, width, -1).permute(2, 0, 1)


def check_shapes(dataset: str, train: Split, test: Split) -> None:
    """Raise BadOption if the images of the two parts of ``dataset`` differ in size or channels."""
    if train.shape == test.shape:
        return
    shapes = [f"{part} has {'x'.join(map(str, split.shape))}" for part, split in (("train", train), ("test", test))]
    raise BadOption(
        f"the images to train on and to test on differ in shape: {dataset}",
        why=", ".join(shapes),
        next="make them all alike" + (": --image_size 64" if is_folder(dataset) else ""),
    )


def warn_of_untrained(train: Split, test: Split) -> None:
    """Name the classes without a training image; a label that is too large may have made them."""
    trained, tested = (split.labels.bincount(minlength=len(split.classes)) > 0 for split in (train, test))
    if trained.all():
        return
    logger.warning("no training image of %s (of %d)", _named(~trained, train.classes), len(train.classes))
    if (tested & ~trained).any():
        logger.warning("tested but never trained on: %s", _named(tested & ~trained, train.classes))
    elif trained[1:].all():
        logger.warning("if the labels are numbered from 1, count them from 0")


def _named(chosen: Tensor, classes: Sequence[str]) -> str:
    names = [classes[index] for index in chosen.nonzero().flatten().tolist()]
    more = f" and {len(names) - MOST_CLASSES_NAMED} more" if len(names) > MOST_CLASSES_NAMED else ""
    return f"class{'es'[: 2 * (len(names) > 1)]} {', '.join(names[:MOST_CLASSES_NAMED])}{more}"


def epoch_order(count: int, *, seed: int, epoch: int) -> Tensor:
    """Return the order in which an epoch goes through its samples: int64 [count], drawn from seed and epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def share(order: Tensor, *, start: int, stop: int, rank: int, world_size: int) -> Tensor:
    """Return the samples that ``rank`` takes in a step in which all ranks together take ``order[start:stop]``.

    As in torch.utils.data.DistributedSampler, that is every world_size-th sample; but no sample is taken twice: where
    there are not enough for all ranks, the shares differ by one sample or are empty. So any number of ranks can go on
    from ``stop``, and no sample is repeated or left out.
    """
    return order[start + rank : stop : world_size]


def check_batch_fits(count: int, batch_size: int, world_size: int) -> None:
    """Raise BadOption if a rank's share of ``count`` training samples does not fill one batch."""
    share = count // world_size
    if batch_size > share:
        raise BadOption(
            f"a batch of {batch_size} per rank is larger than a rank's share of the training set",
            why=f"{count} samples over {world_size} rank(s) are {share} for each",
            next=f"choose a --batch_size of at most {share}" if share else "start fewer ranks",
        )
