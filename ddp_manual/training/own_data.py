"""``package.module:factory``: a data set that a function of the user's returns."""

from __future__ import annotations

import logging
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
from ddp_manual.training.data import PARTS, Source, Split, as_tensor, eight_bit

OPTION = "dataset"
# Labels without names may make this many classes more than there are images: few images are enough to try things.
MOST_WITHOUT_AN_IMAGE = 1000
# Images of a part: a transform that mirrors every second image leaves all of them unchanged once in 65,536 runs.
READ_AGAIN = 16

logger = logging.getLogger(__name__)


class OwnData(Source):
    """What ``factory(data_dir)`` returns: the training part and the test part.

    Each part is a pair of tensors or numpy arrays, images uint8 [N, C, H, W] (or grey, [N, H, W]) and labels int64 [N];
    or a dataset of ``torch.utils.data`` whose items are pairs: an image, either Pillow's or such a tensor, and a label.
    Its ``classes`` name the labels, which are numbers otherwise. The factory may leave out ``data_dir``, a
    pathlib.Path. The first rank of a host calls it before the others of that host do, since it may download.

    Args:
        seed: for random, numpy and torch before the factory is called, so that every rank and every start of a run gets
            the same data.
    """

    verb = "load"

    def __init__(self, name: str, data_dir: Path, classes: tuple[str, ...] | None, seed: int) -> None:
        super().__init__(name, data_dir, classes)
        self._seed = seed
        self._parts: dict[str, Split] = {}

    def read(self, part: str) -> Split:
        if not self._parts:
            self._parts = self._call()
        return self._parts[part]

    def _call(self) -> dict[str, Split]:
        own_code.factory(OPTION, self.name)  # what its module draws when it is imported is drawn before the seed
        _seed_generators(self._seed)
        made = own_code.call(OPTION, self.name, data_dir=self.folder)
        if not isinstance(made, Sequence) or len(made) != len(PARTS):
            size = f" of {len(made)}" if isinstance(made, Sequence) else ""
            raise self._wrong(f"a {type(made).__name__}{size}", "a pair: the training part and the test part")
        if _is_array(made[0]):
            raise self._wrong(
                "images and labels of one part",
                "two parts, the second to test on: (train_images, train_labels), (test_images, test_labels)",
            )
        parts = [self._part(part, value) for part, value in zip(PARTS, made, strict=True)]
        classes = self._class_names(parts)
        found = {part: Split(images, labels, classes) for part, (images, labels, _) in zip(PARTS, parts, strict=True)}
        # Last: so the second reading changes nothing, even if it draws from a generator of the user's own.
        with _generators_kept():
            varying = [part for part, value in zip(PARTS, made, strict=True) if _varies(value, found[part].images)]
        if varying and collectives.rank() == 0:
            logger.warning(
                "the %s images of %s differ when they are read again: random transforms are drawn once, and kept; "
                "--shift and --flip vary images anew in each epoch",
                *(" and ".join(varying), self.name),
            )
        return found

    def _class_names(self, parts: Sequence[tuple[Tensor, Tensor, tuple[str, ...]]]) -> tuple[str, ...]:
        count = max(1 + int(labels.max()) for _, labels, _ in parts)
        images = sum(len(images) for images, *_ in parts)
        named = list(dict.fromkeys(names for *_, names in parts if names))
        if len(named) > 1:
            raise self._wrong(
                f"parts whose classes differ: {' and '.join(', '.join(names) for names in named)}",
                "the same classes in the same order, since a label means the same in both parts",
            )
        if not named and count > images + MOST_WITHOUT_AN_IMAGE:
            raise self._wrong(
                f"labels up to {count - 1} for {images} images", "classes numbered from 0, without gaps, or their names"
            )
        names = named[0] if named else tuple(map(str, range(count)))
        if twice := sorted(name for name, times in Counter(names).items() if times > 1):
            raise self._wrong(f"classes with a name that occurs twice: {', '.join(twice)}", "a name for each class")
        if count > len(names):
            raise self._wrong(f"a label {count - 1}", f"labels below {len(names)}, the number of its classes")
        return names

    def _part(self, part: str, value: Any) -> tuple[Tensor, Tensor, tuple[str, ...]]:
        classes = getattr(value, "classes", None)
        if classes is not None and (isinstance(classes, str) or not isinstance(classes, Iterable)):
            raise self._wrong(f"a {type(classes).__name__} as the classes of its {part} part", "a name for each class")
        if _is_pair(value):
            try:
                images, labels = map(_as_tensor, value)
            except (TypeError, ValueError, RuntimeError) as error:  # strings, objects, lists of different lengths
                raise self._wrong(
                    f"a {part} part that is not tensors ({error})", "images and labels as numbers"
                ) from error
        elif hasattr(value, "__getitem__") and hasattr(value, "__len__"):
            images, labels = self._gathered(part, value)
        else:
            raise self._wrong(
                f"a {type(value).__name__} as its {part} part",
                "a pair of tensors or numpy arrays (images, labels), or a torch.utils.data dataset with a length",
            )
        images = images.unsqueeze(1) if images.dim() == 3 else images
        if images.dim() != 4 or images.shape[1] not in (1, 3) or images.dtype != torch.uint8:
            raise self._wrong(
                f"{part} images that are {_kind(images)}",
                "uint8 [N, 1 or 3, H, W], 0 to 255: they are normalised here",
                _conversion(images),
            )
        if labels.shape != images.shape[:1] or not _is_whole(labels):
            raise self._wrong(
                f"{part} labels that are {_kind(labels)}", f"whole numbers [{len(images)}], one for each image"
            )
        labels = labels.long()  # torch does not compare unsigned numbers
        if not len(images) or int(labels.min()) < 0:
            raise self._wrong(
                f"a {part} part without images" if not len(images) else f"a {part} label {int(labels.min())}",
                "at least one image, and labels from 0",
            )
        # A factory may have put them on a GPU; the ranks compare, measure and move them from the CPU.
        return images.cpu().contiguous(), labels.cpu(), tuple(map(str, () if classes is None else classes))

    def _gathered(self, part: str, dataset: Any) -> tuple[Tensor, Tensor]:
        images: list[Tensor] = []
        labels: list[int] = []
        for index in range(len(dataset)):
            where = f"item {index} of its {part} part"
            try:
                item = dataset[index]
            except Exception as error:  # the traceback, of the user's own code, does not say which item it was
                logger.warning("--%s %s: %s raised %r", OPTION, self.name, where, error)
                raise
            try:
                image, label = item
                labels.append(_number(label))
                pixels = _pixels(image)
            except (TypeError, ValueError, RuntimeError) as error:
                raise self._wrong(
                    f"a strange {where} ({error})", "pairs (image, label), the label a whole number"
                ) from error
            if not isinstance(pixels, Tensor):
                wanted = "an image of Pillow's, or a uint8 tensor or array"
                raise self._wrong(f"a {type(image).__name__} in {where}", wanted)
            if images and pixels.shape != images[0].shape:
                shapes = f"{list(images[0].shape)} and {list(pixels.shape)}"
                raise self._wrong(f"images of {shapes} in its {part} part", "images of one size")
            images.append(pixels)
        return torch.stack(images) if images else torch.empty(0, 1, 1, 1, dtype=torch.uint8), torch.tensor(labels)

    def _wrong(self, returned: str, wanted: str, then: str | None = None) -> BadOption:
        return BadOption(
            f"--{OPTION} {self.name} returned {returned}",
            why=f"expected: {wanted}",
            next=then or "mend the factory; docs/own-model-and-data.md has its signature and an example",
        )


