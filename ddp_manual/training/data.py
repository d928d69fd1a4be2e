"""Images in memory, and which of them a rank takes at each step.

A data set is two tensors, uint8 images and int64 labels. Batches are gathered by indexing them on the device, all
samples at once; nothing is decoded or transformed one sample at a time.
"""

from __future__ import annotations

import io
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_manual import rundir
from ddp_manual.errors import BadOption, DataCorrupt, DataMissing, writing
from ddp_manual.training import synthetic
from ddp_manual.training.idx import IMAGES_MAGIC, LABELS_MAGIC, read_idx, unreadable

DIGITS = tuple("0123456789")


@dataclass(frozen=True)
class Source:
    """What is known of a data set before it is read.

    Args:
        folder: its name in torchvision, which is also the folder below data_dir; None if it is drawn in code.
        mean, std: of the pixels of its training set, on the scale 0 to 1, as everybody rounds them.
    """

    folder: str | None
    classes: tuple[str, ...]
    mean: float
    std: float


SOURCES = {
    "mnist": Source("MNIST", DIGITS, 0.1307, 0.3081),
    "fashion-mnist": Source(
        "FashionMNIST",
        ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot"),
        0.2860,
        0.3530,
    ),
    # One character of each row of hiragana, in Latin letters.
    "kmnist": Source("KMNIST", ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo"), 0.1918, 0.3483),
    # The digits are drawn to look like MNIST's, so a network trained on one reads the other.
    "synthetic": Source(None, DIGITS, 0.1307, 0.3081),
}
PARTS = {"train": "train", "test": "t10k"}
SYNTHETIC_COUNTS = {"train": 60_000, "test": 10_000}
SYNTHETIC_SEEDS = {"train": 1, "test": 2}


@dataclass(frozen=True, eq=False)
class Split:
    """One part of a data set.

    Args:
        images: uint8 [N, 1, H, W].
        labels: int64 [N], each an index into ``classes``.
    """

    images: Tensor
    labels: Tensor
    classes: tuple[str, ...]

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: torch.device) -> Split:
        return Split(self.images.to(device), self.labels.to(device), self.classes)


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


def draw_shifts(count: int, most: int, *, seed: int, epoch: int) -> Tensor:
    """How far each sample is moved in an epoch: int64 [count, 2], rows and columns, each -most to most.

    Drawn for all samples, so a sample is moved alike whatever rank it falls to.
    """
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randint(-most, most + 1, (count, 2), generator=generator)


def shifted(images: Tensor, shifts: Tensor, *, most: int) -> Tensor:
    """Each image moved by its own whole pixels; what comes in from outside is black.

    Args:
        images: uint8 [N, C, H, W].
        shifts: int64 [N, 2], down and to the right, each -most to most. ``most`` is not read from them: that would
            wait for the device at every step.
    """
    count, _, height, width = images.shape
    padded = F.pad(images, (most, most, most, most))
    rows = torch.arange(height, device=images.device) + most - shifts[:, :1]
    columns = torch.arange(width, device=images.device) + most - shifts[:, 1:]
    which = torch.arange(count, device=images.device)[:, None, None]
    # [N, H, W, C]: an index between two slices goes to the front.
    return padded[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)


class Normalise:
    """uint8 images -> float32 of mean 0 and variance 1 over the training set, in channels-last layout."""

    def __init__(self, source: Source) -> None:
        self.mean, self.std = 255 * source.mean, 255 * source.std

    def __call__(self, images: Tensor) -> Tensor:
        scaled = images.float().sub_(self.mean).div_(self.std)
        return scaled.contiguous(memory_format=torch.channels_last)


def load(dataset: str, data_dir: Path, part: str) -> Split:
    """Read ``train`` or ``test`` from files that are there: see ``prepare``.

    Raises:
        DataMissing, DataCorrupt: a file is not there, or is not what it should be.
    """
    source = SOURCES[dataset]
    if source.folder is None:
        return _load_synthetic(data_dir, part)
    raw = data_dir / source.folder / "raw"
    images = read_idx(_existing(raw, f"{PARTS[part]}-images-idx3-ubyte", dataset), IMAGES_MAGIC)
    labels = read_idx(_existing(raw, f"{PARTS[part]}-labels-idx1-ubyte", dataset), LABELS_MAGIC)
    if len(images) != len(labels) or len(images) == 0:
        raise DataCorrupt(
            f"the {part} part of {dataset} has {len(images)} images and {len(labels)} labels",
            why=f"the files in {raw} do not belong together",
            next=f"delete {raw} and start again with a network, to download them anew",
        )
    if int(labels.max()) >= len(source.classes):
        raise DataCorrupt(
            f"the {part} part of {dataset} has a label {int(labels.max())}",
            why=f"{dataset} has {len(source.classes)} classes, 0 to {len(source.classes) - 1}",
            next=f"delete {raw} and start again with a network, to download it anew",
        )
    return Split(images.unsqueeze(1), labels.long(), source.classes)


