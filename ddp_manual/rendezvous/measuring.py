"""How fast the process group is: latency of a barrier, bandwidth of an all-reduce, round trips between pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

# All pairs of ranks are tried up to this many ranks; beyond it, rank 0 with each other.
ALL_PAIRS_UP_TO = 16
SIZES = {1 << 10: 20, 1 << 20: 10, 64 << 20: 3}
"""Bytes of an all-reduce -> repetitions."""
BARRIERS = 20
ROUND_TRIPS = 10


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    """One size of all-reduce, float32.

    ``bus_bandwidth`` is in bytes per second, as nccl-tests defines it: size / time * 2 (n - 1) / n, which is the speed
    of the slowest link whatever the number of ranks
    (https://github.com/NVIDIA/nccl-tests/blob/master/doc/PERFORMANCE.md).
    """

    bytes: int
    seconds: float
    bus_bandwidth: float


def barrier_seconds(device: torch.device) -> float:
    """Median over repetitions."""
    return statistics.median(_timed(dist.barrier, device, BARRIERS))


def all_reduces(device: torch.device) -> list[AllReduce]:
    """The median of each of SIZES; all ranks see the time of the slowest."""
    ranks = dist.get_world_size()
    found = []
    for size, repetitions in SIZES.items():
        tensor = torch.zeros(size // 4, device=device)
        times = torch.tensor(_timed(partial(dist.all_reduce, tensor), device, repetitions), device=device)
        dist.all_reduce(times, dist.ReduceOp.MAX)
        seconds = statistics.median(times.tolist())
        found.append(AllReduce(bytes=size, seconds=seconds, bus_bandwidth=size / seconds * 2 * (ranks - 1) / ranks))
    return found


def round_trips(device: torch.device) -> list[tuple[int, int, float]]:
    """(rank, other rank, seconds) for one small message there and back: the median of several, one pair at a time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    pairs = [(first, second) for first in range(ranks) for second in range(first + 1, ranks)]
    if ranks > ALL_PAIRS_UP_TO:
        pairs = [pair for pair in pairs if pair[0] == 0]
    if not pairs:
        return []
    seconds = torch.zeros(len(pairs), device=device)
    for index, pair in enumerate(pairs):
        dist.barrier()
        if rank in pair:
            seconds[index] = _round_trip(pair, device) if rank == pair[0] else _answer(pair, device)
    dist.all_reduce(seconds)
    return [(*pair, median) for pair, median in zip(pairs, seconds.tolist(), strict=True)]


def _round_trip(pair: Sequence[int], device: torch.device) -> float:
    message = torch.zeros(1, device=device)

    def there_and_back() -> None:
        dist.send(message, pair[1])
        dist.recv(message, pair[1])

    return statistics.median(_timed(there_and_back, device, ROUND_TRIPS))


def _answer(pair: Sequence[int], device: torch.device) -> float:
    message = torch.zeros(1, device=device)
    for _ in range(ROUND_TRIPS + 1):
        dist.recv(message, pair[0])
        dist.send(message, pair[0])
    return 0.0


def _timed(action: Callable[[], object], device: torch.device, repetitions: int) -> list[float]:
    """Seconds of each repetition, after one that warms up."""
    times = []
    for _ in range(repetitions + 1):
        started = time.perf_counter()
        action()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - started)
    return times[1:]
