"""Points near a line, as tutorials keep their data in a module beside the script."""

import torch
from torch.utils.data import Dataset


class Line(Dataset):
    """Pairs of four numbers and their noisy sum.

    Args:
        broken: the number of a sample that cannot be read.
    """

    def __init__(self, count: int, broken: int | None = None) -> None:
        generator = torch.Generator().manual_seed(0)
        self.inputs = torch.randn(count, 4, generator=generator)
        self.targets = self.inputs.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=generator)
        self.broken = broken

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        if number == self.broken:
            raise ValueError(f"sample {number} is broken")
        return self.inputs[number], self.targets[number]
