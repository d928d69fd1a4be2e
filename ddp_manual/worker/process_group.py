"""torch's store and process group: made once all ranks are known to be here, and tried before they are used."""

from __future__ import annotations

import re
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed import distributed_c10d

from ddp_manual import launchers
from ddp_manual.errors import BackendUnavailable, BadOption, DdpManualError, DeviceTaken, MasterLost, PeerUnreachable
from ddp_manual.worker.whereabouts import OWN_THREADS

# Everybody is here, so connecting is a matter of seconds; a pair that cannot connect should not take 30 minutes.
FIRST_COLLECTIVE_TIMEOUT = timedelta(seconds=60)
# torch's own default: a rank may be this much slower than another between two collectives.
COLLECTIVE_TIMEOUT = timedelta(minutes=30)
# For a store whose address rank 0 has told a moment ago.
CONNECT_TIMEOUT = timedelta(seconds=10)

# Seconds, after which a process group that does not close is left as it is.
CLOSE_WITHIN = 20.0

# How gloo words a collective that broke because a peer did; its other errors are mistakes in the call.
_BROKEN = re.compile(r"Connection (closed|reset)|Broken pipe|Socket closed|Timed out waiting", re.IGNORECASE)


def check_none_open() -> None:
    """Raises BadOption where this process has a process group already: it can be a rank of one run at a time."""
    if dist.is_initialized():
        raise BadOption(
            "this process has a process group already",
            why="another join of this script is still open, or it has called init_process_group",
            next="leave init_process_group out, since join opens the group\n"
            "or end the one before the next begins; after one that has failed, begin in a new process",
        )


def listen_for_store(address: str) -> socket.socket:
    """As rank 0: where torch's store will be, at this IP address only."""
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address, 0), family=family, backlog=4096)


def open_store(address: str, port: int, listener: socket.socket | None = None) -> TCPStore:
    """torch's store, at rank 0's address; rank 0 hosts it on its ``listener``, which it takes over.

    torch looks up the name of every peer of a store, for its log alone, and a name server that does not answer would
    hold up all ranks. The first look-up that fails makes torch ask no more in that process
    (https://github.com/pytorch/pytorch/pull/159596): here it fails at once, in a thread whose resolver makes no
    attempt, so that other look-ups of the process are left alone.

    Raises:
        MasterLost: nothing answers there. BackendUnavailable: USE_LIBUV=0 is set.
    """
    if launchers.legacy_store_requested():
        raise BackendUnavailable(
            "the store must be torch's libuv one",
            why="USE_LIBUV=0 is set; the legacy store it asks for cannot be kept to one address",
            next="unset USE_LIBUV",
        )
    listening = listener.detach() if listener is not None else None
    how: dict[str, Any] = {"wait_for_workers": False, "multi_tenant": False, "use_libuv": True}
    how |= {"is_master": listening is not None, "master_listen_fd": listening, "timeout": CONNECT_TIMEOUT}
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
    """``init_process_group`` and a first all-reduce.

    Raises:
        PeerUnreachable: the ranks have met at rank 0, but cannot connect to one another.
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
        counted = round(total.item())
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
    assert counted == world_size, f"{counted} ranks answered the first all-reduce, not {world_size}"
    # Public since torch 2.15; before that it has the same signature under a private name.
    set_timeout = getattr(distributed_c10d, "set_timeout", None) or distributed_c10d._set_pg_timeout
    set_timeout(COLLECTIVE_TIMEOUT)


def close_process_group(device: torch.device, *, all_finished: bool) -> bool:
    """Destroy the process group; whether that was done in time. Where a driver or a network hangs it may take for ever.

    Args:
        all_finished: every rank is about to do the same, so a last collective has somebody to meet.
    """
    failed: list[BaseException] = []

    def close() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # which is each thread's own
            _close(all_finished=all_finished)
        except BaseException as error:
            failed.append(error)

    closing = threading.Thread(target=close, name=f"{OWN_THREADS}closing", daemon=True)
    closing.start()
    closing.join(CLOSE_WITHIN)
    if failed:
        raise failed[0]
    return not closing.is_alive()


def _close(*, all_finished: bool) -> None:
    if not dist.is_initialized():
        return
    if all_finished and dist.get_backend() == "gloo":
        # gloo's two threads may still hold the last all-reduce that DDP began inside a backward pass, and with it a
        # Python object. If they let go of it while the interpreter ends, the process aborts (seen in 3 of 80 runs under
        # load). A thread that has taken up a barrier has let go.
        with suppress(RuntimeError):
            for _ in range(2):
                dist.barrier()
    dist.destroy_process_group()


def collectives_begun() -> dict[str, int]:
    """By process group of this rank: how many collectives it has begun. Any thread may ask.

    torch numbers them itself, to name the one that a rank is missing from in its own reports.
    """
    begun = {}
    for group, name in list(distributed_c10d._world.pg_names.items()):
        # A group that this rank is no member of has no such number; nor has one that is being destroyed.
        with suppress(AttributeError, RuntimeError):
            begun[str(name)] = int(group._get_sequence_number_for_group())  # type: ignore[attr-defined]
    return begun


def is_broken_collective(error: BaseException | None) -> bool:
    """Whether this is how torch says that a peer is gone, or what the user's code made of it, rather than a mistake."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and _BROKEN.search(str(error))):
            return True
        error = error.__cause__
    return False


def is_opened_twice(error: BaseException) -> bool:
    """Whether this is how torch says that a process group was to be opened where one is open."""
    return isinstance(error, ValueError) and "default process group twice" in str(error)


def first_line(error: BaseException) -> str:
    """The gist of any exception on one line of at most 300 characters, without gloo's source file in front."""
    text = error.what if isinstance(error, DdpManualError) else f"{type(error).__name__}: {error}"
    line = text.strip().splitlines()[0]
    return re.sub(r"\[/[^\]]*\] ", "", line).split(". This is typically")[0][:300]
