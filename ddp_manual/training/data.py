"""Images in memory, and which of them a rank takes at each step.

A data set is two tensors, uint8 images and int64 labels. Batches are gathered by indexing them on the device, all
samples at once; nothing is decoded or transformed one sample at a time.
"""

from __future__ import annotations

import logging
import unicodedata
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.terminal import escaped
from ddp_manual.training.augment import Normalise
from ddp_manual.training.config import is_folder

logger = logging.getLogger(__name__)

# Of classes, in a message.
MOST_NAMED = 5
DIGITS = tuple("0123456789")
# Unicode's categories of control characters and of separators of lines and paragraphs.
UNSHOWABLE = {"Cc", "Zl", "Zp"}


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set.

    Args:
        images: uint8 [N, C, H, W]; C is 1 for grey images, 3 for red, green and blue.
        labels: int64 [N], each an index into ``classes``.
        classes: their names; a byte that is no UTF-8, as in a folder's name, becomes an escape.
        digest: of images and labels, where the ranks have compared them.

    Raises:
        BadOption: a class has a name that would break the line of a table.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]
    digest: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "classes", tuple(map(escaped, self.classes)))
        for name in self.classes:
            if any(unicodedata.category(letter) in UNSHOWABLE for letter in name):
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
        """The same images with labels that are indices into ``classes``, which are its own in another order."""
        places = {name: place for place, name in enumerate(classes)}
        renumbered = torch.tensor([places[name] for name in self.classes])
        return replace(self, labels=renumbered[self.labels], classes=classes)

    def to(self, device: torch.device) -> Split:
        return replace(self, images=self.images.to(device), labels=self.labels.to(device))


def check_shapes(dataset: str, train: Split, test: Split) -> None:
    """Raises BadOption if the images of the two parts of ``dataset`` differ in size or channels."""
    if train.shape == test.shape:
        return
    shapes = [f"{part} has {'x'.join(map(str, split.shape))}" for part, split in (("train", train), ("test", test))]
    raise BadOption(
        f"the images to train on and to test on differ in shape: {dataset}",
        why=", ".join(shapes),
        next="make them all alike" + (": --image_size 64" if is_folder(dataset) else ""),
    )


def warn_of_untrained(train: Split, test: Split) -> None:
    """Say which classes no image is there to train on; a number beyond the labels may have made them."""
    trained, tested = (split.labels.bincount(minlength=len(split.classes)) > 0 for split in (train, test))
    if trained.all():
        return
    logger.warning("no training image of %s (of %d)", _named(~trained, train.classes), len(train.classes))
    if (tested & ~trained).any():
        logger.warning("tested but never trained on: %s", _named(tested & ~trained, train.classes))
    elif trained[1:].all():
        logger.warning("if the labels are numbered from 1, count them from 0")


def _named(chosen: Tensor, classes: tuple[str, ...]) -> str:
    names = [classes[index] for index in chosen.nonzero().flatten().tolist()]
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return f"class{'es'[: 2 * (len(names) > 1)]} {', '.join(names[:MOST_NAMED])}{more}"


@dataclass(frozen=True, eq=False)
class Data:
    """What a run trains and tests on, and how its images are normalised."""

    train: Split
    test: Split
    normalise: Normalise


def epoch_order(count: int, *, seed: int, epoch: int) -> Tensor:
    """The order in which an epoch goes through its samples: int64 [count], a permutation drawn from seed and epoch."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(seed + epoch))


def share(order: Tensor, *, start: int, stop: int, rank: int, world_size: int) -> Tensor:
    """The samples ``rank`` takes in a step for which all ranks together take ``order[start:stop]``.

    Every world_size-th, as in torch.utils.data.DistributedSampler, but none twice: the shares differ by one sample, or
    are empty, where there is not enough for all. So however many ranks go on from ``stop``, none is seen again and none
    left out.
    """
    return order[start + rank : stop : world_size]


def check_batch_fits(count: int, batch_size: int, world_size: int) -> None:
    """Raises BadOption if a rank's share of ``count`` training samples does not fill one batch."""
    share = count // world_size
    if batch_size > share:
        raise BadOption(
            f"a batch of {batch_size} per rank is larger than a rank's share of the training set",
            why=f"{count} samples over {world_size} rank(s) are {share} for each",
            next=f"choose a --batch_size of at most {share}" if share else "start fewer ranks",
        )
