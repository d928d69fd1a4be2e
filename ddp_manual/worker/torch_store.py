"""torch's store, which rank 0's worker hosts: host it, or connect to it."""

from __future__ import annotations

import ctypes
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import timedelta
from typing import Any

from torch.distributed import TCPStore

from ddp_manual.environment import user_variables
from ddp_manual.errors import BackendUnavailable, MasterLost
from ddp_manual.worker.explain_errors import first_line

# Short, since rank 0 announced the address of its store a moment ago.
CONNECT_TIMEOUT = timedelta(seconds=10)


def open_store(address: str, port: int | None = None) -> TCPStore:
    """Connect to torch's store at rank 0's address; without a port, host it there, and at no other address.

    torch looks up the name of every peer of a store, only for its log, and a name server that does not answer would
    delay all ranks. After the first look-up that fails, torch asks no more in that process
    (https://github.com/pytorch/pytorch/pull/159596). Here it fails at once, in a thread whose resolver makes no
    attempt, so that the other look-ups of the process are not affected.

    Raises:
        MasterLost: nothing answers there. BackendUnavailable: USE_LIBUV=0 is set.
    """
    if user_variables.legacy_store_requested():
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
        return ThreadPoolExecutor(1, initializer=shorten_name_lookups).submit(TCPStore, address, port, **how).result()
    except Exception as error:
        raise MasterLost(
            f"torch's store of rank 0 at {address}:{port} is gone",
            why=first_line(error),
            next="look at rank 0's last lines for why it left, then start all ranks again",
        ) from error


def shorten_name_lookups() -> None:
    """Keep this thread from asking a name server; where torch would print a warning about that, allow one attempt of
    1 s.

    glibc keeps these settings for each thread: struct __res_state in its resolv/bits/types/res_state.h begins with
    the seconds of an attempt and the number of attempts. The variable RES_OPTIONS would also reach the user's own
    threads and programs.
    """
    with suppress(AttributeError):  # other libraries than glibc do not have them
        library = ctypes.CDLL(None)
        library.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        library.__res_init()
        state = library.__res_state()
        state[0], state[1] = 1, 0 if user_variables.torch_log_is_quiet() else 1
