"""What a worker that its agent has started does as one rank: train, or measure the process group for ``check``."""

from __future__ import annotations

import os
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ddp_manual import signals, terminal, unread
from ddp_manual.errors import Stopped
from ddp_manual.from_agent import Start, Training
from ddp_manual.from_worker import Born
from ddp_manual.held_memory import HeldMemory
from ddp_manual.messages import first_command_and
from ddp_manual.steps import Steps
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.main import check_own_code, train_as_agreed
from ddp_manual.wire import all_escaped
from ddp_manual.worker.device import keep_freed_memory
from ddp_manual.worker.main import Rank
from ddp_manual.worker.process_group import import_dynamo
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.world import World

# Up to this many ranks all pairs are measured; with more ranks, only rank 0 with each other rank.
ALL_PAIRS_UP_TO = 16
SIZES = {1 << 10: 20, 1 << 20: 10, 64 << 20: 3}
"""Bytes of an all-reduce -> repetitions."""
BARRIERS = 20
ROUND_TRIPS = 10

# Here, so that a worker has it before it joins, and so that ``launch`` imports it once for all its workers.
import_dynamo()


@unread.never_block()
def main(channel: int, held: int) -> None:
    """Live as a rank; never return, since the agent ends the process without a teardown that could hang.

    Args:
        channel: the descriptor of the socket to the agent.
        held: the descriptor of the memory that the agent holds.
    """
    signals.let_children_be_terminated()
    keep_freed_memory()
    reporter = Reporter(socket.socket(fileno=channel), Born(os.getpid()), own_process=True)
    start = reporter.wait(Start)
    rank = Rank(reporter, start, HeldMemory(held))
    terminal.log_to_stderr(rank.spec.rank)
    terminal.escape_what_cannot_be_shown()
    sys.path[0] = start.path
    try:
        train_or_check(rank, start.work if isinstance(start.work, Training) else None)
    except BaseException as error:
        rank.tell(error)
    reporter.unwinding = False
    threading.Event().wait()


def train_or_check(rank: Rank, training: Training | None) -> None:
    """Join the process group, train (or measure, for ``ddp-manual check``), leave, and send the result to the agent.

    Args:
        training: what the agent has told to train; None: to measure.

    Raises:
        BaseException: what ends the rank; the caller tells the agent.
    """
    config = TrainConfig(**training.config, sources=training.sources) if training is not None else None
    own_code = check_own_code(config, rank.spec.rank) if config is not None else {}
    result, stopped = None, None
    with rank.live(own_code) as world:
        try:
            if training is None or config is None:
                result = measure(world, rank.steps)
            else:
                how = training.launched or first_command_and(str(world.run_dir))
                result = train_as_agreed(world, config, f"go on: {how}")
        except Stopped as error:  # all ranks have stopped after the same step, and leave in order
            stopped = error
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    rank.send_result(result, stopped)


def measure(world: World, steps: Steps) -> dict[str, Any]:
    """Time a barrier, all-reduces and round trips between ranks for ``ddp-manual check``, each as a step of joining.

    Returns:
        The ``steps`` of this rank; on rank 0 also what it measured and the steps of all ranks.
    """
    world.progress.phase = "measuring"
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


def _round_trips(world: World) -> list[dict[str, float]]:
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
