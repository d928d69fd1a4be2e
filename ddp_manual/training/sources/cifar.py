"""CIFAR-10, as torchvision downloads, checks and reads it."""

from __future__ import annotations

from pathlib import Path

import torch

from ddp_manual.errors import DataCorrupt
from ddp_manual.training.data import Split
from ddp_manual.training.sources import Source
from ddp_manual.training.sources.download import data_missing, download

FOLDER = "cifar-10-batches-py"


class Cifar10(Source):
    """60,000 colour images of 32x32 pixels, 10,000 of them to test on: https://www.cs.toronto.edu/~kriz/cifar.html."""

    name = "cifar10"
    mean, std = (0.4914, 0.4822, 0.4465), (0.2470, 0.2435, 0.2616)

    def is_prepared(self, data_dir: Path) -> bool:
        return not self._missing(data_dir)

    def prepare(self, data_dir: Path) -> None:
        if missing := self._missing(data_dir):
            download(self.name, "CIFAR10", data_dir, into=data_dir / FOLDER, missing=missing)

    def load(self, data_dir: Path, part: str) -> Split:
        from torchvision.datasets import CIFAR10

        if missing := self._missing(data_dir):
            raise data_missing(self.name, data_dir / FOLDER, missing, "they are not there")
        try:
            # Unpickles, but only files whose digests are those of the original.
            found = CIFAR10(root=str(data_dir), train=part == "train")
        except (RuntimeError, OSError) as error:
            raise DataCorrupt(
                f"cifar10 in {data_dir / FOLDER} cannot be read",
                why=str(error),
                next=f"delete {data_dir / FOLDER} and start again with a network, to download it anew",
            ) from error
        images = torch.from_numpy(found.data).permute(0, 3, 1, 2).contiguous()
        return Split(images, torch.tensor(found.targets), tuple(found.classes))

    def _missing(self, data_dir: Path) -> list[str]:
        names = ["batches.meta", *(f"data_batch_{number}" for number in range(1, 6)), "test_batch"]
        return [name for name in names if not (data_dir / FOLDER / name).is_file()]
