"""Where images come from: each data set is a Source, which brings its files to this machine and reads them."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from dataclasses import replace
from pathlib import Path

import torch

from ddp_manual.errors import BadOption
from ddp_manual.training.augment import Normalise
from ddp_manual.training.config import FOLDER_PREFIX, TrainConfig, is_folder
from ddp_manual.training.data import Split

logger = logging.getLogger(__name__)

PARTS = ("train", "test")


class Source(ABC):
    """A data set.

    Args:
        name: as ``--dataset`` has it.
        mean, std: of the pixels of its training set by channel, on the scale 0 to 1, as everybody rounds them; None
            where nobody has, and they are computed.
        preparing: the verb for what ``prepare`` does.
    """

    name: str
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    preparing = "download"

    def check(self) -> None:  # noqa: B027  # nothing to look at, of most
        """Look at what takes no time, before the other ranks are waited for.

        Raises:
            DataMissing, DataCorrupt: ``load`` would raise it too.
        """

    @abstractmethod
    def load(self, data_dir: Path, part: str) -> Split:
        """Read ``train`` or ``test`` from files that are there: see ``prepare``.

        Raises:
            DataMissing, DataCorrupt: a file is not there, or is not what it should be.
        """

    def is_prepared(self, data_dir: Path) -> bool:
        """Whether ``load`` would find every file."""
        return True

    def prepare(self, data_dir: Path) -> None:  # noqa: B027  # nothing to do for files that are the user's own
        """Download or draw what is not there yet. One rank per host calls this; the others wait for it.

        Raises:
            DataMissing: the files are not there and cannot be downloaded. BadOption: data_dir cannot be written.
        """

    def normalise(self, train: Split) -> Normalise:
        """To mean 0 and variance 1 over the training set."""
        if self.mean is not None and self.std is not None:
            return Normalise([255 * value for value in self.mean], [255 * value for value in self.std])
        values = torch.arange(256, dtype=torch.float64)
        means, stds = [], []
        for channel in range(train.images.shape[1]):
            # Counts are exact, so every rank gets the same numbers whatever its threads are.
            counts = torch.bincount(train.images[:, channel].flatten(), minlength=256).double()
            mean = (counts @ values) / counts.sum()
            means.append(float(mean))
            stds.append(float(((counts @ (values - mean).square()) / counts.sum()).sqrt()) or 1.0)
        return Normalise(means, stds)


class Named(Source):
    """Another data set whose classes have got other names."""

    def __init__(self, source: Source, classes: tuple[str, ...]) -> None:
        self._source = source
        self._classes = classes
        self.name, self.mean, self.std, self.preparing = source.name, source.mean, source.std, source.preparing

    def check(self) -> None:
        self._source.check()

    def is_prepared(self, data_dir: Path) -> bool:
        return self._source.is_prepared(data_dir)

    def prepare(self, data_dir: Path) -> None:
        self._source.prepare(data_dir)

    def load(self, data_dir: Path, part: str) -> Split:
        split = self._source.load(data_dir, part)
        if len(self._classes) != len(split.classes):
            raise BadOption(
                f"--classes gives {len(self._classes)} names, {self.name} has {len(split.classes)} classes",
                why=f"they are {', '.join(split.classes)}",
                next="give one name for each class, in this order, with commas between them",
            )
        return replace(split, classes=self._classes)


def source(
    dataset: str, *, image_size: int | None = None, classes: tuple[str, ...] | None = None, seed: int = 0
) -> Source:
    """The data set that ``--dataset`` names.

    Args:
        image_size: pixels; of a folder of images, see ``Folder``.
        classes: names to show in place of its own.
        seed: of what a factory of the user's draws.
    """
    from ddp_manual.training.own_data import OwnData
    from ddp_manual.training.sources.cifar import Cifar10
    from ddp_manual.training.sources.drawn import Drawn
    from ddp_manual.training.sources.folder import Folder
    from ddp_manual.training.sources.idx_files import FAMILY, IdxFiles

    found: Source
    if is_folder(dataset):
        found = Folder(Path(dataset.removeprefix(FOLDER_PREFIX)), image_size=image_size)
    elif dataset in FAMILY:
        found = IdxFiles(dataset)
    elif dataset == "synthetic":
        found = Drawn()
    elif dataset == "cifar10":
        found = Cifar10()
    else:
        found = OwnData(dataset, seed)
    return Named(found, classes) if classes else found


def source_of(config: TrainConfig) -> Source:
    return source(config.dataset, image_size=config.image_size, classes=config.class_names, seed=config.seed)


def prepared(config: TrainConfig) -> Source:
    """The data set of these options, prepared; for a process without others to share that work with.

    Raises:
        DataMissing, BadOption: see ``Source.prepare``.
    """
    found = source_of(config)
    prepare(found, Path(config.data_dir))
    return found


def prepare(found: Source, data_dir: Path) -> None:
    """Prepare a data set that is not yet, and say so.

    Raises:
        DataMissing, BadOption: see ``Source.prepare``.
    """
    if not found.is_prepared(data_dir):
        logger.info("%sing %s into %s", found.preparing, found.name, data_dir)
        found.prepare(data_dir)
