"""``package.module:factory``: a data set that a function of the user's returns."""

from __future__ import annotations

import logging
import operator
import random
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_manual.errors import BadOption
from ddp_manual.training import collectives, own_code
from ddp_manual.training.data import Split
from ddp_manual.training.sources import PARTS, Source
from ddp_manual.training.sources.pixels import as_tensor, eight_bit

OPTION = "dataset"
# Classes without an image that labels without names may make: a few images of very many classes are data to try with.
MOST_WITHOUT_AN_IMAGE = 1000
# Images of a part: a transform that mirrors every second one leaves all of them as they were once in 65,536 runs.
READ_AGAIN = 16

logger = logging.getLogger(__name__)


class OwnData(Source):
    """What ``factory(data_dir)`` returns: the training part and the test part.

    Each part is a pair of tensors or numpy arrays, images uint8 [N, C, H, W] (or [N, H, W], grey) and labels int64 [N];
    or a dataset of ``torch.utils.data`` whose items are pairs of an image, as Pillow has it or as such a tensor, and a
    label. Its ``classes`` name the labels; else they are numbers. The factory may leave ``data_dir``, a pathlib.Path,
    out.

    Args:
        seed: for random, numpy and torch before the factory is called, so that every rank and every start of a run gets
            the same data.
    """

    preparing = "load"

    def __init__(self, name: str, seed: int = 0) -> None:
        self.name = name
        self._seed = seed
        self._parts: dict[str, Split] = {}

    def is_prepared(self, data_dir: Path) -> bool:
        """Never known: one rank per host calls the factory before the others do, since it may download."""
        return bool(self._parts)

    def prepare(self, data_dir: Path) -> None:
        own_code.factory(OPTION, self.name)  # what its module draws while it is imported comes before
        _seed_generators(self._seed)
        made = own_code.call(OPTION, self.name, data_dir=data_dir)
        if not isinstance(made, Sequence) or len(made) != len(PARTS):
            size = f" of {len(made)}" if isinstance(made, Sequence) else ""
            raise self._wrong(f"a {type(made).__name__}{size}", "a pair: the training part and the test part")
        if _is_array(made[0]):
            raise self._wrong(
                "images and labels of one part",
                "two parts, the second to test on: (train_images, train_labels), (test_images, test_labels)",
            )
        parts = [self._split(part, value) for part, value in zip(PARTS, made, strict=True)]
        count = max(1 + int(labels.max()) for _, labels, _ in parts)
        named = list(dict.fromkeys(names for *_, names in parts if names))
        if len(named) > 1:
            raise self._wrong(
                f"parts whose classes differ: {' and '.join(', '.join(names) for names in named)}",
                "the same classes in the same order, since a label means the same in both parts",
            )
        images = sum(len(images) for images, *_ in parts)
        if not named and count > images + MOST_WITHOUT_AN_IMAGE:
            raise self._wrong(
                f"labels up to {count - 1} for {images} images", "classes numbered from 0, without gaps, or their names"
            )
        names = named[0] if named else tuple(map(str, range(count)))
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise self._wrong(f"classes with a name that occurs twice: {', '.join(twice)}", "a name for each class")
        if count > len(names):
            raise self._wrong(f"a label {count - 1}", f"labels below {len(names)}, the number of its classes")
        self._parts = {
            part: Split(images, labels, names) for part, (images, labels, _) in zip(PARTS, parts, strict=True)
        }
        # When all is read: what the second reading draws changes nothing, even of a generator that is the user's own.
        with _generators_kept():
            varying = [part for part, value in zip(PARTS, made, strict=True) if self._varies(part, value)]
        if varying and collectives.rank() == 0:
            logger.warning(
                "the %s images of %s differ when they are read again: random transforms are drawn once, and kept; "
                "--shift and --flip vary images anew in each epoch",
                *(" and ".join(varying), self.name),
            )

    def load(self, data_dir: Path, part: str) -> Split:
        if not self._parts:
            self.prepare(data_dir)
        return self._parts[part]

    def _split(self, part: str, value: Any) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        classes = getattr(value, "classes", None)
        if classes is not None and (isinstance(classes, str) or not isinstance(classes, Iterable)):
            raise self._wrong(f"a {type(classes).__name__} as the classes of its {part} part", "a name for each class")
        names = tuple(map(str, () if classes is None else classes))
        if _is_pair(value):
            images, labels = (self._tensor(part, one) for one in value)
        elif hasattr(value, "__getitem__") and hasattr(value, "__len__"):
            images, labels = self._gathered(part, value)
        else:
            raise self._wrong(
                f"a {type(value).__name__} as its {part} part",
                "a pair of tensors or numpy arrays (images, labels), or a torch.utils.data dataset with a length",
            )
        if images.dim() == 3:
            images = images.unsqueeze(1)
        if images.dim() != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
            raise self._wrong(
                f"{part} images that are {str(images.dtype).removeprefix('torch.')} {list(images.shape)}",
                "uint8 [N, 1 or 3, H, W], 0 to 255: they are normalised here",
                _converting(images),
            )
        if labels.shape != images.shape[:1] or not _is_whole(labels):
            raise self._wrong(
                f"{part} labels that are {str(labels.dtype).removeprefix('torch.')} {list(labels.shape)}",
                f"whole numbers [{len(images)}], one for each image",
            )
        labels = labels.long()  # torch compares no unsigned ones
        if not len(images) or int(labels.min()) < 0:
            raise self._wrong(
                f"a {part} part without images" if not len(images) else f"a {part} label {int(labels.min())}",
                "at least one image, and labels from 0",
            )
        # A factory may have put them on a GPU; ranks compare, measure and move them from the CPU.
        return images.cpu().contiguous(), labels.cpu(), names

    def _tensor(self, part: str, value: Any) -> Tensor:
        try:
            return _as_tensor(value)
        except (TypeError, ValueError, RuntimeError) as error:  # of texts, of objects, of lists of different lengths
            raise self._wrong(f"what is no tensor in its {part} part ({error})", "numbers") from error

    def _gathered(self, part: str, dataset: Any) -> tuple[Tensor, Tensor]:
        images: list[Tensor] = []
        labels: list[int] = []
        for index in range(len(dataset)):
            where = f"item {index} of its {part} part"
            item = self._item(part, dataset, index)
            try:
                image, label = item
                labels.append(_index(label))
                pixels = _pixels(image)
            except (TypeError, ValueError) as error:
                raise self._wrong(
                    f"a strange {where} ({error})", "pairs (image, label), the label a whole number"
                ) from error
            if not isinstance(pixels, Tensor):
                raise self._wrong(
                    f"a {type(image).__name__} in {where}", "an image of Pillow's, or a uint8 tensor or array"
                )
            if images and pixels.shape != images[0].shape:
                shapes = f"{list(images[0].shape)} and {list(pixels.shape)}"
                raise self._wrong(f"images of {shapes} in its {part} part", "images of one size")
            images.append(pixels)
        return torch.stack(images) if images else torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.tensor(labels)

    def _item(self, part: str, dataset: Any, index: int) -> Any:
        try:
            return dataset[index]
        except Exception as error:  # the user's own, whose traceback does not say which item it was
            logger.warning("--%s %s: item %d of its %s part raised %r", OPTION, self.name, index, part, error)
            raise

    def _varies(self, part: str, value: Any) -> bool:
        images = self._parts[part].images[:READ_AGAIN]
        if _is_pair(value):
            return False
        try:
            for index, before in enumerate(images):
                image, _ = value[index]
                if not torch.equal(_pixels(image).cpu().flatten(), before.flatten()):
                    return True
        except Exception:  # it gives each item away once, and nothing more is wanted of it
            logger.debug("the %s part of %s cannot be read again", part, self.name, exc_info=True)
        return False

    def _wrong(self, returned: str, wanted: str, next: str | None = None) -> BadOption:
        return BadOption(
            f"--{OPTION} {self.name} returned {returned}",
            why=f"wanted is {wanted}",
            next=next or "mend the factory; docs/own-model-and-data.md has its signature and an example",
        )


