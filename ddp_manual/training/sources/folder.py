"""``folder:PATH``: anyone's own images, in PATH/train and PATH/test with a folder for each class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import psutil
import torch
from torch import Tensor

from ddp_manual import launchers
from ddp_manual.errors import BadOption, DataCorrupt, DataMissing
from ddp_manual.training.data import Split
from ddp_manual.training.sources import PARTS, Source
from ddp_manual.training.sources.pixels import as_tensor, eight_bit, is_grey

if TYPE_CHECKING:
    from PIL.Image import Image

T = TypeVar("T")
ENDINGS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".ppm", ".pgm", ".tif", ".tiff"}


class Folder(Source):
    """Images as Pillow reads them; the folders of ``train``, sorted by name, are the classes.

    Grey if all images are, else in colour. Files of other kinds and hidden ones are passed over, and so
    are those in hidden folders.

    Args:
        image_size: resize to this many pixels along the shorter side and cut the middle out, a square. None: all images
            must have one size already.
    """

    preparing = "read"

    def __init__(self, path: Path, *, image_size: int | None = None) -> None:
        self.name = f"folder:{path}"
        self._path = path
        self._size = image_size
        self._grey: bool | None = None

    def check(self) -> None:
        for part in PARTS:
            self._listed(part)
        self._classes()

    def load(self, data_dir: Path, part: str) -> Split:
        self._listed(part)
        classes = self._classes()
        files, labels = self._files(part, classes)
        if self._grey is None:
            self._grey = all(self._modes(classes))
        images = self._read(files)
        return Split(images, torch.tensor(labels), classes)

    def _classes(self) -> tuple[str, ...]:
        """Of the training part, if there is one: a network can be tested without."""
        train, test = (self._path / part for part in PARTS)
        if not train.is_dir():
            return self._listed("test")
        classes = self._listed("train")
        strange = sorted(set(self._listed("test")) - set(classes)) if test.is_dir() else []
        if strange:
            raise DataCorrupt(
                f"{test} has a class that {train} has not: {', '.join(strange)}",
                why=f"the classes to learn are {', '.join(classes)}",
                next="give both the same class folders",
            )
        return classes

    def _listed(self, part: str) -> tuple[str, ...]:
        folder = self._path / part
        try:
            names = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and entry.name[0] != ".")
        except OSError as error:
            raise DataMissing(
                f"{folder} cannot be read as a folder of images",
                why=f"{error.strerror}: {error.filename}",
                next="give --dataset folder:PATH where PATH has train/ and test/, each with one folder per class",
            ) from None
        if not names:
            raise DataMissing(
                f"{folder} has no class folders",
                why="each class is a folder of images there, named as the class",
                next=f"put the images into folders such as {folder / 'cat'}",
            )
        return tuple(names)

    def _files(self, part: str, classes: Sequence[str]) -> tuple[list[Path], list[int]]:
        files: list[Path] = []
        labels: list[int] = []
        for label, name in enumerate(classes):
            folder = self._path / part / name
            if not folder.is_dir() and part == "test":
                continue  # a class of which no image is tested on
            found = sorted(path for path in folder.rglob("*") if _is_image(path, folder))
            if not found and part == "train":
                raise DataMissing(
                    f"{folder} has no images",
                    why=f"looked for files that end in {' '.join(sorted(ENDINGS))}",
                    next="put the images of that class there, or delete the folder",
                )
            files += found
            labels += [label] * len(found)
        if not files:
            raise DataMissing(
                f"{self._path / part} has no images",
                why=f"looked for files that end in {' '.join(sorted(ENDINGS))}",
                next="put some there, in folders named as the classes",
            )
        return files, labels

    def _modes(self, classes: Sequence[str]) -> Sequence[bool]:
        """Whether each image is grey, of both parts, so that they are read alike."""
        files = [path for part in PARTS if (self._path / part).is_dir() for path in self._files(part, classes)[0]]
        return _in_threads(lambda path: _opened(path, is_grey), files)

    def _read(self, files: Sequence[Path]) -> Tensor:
        """uint8 [N, C, H, W]."""
        channels = 1 if self._grey else 3
        width, height = (self._size, self._size) if self._size else _opened(files[0], lambda image: image.size)
        size = len(files) * channels * height * width
        available = psutil.virtual_memory().available
        if size > available:
            raise BadOption(
                f"the {len(files)} images of {self._path} do not fit into memory",
                why=f"as {channels}x{height}x{width} they take {size >> 20} MB, {available >> 20} MB are free; "
                "each rank keeps all of them",
                next="make them smaller with --image_size, or give fewer of them",
            )
        images = torch.empty((len(files), channels, height, width), dtype=torch.uint8)

        def read(index: int) -> None:
            images[index] = _opened(files[index], lambda image: self._pixels(image, files, index, (width, height)))

        _in_threads(read, range(len(files)))
        return images

    def _pixels(self, image: Image, files: Sequence[Path], index: int, size: tuple[int, int]) -> Tensor:
        from PIL import Image as pillow
        from PIL import ImageOps

        image = eight_bit(image)
        if self._size:
            image = ImageOps.fit(image, size, pillow.Resampling.BILINEAR)
        if image.size != size:
            raise BadOption(
                f"the images of {self._path} differ in size",
                why=f"{files[0]} has {size[0]}x{size[1]} pixels, {files[index]} {image.size[0]}x{image.size[1]}",
                next="make them all alike: --image_size 64",
            )
        return as_tensor(image.convert("L" if self._grey else "RGB"))


def _is_image(path: Path, folder: Path) -> bool:
    """By its name; notebooks keep copies of what they show in ``.ipynb_checkpoints``."""
    if path.suffix.lower() not in ENDINGS or any(part[0] == "." for part in path.relative_to(folder).parts):
        return False
    # A link that leads nowhere stays, to be named when it is opened.
    return path.is_file() or not path.exists()


def _in_threads(action: Callable[..., T], items: Sequence[object]) -> list[T]:
    """Pillow decodes outside of Python's lock."""
    with ThreadPoolExecutor(launchers.usable_cores()) as pool:
        return list(pool.map(action, items))


def _opened(path: Path, action: Callable[[Image], T]) -> T:
    from PIL import Image

    try:
        with Image.open(path) as image:
            return action(image)
    except PermissionError as error:
        raise DataMissing(
            f"{path} may not be read", why=str(error), next=f"make it readable for this user: chmod a+r {path}"
        ) from error
    except (OSError, ValueError, SyntaxError, EOFError, Image.DecompressionBombError) as error:
        raise DataCorrupt(
            f"{path} cannot be read as an image",
            why=f"{type(error).__name__}: {error}",
            next="mend or delete that file",
        ) from error
