"""torch's process group: open it once all ranks are here, try it, and close it."""

from __future__ import annotations

import atexit
import sys
import threading
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore

from ddp_manual.deadline import done_within
from ddp_manual.errors import BadOption
from ddp_manual.worker.device_and_backend import for_all_devices
from ddp_manual.worker.explain_errors import error_while_joining, first_line
from ddp_manual.worker.private_torch import set_timeout

# All ranks are here, so connecting takes seconds; ranks that cannot connect should not take 30 minutes to say so.
FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# torch's own default: a rank may be this much slower than another between two collectives.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Seconds, after which a process group that does not close is left open.
CLOSE_WITHIN = 20.0
# Seconds to wait for gloo's threads at most: a thread of the program's own may compute for ever.
RELEASE_WITHIN = 2.0


def check_none_open() -> None:
    """Raise BadOption if this process has a process group already: it can be a rank of one run at a time."""
    if dist.is_initialized():
        raise BadOption(
            "this process has a process group already",
            why="another join of this script is still open, or it has called init_process_group",
            next="leave init_process_group out, since join opens the group\n"
            "or end one join before the next begins; after a join that failed, start a new process",
        )


def open_process_group(
    store: TCPStore,
    rank: int,
    world_size: int,
    backend: str,
    device: torch.device,
    timeout: timedelta = COLLECTIVE_TIMEOUT,
) -> None:
    """Call ``init_process_group``, and try it with a first all-reduce.

    Args:
        timeout: of each later collective.

    Raises:
        PeerUnreachable: the ranks have met at rank 0, but cannot connect to each other. DdpManualError: what else
            torch says, such as that two ranks share a GPU.
    """
    try:
        dist.init_process_group(
            for_all_devices(backend),
            store=PrefixStore("process_group", store),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        # Before the first collective: after this time NCCL's watchdog aborts the process, without an exception.
        set_timeout(timeout)
        total = torch.ones(1, device=device)
        work = dist.all_reduce(total, async_op=True)
        assert work is not None
        work.wait(FIRST_COLLECTIVE_TIMEOUT)
        answered = round(total.item())
        store.set_timeout(timeout)  # as torch does: a program's own reads may wait for a rank that is behind
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, ValueError) as error:
        why = f"all {world_size} ranks joined, but {backend} said: {first_line(error)}"
        raise error_while_joining(error, rank, why) from error
    assert answered == world_size, f"{answered} ranks answered the first all-reduce, not {world_size}"


def close_process_group(device: torch.device) -> bool:
    """Destroy the process group; return False if that takes too long, as when a driver or the network hangs."""

    def close() -> None:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # each thread has its own current device
        if dist.is_initialized():
            dist.destroy_process_group()

    return done_within(CLOSE_WITHIN, close, "closing")


def release_tensors_of_collectives() -> None:
    """Wait until gloo's threads have let go of the tensors of their last collectives, at most RELEASE_WITHIN seconds.

    They do so after the rank that waited for the collective has gone on, and need the GIL for it. Before 3.14, Python
    ends a thread that asks for the GIL while the interpreter ends; in a destructor of C++ that aborts the process, with
    "terminate called without an active exception": 6 of 96 plain scripts without ``destroy_process_group`` under load.
    While this thread sleeps the GIL is free, so that a thread that waits for it wakes up: one that has slept before and
    after, and has not woken up in between, has nothing left to do.
    """
    deadline, before = time.monotonic() + RELEASE_WITHIN, None
    while time.monotonic() < deadline:
        now = _other_threads()
        if now == before and all("State:\tS" in status for status in now.values()):
            return
        before = now
        time.sleep(0.002)


def _other_threads() -> dict[int, str]:
    """Return thread -> its state, and how often it has woken up; empty where the system does not say."""
    threads = {}
    for thread in Path("/proc/self/task").glob("[0-9]*"):
        with suppress(OSError):  # it has ended
            lines = (thread / "status").read_text().splitlines()
            threads[int(thread.name)] = "\n".join(line for line in lines if line.startswith(("State:", "voluntary")))
    threads.pop(threading.get_native_id(), None)
    return threads


if sys.version_info < (3, 14):
    atexit.register(release_tensors_of_collectives)  # early, and so called after what the program registers