def _pixels(image: Any) -> Any:
    """An image of Pillow's as uint8 [C, H, W], an array as a tensor; anything else as it is."""
    if _is_array(image):
        return _as_tensor(image)
    return as_tensor(eight_bit(image)) if hasattr(image, "convert") else image


def _is_pair(value: Any) -> bool:
    """Of images and labels, not a dataset."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and _is_array(value[0])


def _converting(images: Tensor) -> str | None:
    """How the two that are met most become what is wanted."""
    if images.is_floating_point():
        return "leave ToTensor and Normalize out, or use PILToTensor in place of ToTensor"
    if images.dim() == 4 and images.shape[-1] in (1, 3):
        return "put the channels first: images.permute(0, 3, 1, 2), or of a single image image.permute(2, 0, 1)"
    return None


def _index(label: Any) -> int:
    """Raises TypeError where it is no whole number: ``int`` would cut a half off, and read texts."""
    if hasattr(label, "dtype"):  # a tensor, an array or a number of numpy's
        label = _as_tensor(label)
        if not _is_whole(label):
            raise TypeError(f"its label is {str(label.dtype).removeprefix('torch.')}")
    return operator.index(label)


def _is_whole(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # nobody has an array of one that is not imported
    return isinstance(value, Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor) and _is_array(value):
        # torch warns of memory that it may not write to, and refuses an array that is turned round.
        value = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
    return torch.as_tensor(value)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)  # it takes no larger one


@contextmanager
def _generators_kept() -> Iterator[None]:
    """What the body draws is drawn once more after it."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([]):
        yield
    random.setstate(python)
    if numpy and numpys:
        numpy.random.set_state(numpys)
