"""How a worker begins, before torch is loaded, and how it ends: signals are left to the agent, crashes leave their
stack, and the kernel ends it with its agent."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
from types import FrameType

from ddp_manual.signals import HELD_BACK, SAVE, STACKS, STOP

PR_SET_PDEATHSIG = 1
# Seconds, for a terminal or a pipe that nobody may read.
FLUSH_WITHIN = 0.3


def leave_signals_to_the_agent() -> None:
    """The terminal sends Ctrl-C to agent and worker alike; the agent says what is wished."""
    for number in (*STOP, SAVE):
        signal.signal(number, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, _pass_over)  # a handler is not handed on to another program
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def let_children_be_terminated() -> None:
    """Give forked children the default SIGTERM: a ``multiprocessing.Pool`` ends its processes with it."""
    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=lambda: signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM]),
        after_in_child=_take_sigterm_as_usual,
    )


def _take_sigterm_as_usual() -> None:
    """In a child, which may have been sent one already, before it ran at all."""
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])


def _pass_over(number: int, frame: FrameType | None) -> None:
    pass


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with the one that has started it; where it cannot, the channel's end does."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def leave_stacks_in(faults: int) -> None:
    """From now on a native crash, or ``signals.STACKS``, writes the Python stacks of all threads to this descriptor."""
    faulthandler.enable(file=faults)
    faulthandler.register(STACKS, file=faults)


def leave_no_stacks(*, was_enabled: bool) -> None:
    """Undo ``leave_stacks_in``; a faulthandler that was on writes to stderr again."""
    faulthandler.unregister(STACKS)
    faulthandler.disable()
    if was_enabled:
        faulthandler.enable()


def flush_briefly() -> None:
    """Write what is still unwritten, unless nobody reads it."""

    def flush() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_WITHIN)


def end_process(status: int) -> None:
    """From any thread, without the interpreter's teardown: the main thread may be blocked for good."""
    flush_briefly()
    os._exit(status)
