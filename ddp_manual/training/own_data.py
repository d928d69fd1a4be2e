"""``--dataset package.module:factory``: a data set that the user's own function returns, checked and made tensors."""

from __future__ import annotations

import logging
import random
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any

import numpy
import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.training import ddp, own_factory
from ddp_manual.training.data import PARTS, Source, Split
from ddp_manual.training.pictures import as_tensor, eight_bit

# Unnamed labels may make this many more classes than there are images: people try things with few images.
MOST_WITHOUT_AN_IMAGE = 1000
# Images that are read twice to find random transforms: mirroring one image in two misses all 16 in 1 of 65,536 runs.
READ_AGAIN = 16

logger = logging.getLogger(__name__)


class OwnData(Source):
    """What ``factory(data_dir)`` returns: the training part and the test part.

    Each part is a pair of tensors or numpy arrays, images uint8 [N, C, H, W] (or grey, [N, H, W]) and labels int64 [N];
    or a dataset of ``torch.utils.data`` whose items are pairs: an image, either Pillow's or such a tensor, and a label.
    A part's attribute ``classes`` names the labels; without it their names are numbers. The factory may leave out the
    argument ``data_dir``, a pathlib.Path. The first rank of a host calls it before the others: it may download.

    random, numpy and torch are seeded before the factory is called, so that every rank and every start of a run gets
    the same data.
    """

    verb = "load"

    def read(self, part: str) -> Split:
        return self._parts[part]

    @cached_property
    def _parts(self) -> dict[str, Split]:
        own_factory.factory("dataset", self.name)  # before seeding: importing the module may draw random numbers
        random.seed(self.config.seed)
        torch.manual_seed(self.config.seed)
        numpy.random.seed(self.config.seed % 2**32)  # numpy takes no larger seed
        made = own_factory.call("dataset", self.name, data_dir=self.folder)
        if not isinstance(made, Sequence) or len(made) != len(PARTS) or _is_array(made[0]):
            size = f" of {len(made)}" if isinstance(made, Sequence) else ""
            wanted = "two parts, the second to test on: (train_images, train_labels), (test_images, test_labels)"
            raise self._wrong(f"a {type(made).__name__}{size}", wanted)
        parts = {part: self._part(part, value) for part, value in zip(PARTS, made, strict=True)}
        classes = self._class_names(list(parts.values()))
        varying = [part for part, value in zip(PARTS, made, strict=True) if _varies(value, parts[part][0])]
        if varying and ddp.rank() == 0:
            logger.warning(
                "the %s images of %s differ when they are read again: random transforms are drawn once, and kept; "
                "--shift and --flip vary images anew in each epoch",
                *(" and ".join(varying), self.name),
            )
        return {part: Split(images, labels, classes) for part, (images, labels, _) in parts.items()}

    def _class_names(self, parts: Sequence[tuple[Tensor, Tensor, tuple[str, ...]]]) -> tuple[str, ...]:
        count = max(1 + int(labels.max()) for _, labels, _ in parts)
        images = sum(len(images) for images, *_ in parts)
        named = list(dict.fromkeys(names for *_, names in parts if names))
        if not named:
            if count > images + MOST_WITHOUT_AN_IMAGE:
                wanted = "classes numbered from 0, without gaps, or their names"
                raise self._wrong(f"labels up to {count - 1} for {images} images", wanted)
            return tuple(map(str, range(count)))
        names = named[0]
        if len(named) > 1 or len(set(names)) < len(names) or count > len(names):
            raise self._wrong(
                f"a label {count - 1} and the classes {' and '.join(', '.join(names) for names in named)}",
                "a name for each label, no name twice, and the same names in the same order for both parts",
            )
        return names

    def _part(self, part: str, value: Any) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        """Return the images, the labels and the names of the classes (none, if they have no names) of a part."""
        classes = getattr(value, "classes", None)
        classes = () if classes is None else classes
        if isinstance(classes, str) or not isinstance(classes, Iterable):
            raise self._wrong(f"a {type(classes).__name__} as the classes of its {part} part", "a name for each class")
        if _is_pair(value):
            try:
                images, labels = map(_as_tensor, value)
            except (TypeError, ValueError, RuntimeError) as error:  # strings, objects, lists of different lengths
                what = f"a {part} part that is not tensors ({error})"
                raise self._wrong(what, "images and labels as numbers") from error
        elif hasattr(value, "__getitem__") and hasattr(value, "__len__"):
            images, labels = self._gathered(part, value)
        else:
            raise self._wrong(
                f"a {type(value).__name__} as its {part} part",
                "a pair of tensors or numpy arrays (images, labels), or a torch.utils.data dataset with a length",
            )
        images = images.unsqueeze(1) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
            how = None  # advice for the two most frequent mistakes
            if images.is_floating_point():
                how = "leave ToTensor and Normalize out, or use PILToTensor in place of ToTensor"
            elif images.dim() == 4 and images.shape[-1] in (1, 3):
                how = "put the channels first: images.permute(0, 3, 1, 2), or of a single image image.permute(2, 0, 1)"
            wanted = "uint8 [N, 1 or 3, H, W], 0 to 255: they are normalised here"
            raise self._wrong(f"{part} images that are {_kind(images)}", wanted, how)
        if labels.shape != images.shape[:1] or not _is_whole(labels):
            wanted = f"whole numbers [{len(images)}], one for each image"
            raise self._wrong(f"{part} labels that are {_kind(labels)}", wanted)
        labels = labels.long()  # torch does not compare unsigned numbers
        if not len(images) or int(labels.min()) < 0:
            what = f"a {part} label {int(labels.min())}" if len(images) else f"a {part} part without images"
            raise self._wrong(what, "at least one image, and labels from 0")
        # A factory may have put the images on a GPU; the ranks compare, measure and move them from the CPU.
        return images.cpu().contiguous(), labels.cpu(), tuple(map(str, classes))

    def _gathered(self, part: str, dataset: Any) -> tuple[Tensor, Tensor]:
        images: list[Tensor] = []
        labels: list[int] = []
        for index in range(len(dataset)):
            where = f"item {index} of its {part} part"
            try:
                item = dataset[index]
            except Exception as error:  # the traceback of the user's own code does not say which item it was
                logger.warning("--dataset %s: %s raised %r", self.name, where, error)
                raise
            try:
                image, label = item
                label = _as_tensor(label)
                if not _is_whole(label):  # int() would truncate 0.5
                    raise TypeError(f"its label is {_kind(label)}")
                labels.append(int(label))
                images.append(_pixels(image))
                if images[-1].shape != images[0].shape:
                    raise ValueError(f"images of {list(images[0].shape)} and {list(images[-1].shape)}")
            except (TypeError, ValueError, RuntimeError) as error:
                wanted = "pairs of an image, all of one size (Pillow's, or uint8 tensors or arrays), and a whole number"
                raise self._wrong(f"a strange {where} ({error})", wanted) from error
        return torch.stack(images) if images else torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.tensor(labels)

    def _wrong(self, returned: str, wanted: str, next: str | None = None) -> BadOption:
        return own_factory.factory_error("dataset", self.name, f"returned {returned}", wanted, next)


