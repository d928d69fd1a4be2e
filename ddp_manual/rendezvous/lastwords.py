"""The first failure of a run, as it travels: published before anything is torn down, told by every other rank."""

from __future__ import annotations

import os
import time
import traceback
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ddp_manual import environment, rundir
from ddp_manual.config import WorldSpec
from ddp_manual.errors import (
    DdpManualError,
    MasterLost,
    OutOfMemory,
    PeerFailed,
    PeerGone,
    PeerLost,
    StopSignal,
    TrainingFailed,
    stopped_by,
)
from ddp_manual.rendezvous.group import first_line, is_broken_collective
from ddp_manual.rendezvous.store import RunStore

# Seconds another rank's last words may take to arrive after a collective with it broke.
WORDS_TIMEOUT = 2.0
TRACEBACK_FRAMES = 10


def publish(store: RunStore, spec: WorldSpec, error: BaseException, seen: DdpManualError | None) -> DdpManualError:
    """Tell the run that ``error`` ends this rank; returns it as one of ours, its root cause if a peer is that.

    Args:
        seen: the failure of the run that the watchdog has read.
    """
    if isinstance(error, PeerGone):
        return error
    broken = is_broken_collective(error)
    if broken and seen is not None:
        return seen
    try:
        words = _await_words(store) if broken else None
        if words is not None:
            return peer_failure(words)
        early = [rank for rank in range(spec.world_size) if store.has_finished(rank)] if broken else []
        ours = _finished_early(spec.rank, early) if early else as_ours(spec.rank, error)
        store.publish_failure(_words(spec.rank, ours))
        return ours
    except MasterLost as lost:
        return lost if broken else as_ours(spec.rank, error)


def _await_words(store: RunStore) -> Any:
    deadline = time.monotonic() + WORDS_TIMEOUT
    while time.monotonic() < deadline:
        words = store.failure_if_any()
        if words is not None:
            return words
        time.sleep(0.05)
    return None


def _finished_early(rank: int, early: list[int]) -> PeerLost:
    who = f"rank {early[0]}" if len(early) == 1 else f"ranks {', '.join(map(str, early))}"
    return PeerLost(
        f"{who} had finished while rank {rank} was still in a collective",
        why="a collective needs every rank, and they did not make the same number of calls",
        next="give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for less",
    )


def as_ours(rank: int, error: BaseException) -> DdpManualError:
    """Any exception that ends a rank, as one that has an identifier."""
    import torch

    if isinstance(error, DdpManualError):
        return error
    if isinstance(error, (StopSignal, KeyboardInterrupt)):
        return stopped_by(error)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(
            f"rank {rank} on {environment.host_name()} ran out of GPU memory",
            why=first_line(error),
            next="choose a smaller --batch_size, or end what else uses that GPU: nvidia-smi",
        )
    if is_broken_collective(error):
        return PeerLost(
            f"a peer of rank {rank} is gone without last words",
            why=f"a collective broke: {first_line(error)}",
            next="look for the rank whose process has ended (killed, out of memory?), then start all ranks again",
        )
    return training_failed(rank, error)


def training_failed(rank: int | None, error: BaseException) -> TrainingFailed:
    """The user's own exception, with the end of its traceback."""
    who = "a rank" if rank is None else f"rank {rank}"
    return TrainingFailed(
        f"{who} on {environment.host_name()}: {first_line(error)}",
        why="".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES)).rstrip(),
        next="mend the code or the data that raised it, then start all ranks again",
    )


def _words(rank: int, error: DdpManualError) -> dict[str, Any]:
    return {**error.as_dict(), "rank": rank, "host": environment.host_name(), "pid": os.getpid()}


def peer_failure(words: Mapping[str, Any]) -> PeerFailed:
    """The last words of another rank, as the error that ends this one."""
    return PeerFailed(
        f"rank {words['rank']} ({words['host']}, pid {words['pid']}) left with error[{words['identifier']}]",
        why=f"{words['what']}\n{words['why']}",
        next=str(words["next"]),
    )


def write_failure(error: DdpManualError, rank: int, run_dir: Path | None) -> None:
    """Leave the error as ``failure-rank<k>.json``, where the run has a folder that can be written."""
    if run_dir is None:
        return
    with suppress(DdpManualError, OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        rundir.write_json(rundir.RunPaths(run_dir).failure(rank), {**_words(rank, error), "exit_code": error.exit_code})