def prepare(dataset: str, data_dir: Path) -> None:
    """Download or draw what is not there yet. One rank per host calls this; the others wait for it.

    Raises:
        DataMissing: the files are not there and cannot be downloaded. BadOption: data_dir cannot be written.
    """
    folder = SOURCES[dataset].folder
    if folder is None:
        for part in PARTS:
            _draw_synthetic(data_dir, part)
        return
    raw = data_dir / folder / "raw"
    missing = [name for name in _file_names() if _find(raw, name) is None]
    if missing:
        _download(dataset, folder, data_dir, raw, missing)


def is_prepared(dataset: str, data_dir: Path) -> bool:
    """Whether ``load`` would find every file."""
    folder = SOURCES[dataset].folder
    if folder is None:
        return all(_synthetic_file(data_dir, part).exists() for part in PARTS)
    return all(_find(data_dir / folder / "raw", name) for name in _file_names())


def _file_names() -> list[str]:
    return [f"{prefix}-{kind}" for prefix in PARTS.values() for kind in ("images-idx3-ubyte", "labels-idx1-ubyte")]


def _find(raw: Path, name: str) -> Path | None:
    """torchvision keeps the archive and what was in it; either will do."""
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.is_file()), None)


def _existing(raw: Path, name: str, dataset: str) -> Path:
    path = _find(raw, name)
    if path is None:
        raise data_missing(dataset, raw, [name], "it is not there")
    return path


def data_missing(dataset: str, raw: Path, names: list[str], reason: str) -> DataMissing:
    return DataMissing(
        f"{dataset} is not in {raw.absolute()}",
        why=f"looked for {', '.join(f'{name}[.gz]' for name in names)}\n{reason}",
        next="give the folder that has them as --data_dir, or use digits drawn in code: --dataset synthetic",
    )


def _download(dataset: str, folder: str, data_dir: Path, raw: Path, missing: list[str]) -> None:
    with writing(data_dir, "--data_dir"):
        # Not its parents: a folder whose parent is not there is more likely mistyped than wanted.
        data_dir.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=data_dir).close()
    # torchvision takes 1.6 s to import and is needed for nothing else here.
    from torchvision import datasets

    kind = getattr(datasets, folder)
    try:
        kind(root=str(data_dir), download=True)
    except (RuntimeError, OSError) as error:
        reason = "\n".join(line for line in str(error).splitlines() if line.strip())
        for folder_made in (raw, raw.parent):
            with suppress(OSError):
                folder_made.rmdir()
        raise data_missing(dataset, raw, missing, f"it could not be downloaded:\n{reason}") from error


def _synthetic_file(data_dir: Path, part: str) -> Path:
    name = f"{part}-{SYNTHETIC_COUNTS[part]}-v{synthetic.DRAWING_VERSION}.pt"
    return data_dir / "synthetic" / name


def _draw_synthetic(data_dir: Path, part: str) -> None:
    path = _synthetic_file(data_dir, part)
    if path.exists():
        return
    images, labels = synthetic.draw_digits(SYNTHETIC_COUNTS[part], seed=SYNTHETIC_SEEDS[part])
    with writing(data_dir, "--data_dir"):
        data_dir.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        content = io.BytesIO()
        torch.save({"images": images, "labels": labels}, content)
        rundir.replace_file(path, content.getvalue())


def _load_synthetic(data_dir: Path, part: str) -> Split:
    path = _synthetic_file(data_dir, part)
    if not path.exists():
        raise data_missing("synthetic", path.parent, [path.name], "it has not been drawn")
    try:
        content = torch.load(path, weights_only=True)
        images, labels = content["images"], content["labels"]
    except PermissionError as error:
        raise unreadable(path, error) from error
    except Exception as error:  # a damaged file raises whatever its first wrong byte leads to
        raise DataCorrupt(
            f"{path} cannot be read as a data set",
            why=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}",
            next=f"delete it, and the digits are drawn again: rm {path}",
        ) from error
    return Split(images.unsqueeze(1), labels, DIGITS)


def check_batch_fits(count: int, batch_size: int, world_size: int) -> None:
    """Raises BadOption if a rank's share of ``count`` training samples does not fill one batch."""
    share = count // world_size
    if batch_size > share:
        raise BadOption(
            f"a batch of {batch_size} per rank is larger than a rank's share of the training set",
            why=f"{count} samples over {world_size} rank(s) are {share} for each",
            next=f"choose a --batch_size of at most {share}" if share else "start fewer ranks",
        )
