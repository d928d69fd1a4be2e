"""All that a run needs to go on as if it had never stopped, as bytes and back. Never unpickles code."""

from __future__ import annotations

import io
import random
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from ddp_manual.training import collectives
from ddp_manual.training.epoch_plan import Position
from ddp_manual.training.evaluate import Evaluation
from ddp_manual.training.metrics import Window

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class History:
    """What a run has measured so far."""

    evaluations: tuple[Evaluation, ...] = ()
    """After each epoch."""
    window: Window = field(default_factory=Window)
    """What adds up to the next line of metrics."""
    train_seconds: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Saved:
    """What a checkpoint holds.

    Args:
        options: of the run that saved it, and the number of its training samples.
        model: the network's state dict, without DDP's prefix.
        optimizer: its state by parameter. Learning rate, momentum and the like are those of the options.
        random: the state of rank 0's Python generator. Those of torch are seeded anew at each step.
    """

    position: Position
    history: History
    options: Mapping[str, Any]
    world_size: int
    model: Mapping[str, Tensor]
    optimizer: Mapping[int, Any]
    random: Mapping[str, Any]


class Unreadable(Exception):
    """Bytes that are no checkpoint of this program; says why."""


def take(
    network: nn.Module,
    optimizer: torch.optim.Optimizer,
    position: Position,
    history: History,
    options: Mapping[str, Any],
    world_size: int,
) -> Saved:
    """The state as it is now; of rank 0, since all ranks have the same but for buffers, which are rank 0's."""
    return Saved(
        position=position,
        history=history,
        options=options,
        world_size=world_size,
        model=network.state_dict(),
        optimizer=optimizer.state_dict()["state"],
        random={"python": random.getstate()},
    )


def pack(saved: Saved) -> bytes:
    content = io.BytesIO()
    torch.save(
        {
            "position": asdict(saved.position),
            "history": asdict(saved.history),
            "options": dict(saved.options),
            "world_size": saved.world_size,
            "model": on_cpu(saved.model),
            "optimizer": on_cpu(saved.optimizer),
            "random": dict(saved.random),
        },
        content,
    )
    return content.getvalue()


def on_cpu(state: Any) -> Any:
    """The same with its tensors on the CPU, so that a machine without a GPU can read them."""
    if isinstance(state, Tensor):
        return state.cpu()
    if isinstance(state, Mapping):
        return {name: on_cpu(value) for name, value in state.items()}
    return state


def unpack(content: bytes) -> Saved:
    """Raises Unreadable if these bytes are anything but what ``pack`` makes."""
    try:
        read = torch.load(io.BytesIO(content), map_location="cpu", weights_only=True)
        history = read["history"]
        return Saved(
            position=_built(Position, read["position"]),
            history=History(
                evaluations=tuple(_built(Evaluation, evaluation) for evaluation in history["evaluations"]),
                window=_built(Window, history["window"]),
                train_seconds=float(history["train_seconds"]),
            ),
            options={str(name): value for name, value in read["options"].items()},
            world_size=int(read["world_size"]),
            model=dict(read["model"]),
            optimizer=dict(read["optimizer"]),
            random=dict(read["random"]),
        )
    except Exception as error:  # whatever its first wrong byte leads to
        raise Unreadable(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}") from error


def _built(kind: type[T], values: Mapping[str, Any]) -> T:
    """A dataclass of numbers."""
    wanted = {one.name: type(values[one.name]) for one in fields(kind)}  # type: ignore[arg-type]
    if set(values) != set(wanted) or not all(number in (int, float) for number in wanted.values()):
        raise TypeError(f"{values} is no {kind.__name__}")
    return kind(**values)


def shapes(state: Mapping[str, Any]) -> dict[str, tuple[int, ...]]:
    """Of each tensor in a state dict."""
    return {name: tuple(value.shape) for name, value in state.items() if isinstance(value, Tensor)}


def restore(saved: Saved, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Put it back, on every rank.

    Raises:
        Unreadable: it does not fit this network or optimizer.
    """
    try:
        network.load_state_dict(dict(saved.model))
        _check_shapes(saved.optimizer, optimizer)
        groups = optimizer.state_dict()["param_groups"]
        optimizer.load_state_dict({"state": dict(saved.optimizer), "param_groups": groups})
        version, words, gauss = saved.random["python"]
        random.setstate((version, tuple(words), gauss))
    except Exception as error:  # torch words each misfit in its own way
        raise Unreadable(f"{type(error).__name__}: {' '.join(str(error).split())[:300]}") from error


def _check_shapes(state: Mapping[int, Any], optimizer: torch.optim.Optimizer) -> None:
    """torch takes any tensor for a parameter's momentum, and fails only in the next step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for number, values in state.items():
        for name, value in values.items():
            if isinstance(value, Tensor) and value.dim() and value.shape != parameters[number].shape:
                raise ValueError(f"{name} of parameter {number} has another shape than the parameter")


def share_bytes(content: bytes | None, device: torch.device) -> bytes | None:
    """Rank 0's ``content``, on every rank; a collective. The others pass None, as does rank 0 if it has nothing."""
    is_source = collectives.rank() == 0
    size = torch.tensor([len(content) if is_source and content is not None else -1], device=device)
    collectives.broadcast(size)
    length = int(size)
    if length < 0:
        return None
    # bytearray: torch wants memory it could write to.
    buffer = (
        torch.frombuffer(bytearray(content), dtype=torch.uint8).to(device)
        if is_source and content
        else torch.empty(length, dtype=torch.uint8, device=device)
    )
    collectives.broadcast(buffer)
    return buffer.cpu().numpy().tobytes()
