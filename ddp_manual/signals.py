"""What signals ask of a run: to stop after a step that all ranks agree on, or to save a checkpoint.

An agent takes them from its event loop, and tells its worker what is wished; a worker itself ignores them. Where the
worker is a person's own script, Python's handlers note them in it.
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from types import FrameType

from ddp_manual.errors import StopSignal

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE = signal.SIGUSR1
# What has faulthandler write the stacks of all threads; no library uses it.
STACKS: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
# What agents and workers are not to see before they can take it on.
HELD_BACK = (*STOP, SAVE, STACKS)
NOTHING_TO_SAVE = "nothing to save, since this rank is not training"
# Seconds. A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
ONCE_WITHIN = 0.3


class Requests:
    """What this process has been asked for; the ranks agree on it at their next sync point."""

    def __init__(self) -> None:
        self.stop = 0
        """The number of the signal that asked for it, or 0."""
        self._save = threading.Event()

    def request_stop(self, number: int) -> None:
        self.stop = self.stop or number

    def request_save(self) -> None:
        self._save.set()

    def take_save(self) -> bool:
        """Whether a checkpoint has been asked for since the last time."""
        asked = self._save.is_set()
        if asked:
            self._save.clear()
        return asked


def handled() -> list[signal.Signals]:
    """Those that ask to stop, without one that this process was told to ignore, as nohup does with SIGHUP."""
    return [number for number in STOP if signal.getsignal(number) is not signal.SIG_IGN or number == signal.SIGINT]


@contextmanager
def held_back(numbers: Iterable[int] = HELD_BACK) -> Iterator[None]:
    """A process that the body starts hears of none of these before it unblocks them: what comes until then waits."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def taken(take: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, the event loop calls ``take`` with the number of each of these signals."""
    import asyncio  # of 0.05 s, which the command line's --help does without

    loop = asyncio.get_running_loop()
    numbers = [*handled(), SAVE]
    before = {number: signal.getsignal(number) for number in numbers}
    for number in numbers:
        loop.add_signal_handler(number, take, int(number))
    try:
        yield
    finally:
        for number in numbers:
            loop.remove_signal_handler(number)
            # What comes from here on is too late: this process is leaving.
            signal.signal(number, signal.SIG_IGN if before[number] is signal.SIG_DFL else before[number])


@contextmanager
def as_errors() -> Iterator[None]:
    """While the body runs, Ctrl-C, SIGTERM and SIGHUP raise StopSignal: the stack unwinds, and what is open is closed.
    An echo of the first within ``ONCE_WITHIN`` does nothing.
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
def deferred() -> Iterator[None]:
    """While the body runs, what asks to stop is held back; after it, the first raises StopSignal."""
    arrived: list[int] = []
    with _handlers(dict.fromkeys(handled(), lambda number, frame: arrived.append(number))):
        yield
    if arrived:
        raise StopSignal(arrived[0])


@contextmanager
def without_saving(instead: Callable[[int], None] = lambda number: None) -> Iterator[None]:
    """While the body runs, except where signals are ``noted``, SIGUSR1 does nothing, or what is to be done instead;
    else it would end the process."""
    with _handlers({SAVE: lambda number, frame: instead(number)}):
        yield


@contextmanager
def noted(requests: Requests, tell: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, signals become ``requests`` instead of interrupting this process; ``tell`` gets each."""

    def note(number: int, frame: FrameType | None) -> None:
        if number == SAVE:
            requests.request_save()
        else:
            requests.request_stop(number)
        tell(number)

    with _handlers(dict.fromkeys([*handled(), SAVE], note)):
        yield


@contextmanager
def _handlers(wanted: dict[signal.Signals, Callable[[int, FrameType | None], None]]) -> Iterator[None]:
    """In a thread other than the main one, where Python sets no handlers, signals do what they did before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
