"""DistributedDataParallel: how the model is wrapped, and what DDP's own error means; and the training's collectives.

A process without a process group (``--no_ddp``) is a world of one. Every collective goes through here, so the training
loop is the same in both cases.
"""

from __future__ import annotations

import inspect
import json
import re
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ddp_manual.errors import TrainingFailed

# Only these, no subclasses: batch renormalisation, for example, reads its running statistics in training too.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def wrap_in_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap a model that is already on its device in DDP.

    Rank 0's buffers are broadcast at every step, unless all of them are of batch normalisation, which does not read its
    running statistics while training: it is enough that ``share_buffers`` copies them before they are read.
    """
    # torch 2.15 renamed the option.
    renamed = "forward_sync_buffers" in inspect.signature(DistributedDataParallel.__init__).parameters
    others = [module for module in model.modules() if type(module) not in BATCH_NORMS]
    needed = any(list(module.buffers(recurse=False)) for module in others)
    broadcast: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": needed}
    return DistributedDataParallel(
        model,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **broadcast,
    )


def unused_parameters(model: nn.Module, error: RuntimeError) -> TrainingFailed | None:
    """Return an error that names the parameters without a gradient, if ``error`` is what DDP raises one step later.

    Returns:
        None for any other error.
    """
    found = re.search(r"indices which did not receive grad for rank \d+: ([\d ]+)", str(error))
    if found is None or not isinstance(model, DistributedDataParallel):
        return None
    trained = [name for name, parameter in model.module.named_parameters() if parameter.requires_grad]
    return TrainingFailed(
        "the model did not use all of its parameters in a step: "
        + ", ".join(trained[int(index)] for index in found[1].split()),
        why="DDP waits for a gradient of each, in every step; find_unused_parameters is not offered here",
        next="use them in every step, such as with a weight of 0; one process can do without: --world_size 1 --no_ddp",
    )


def share_buffers(model: nn.Module) -> None:
    """Give every rank the buffers of rank 0, as DDP does at each step if it broadcasts buffers."""
    for buffer in model.buffers():
        broadcast(buffer)


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: Tensor) -> None:
    """Sum ``tensor`` over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def broadcast(tensor: Tensor, source: int = 0) -> None:
    """Overwrite ``tensor`` with that of rank ``source``, in place."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=source)


def all_gather(tensor: Tensor, group: dist.ProcessGroup | None = None) -> list[Tensor]:
    """Return every rank's ``tensor``, in rank order; all have the same shape. ``group`` None: the default group."""
    gathered = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(gathered, tensor, group=group)
    return gathered


def gather_messages(message: Any, device: torch.device, group: dist.ProcessGroup | None = None) -> list[Any]:
    """Return the messages of all ranks in rank order, on every rank; a collective of an open process group.

    Args:
        message: JSON of any length.
        device: one for which the process group has a backend.
        group: None for the default group.
    """
    # A bytearray, since torch warns about memory that cannot be written to.
    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(device)
    lengths = torch.cat(all_gather(torch.tensor([len(own)], device=device), group)).tolist()
    padded = own.new_zeros(max(lengths))
    padded[: len(own)] = own
    received = zip(all_gather(padded, group), lengths, strict=True)
    return [json.loads(buffer[:length].cpu().numpy().tobytes()) for buffer, length in received]


def share_bytes(content: Tensor | None, device: torch.device, source: int = 0) -> Tensor | None:
    """Return the uint8 vector that rank ``source`` passes, on the CPU of every rank; None if it passes None."""
    size = torch.tensor([-1 if content is None else len(content)], device=device)
    broadcast(size, source)
    if size < 0:
        return None
    shared = torch.empty(int(size), dtype=torch.uint8, device=device) if content is None else content.to(device)
    broadcast(shared, source)
    return shared.cpu()


def to_host(tensor: Tensor) -> Tensor:
    """Return ``tensor`` on the CPU, once its device has done all work in its queue, collectives included.

    With NCCL a rank waits for the others here, not in the call of a collective. The reporter recognises ``cpu()``.
    """
    return tensor.cpu()
