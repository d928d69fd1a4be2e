"""Images in memory: what a data set is, the cache that ranks map it from, and which images a rank takes at each step.

A data set is two tensors, uint8 images and int64 labels. A batch is gathered by indexing them where they are
(``data_memory``), all of its samples at once; nothing is decoded or transformed one sample at a time.

The images are read into the cache once, a file of torch.save for each part of the data set, which every rank maps into
memory. The ranks of a host then share one copy, in the kernel's page cache, and a second start reads only the cache.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import secrets
import textwrap
import time
import unicodedata
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from ddp_manual import run_folder
from ddp_manual.environment import machine
from ddp_manual.errors import BadOption
from ddp_manual.memory_cgroup import memory_left
from ddp_manual.training.options import TrainConfig, is_folder
from ddp_manual.training.transforms import Normalise
from ddp_manual.wording import counted

logger = logging.getLogger(__name__)

PARTS = ("train", "test")
DIGITS = tuple("0123456789")
# Unicode's categories of control characters, of separators of lines and paragraphs, and of bytes that are not UTF-8.
UNPRINTABLE = {"Cc", "Zl", "Zp", "Cs"}
CACHE_FOLDER = ".ddp_manual_cache"
# Raise it whenever the layout of a cache changes, or other images are read from the same files.
CACHE_VERSION = 2
# Seconds until the cache of earlier files is removed. Ranks of another run may have mapped it: on a network file
# system, unlike on a disk, a rank loses its mapped pages together with the file, and SIGBUS ends the rank.
OUTDATED_AFTER = 7 * 24 * 3600.0


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set.

    Args:
        images: uint8 [N, C, H, W]; C is 1 for grey images, 3 for red, green and blue.
        labels: int64 [N], each an index into ``classes``.
        classes: the names of the classes; characters that break the line of a table or are not UTF-8 are escaped.
        digest: see ``digest_of``; computed where it is not given, of images on the CPU.
        target: where batches are copied to if the images stay in host memory; None: batches stay where the images are.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    digest: str = ""
    target: torch.device | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple("".join(map(_printable, name)) for name in self.classes))
        object.__setattr__(self, "digest", self.digest or digest_of(self.images, self.labels))

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def shape(self) -> tuple[int, int, int]:
        """Channels, height and width of an image."""
        channels, height, width = self.images.shape[1:]
        return channels, height, width

    def in_the_order_of(self, classes: tuple[str, ...]) -> Split:
        """Return the split with labels that are indices into ``classes``: the same names in another order."""
        places = {name: place for place, name in enumerate(classes)}
        renumbered = torch.tensor([places[name] for name in self.classes])
        return replace(self, labels=renumbered[self.labels], classes=classes, digest="")

    @property
    def nbytes(self) -> int:
        """How many bytes the images and labels take."""
        return self.images.nbytes + self.labels.nbytes

    @property
    def device(self) -> torch.device:
        """The device of its batches."""
        return self.target or self.labels.device

    def batch(self, samples: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return the images, labels and numbers of ``samples``, all on ``device``. ``samples`` are on the device of
        the images.

        A copy to a GPU may still run while the next batch is gathered: torch reuses pinned memory only after the copy.
        """
        if self.target is None:
            return self.images[samples], self.labels[samples], samples
        pin = self.target.type == "cuda"
        pinned = [
            torch.empty((len(samples), *tensor.shape[1:]), dtype=tensor.dtype, pin_memory=pin)
            for tensor in (self.images, self.labels, samples)
        ]
        torch.index_select(self.images, 0, samples, out=pinned[0])
        torch.index_select(self.labels, 0, samples, out=pinned[1])
        pinned[2].copy_(samples)
        images, labels, numbers = (tensor.to(self.target, non_blocking=True) for tensor in pinned)
        return images, labels, numbers

    def to(self, device: torch.device) -> Split:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device), target=None)


def _printable(letter: str) -> str:
    return ascii(letter)[1:-1] if unicodedata.category(letter) in UNPRINTABLE else letter


@dataclass(frozen=True, eq=False)
class Data:
    """What a run trains and tests on, and how its images are normalised."""

    train: Split
    test: Split
    normalise: Normalise


