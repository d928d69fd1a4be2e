"""What each rank of ``ddp-manual check`` runs: ``python -m ddp_manual.tools.measure`` measures the process group."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import ddp_manual
from ddp_manual.join_steps import Steps
from ddp_manual.wire import all_escaped

# Up to this many ranks all pairs are measured; with more ranks, only rank 0 with each other rank.
ALL_PAIRS_UP_TO = 16
SIZES = {1 << 10: 20, 1 << 20: 10, 64 << 20: 3}
"""Bytes of an all-reduce -> repetitions."""
BARRIERS = 20
ROUND_TRIPS = 10


def prepare(rank: int, arguments: Sequence[str]) -> Mapping[str, Any]:
    """Return the options, of the user's own code, that must be the same on all ranks: none."""
    return {}


def measure(world: ddp_manual.World) -> dict[str, Any]:
    """Time a barrier, all-reduces and round trips between ranks, each as a step of joining.

    Returns:
        The ``steps`` of this rank; on rank 0 also what it measured and the steps of all ranks.
    """
    world.progress.phase = "measuring"
    steps = Steps(world.steps)
    with steps.step("barrier"):
        barrier = statistics.median(_timed(dist.barrier, world.device, BARRIERS))
    with steps.step("all-reduce"):
        all_reduces = [_all_reduce(size, repetitions, world.device) for size, repetitions in SIZES.items()]
    with steps.step("round trips"):
        round_trips = _round_trips(world)
    seen = steps.as_dicts()
    ranks = all_escaped(world.gather({"rank": world.rank, "host": world.host, "steps": seen}))
    if world.rank != 0:
        return {"steps": seen}
    measured = {"barrier_seconds": barrier, "all_reduce": all_reduces, "round_trips": round_trips}
    return {"steps": seen, "measured": measured, "ranks": ranks, "roster": world.roster()}


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


def _round_trips(world: ddp_manual.World) -> list[dict[str, float]]:
    """Return the median seconds of a small message there and back, one pair of ranks at a time."""
    ranks = range(world.world_size)
    firsts = ranks if len(ranks) <= ALL_PAIRS_UP_TO else [0]
    pairs = [(first, second) for first in firsts for second in ranks[first + 1 :]]
    if not pairs:
        return []
    message = torch.zeros(1, device=world.device)
    medians = torch.zeros(len(pairs), device=world.device)

    def ask(other: int) -> None:
        dist.send(message, other)
        dist.recv(message, other)

    for index, (first, second) in enumerate(pairs):
        dist.barrier()
        if world.rank == first:
            medians[index] = statistics.median(_timed(partial(ask, second), world.device, ROUND_TRIPS))
        elif world.rank == second:
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


if __name__ == "__main__":
    with ddp_manual.join() as world:
        world.result = measure(world)