def _varies(value: Any, images: Tensor) -> bool:
    """Tell whether the first items of a dataset differ from ``images`` when they are read again."""
    if _is_pair(value):
        return False
    try:
        again = (_pixels(value[index][0]).cpu().flatten() for index in range(min(READ_AGAIN, len(images))))
        return any(not torch.equal(pixels, image.flatten()) for pixels, image in zip(again, images, strict=False))
    except Exception:  # it may give each item only once; the images have been read already
        logger.debug("a part cannot be read again", exc_info=True)
        return False


def _pixels(image: Any) -> Tensor:
    """Return an image as a tensor: uint8 [C, H, W] if it is Pillow's; a tensor or an array keeps its form."""
    if not _is_array(image) and not hasattr(image, "convert"):
        raise TypeError(f"a {type(image).__name__} is no image")
    return _as_tensor(image) if _is_array(image) else as_tensor(eight_bit(image))


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _is_whole(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def _is_pair(value: Any) -> bool:
    """Tell whether ``value`` is a pair of images and labels, not a dataset."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and _is_array(value[0])


def _is_array(value: Any) -> bool:
    return isinstance(value, (Tensor, numpy.ndarray))


def _as_tensor(value: Any) -> Tensor:
    # torch warns of memory that it may not write to, and refuses arrays with negative strides.
    return torch.as_tensor(numpy.require(value, requirements=("C", "W")) if isinstance(value, numpy.ndarray) else value)
