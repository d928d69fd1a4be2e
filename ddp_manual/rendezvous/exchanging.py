"""What each rank says to all others over the process group, once they have met: JSON, never pickle."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def exchange(message: Any, device: torch.device) -> list[Any]:
    """The message of every rank, in rank order and on every rank; a collective.

    Args:
        message: JSON of any length.
        device: where the process group's tensors live.
    """
    import torch
    import torch.distributed as dist

    # bytearray: torch wants memory it could write to.
    own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(device)
    lengths = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size())]
    dist.all_gather(lengths, torch.tensor([len(own)], device=device))
    padded = own.new_zeros(max(int(length) for length in lengths))
    padded[: len(own)] = own
    received = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(received, padded)
    pairs = zip(received, lengths, strict=True)
    return [json.loads(buffer[: int(length)].cpu().numpy().tobytes()) for buffer, length in pairs]
