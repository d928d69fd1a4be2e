"""The networks: images float32 [N, C, H, W] in, class scores float32 [N, classes] out.

Each is an ``nn.Sequential``, which runs its layers in the order in which they are assigned.
"""

from __future__ import annotations

import torch
from torch import nn

from ddp_manual.errors import BadOption
from ddp_manual.training import own_model

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
MNIST: Shape = (1, 28, 28)


class ConvNet(nn.Sequential):
    """Two blocks of convolution 5x5, batch normalisation, ReLU and pooling, then a linear layer.

    29,034 parameters on MNIST.
    """

    smallest = 4

    def __init__(self, shape: Shape = MNIST, classes: int = 10) -> None:
        channels, height, width = shape
        super().__init__()
        self.layer1 = _block(channels, 16)
        self.layer2 = _block(16, 32)
        self.flatten = nn.Flatten()
        self.fc = nn.Linear((height // 4) * (width // 4) * 32, classes)


def _block(channels_in: int, channels_out: int) -> nn.Sequential:
    # Max-pooling and ReLU commute, gradients included; pooling first leaves ReLU a quarter of the values.
    return nn.Sequential(
        nn.Conv2d(channels_in, channels_out, kernel_size=5, padding=2),
        nn.BatchNorm2d(channels_out),
        nn.MaxPool2d(2),
        nn.ReLU(inplace=True),
    )


class MLP(nn.Sequential):
    """One hidden layer without batch statistics: however a batch is split over ranks, it trains the same network.

    tanh, not ReLU: the ranks' sums differ by a rounding, which a smooth network keeps at 1e-7. With ReLU a single
    activation that fell on the other side of zero had grown to 1e-2 after 200 more steps.
    """

    smallest = 1

    def __init__(self, shape: Shape = MNIST, classes: int = 10, hidden: int = 128) -> None:
        channels, height, width = shape
        super().__init__()
        self.flatten = nn.Flatten()
        self.hidden = nn.Linear(channels * height * width, hidden)
        self.tanh = nn.Tanh()
        self.fc = nn.Linear(hidden, classes)


class Classic(nn.Sequential):
    """The network of most MNIST tutorials: two convolutions 3x3, pooling, dropout, two linear layers, log-softmax.

    1,199,882 parameters on MNIST. Its scores are logarithms of probabilities already; the cross-entropy takes the
    log-softmax of them once more, which changes nothing: it is the negative log-likelihood those tutorials train with.
    """

    smallest = 6

    def __init__(self, shape: Shape = MNIST, classes: int = 10) -> None:
        channels, height, width = shape
        super().__init__()
        self.conv1 = nn.Conv2d(channels, 32, kernel_size=3)
        self.relu1 = nn.ReLU()
        self.conv2 = nn.Conv2d(32, 64, kernel_size=3)
        self.pool = nn.MaxPool2d(2)  # max-pooling and ReLU commute
        self.relu2 = nn.ReLU()
        self.dropout1 = nn.Dropout(0.25)
        self.flatten = nn.Flatten()
        self.fc1 = nn.Linear(64 * ((height - 4) // 2) * ((width - 4) // 2), 128)
        self.relu3 = nn.ReLU()
        self.dropout2 = nn.Dropout(0.5)
        self.fc2 = nn.Linear(128, classes)
        self.log_softmax = nn.LogSoftmax(dim=1)


class CifarCNN(nn.Sequential):
    """Like VGG: three pairs of convolutions 3x3 with 64, 128 and 256 channels, each pooled, then two linear layers.

    Batch normalisation and ReLU follow each convolution. 3,249,098 parameters on CIFAR-10.
    """

    smallest = 8

    def __init__(self, shape: Shape = (3, 32, 32), classes: int = 10) -> None:
        super().__init__()
        channels, height, width = shape
        features: list[nn.Module] = []
        for channels_out in (64, 128, 256):
            features += [*_convolution(channels, channels_out), *_convolution(channels_out, channels_out)]
            features.append(nn.MaxPool2d(2))
            channels = channels_out
        self.features = nn.Sequential(*features)
        self.flatten = nn.Flatten()
        self.classifier = nn.Sequential(
            nn.Linear(256 * (height // 8) * (width // 8), 512),
            nn.ReLU(inplace=True),
            nn.Dropout(0.5),
            nn.Linear(512, classes),
        )


def _convolution(channels_in: int, channels_out: int) -> list[nn.Module]:
    convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
    return [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]


MODELS: dict[str, type[ConvNet | MLP | Classic | CifarCNN]] = {
    "convnet": ConvNet,
    "mlp": MLP,
    "classic": Classic,
    "cifar-cnn": CifarCNN,
}


def build(
    name: str, *, device: torch.device, seed: int, shape: Shape = MNIST, classes: int = 10, sync_bn: bool = False
) -> nn.Module:
    """Build a network on its device, with the same weights for the same seed on every rank.

    Args:
        name: of one of ``MODELS``, or ``package.module:factory``, see ``docs/own-model-and-data.md``.
        shape: channels, height and width of its images.

    Raises:
        BadOption: the images are too small for it; it is no network for these images and classes; sync_bn on a device
            where torch has no synchronised batch normalisation.
    """
    if sync_bn and device.type == "cpu":
        raise BadOption(
            "--sync_bn needs GPUs",
            why="torch.nn.SyncBatchNorm is implemented for accelerators only; this rank trains on the CPU",
            next="leave --sync_bn out, or use --model mlp, which has no batch statistics",
        )
    torch.manual_seed(seed)
    if name not in MODELS:
        model = own_model.build(name, shape, classes)
    elif min(shape[1:]) < (smallest := MODELS[name].smallest):
        raise BadOption(
            f"--model {name} needs images of at least {smallest}x{smallest} pixels",
            why=f"those of the data set have {shape[1]}x{shape[2]}; each of its poolings halves them",
            next="choose another --model, such as mlp, or larger images",
        )
    else:
        # Channels last is the layout oneDNN and cuDNN compute in: 1.3 to 1.45x the steps per second here.
        model = MODELS[name](shape=shape, classes=classes).to(memory_format=torch.channels_last)
    if sync_bn:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    return model.to(device)


def fewest_samples(
    name: str, model: nn.Module, device: torch.device, shape: Shape, classes: int, *, with_ddp: bool
) -> int:
    """Return how many samples a batch of training needs; a collective. See ``own_model.fewest_samples``."""
    return 1 if name in MODELS else own_model.fewest_samples(name, model, device, shape, classes, with_ddp=with_ddp)