class Source(ABC):
    """A data set as ``--dataset`` names it: brings its images to this machine, and reads them once into a cache.

    Its files are in ``folder``, and the cache is beside them.
    """

    mean: tuple[float, ...] | None = None
    """The mean of the training set's pixels by channel, 0 to 1, rounded as is usual; None: it is computed."""
    std: tuple[float, ...] | None = None
    verb = "read"
    """What ``prepare`` does, as a verb: for the log, and for ranks that wait for it."""

    def __init__(self, config: TrainConfig) -> None:
        self.config, self.name, self.folder = config, config.dataset, Path(config.data_dir)
        self._in_memory: dict[str, Split] = {}

    def check(self) -> None:  # noqa: B027  # most data sets have nothing to check
        """Check what takes no time, before the ranks meet; raise what ``prepare`` would raise."""

    def fetch(self) -> None:  # noqa: B027  # a user's own files are there, or not
        """Download the files that are not there yet."""

    @abstractmethod
    def read(self, part: str) -> Split:
        """Read the images of ``part`` from the files themselves."""

    def cache(self, part: str) -> DataCache | None:
        """Return the cache for ``part`` of the files as they are now; None: this data set has no cache."""
        return None

    def prepare(self, parts: Sequence[str] = PARTS, *, ranks: int = 1) -> None:
        """Fetch the files and fill the cache, as far as that has not been done; one rank of each host calls this.

        Args:
            ranks: how many ranks of this host load the images afterwards.

        Raises:
            DataMissing, DataCorrupt: files are missing and cannot be downloaded, or are damaged.
            BadOption: a folder cannot be written, or the images do not fit together or into memory.
        """
        self.fetch()
        caches = {part: self.cache(part) for part in parts}
        missing = {part: cache for part, cache in caches.items() if cache is None or cache.load() is None}
        if missing:
            logger.info("%sing %s", self.verb, self.name)
        for part, cache in missing.items():
            split = self.read(part)
            if cache is None or not cache.save(split):
                self._in_memory[part] = split
        # What each rank reads for itself, because its cache could not be written.
        size = sum(split.nbytes for part, split in self._in_memory.items() if self.cache(part) is not None)
        available = memory_left()
        if (ranks - 1) * size > available:
            raise BadOption(
                f"the images of {self.name} do not fit into memory once for each of the {ranks} ranks on "
                f"{machine.host_name()}",
                why=f"no cache can be written, which the ranks would share; each copy takes {size >> 20} MB, "
                f"{available >> 20} MB are free",
                next="start the ranks as a user who may write beside the data or into a cache folder (see the warning "
                "above), or start fewer ranks on this host",
            )

    def load(self, part: str) -> Split:
        """Return ``train`` or ``test``, on the CPU; fast once it is prepared. Raises what ``prepare`` raises."""
        split = self._in_memory.get(part)
        if split is None:
            cache = self.cache(part)
            split = (cache.load() if cache else None) or self.read(part)
        names = self.config.class_names
        if names is None:
            return split
        if len(names) != len(split.classes):
            raise BadOption(
                f"--classes gives {counted(len(names), 'name')}, {self.name} has {len(split.classes)} classes",
                why=f"they are {', '.join(split.classes)}",
                next="give one name for each class, in this order, with commas between them",
            )
        return replace(split, classes=names)

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


class DataCache:
    """The cache of one part of a data set.

    Args:
        name: the data set and the part, as in the name of the file.
        beside: the folder with the data. If that cannot be written, the cache is in the user's folder for caches.
        files: see ``digest_of_files``.
    """

    def __init__(self, name: str, beside: Path, files: str) -> None:
        self._name = name
        data = beside.absolute()
        folders = (data / CACHE_FOLDER, machine.cache_folder() / run_folder.in_a_file_name(str(data)))
        self._paths = [folder / f"{name}-{files}.cache" for folder in folders]

    def load(self) -> Split | None:
        """Return the split, mapped from the file, if that is there and whole; warn of a damaged file and remove it.

        Every rank reads the whole file once, to verify its digest (0.1 s for MNIST): a damaged file may still be
        there because no rank was allowed to remove it.
        """
        # The user's folder first: otherwise a damaged file beside the data, where nobody may write, hides it.
        for path in reversed(self._paths):
            try:
                split = _map(path)
                with suppress(OSError):
                    os.utime(path)  # see _remove_outdated
                return split
            except (FileNotFoundError, NotADirectoryError):
                continue
            except (OSError, MemoryError) as error:  # a problem of this rank now: the file may be whole
                logger.warning("the cache %s cannot be read: %s", path, error)
            except Damaged as error:
                logger.warning("the cache %s is damaged and is made anew: %s", path, error)
                with suppress(OSError):
                    path.unlink()
        return None

    def save(self, split: Split) -> bool:
        """Write the file beside the data or in the user's folder; warn and return False if neither works."""
        failures = []
        for path in self._paths:
            try:
                if path.is_absolute():  # without a home directory the user's folder is not
                    path.parent.mkdir(parents=path != self._paths[0], exist_ok=True)
                    _write(path, split)
                    logger.debug("kept the %s images for later starts: %s", self._name, path)
                    self._remove_outdated(path)
                    return True
            except (OSError, RuntimeError) as error:  # both mean a full disk, depending on what torch was writing
                failures.append(f"{path.parent}: {error}")
        logger.warning("each rank reads the %s images itself, as no cache can be written: %s", self._name, failures)
        return False

    def _remove_outdated(self, current: Path) -> None:
        """Remove caches of earlier data files, and files that killed processes left half-written, a week after the last
        start that used them: see OUTDATED_AFTER."""
        for name in (f"{self._name}-*.cache", f".{self._name}-*.tmp"):
            for path in current.parent.glob(name):
                with suppress(OSError):
                    if path != current and path.stat().st_mtime < time.time() - OUTDATED_AFTER:
                        path.unlink()


