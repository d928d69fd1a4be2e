"""``synthetic``: digits drawn in code, and kept in ``data_dir`` once they are."""

from __future__ import annotations

import io
import tempfile
from pathlib import Path

import torch

from ddp_manual import run_folder
from ddp_manual.errors import DataCorrupt, writing
from ddp_manual.training.data import DIGITS, Split
from ddp_manual.training.sources import PARTS, Source, synthetic
from ddp_manual.training.sources.download import data_missing
from ddp_manual.training.sources.idx import unreadable

COUNTS = {"train": 60_000, "test": 10_000}
SEEDS = {"train": 1, "test": 2}


class Drawn(Source):
    """They look like MNIST's, so a network trained on one reads the other; mean and std are MNIST's too."""

    name = "synthetic"
    mean, std = (0.1307,), (0.3081,)
    preparing = "draw"

    def is_prepared(self, data_dir: Path) -> bool:
        return all(_file(data_dir, part).exists() for part in PARTS)

    def prepare(self, data_dir: Path) -> None:
        for part in PARTS:
            path = _file(data_dir, part)
            if not path.exists():
                _draw(part, path, data_dir)

    def load(self, data_dir: Path, part: str) -> Split:
        path = _file(data_dir, part)
        if not path.exists():
            raise data_missing(self.name, path.parent, [path.name], "it has not been drawn")
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


def _file(data_dir: Path, part: str) -> Path:
    return data_dir / "synthetic" / f"{part}-{COUNTS[part]}-v{synthetic.DRAWING_VERSION}.pt"


def _draw(part: str, path: Path, data_dir: Path) -> None:
    with writing(data_dir, "--data_dir"):  # which is found out before seconds are spent on drawing
        data_dir.mkdir(exist_ok=True)
        path.parent.mkdir(exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    images, labels = synthetic.draw_digits(COUNTS[part], seed=SEEDS[part])
    content = io.BytesIO()
    torch.save({"images": images, "labels": labels}, content)
    with writing(data_dir, "--data_dir"):
        run_folder.replace_file(path, content.getvalue())
