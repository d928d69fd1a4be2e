"""A model and a data set of your own, for --model my_shapes:network and --dataset my_shapes:shapes.

PYTHONPATH=examples python run_multi_gpu_train.py --model my_shapes:network --dataset my_shapes:shapes --batch_size 50
"""

import torch
from torch import nn


def network(shape: tuple[int, int, int], classes: int) -> nn.Module:
    channels = shape[0]
    layers = [nn.Conv2d(channels, 8, 5, padding=2), nn.ReLU(), nn.AdaptiveMaxPool2d(4), nn.Flatten()]
    return nn.Sequential(*layers, nn.Linear(8 * 4 * 4, classes))


class Shapes(torch.utils.data.Dataset):
    """Bright bars on a dark background, vertical or horizontal."""

    classes = ("vertical", "horizontal")

    def __init__(self, count: int, seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.places = torch.randint(2, 14, (count,), generator=generator)

    def __len__(self) -> int:
        return len(self.places)

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        image, label, place = torch.zeros(1, 16, 16, dtype=torch.uint8), index % 2, int(self.places[index])
        image[0, :, place] = 255
        return (image.transpose(1, 2) if label else image), label


def shapes() -> tuple[Shapes, Shapes]:
    return Shapes(400, seed=1), Shapes(100, seed=2)
