"""How fast the process group is: latency of a barrier, bandwidth of an all-reduce, round trips between ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_manual.messages import Steps

if TYPE_CHECKING:
    from ddp_manual.worker.world import World

# Up to this many ranks all pairs are measured; with more ranks, only rank 0 with each other rank.
ALL_PAIRS_UP_TO = 16
SIZES = {1 << 10: 20, 1 << 20: 10, 64 << 20: 3}
"""Bytes of an all-reduce -> repetitions."""
BARRIERS = 20
ROUND_TRIPS = 10


def check(world: World, steps: Steps) -> dict[str, Any]:
    """Return what ``ddp-manual check`` measures, and on rank 0 also the steps of all ranks."""
    world.progress.phase = "measuring"
    measured = measure(world.device, steps)
    seen = steps.as_dicts()
    ranks = world.gather({"rank": world.rank, "host": world.host, "steps": seen})
    found = {"measured": measured, "ranks": ranks, "roster": world.roster()} if world.rank == 0 else {}
    return {"steps": seen, **found}


def measure(device: torch.device, steps: Steps) -> dict[str, Any]:
    """Return ``barrier_seconds``, ``all_reduce`` and ``round_trips``, each measured as a step."""
    with steps.step("barrier"):
        barrier = statistics.median(_timed(dist.barrier, device, BARRIERS))
    with steps.step("all-reduce"):
        all_reduces = [_all_reduce(size, repetitions, device) for size, repetitions in SIZES.items()]
    with steps.step("round trips"):
        round_trips = _round_trips(device)
    return {"barrier_seconds": barrier, "all_reduce": all_reduces, "round_trips": round_trips}


def _all_reduce(size: int, repetitions: int, device: torch.device) -> dict[str, float]:
    """Return the median time of an all-reduce of float32, on the slowest rank.

    ``bus_bandwidth`` is in bytes per second, as nccl-tests defines it: size / time * 2 (n - 1) / n, which is the speed
    of the slowest link whatever the number of ranks
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """
    ranks = dist.get_world_size()
    tensor = torch.zeros(size // 4, device=device)
    times = torch.tensor(_timed(partial(dist.all_reduce, tensor), device, repetitions), device=device)
    dist.all_reduce(times, dist.ReduceOp.MAX)
    seconds = statistics.median(times.tolist())
    return {"bytes": size, "seconds": seconds, "bus_bandwidth": size / seconds * 2 * (ranks - 1) / ranks}


def _round_trips(device: torch.device) -> list[dict[str, float]]:
    """Return the median seconds of a small message there and back, one pair of ranks at a time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [(first, second) for first in range(ranks) for second in range(first + 1, ranks)]
    if ranks > ALL_PAIRS_UP_TO:
        pairs = [pair for pair in pairs if pair[0] == 0]
    if not pairs:
        return []
    message = torch.zeros(1, device=device)

    def send_to(other: int) -> None:
        dist.send(message, other)
        dist.recv(message, other)

    medians = torch.zeros(len(pairs), device=device)
    for index, (first, second) in enumerate(pairs):
        dist.barrier()
        if rank == first:
            medians[index] = statistics.median(_timed(partial(send_to, second), device, ROUND_TRIPS))
        elif rank == second:
            for _ in range(ROUND_TRIPS + 1):
                dist.recv(message, first)
                dist.send(message, first)
    dist.all_reduce(medians)
    return [
        {"rank": first, "other": second, "seconds": seconds}
        for (first, second), seconds in zip(pairs, medians.tolist(), strict=True)
    ]


def _timed(action: Callable[[], object], device: torch.device, repetitions: int) -> list[float]:
    """Return the seconds of each repetition, without the first one, which warms up."""
    times = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return times[1:]
