"""Normalise and vary images between memory and network: a whole batch at once, on its device."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from ddp_manual.training.options import TrainConfig


class Normalise:
    """Maps uint8 images [N, C, H, W] to float32, channels last: minus ``mean``, divided by ``std``.

    Args:
        mean, std: by channel, on the scale 0 to 255. The training set's pixels then have mean 0 and variance 1.
    """

    def __init__(self, mean: Sequence[float], std: Sequence[float]) -> None:
        self.mean, self.std = tuple(mean), tuple(std)
        self._on: dict[torch.device, tuple[Tensor, Tensor]] = {}

    def __call__(self, images: Tensor) -> Tensor:
        if images.device not in self._on:
            mean, std = (torch.tensor(values).view(-1, 1, 1).to(images.device) for values in (self.mean, self.std))
            self._on[images.device] = mean, std
        mean, std = self._on[images.device]
        return images.float().sub_(mean).div_(std).contiguous(memory_format=torch.channels_last)


def unit_scale(channels: int) -> Normalise:
    """Return a ``Normalise`` that maps pixels to the range 0 to 1, whatever the data set."""
    return Normalise([0.0] * channels, [255.0] * channels)


@dataclass(frozen=True, kw_only=True, eq=False)
class Augmentation:
    """How each training image is varied in one epoch.

    Args:
        shift: the largest value in ``shifts``; reading it from there would wait for the device at every step.
        shifts: int64 [N, 2], pixels down and to the right; the edges become black.
        flips: bool [N], whether an image is mirrored, left to right; None if no image is.
    """

    shift: int
    shifts: Tensor
    flips: Tensor | None

    @classmethod
    def draw(cls, config: TrainConfig, epoch: int, count: int, device: torch.device) -> Augmentation:
        """Draw for all samples of an epoch, so that each sample is varied alike, whichever rank takes it."""
        generator = torch.Generator().manual_seed(config.seed + epoch)
        shifts = torch.randint(-config.shift, config.shift + 1, (count, 2), generator=generator).to(device)
        flips = torch.randint(0, 2, (count,), generator=generator).bool().to(device) if config.flip else None
        return cls(shift=config.shift, shifts=shifts, flips=flips)

    def __call__(self, images: Tensor, samples: Tensor) -> Tensor:
        """Return ``images``, uint8 [n, C, H, W], varied as drawn for ``samples``, the n numbers of these samples."""
        if not self.shift and self.flips is None:
            return images
        height, width = images.shape[-2:]
        rows = torch.arange(height, device=images.device).expand(len(samples), height)
        columns = torch.arange(width, device=images.device).expand(len(samples), width)
        if self.shift:
            rows = rows - self.shifts[samples, :1]
            columns = columns - self.shifts[samples, 1:]
        if self.flips is not None:
            columns = torch.where(self.flips[samples][:, None], width - 1 - columns, columns)
        if self.shift:
            images = F.pad(images, (self.shift,) * 4)
            rows, columns = rows + self.shift, columns + self.shift
        which = torch.arange(len(samples), device=images.device)[:, None, None]
        # [n, H, W, C]: where a slice stands between indices, torch puts their dimensions first.
        return images[which, :, rows[:, :, None], columns[:, None, :]].permute(0, 3, 1, 2)
