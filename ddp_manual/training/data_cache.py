"""The cache that images are read into once: a file of plain tensors, which every rank maps into memory.

The ranks of a host then hold the images once, in the kernel's page cache, and a second start reads nothing else: it
does not import torchvision either (1.6 s). A file holds one part of a data set: a line of JSON with its own digest
before it, then the labels, then the images. Its name has a digest of the files that it was read from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import logging
import math
import mmap
import os
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ddp_manual import launchers, run_folder

logger = logging.getLogger(__name__)

Content = tuple[Tensor, Tensor, tuple[str, ...], str]
"""Images, labels, names of the classes, and the digest of the first two."""

FOLDER = ".ddp_manual_cache"
# Raised whenever the layout of the file changes, or what is read from the same files.
VERSION = 1
# Bytes: labels, which come first, begin at a multiple of this.
ALIGNMENT = 64
LONGEST_HEADER = 1 << 24
# Seconds after which a temporary file belongs to a process that was killed.
ABANDONED_AFTER = 24 * 3600.0


def digest_of_files(folder: Path, files: Iterable[Path], *others: object) -> str:
    """Return 16 hexadecimal digits that change when a file below ``folder`` is replaced, added or removed.

    Besides its name and its size, the times of a file count: when it was modified, and when its inode changed, since
    a file that is moved to the place of another brings along its own time of modification.

    Args:
        others: JSON values that count too.
    """
    found = []
    for file in files:
        with suppress(OSError):  # a link that leads nowhere is named when it is read
            stat = file.stat()
            found.append([str(file.relative_to(folder)), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns])
    return _digest(json.dumps([VERSION, others, sorted(found)]).encode())[:16]


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def digest_of(images: Tensor, labels: Tensor) -> str:
    """BLAKE2b of shapes and contents: 32 hexadecimal digits."""
    digest = hashlib.blake2b(digest_size=16)
    for tensor in (images, labels):
        digest.update(repr(tuple(tensor.shape)).encode())
        digest.update(tensor.contiguous().numpy().data)
    return digest.hexdigest()


class DataCache:
    """The cache of one part of a data set.

    Args:
        name: of the data set and the part, as it stands in the name of the file.
        beside: the folder with the data. If it cannot be written, the file is in the user's folder for caches.
        files: see ``digest_of_files``.
    """

    def __init__(self, name: str, beside: Path, files: str) -> None:
        self._name = name
        data = beside.absolute()
        folders = (data / FOLDER, launchers.cache_folder() / run_folder.in_a_file_name(str(data)))
        self._paths = [folder / f"{name}-{files}.cache" for folder in folders]

    def load(self) -> Content | None:
        """Map the file, if it is there and whole; name a damaged file and remove it.

        Every rank reads all of it once, to compare its digest, since a damaged file may be one that nobody could
        replace: 0.1 s for MNIST.
        """
        # The user's folder first: a damaged file where nobody may write would otherwise stay in the way.
        for path in reversed(self._paths):
            try:
                return _map(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            except OSError as error:  # of this rank at this moment: the file may be whole
                logger.warning("the cache %s cannot be read: %s", path, error)
            except ValueError as error:
                logger.warning("the cache %s is damaged and is made anew: %s", path, error)
                with suppress(OSError):
                    path.unlink()
        return None

    def save(self, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> bool:
        """Write the file beside the data or else into the user's folder; warn and return False if neither works."""
        failures = []
        for path in self._paths:
            try:
                if path.is_absolute():  # without a home the user's folder is not
                    path.parent.mkdir(parents=path != self._paths[0], exist_ok=True)
                    _write(path, images, labels, classes)
                    logger.debug("kept the %s images for later starts: %s", self._name, path)
                    self._tidy(path)
                    return True
            except OSError as error:
                failures.append(f"{path.parent}: {error.strerror}")
        logger.warning("each rank reads the %s images itself, as no cache can be written: %s", self._name, failures)
        return False

    def _tidy(self, kept: Path) -> None:
        """Remove the caches of files that have changed since, and what killed processes have left half-written.

        A file that a rank has mapped stays until the next time. On a network file system, unlike on a disk, the rank
        would lose its pages with the file, and a SIGBUS would end it.
        """
        half_written = [*kept.parent.glob(f".{self._name}-*.tmp"), *kept.parent.glob(f"..{self._name}-*.tmp")]
        for path in [*kept.parent.glob(f"{self._name}-*.cache"), *half_written]:
            with suppress(OSError), open(path, "r+b") as file:
                is_being_written = path.suffix == ".tmp" and path.stat().st_mtime > time.time() - ABANDONED_AFTER
                if path != kept and not is_being_written:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()


def _map(path: Path) -> Content:
    """Raises ValueError if the file is not what was written."""
    with open(path, "rb") as file:
        with suppress(OSError):  # some network file systems know no locks
            # The mapping keeps the file open, and so the lock, for as long as the tensors live.
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        line = file.readline(LONGEST_HEADER)
        digest, _, header = line.rstrip().partition(b" ")
        if digest != _digest(header).encode():
            raise ValueError("its first line is not the one that was written")
        known = json.loads(header)
        shape, start = known["shape"], len(line) + 8 * known["shape"][0]
        size = os.fstat(file.fileno()).st_size
        if size != start + math.prod(shape):
            raise ValueError(f"it has {size} bytes instead of {start + math.prod(shape)}")
        # A private mapping: a page is shared until a rank writes to it, which changes only that rank's copy.
        memory = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    labels = torch.frombuffer(memory, dtype=torch.int64, offset=len(line), count=shape[0])
    images = torch.frombuffer(memory, dtype=torch.uint8, offset=start).view(shape)
    if digest_of(images, labels) != known["digest"]:
        raise ValueError("its images or labels are not those that were written")
    return images, labels, tuple(known["classes"]), known["digest"]


def _write(path: Path, images: Tensor, labels: Tensor, classes: tuple[str, ...]) -> None:
    """Write the file under another name and link it to its own, unless another host was faster.

    That host's file was read from the same files, and stays if it is whole, since ranks may have mapped it.
    """
    header = {"shape": tuple(images.shape), "classes": classes, "digest": digest_of(images, labels)}
    line = json.dumps(header).encode()
    line = _digest(line).encode() + b" " + line
    line += b" " * (-(len(line) + 1) % ALIGNMENT) + b"\n"
    content: list[Any] = [line, *(tensor.contiguous().numpy().data.cast("B") for tensor in (labels, images))]
    temporary = path.with_name(f".{path.name}.{secrets.randbits(64)}.tmp")
    try:
        run_folder.replace_files({temporary: content})
        try:
            os.link(temporary, path)
        except FileExistsError:
            try:
                _map(path)
            except ValueError:
                os.replace(temporary, path)
        except OSError:  # a file system without hard links
            os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
