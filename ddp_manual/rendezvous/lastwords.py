"""How a rank leaves when something has stopped it: the cause is told before anything is torn down, and kept on disk."""

from __future__ import annotations

import logging
import traceback
from contextlib import suppress
from pathlib import Path

from ddp_manual import environment, rundir
from ddp_manual.errors import (
    DdpManualError,
    MasterLost,
    OutOfMemory,
    PeerGone,
    PeerLost,
    StopSignal,
    TrainingFailed,
    stopped_by,
)
from ddp_manual.rendezvous import verdicts
from ddp_manual.rendezvous.group import first_line, is_broken_collective, is_opened_twice
from ddp_manual.rendezvous.stacks import raised_at
from ddp_manual.rendezvous.store import RunStore, interruptibly
from ddp_manual.rendezvous.waiting import Waiting
from ddp_manual.rendezvous.watchdog import Watchdog
from ddp_manual.world_spec import WorldSpec

TRACEBACK_FRAMES = 10
# Seconds, for rank 0's store.
ANSWER_WITHIN = 1.0

logger = logging.getLogger(__name__)


def tell_by_store(store: RunStore, spec: WorldSpec, error: BaseException) -> None:
    """Tell the run that ``error`` ends this rank, while there are no lifelines yet."""
    if isinstance(error, PeerGone):
        return
    with suppress(MasterLost):
        store.publish_failure(verdicts.last_words(spec.rank, as_ours(spec.rank, error)))


def conclude(watchdog: Watchdog, store: RunStore, spec: WorldSpec, error: BaseException) -> DdpManualError:
    """Tell the run that ``error`` ends this rank; returns it as one of ours, or the root cause if a peer is that."""
    watchdog.main_thread_leaves()
    broken = is_broken_collective(error)
    if broken or isinstance(error, PeerGone):
        seen = watchdog.await_verdict()
        if seen is not None:
            return seen
    ours = as_ours(spec.rank, error)
    if broken:
        early = [0] if watchdog.over else _finished(store, spec.world_size)
        ours = _finished_early(spec.rank, raised_at(error), early) if early else ours
    watchdog.tell(verdicts.last_words(spec.rank, ours))
    return ours


def _finished(store: RunStore, world_size: int) -> list[int]:
    """The ranks that have done their work, as far as rank 0's store tells it within a second."""

    def ask() -> list[int]:
        return [rank for rank in range(world_size) if store.has_finished(rank)]

    try:
        return interruptibly(ask, Waiting(ANSWER_WITHIN, logger), "asking who has finished")
    except (TimeoutError, MasterLost):
        return []


def _finished_early(rank: int, place: str, early: list[int]) -> PeerLost:
    who = f"rank {early[0]}" if len(early) == 1 else f"ranks {', '.join(map(str, early))}"
    return PeerLost(
        f"{who} had finished while rank {rank} was still in a collective",
        why=f"a collective needs every rank, and they did not make the same number of calls\nthis one was on {place}",
        next="give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for less\n"
        "and let no rank alone call a collective or what calls one, such as below `if rank == 0`: a step, train()",
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
        next="leave init_process_group out: the process group is open, and is closed at the end"
        if is_opened_twice(error)
        else "mend the code or the data that raised it, then start all ranks again",
    )


def write_failure(error: DdpManualError, rank: int, run_dir: Path | None) -> None:
    """Leave the error as ``failure-rank<k>.json``, where the run has a folder that can be written."""
    if run_dir is None:
        return
    with suppress(DdpManualError, OSError):
        run_dir.mkdir(parents=True, exist_ok=True)
        rundir.write_json(
            rundir.RunPaths(run_dir).failure(rank), {**verdicts.last_words(rank, error), "exit_code": error.exit_code}
        )
