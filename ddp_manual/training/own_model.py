"""A network of the user's own: built by the factory, and tried out before the ranks train with it.

Its images come in rows (contiguous), unlike those of this package's networks: in many tutorials ``forward`` has a
``view(-1, 320)`` after its convolutions, which torch refuses of tensors that have their channels last.
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
from ddp_manual.training import collectives, own_code

# Where a network that torch.compile has made keeps the original; torch's documentation of torch.compile names it, as
# the prefix of the keys of the state dict.
COMPILED = "_orig_mod"

logger = logging.getLogger(__name__)


def build(name: str, shape: tuple[int, int, int], classes: int) -> nn.Module:
    """Return the network that the factory makes, on the CPU and for training. Lazy layers have got their shapes.

    Raises:
        BadOption: it is no network for these images and classes, or a checkpoint could not hold its state.
    """
    if isinstance(own_code.factory("model", name), nn.Module):
        wanted = "its class, or a function that returns a new network, whose weights are drawn once the seed is set"
        raise _wrong(name, "is a network, not a function that makes one", wanted)
    model = own_code.call("model", name, shape=shape, classes=classes)
    if not isinstance(model, nn.Module):
        raise _wrong(name, f"returned a {type(model).__name__}", "a torch.nn.Module")
    if isinstance(model, (DataParallel, DistributedDataParallel)):
        wrapper = type(model).__name__
        raise _wrong(name, f"returned a {wrapper}", f"the network that you give to {wrapper}(...): it is wrapped here")
    if isinstance(getattr(model, COMPILED, None), nn.Module):
        model.register_state_dict_post_hook(_without_prefix)
        model.register_load_state_dict_pre_hook(_with_prefix)
    model = model.cpu()
    if not isinstance(model, torch.jit.ScriptModule):  # those take no hooks
        model.register_forward_pre_hook(_in_rows)
    model.eval()  # in which neither batch statistics nor random numbers are touched
    with torch.no_grad():
        images = _two_images(shape)
        _scores(name, model, images, classes)
        _scores(name, model, images[:1], classes)  # a single image may be left for the end of an evaluation
    model.train()
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise _wrong(name, "has no parameter to train", "one at least with requires_grad")
    _check_state(name, model)
    return model


def _two_images(shape: tuple[int, int, int]) -> Tensor:
    """Return zeros that lie in memory as ``Normalise`` leaves images."""
    channels, height, width = shape
    return torch.zeros(2, height, width, channels).permute(0, 3, 1, 2)


def _in_rows(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    # With a single channel both layouts are contiguous, but a convolution goes by the strides: the view has new ones.
    return tuple(one.contiguous().view(-1).view(one.shape) if isinstance(one, Tensor) else one for one in inputs)


def _without_prefix(_: nn.Module, state: dict[str, Any], prefix: str, __: dict[str, Any]) -> None:
    consume_prefix_in_state_dict_if_present(state, f"{prefix}{COMPILED}.")


def _with_prefix(_: nn.Module, state: dict[str, Any], prefix: str, *__: Any) -> None:
    for key in [key for key in state if key.startswith(prefix) and not key.startswith(f"{prefix}{COMPILED}.")]:
        state[f"{prefix}{COMPILED}.{key.removeprefix(prefix)}"] = state.pop(key)


def _scores(name: str, model: nn.Module, images: Tensor, classes: int) -> Tensor:
    """Return the scores; raise BadOption where there are none for these images and classes."""
    when = " while it trains" if model.training else ""
    with _named_failure(name, images, when):
        scores = model(images)
    wanted = [len(images), classes]
    if not isinstance(scores, Tensor) or list(scores.shape) != wanted or not scores.is_floating_point():
        given = f"{list(scores.shape)}" if isinstance(scores, Tensor) else f"a {type(scores).__name__}"
        count = "1 image" if len(images) == 1 else f"{len(images)} images"
        raise _wrong(name, f"gives {given} for {count}{when}", f"scores of {classes} classes, a float tensor {wanted}")
    return scores


@contextmanager
def _named_failure(name: str, images: Tensor, when: str) -> Iterator[None]:
    """Turn whatever a user's network raises into BadOption, except a lack of memory."""
    try:
        yield
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        what = f"fails{when} on images float32 {list(images.shape)}: {_reason(error)}"
        raise _wrong(name, what, "that it takes them, and that its scores have gradients in training") from error


