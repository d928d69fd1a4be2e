"""What signals ask of a run: to stop after a step that all ranks agree on, or to save a checkpoint.

An agent handles them in its event loop and tells its worker, which ignores signals itself. A person's own script
handles them with Python's handlers. Another signal has a process write its Python stacks.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from ddp_manual.errors import StopSignal

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE = signal.SIGUSR1
# Has faulthandler write the stacks of all threads; no library uses this signal.
STACKS: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
# A new agent or worker starts with these blocked, and unblocks them once it can handle them.
BLOCKED_AT_START = (*STOP, SAVE, STACKS)
# Of prctl(2).
PR_SET_PDEATHSIG = 1
NOTHING_TO_SAVE = "nothing to save, since this rank is not training"
# Seconds. A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
ONCE_WITHIN = 0.3


class Requests:
    """What this process has been asked to do; the ranks agree on it at their next sync point."""

    def __init__(self) -> None:
        self.stop = 0
        """The number of the signal that asked to stop, or 0."""
        self._save = threading.Event()

    def add(self, number: int) -> None:
        """Add what a signal asks for: SIGUSR1 to save, the others to stop; the first that asks to stop counts."""
        if number == SAVE:
            self._save.set()
        else:
            self.stop = self.stop or number

    def take_save(self) -> bool:
        """Return whether a checkpoint has been asked for since the last call."""
        asked = self._save.is_set()
        if asked:
            self._save.clear()
        return asked


def handled() -> list[signal.Signals]:
    """Return the signals that ask to stop, except those this process was told to ignore, as nohup does with SIGHUP."""
    return [number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT]


@contextmanager
def block_in_children(numbers: Iterable[int] = BLOCKED_AT_START) -> Iterator[None]:
    """Start processes in the body that receive none of these signals until they unblock them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def handle_in_event_loop(handle: Callable[[int], None]) -> Iterator[None]:
    """Have the event loop call ``handle`` with the number of each signal that arrives while the body runs."""
    import asyncio  # takes 0.05 s, which --help does without

    loop = asyncio.get_running_loop()
    numbers = [*handled(), SAVE]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, handle, int(number))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            # This process is leaving: a signal that arrives from now on is too late.
            signal.signal(number, signal.SIG_IGN if before[number] is signal.SIG_DFL else before[number])


@contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raise StopSignal in the body on Ctrl-C, SIGTERM or SIGHUP, so that the stack unwinds and open files are closed.

    A repetition within ``ONCE_WITHIN`` of the first signal is ignored.
    """
    first = -ONCE_WITHIN

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if now - first >= ONCE_WITHIN:
            first = now
            raise StopSignal(number)

    with _handlers(dict.fromkeys(handled(), stop)):
        yield


@contextmanager
def defer_stop() -> Iterator[None]:
    """Let the body finish when a signal asks to stop, then raise StopSignal for the first such signal."""
    arrived: list[int] = []
    with _handlers(dict.fromkeys(handled(), lambda number, frame: arrived.append(number))):
        yield
    if arrived:
        raise StopSignal(arrived[0])


@contextmanager
def ignore_save(instead: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """Ignore SIGUSR1 while the body runs, or call ``instead``; by default the signal would end the process."""
    with _handlers({SAVE: lambda number, frame: instead(number)}):
        yield


@contextmanager
def collect_requests(requests: Requests, tell: Callable[[int], None]) -> Iterator[None]:
    """Add signals to ``requests`` instead of interrupting the body; ``tell`` gets the number of each."""

    def collect(number: int, frame: FrameType | None) -> None:
        requests.add(number)
        tell(number)

    with _handlers(dict.fromkeys([*handled(), SAVE], collect)):
        yield


@contextmanager
def _handlers(wanted: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """Set handlers while the body runs; only in the main thread, since Python allows it in no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave_signals_to_the_agent() -> None:
    """Ignore signals: the terminal sends Ctrl-C to agent and worker alike, and the agent tells the worker to stop."""
    for number in (*STOP, SAVE):
        signal.signal(number, signal.SIG_IGN)
    # A handler that does nothing: unlike SIG_IGN, programs that the worker starts do not inherit it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)


def let_children_be_terminated() -> None:
    """Give forked children the default SIGTERM: a ``multiprocessing.Pool`` ends its processes with it."""

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGTERM])

    def restore() -> None:  # in a child, which may have been sent a SIGTERM before it ran at all
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        unblock()

    os.register_at_fork(
        before=lambda: signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM]),
        after_in_parent=unblock,
        after_in_child=restore,
    )


def die_with_parent(parent: int) -> None:
    """Have the kernel end this process with its parent; on other systems than Linux the closed channel ends it."""
    if sys.platform == "linux":
        import ctypes  # takes 2 ms, which --help does without

        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != parent:
            os.kill(os.getpid(), signal.SIGKILL)


def write_stacks_to(descriptor: int) -> None:
    """Write the Python stacks of all threads to this descriptor on a native crash and on the signal STACKS."""
    faulthandler.enable(file=descriptor)
    faulthandler.register(STACKS, file=descriptor)


def write_no_stacks(*, was_enabled: bool) -> None:
    """Undo ``write_stacks_to``; a faulthandler that was enabled before writes to stderr again."""
    faulthandler.unregister(STACKS)
    faulthandler.disable()
    if was_enabled:
        faulthandler.enable()
