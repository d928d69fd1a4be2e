"""DistributedDataParallel: how the model is wrapped, which buffers the ranks share, and what DDP's own error means."""

from __future__ import annotations

import inspect
import re
from typing import Any

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ddp_manual.errors import TrainingFailed
from ddp_manual.training import collectives

# None that is derived from them: batch renormalisation reads its running statistics in training too.
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


def wrap_in_ddp(model: nn.Module, device: torch.device) -> DistributedDataParallel:
    """Wrap a model that is already on its device in DDP.

    Rank 0's buffers are broadcast at every step, unless there are only those of batch normalisation: it does not read
    its running statistics while training, so it is enough that ``share_buffers`` copies them before they are read.
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
    """Name the parameters without a gradient where ``error`` is what DDP raises about them, one step later.

    None: it is another error.
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
    """Give every rank the buffers of rank 0, as DDP does at each step where it is asked to."""
    for buffer in model.buffers():
        collectives.broadcast(buffer)
