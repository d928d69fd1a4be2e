"""The collectives of the training. A process without a process group (``--no_ddp``) is a world of one.

Every collective goes through here, so the training loop is the same in both cases.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def all_reduce(tensor: Tensor) -> None:
    """Sum ``tensor`` over the ranks, in place."""
    if dist.is_initialized():
        dist.all_reduce(tensor)


def broadcast(tensor: Tensor) -> None:
    """Overwrite ``tensor`` with rank 0's, in place."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Return every rank's ``tensor``, in rank order; all have the same shape."""
    if not dist.is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def gather(tensor: Tensor) -> list[Tensor]:
    """Return every rank's ``tensor`` on rank 0, in rank order, and [] on the others; all have the same shape."""
    if not dist.is_initialized():
        return [tensor]
    gathered = [torch.empty_like(tensor) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(tensor, gathered, dst=0)
    return gathered or []


def wait_for_all_ranks(device: torch.device) -> None:
    """Return once every rank has called this."""
    arrived = torch.zeros(1, device=device)
    all_reduce(arrived)
    arrived.item()


def rank_0_decides(decision: bool, device: torch.device) -> bool:
    """Return rank 0's ``decision`` on every rank."""
    answer = torch.tensor([decision], dtype=torch.uint8, device=device)
    broadcast(answer)
    return bool(answer.item())
