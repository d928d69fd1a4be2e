"""torch's store and process group: open them once all ranks are here, try them, close them, and read their errors.

At the end of the file are the private names of torch and Python that this package uses.
"""

from __future__ import annotations

import importlib
import re
import socket
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, TCPStore, distributed_c10d

from ddp_manual import launchers
from ddp_manual.errors import BackendUnavailable, BadOption, DdpManualError, DeviceTaken, MasterLost, PeerUnreachable

# All ranks are here, so connecting takes seconds; ranks that cannot connect should not take 30 minutes to say so.
FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# torch's own default: a rank may be this much slower than another between two collectives.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# Rank 0 announced the address of its store a moment ago.
CONNECT_TIMEOUT = timedelta(seconds=10)
# Seconds, after which a process group that does not close is left open.
CLOSE_WITHIN = 20.0

# How gloo says that a collective broke because another rank is gone; its other errors are mistakes in the call.
_BROKEN = re.compile(r"Connection (closed|reset)|Broken pipe|Socket closed|Timed out waiting", re.IGNORECASE)


def check_none_open() -> None:
    """Raise BadOption if this process has a process group already: it can be a rank of one run at a time."""
    if dist.is_initialized():
        raise BadOption(
            "this process has a process group already",
            why="another join of this script is still open, or it has called init_process_group",
            next="leave init_process_group out, since join opens the group\n"
            "or end one join before the next begins; after a join that failed, start a new process",
        )


def open_store(address: str, port: int | None = None) -> TCPStore:
    """Connect to torch's store at rank 0's address; without a port, host it there, and at no other address.

    torch looks up the name of every peer of a store, only for its log, and a name server that does not answer would
    delay all ranks. After the first look-up that fails, torch asks no more in that process
    (https://github.com/pytorch/pytorch/pull/159596). Here it fails at once, in a thread whose resolver makes no
    attempt, so that the other look-ups of the process are not affected.

    Raises:
        MasterLost: nothing answers there. BackendUnavailable: USE_LIBUV=0 is set.
    """
    if launchers.legacy_store_requested():
        raise BackendUnavailable(
            "the store must be torch's libuv one",
            why="USE_LIBUV=0 is set; it asks for the legacy store, which listens on all addresses",
            next="unset USE_LIBUV",
        )
    how: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": False, "use_libuv": True}
    how |= {"is_master": port is None, "timeout": CONNECT_TIMEOUT}
    if port is None:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = socket.create_server((address, 0), family=family, backlog=4096)
        port = listener.getsockname()[1]
        how["master_listen_fd"] = listener.detach()
    try:
        with launchers.brief_name_lookups():
            return ThreadPoolExecutor(1).submit(TCPStore, address, port, **how).result()
    except Exception as error:
        raise MasterLost(
            f"torch's store of rank 0 at {address}:{port} is gone",
            why=first_line(error),
            next="look at rank 0's last lines for why it left, then start all ranks again",
        ) from error


def open_process_group(store: TCPStore, rank: int, world_size: int, backend: str, device: torch.device) -> None:
    """Call ``init_process_group``, and try it with a first all-reduce.

    Raises:
        PeerUnreachable: the ranks have met at rank 0, but cannot connect to each other. DeviceTaken: NCCL found two
            ranks on one GPU.
    """
    try:
        dist.init_process_group(
            backend,
            store=PrefixStore("process_group", store),
            rank=rank,
            world_size=world_size,
            timeout=FIRST_COLLECTIVE_TIMEOUT,
            device_id=device if device.type == "cuda" else None,
        )
        total = torch.ones(1, device=device)
        dist.all_reduce(total)
        answered = round(total.item())
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        if "Duplicate GPU" in str(error):
            raise DeviceTaken(
                f"rank {rank} shares {device} with another rank",
                why=first_line(error),
                next="give each rank of a host a GPU of its own: leave --local_rank out, or choose different ones",
            ) from error
        raise PeerUnreachable(
            f"rank {rank} could not connect to all other ranks",
            why=f"all {world_size} ranks joined, but {backend} said: {first_line(error)}",
            next="open all TCP ports between the hosts, or name the interface that connects them:\n"
            f"{'NCCL' if backend == 'nccl' else 'GLOO'}_SOCKET_IFNAME=<interface>",
        ) from error
    assert answered == world_size, f"{answered} ranks answered the first all-reduce, not {world_size}"
    set_timeout(COLLECTIVE_TIMEOUT)


def close_process_group(device: torch.device, *, all_finished: bool) -> bool:
    """Destroy the process group; return False if that takes too long, as when a driver or the network hangs.

    Args:
        all_finished: whether all ranks close it now, so that a last collective can succeed.
    """
    failed: list[BaseException] = []

    def close() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # each thread has its own
            if all_finished and dist.get_backend() == "gloo":
                # gloo's two threads may still hold the last all-reduce that DDP began inside a backward pass, and with
                # it a Python object. If they release it while the interpreter ends, the process aborts (seen in 3 of
                # 80 runs under load). A thread that has begun a barrier has released it.
                with suppress(RuntimeError):
                    for _ in range(2):
                        dist.barrier()
            dist.destroy_process_group()
        except BaseException as error:
            failed.append(error)

    if not dist.is_initialized():
        return True
    closing = threading.Thread(target=close, name="ddp_manual closing", daemon=True)
    closing.start()
    closing.join(CLOSE_WITHIN)
    if failed:
        raise failed[0]
    return not closing.is_alive()


def is_broken_collective(error: BaseException | None) -> bool:
    """Return whether torch raised this, or what the user's code made of it, because another rank is gone."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _BROKEN.search(str(error))):
            return True
        error = error.__cause__
    return False


def first_line(error: BaseException) -> str:
    """Return the first line of an exception, at most 300 characters, without the name of gloo's source file."""
    text = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
    line = text.strip().splitlines()[0]
    return re.sub(r"\[/[^\]]*\] ", "", line).split(". This is typically")[0][:300]


# Private names of torch and Python, each here because no public name does the same.


def import_dynamo() -> None:
    """Import ``torch._dynamo``, as DDP's constructor and the first step of an optimizer do: 2 to 4 s."""
    importlib.import_module("torch._dynamo")


def set_timeout(timeout: timedelta) -> None:
    """Set the time-out of the default process group: public since torch 2.15, private before."""
    (getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout)(timeout)


def collectives_begun() -> dict[str, int]:
    """Return process group -> how many collectives this rank has begun in it; any thread may ask.

    torch numbers the collectives, and its own reports name the one that a rank is missing from. Neither the numbers
    nor the list of process groups has a public name.
    """
    begun = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        # A group that this rank does not belong to has no number, nor has a group that is being destroyed.
        with suppress(AttributeError, RuntimeError):
            begun[str(name)] = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return begun


def innermost_frame(thread: int) -> FrameType | None:
    """Return the frame a thread is in, by ``threading.get_ident()``: documented, but with a private name."""
    return sys._current_frames().get(thread)