def _check_state(name: str, model: nn.Module) -> None:
    """What ``get_extra_state`` returns goes into the state dict, and need not be a tensor."""
    extra = {key: value for key, value in model.state_dict().items() if not isinstance(value, Tensor)}
    content = io.BytesIO()
    try:
        torch.save(extra, content)
        torch.load(io.BytesIO(content.getvalue()), weights_only=True)
    except Exception as error:  # of torch, of pickle, or of the user's own class
        raise _wrong(
            name,
            f"has a state that cannot be read back without running code, in {', '.join(extra)}",
            "a get_extra_state() of numbers, texts, lists, dicts and tensors: no checkpoint here holds more",
        ) from error


def fewest_samples(
    name: str, model: nn.Module, device: torch.device, shape: tuple[int, int, int], classes: int, *, with_ddp: bool
) -> int:
    """Check that the network can be trained, with one step on a copy, and find the smallest batch it trains on.

    A collective if ``with_ddp``: every rank calls it, and all of them find the same.

    Returns:
        Samples. 2 if a batch of one fails, as in batch normalisation over a single value, or if the network cannot be
        copied and so not be tried; otherwise 1.

    Raises:
        BadOption: the step fails; or, with DDP, a parameter gets no gradient, or the backend cannot send a buffer of
            that type.
    """
    if with_ddp:
        _check_buffers(name, model)
    if isinstance(model, torch.jit.ScriptModule):  # whose copies do not show their gradients
        return 2
    try:
        trial = copy.deepcopy(model)
    except Exception as error:  # a module may hold anything
        logger.info("--model %s is not tried out, since it cannot be copied: %s", name, _reason(error))
        return 2
    images = _two_images(shape).to(device)
    with torch.random.fork_rng([device.index] if device.type == "cuda" else []):
        scores = _scores(name, trial, images, classes)
        if _are_probabilities(scores) and collectives.rank() == 0:
            logger.warning(
                "--model %s gives probabilities, as after a softmax, which the cross-entropy takes itself: "
                "leave the softmax out, or end in log_softmax",
                name,
            )
        with _named_failure(name, images, " while it trains"):
            F.cross_entropy(scores.float(), torch.zeros(2, dtype=torch.int64, device=device)).backward()
        if with_ddp:
            _check_gradients(name, trial)
        try:
            with torch.no_grad():
                return 1 if trial(images[:1]).shape == (1, classes) else 2
        except Exception:  # how a network says that one sample is too few for it
            return 2


def _are_probabilities(scores: Tensor) -> bool:
    sums = scores.detach().float().sum(dim=1)
    return bool((scores >= 0).all()) and bool((sums - 1).abs().max() < 0.01)  # bfloat16 has three digits


def _check_buffers(name: str, model: nn.Module) -> None:
    for buffer_name, buffer in model.named_buffers():
        try:
            collectives.broadcast(buffer)  # all ranks have the same in it
            buffer.copy_(buffer.clone())  # which DDP does too; torch refuses it of one that is expanded
        except Exception as error:  # each backend words it in its own way
            kind = f"{str(buffer.dtype).removeprefix('torch.')} {list(buffer.shape)}"
            raise _wrong(
                name,
                f"has a buffer that cannot be sent to other ranks, {buffer_name}, {kind}: {_reason(error)}",
                "one that torch.distributed.broadcast takes, such as a contiguous one of float32, int64 or bool",
            ) from error


def _check_gradients(name: str, trial: nn.Module) -> None:
    without = [one for one, parameter in trial.named_parameters() if parameter.requires_grad and parameter.grad is None]
    if without:
        raise BadOption(
            f"--model {name} has parameters that the loss does not depend on: {', '.join(without)}",
            why="they get no gradient, for which DDP would wait without end",
            next="leave them out of the model, or say that they are not trained: parameter.requires_grad_(False)",
        )


def _reason(error: Exception) -> str:
    """Return the error in one line; torch tells some of its own over twenty."""
    return textwrap.shorten(f"{type(error).__name__}: {error}", 300, placeholder=" ...")


def _wrong(name: str, what: str, wanted: str) -> BadOption:
    return BadOption(
        f"--model {name} {what}",
        why=f"wanted is {wanted}",
        next="mend the factory; docs/own-model-and-data.md has its signature and an example",
    )
