"""MNIST and its relatives, in the files and folders torchvision keeps them in."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from ddp_manual.errors import DataCorrupt, DataMissing
from ddp_manual.training.data import DIGITS, Split
from ddp_manual.training.sources import Source
from ddp_manual.training.sources.download import data_missing, download
from ddp_manual.training.sources.idx import IMAGES_MAGIC, LABELS_MAGIC, read_idx

PREFIXES = {"train": "train", "test": "t10k"}
FASHION = ("top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "boot")
# One character of each row of hiragana, in Latin letters.
HIRAGANA = ("o", "ki", "su", "tsu", "na", "ha", "ma", "ya", "re", "wo")
# Name -> its folder below data_dir, which is torchvision's name for it; classes; mean and standard deviation.
FAMILY: dict[str, tuple[str, tuple[str, ...], float, float]] = {
    "mnist": ("MNIST", DIGITS, 0.1307, 0.3081),
    "fashion-mnist": ("FashionMNIST", FASHION, 0.2860, 0.3530),
    "kmnist": ("KMNIST", HIRAGANA, 0.1918, 0.3483),
}


class IdxFiles(Source):
    """One of the family: 28x28 grey images of ten classes."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._folder, self._classes, mean, std = FAMILY[name]
        self.mean, self.std = (mean,), (std,)

    def is_prepared(self, data_dir: Path) -> bool:
        return not self._missing(data_dir)

    def prepare(self, data_dir: Path) -> None:
        if missing := self._missing(data_dir):
            download(self.name, self._folder, data_dir, into=self._raw(data_dir), missing=_shown(missing))

    def load(self, data_dir: Path, part: str) -> Split:
        raw = self._raw(data_dir)
        images = read_idx(self._existing(raw, f"{PREFIXES[part]}-images-idx3-ubyte"), IMAGES_MAGIC)
        labels = read_idx(self._existing(raw, f"{PREFIXES[part]}-labels-idx1-ubyte"), LABELS_MAGIC)
        if len(images) != len(labels) or len(images) == 0:
            raise DataCorrupt(
                f"the {part} part of {self.name} has {len(images)} images and {len(labels)} labels",
                why=f"the files in {raw} do not belong together",
                next=f"delete {raw} and start again with a network, to download them anew",
            )
        if int(labels.max()) >= len(self._classes):
            raise DataCorrupt(
                f"the {part} part of {self.name} has a label {int(labels.max())}",
                why=f"{self.name} has {len(self._classes)} classes, 0 to {len(self._classes) - 1}",
                next=f"delete {raw} and start again with a network, to download it anew",
            )
        return Split(images.unsqueeze(1), labels.long(), self._classes)

    def _raw(self, data_dir: Path) -> Path:
        return data_dir / self._folder / "raw"

    def _missing(self, data_dir: Path) -> list[str]:
        kinds = ("images-idx3-ubyte", "labels-idx1-ubyte")
        names = [f"{prefix}-{kind}" for prefix in PREFIXES.values() for kind in kinds]
        return [name for name in names if _find(self._raw(data_dir), name) is None]

    def _existing(self, raw: Path, name: str) -> Path:
        path = _find(raw, name)
        if path is None:
            raise self._not_there(raw, name)
        return path

    def _not_there(self, raw: Path, name: str) -> DataMissing:
        return data_missing(self.name, raw, _shown([name]), "it is not there")


def _find(raw: Path, name: str) -> Path | None:
    """torchvision keeps the archive and what was in it; either will do."""
    return next((path for path in (raw / name, raw / f"{name}.gz") if path.is_file()), None)


def _shown(names: Sequence[str]) -> list[str]:
    return [f"{name}[.gz]" for name in names]
