"""The networks: images float32 [N, 1, 28, 28] in, class scores float32 [N, 10] out."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_manual.errors import BadOption


class ConvNet(nn.Module):
    """Two blocks of convolution 5x5, batch normalisation, ReLU and pooling, then a linear layer: 29,034 parameters."""

    def __init__(self, classes: int = 10) -> None:
        super().__init__()
        self.layer1 = _block(1, 16)
        self.layer2 = _block(16, 32)
        self.fc = nn.Linear(7 * 7 * 32, classes)

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.layer2(self.layer1(images))
        scores: Tensor = self.fc(features.flatten(1))
        return scores


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    # Max-pooling and ReLU commute, gradients included; pooling first leaves ReLU a quarter of the values.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
    )


class MLP(nn.Module):
    """One hidden layer without batch statistics: however a batch is split over ranks, it trains the same network.

    tanh, not ReLU: the ranks' sums differ by a rounding, which a smooth network keeps at 1e-7. With ReLU a single
    activation that fell on the other side of zero had grown to 1e-2 after 200 more steps.
    """

    def __init__(self, classes: int = 10, hidden: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(28 * 28, hidden)
        self.fc = nn.Linear(hidden, classes)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(torch.tanh(self.hidden(images.flatten(1))))
        return scores


MODELS: dict[str, Callable[[], nn.Module]] = {"convnet": ConvNet, "mlp": MLP}


def build(name: str, *, device: torch.device, seed: int, sync_bn: bool = False) -> nn.Module:
    """A network on its device, with the same weights for the same seed on every rank.

    Raises:
        BadOption: sync_bn on a device where torch has no synchronised batch normalisation.
    """
    if sync_bn and device.type == "cpu":
        raise BadOption(
            "--sync_bn needs GPUs",
            why="torch.nn.SyncBatchNorm is implemented for accelerators only; this rank trains on the CPU",
            next="leave --sync_bn out, or use --model mlp, which has no batch statistics",
        )
    torch.manual_seed(seed)
    model = MODELS[name]()
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    # Channels last is the layout oneDNN and cuDNN compute in: 1.3 to 1.45x the steps per second here.
    return model.to(device).to(memory_format=torch.channels_last)


def wrap(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """DDP around a model that is already on its device.

    Buffers are not broadcast at every step: batch normalisation does not read its running statistics while training,
    so it is enough that ``share_buffers`` copies rank 0's before they are read.
    """
    # torch 2.15 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    no_broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **no_broadcast,
    )


def share_buffers(model: nn.Module) -> None:
    """Give every rank rank 0's buffers, as DDP does at each step where it is asked to."""
    for buffer in model.buffers():
        torch.distributed.broadcast(buffer, src=0)
