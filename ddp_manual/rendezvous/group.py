"""The process group: made over the run's store once all ranks are known to be here, and tried before it is used."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import TYPE_CHECKING

from ddp_manual.errors import PeerUnreachable
from ddp_manual.rendezvous.store import RunStore

if TYPE_CHECKING:
    import torch

# Everybody is here, so connecting is a matter of seconds; a pair that cannot connect should not take 30 minutes.
FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# torch's own default: a rank may be this much slower than another between two collectives.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)

# How gloo, NCCL and c10d word a collective that broke because a peer did.
_BROKEN = re.compile(r"gloo|nccl|ProcessGroup|Connection (closed|reset)|Broken pipe|Socket closed|c10d", re.IGNORECASE)


def open_process_group(store: RunStore, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """``init_process_group`` and a first all-reduce.

    Raises:
        PeerUnreachable: the ranks have met at rank 0, but cannot connect to one another.
    """
    import torch
    import torch.distributed as dist

    try:
        dist.init_process_group(
            backend,
            store=store.for_process_group(),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        counted = round(total.item())
    except RuntimeError as error:
        raise PeerUnreachable(
            f"rank {rank} could not connect to all other ranks",
            why=f"all {world_size} ranks joined at {store.address}, but {backend} said: {_first_line(error)}",
            next="open all TCP ports between the hosts, or name the interface that connects them:\n"
            f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME=<interface>",
        ) from error
    assert counted == world_size, f"{counted} ranks answered the first all-reduce, not {world_size}"
    _set_timeout(COLLECTIVE_TIMEOUT)


def _set_timeout(timeout: timedelta) -> None:
    from torch.distributed import distributed_c10d

    # Public since torch 2.15; before that it has the same signature under a private name.
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(timeout)


def close_process_group() -> None:
    import torch.distributed as dist

    if dist.is_initialized():
        dist.destroy_process_group()


def is_broken_collective(error: BaseException) -> bool:
    """Whether this is how torch says that a peer is gone, rather than a mistake in the user's code."""
    import torch.distributed as dist

    if isinstance(error, dist.DistError):
        return True
    return isinstance(error, RuntimeError) and bool(_BROKEN.search(str(error)))


def _first_line(error: BaseException) -> str:
    return str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
