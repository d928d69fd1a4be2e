"""The networks: images float32 [N, C, H, W] in, class scores float32 [N, classes] out.

This package's own networks come first; then ``build``, and the checks of a network of the user's own
(``--model package.module:factory``), which is tried out before the ranks train with it.
"""

from __future__ import annotations

import copy
import io
import logging
import textwrap
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.utils import consume_prefix_in_state_dict_if_present
from torch.nn.parallel import DataParallel, DistributedDataParallel

from ddp_manual.errors import BadOption
from ddp_manual.training import ddp, own_factory
from ddp_manual.training.own_factory import factory_error

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""
MNIST: Shape = (1, 28, 28)
# The attribute in which a network from torch.compile keeps the original; it is the prefix of the keys of the state
# dict too. torch's documentation of torch.compile names it.
COMPILED = "_orig_mod"

logger = logging.getLogger(__name__)


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

    tanh, not ReLU: the ranks' sums differ by a rounding, which a smooth network keeps at 1e-7. With ReLU the
    difference from a single activation on the other side of zero had grown to 1e-2 after 200 more steps.
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
            for channels_in in (channels, channels_out):
                convolution = nn.Conv2d(channels_in, channels_out, kernel_size=3, padding=1, bias=False)
                features += [convolution, nn.BatchNorm2d(channels_out), nn.ReLU(inplace=True)]
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
        model = _build_own(name, shape, classes)
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


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Have a network evaluate in the body; afterwards each of its layers trains, or does not, as before."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    yield
    model.train(modes[0][1])
    for module, trains in modes:
        if module.training != trains:
            module.train(trains)