def _varies(value: Any, images: Tensor) -> bool:
    """Whether the first items of a dataset differ from ``images`` when they are read again."""
    if _is_pair(value):
        return False
    try:
        again = (_pixels(value[index][0]).cpu().flatten() for index in range(min(READ_AGAIN, len(images))))
        return any(not torch.equal(pixels, image.flatten()) for pixels, image in zip(again, images, strict=False))
    except Exception:  # it gives each item away only once, and the images are here already
        logger.debug("a part cannot be read again", exc_info=True)
        return False


def _pixels(image: Any) -> Any:
    """Convert an image of Pillow's to uint8 [C, H, W] and an array to a tensor; return anything else as it is."""
    if _is_array(image):
        return _as_tensor(image)
    return as_tensor(eight_bit(image)) if hasattr(image, "convert") else image


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"


def _conversion(images: Tensor) -> str | None:
    """How the two most frequent mistakes are mended."""
    if images.is_floating_point():
        return "leave ToTensor and Normalize out, or use PILToTensor in place of ToTensor"
    if images.dim() == 4 and images.shape[-1] in (1, 3):
        return "put the channels first: images.permute(0, 3, 1, 2), or of a single image image.permute(2, 0, 1)"
    return None


def _number(label: Any) -> int:
    """Raise TypeError for a label that is not a whole number; ``int`` would truncate 0.5, and accept strings."""
    label = _as_tensor(label)
    if not _is_whole(label):
        raise TypeError(f"its label is {_kind(label)}")
    return int(label)


def _is_whole(labels: Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex() or labels.dtype == torch.bool)


def _is_pair(value: Any) -> bool:
    """Whether it is images and labels, and not a dataset."""
    return isinstance(value, (tuple, list)) and len(value) == 2 and _is_array(value[0])


def _is_array(value: Any) -> bool:
    numpy = sys.modules.get("numpy")  # where numpy is not imported, nothing is an array
    return isinstance(value, Tensor) or (numpy is not None and isinstance(value, numpy.ndarray))


def _as_tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor) and _is_array(value):
        # torch warns of memory that it may not write to, and refuses arrays with negative strides.
        value = value if value.flags.writeable and min(value.strides, default=0) >= 0 else value.copy()
    return torch.as_tensor(value)


def _seed_generators(seed: int) -> None:
    random.seed(seed)
    torch.manual_seed(seed)
    if numpy := sys.modules.get("numpy"):
        numpy.random.seed(seed % 2**32)  # it takes no larger seed


@contextmanager
def _generators_kept() -> Iterator[None]:
    """Restore the state of the generators after the body."""
    python, numpy = random.getstate(), sys.modules.get("numpy")
    numpys = numpy.random.get_state() if numpy else None
    with torch.random.fork_rng([]):
        yield
    random.setstate(python)
    if numpy and numpys:
        numpy.random.set_state(numpys)
