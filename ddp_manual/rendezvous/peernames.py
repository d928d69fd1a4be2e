"""Keep torch from looking up the name of every peer that connects to a store.

torch asks for that name on both ends of each connection, for its log alone, and rank 0's store does nothing else
meanwhile: with a name server that does not answer that is 10 s, with one that takes a second to say no it is a second
for each rank. There is no switch. But the first look-up that fails makes torch ask no more in that process
(https://github.com/pytorch/pytorch/pull/159596), and it is made to fail here: in a thread whose own resolver makes no
attempt, over a store that nobody uses. Look-ups elsewhere in the process are left alone.

Where this cannot be done, ``environment.bound_reverse_lookups`` still bounds what a look-up takes.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import socket
import sys
import threading
from datetime import timedelta

from ddp_manual import environment

logger = logging.getLogger(__name__)

# In 127.0.0.0/8, and with no name in any hosts file.
NAMELESS = "127.86.13.7"
# Seconds; it takes 1 to 15 ms.
WAIT = 2.0


@functools.cache
def ask_for_none() -> None:
    """Once a process, before its first store; not where torch would print a warning about it."""
    if sys.platform == "linux" and environment.torch_is_quiet():
        thread = threading.Thread(target=_fail_one_look_up, daemon=True)
        thread.start()
        thread.join(WAIT)


def _fail_one_look_up() -> None:
    from torch._C._distributed_c10d import TCPStore

    try:
        libc = ctypes.CDLL(None)
        libc.__res_state.restype = ctypes.POINTER(ctypes.c_int)
        libc.__res_ninit.argtypes = [ctypes.c_void_p]
        resolver = libc.__res_state()  # of this thread
        if libc.__res_ninit(resolver) != 0:
            return
        # struct __res_state begins with int retrans, retry: how long and how often to ask (resolv.h of glibc).
        resolver[1] = 0
        with socket.socket() as listener:
            listener.bind((NAMELESS, 0))
            listener.listen(1)
            port = listener.getsockname()[1]
            TCPStore(
                NAMELESS,
                port,
                None,
                True,
                timedelta(seconds=WAIT),
                wait_for_workers=False,
                master_listen_fd=listener.detach(),
                use_libuv=True,
            )
    except (AttributeError, OSError, RuntimeError) as error:  # another libc, no such address, another torch
        logger.debug("torch goes on looking up the names of peers: %s", error)
