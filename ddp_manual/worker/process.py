"""How a worker's process begins, before torch is loaded, and how it ends: its agent takes the signals, a crash writes
the Python stacks to a pipe, and the kernel ends the process with its agent."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from types import FrameType

from ddp_manual.signals import BLOCKED_AT_START, SAVE, STACKS, STOP

PR_SET_PDEATHSIG = 1
# Seconds, for a terminal or a pipe that nobody may read.
FLUSH_WITHIN = 0.3


def leave_signals_to_the_agent() -> None:
    """Ignore signals: the terminal sends Ctrl-C to agent and worker alike, and the agent tells the worker to stop."""
    for number in (*STOP, SAVE):
        signal.signal(number, signal.SIG_IGN)
    # A handler that does nothing: unlike SIG_IGN, programs that the worker starts do not inherit it.
    signal.signal(signal.SIGTERM, _do_nothing)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)


def let_children_be_terminated() -> None:
    """Give forked children the default SIGTERM: a ``multiprocessing.Pool`` ends its processes with it."""
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
        after_in_child=_restore_sigterm,
    )


def _restore_sigterm() -> None:
    """In a child, which may have been sent a SIGTERM before it ran at all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _do_nothing(number: int, frame: FrameType | None) -> None:
    pass


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent; on other systems than Linux the closed channel ends it."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def leave_stacks_in(faults: int) -> None:
    """Write the Python stacks of all threads to this descriptor on a native crash and on ``signals.STACKS``."""
    faulthandler.enable(file=faults)
    faulthandler.register(STACKS, file=faults)


def leave_no_stacks(*, was_enabled: bool) -> None:
    """Undo ``leave_stacks_in``; a faulthandler that was enabled before writes to stderr again."""
    faulthandler.unregister(STACKS)
    faulthandler.disable()
    if was_enabled:
        faulthandler.enable()


def flush_briefly() -> None:
    """Write what is still in buffers, but do not wait for a reader that is gone."""

    def flush() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_WITHIN)


def end_process(status: int) -> None:
    """End the process from any thread, without the interpreter's teardown: the main thread may be blocked for good."""
    flush_briefly()
    os._exit(status)