def _build_own(name: str, shape: Shape, classes: int) -> nn.Module:
    """Build what the user's factory returns, on the CPU and for training. Lazy layers have their shapes afterwards.

    Raises:
        BadOption: it is no network for these images and classes, or a checkpoint could not hold its state.
    """
    if isinstance(own_factory.factory("model", name), nn.Module):
        wanted = "its class, or a function that returns a new network, whose weights are drawn once the seed is set"
        raise factory_error("model", name, "is a network, not a function that makes one", wanted)
    model = own_factory.call("model", name, shape=shape, classes=classes)
    if not isinstance(model, nn.Module) or isinstance(model, (DataParallel, DistributedDataParallel)):
        wanted = "a torch.nn.Module that is not wrapped: it is wrapped in DDP here"
        raise factory_error("model", name, f"returned a {type(model).__name__}", wanted)
    if isinstance(getattr(model, COMPILED, None), nn.Module):
        model.register_state_dict_post_hook(_without_prefix)
        model.register_load_state_dict_pre_hook(_with_prefix)
    model = model.cpu()
    if not isinstance(model, torch.jit.ScriptModule):  # a ScriptModule takes no hooks
        model.register_forward_pre_hook(_in_rows)
    if not model.training:  # as a whole: of a network in training, the layers that are not are meant so
        model.train()
    with torch.no_grad(), evaluating(model):  # so that the trial changes neither batch statistics nor random numbers
        images = _two_images(shape)
        _scores(name, model, images, classes)
        _scores(name, model, images[:1], classes)  # the last batch of an evaluation may be one image
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise factory_error("model", name, "has no parameter to train", "at least one parameter with requires_grad")
    # What ``get_extra_state`` returns goes into the state dict, and need not be a tensor.
    extra = {key: value for key, value in model.state_dict().items() if not isinstance(value, Tensor)}
    content = io.BytesIO()
    try:
        torch.save(extra, content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception as error:  # from torch, from pickle, or from the user's own class
        what = f"has a state that cannot be read back without running code, in {', '.join(extra)}"
        wanted = "a get_extra_state() of numbers, texts, lists, dicts and tensors: no checkpoint here holds more"
        raise factory_error("model", name, what, wanted) from error
    return model


def _two_images(shape: Shape) -> Tensor:
    """Return two images of zeros, channels last like those from ``Normalise``."""
    channels, height, width = shape
    return torch.zeros(2, height, width, channels).permute(0, 3, 1, 2)


def _in_rows(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return contiguous images for ``forward``; this package's own networks get images that are channels last.

    In many tutorials ``forward`` has a ``view(-1, 320)`` after its convolutions, which torch refuses for channels-last
    tensors. Images of a single channel are contiguous in both layouts, but a convolution tells the layout by the
    strides: ``view`` gives the images new strides.
    """
    return tuple(one.contiguous().view(-1).view(one.shape) if isinstance(one, Tensor) else one for one in inputs)


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
    consume_prefix_in_state_dict_if_present(state, f"{prefix}{COMPILED}.")


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}{COMPILED}.")]:
        state[f"{prefix}{COMPILED}.{key.removeprefix(prefix)}"] = state.pop(key)
    versions = getattr(state, "_metadata", {})  # of the modules; that of the whole network has an empty name
    versions.update({f"{COMPILED}.{name}".rstrip("."): version for name, version in versions.items()})


def _scores(name: str, model: nn.Module, images: Tensor, classes: int) -> Tensor:
    """Return the scores of the user's network; raise BadOption where they do not fit these images and classes."""
    when = " while it trains" * model.training
    with _named_failure(name, images, when):
        scores = model(images)
    wanted = [len(images), classes]
    if not isinstance(scores, Tensor) or list(scores.shape) != wanted or not scores.is_floating_point():
        given = f"{list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        what = f"gives {given} for {len(images)} image{'s'[: len(images) > 1]}{when}"
        raise factory_error("model", name, what, f"scores of {classes} classes, a float tensor {wanted}")
    return scores


@contextmanager
def _named_failure(name: str, images: Tensor, when: str) -> Iterator[None]:
    """Turn whatever a user's network raises into BadOption, except a lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = f"fails{when} on images float32 {list(images.shape)}: {_in_one_line(error)}"
        wanted = "a network that takes them, and whose scores have gradients in training"
        raise factory_error("model", name, what, wanted) from error


def fewest_samples(
    name: str, model: nn.Module, device: torch.device, shape: Shape, classes: int, *, with_ddp: bool
) -> int:
    """Return the fewest samples that a training batch needs; try one step on a copy of a network of the user's own.

    A collective if ``with_ddp``: every rank calls it, and all ranks find the same.

    Returns:
        2 if a batch of one fails, as in batch normalisation over a single value, or if the network cannot be copied
        and so cannot be tried; otherwise 1.

    Raises:
        BadOption: the step fails; or, with DDP, a parameter gets no gradient, or the backend cannot send a buffer of
            that type.
    """
    if name in MODELS:
        return 1
    if with_ddp:
        _check_buffers(name, model)
    if isinstance(model, torch.jit.ScriptModule):  # its copies do not show their gradients
        return 2
    try:
        trial = copy.deepcopy(model)
    except Exception as error:  # a module may hold anything
        logger.info("--model %s is not tried out, since it cannot be copied: %s", name, _in_one_line(error))
        return 2
    images = _two_images(shape).to(device)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        scores = _scores(name, trial, images, classes)
        sums = scores.detach().float().sum(dim=1)
        # 0.01, because bfloat16 has three digits.
        if ddp.rank() == 0 and bool((scores >= 0).all()) and bool((sums - 1).abs().max() < 0.01):
            logger.warning(
                "--model %s gives probabilities, as after a softmax, which the cross-entropy takes itself: "
                "leave the softmax out, or end in log_softmax",
                name,
            )
        with _named_failure(name, images, " while it trains"):
            F.cross_entropy(scores.float(), torch.zeros(2, dtype=torch.int64, device=device)).backward()
        without = [key for key, value in trial.named_parameters() if value.requires_grad and value.grad is None]
        if with_ddp and without:
            raise BadOption(
                f"--model {name} has parameters that the loss does not depend on: {', '.join(without)}",
                why="they get no gradient, for which DDP would wait without end",
                next="leave them out of the model, or say that they are not trained: parameter.requires_grad_(False)",
            )
        try:
            with torch.no_grad():
                return 1 if trial(images[:1]).shape == (1, classes) else 2
        except Exception:  # such as from batch normalisation over a single value
            return 2


def _check_buffers(name: str, model: nn.Module) -> None:
    """Raise BadOption for a buffer that DDP could not send from rank 0 to the others; a collective."""
    for buffer_name, buffer in model.named_buffers():
        try:
            ddp.broadcast(buffer)  # all ranks have the same values in it
            buffer.copy_(buffer.clone())  # DDP does this too; torch refuses it for an expanded buffer
        except Exception as error:  # each backend raises an error of its own
            kind = f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
            what = f"has a buffer that cannot be sent to other ranks, {buffer_name}, {kind}: {_in_one_line(error)}"
            wanted = "one that torch.distributed.broadcast takes, such as a contiguous one of float32, int64 or bool"
            raise factory_error("model", name, what, wanted) from error


def _in_one_line(error: Exception) -> str:
    """Shorten an error's message; some of torch's have over twenty lines."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")
