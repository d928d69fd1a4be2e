"""What the ranks do together while they train; in a world of one without a process group, nothing.

Every collective of the training goes through here, so that the loop of a single process is the same one.
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
    """Put rank 0's numbers in place of ``tensor``'s."""
    if dist.is_initialized():
        dist.broadcast(tensor, src=0)


def meet(device: torch.device) -> None:
    """Return once all ranks are here."""
    here = torch.zeros(1, device=device)
    all_reduce(here)
    here.item()


def says_rank_0(yes: bool, device: torch.device) -> bool:
    """Rank 0's ``yes``, on every rank."""
    answer = torch.tensor([yes], dtype=torch.uint8, device=device)
    broadcast(answer)
    return bool(answer.item())


def all_gather(tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor``, in rank order; they have one shape."""
    if not dist.is_initialized():
        return [tensor]
    gathered = [tensor.new_empty(tensor.shape) for _ in range(world_size())]
    dist.all_gather(gathered, tensor)
    return gathered


def gather(tensor: Tensor) -> list[Tensor]:
    """Every rank's ``tensor`` on rank 0, in rank order; [] on the others. They have one shape."""
    if not dist.is_initialized():
        return [tensor]
    gathered = [tensor.new_empty(tensor.shape) for _ in range(world_size())] if rank() == 0 else None
    dist.gather(tensor, gathered, dst=0)
    return gathered or []