class Damaged(Exception):
    """A cache file has other content than was written."""


def _map(path: Path) -> Split:
    """Map a cache into memory, privately: ranks share a page until one of them writes to it and gets its own copy."""
    with open(path, "rb"):
        pass  # raises the system's own errors, which torch would turn into others
    try:
        content = torch.load(path, mmap=True, weights_only=True)
        split = Split(content["images"], content["labels"], content["classes"])
        written = content["digest"], content["digest_of_classes"]
    except MemoryError:
        raise
    except Exception as error:  # torch.load raises many kinds, depending on the first wrong byte
        if "unable to mmap" in str(error):
            raise MemoryError(str(error)) from None
        raise Damaged(textwrap.shorten(str(error), 200)) from None
    if written != (split.digest, digest_of_classes(split)):
        raise Damaged("its images, labels or classes are not those that were written")
    return split


def digest_of_classes(split: Split) -> str:
    return hashlib.blake2b(json.dumps(split.classes).encode(), digest_size=16).hexdigest()


def _write(path: Path, split: Split) -> None:
    """Write a cache under a temporary name and link it to its final name, unless another host was faster.

    That host's cache has the same images. If it is whole it stays, because ranks may have mapped it.
    """
    digests = {"digest": split.digest, "digest_of_classes": digest_of_classes(split)}
    content = {"images": split.images.contiguous(), "labels": split.labels, "classes": split.classes, **digests}
    temporary = path.with_name(f".{path.name}.{secrets.randbits(64)}.tmp")
    try:
        with open(temporary, "wb") as file:
            torch.save(content, file)
        try:
            os.link(temporary, path)
        except FileExistsError:
            try:
                _map(path)
            except Damaged:
                os.replace(temporary, path)
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def digest_of_files(folder: Path, files: Iterable[Path], *others: object) -> str:
    """Return 16 hexadecimal digits that change when a file below ``folder`` is replaced, added or removed.

    Besides its name and its size, the times of a file count: when it was modified, and when its inode changed, since
    a file that is moved to the place of another brings along its own time of modification.

    Args:
        others: JSON values that the digest covers too.
    """
    found = []
    for file in files:
        with suppress(OSError):  # a broken link is reported when it is read
            stat = file.stat()
            found.append([str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    content = json.dumps([CACHE_VERSION, others, sorted(found)]).encode()
    return hashlib.blake2b(content, digest_size=8).hexdigest()


def digest_of(images: Tensor, labels: Tensor) -> str:
    """Return the BLAKE2b digest of shapes and contents: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (images, labels):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


def check_shapes(dataset: str, train: Split, test: Split) -> None:
    """Raise BadOption if the images of the two parts of ``dataset`` differ in size or channels."""
    if train.shape != test.shape:
        shapes = [f"{part} has {'x'.join(map(str, split.shape))}" for part, split in (("train", train), ("test", test))]
        raise BadOption(
            f"the images to train on and to test on differ in shape: {dataset}",
            why=", ".join(shapes),
            next="make them all alike" + (": --image_size 64" if is_folder(dataset) else ""),
        )


def warn_of_untrained(train: Split) -> None:
    """Warn of the classes that have no training image; one label that is too large makes many such classes."""
    trained = train.labels.bincount(minlength=len(train.classes)) > 0
    if not trained.all():
        names = [train.classes[index] for index in (~trained).nonzero().flatten().tolist()]
        hint = "; if the labels are numbered from 1, count them from 0" if trained[1:].all() else ""
        named = textwrap.shorten(", ".join(names), 100)
        logger.warning("no training image of %d of the %d classes: %s%s", len(names), len(trained), named, hint)
