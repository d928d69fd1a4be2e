"""What signals ask of a run that is training: to stop after a step all ranks agree on, or to save a checkpoint.

Python runs a signal's handler in the main thread, between two of its own instructions, and so not while that thread is
inside a collective. What C writes to the wake-up descriptor comes through at once; a thread reads it. So a second
signal can end a process that hangs.
"""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import FrameType

from ddp_manual.errors import StopSignal, signal_name

logger = logging.getLogger(__name__)

STOP = (signal.SIGINT, signal.SIGTERM)
SAVE = signal.SIGUSR1
NOTHING_TO_SAVE = "nothing to save, since this rank is not training"
_NO_MORE = b"\0"
# Seconds. A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
ONCE_WITHIN = 0.3


class Wishes:
    """What this process has been asked for; the ranks agree on it at their next sync point."""

    def __init__(self) -> None:
        self.stop = 0
        """The number of the signal that asked for it, or 0."""
        self.heeded = True
        """Whether the ranks still agree on what is asked for; False once they have agreed to stop, or are done."""
        self._save = threading.Event()

    def ask(self, number: int) -> None:
        if number == SAVE:
            self._save.set()
        else:
            self.stop = number

    def take_save(self) -> bool:
        """Whether a checkpoint has been asked for since the last time."""
        asked = self._save.is_set()
        if asked:
            self._save.clear()
        return asked


@contextmanager
def as_errors() -> Iterator[None]:
    """While the body runs, Ctrl-C and SIGTERM raise StopSignal: the stack unwinds, what is open is closed, and the
    others are told. An echo of the first within ``ONCE_WITHIN`` does nothing.

    In a thread other than the main one they do what they did before.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    first = -ONCE_WITHIN

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if now - first >= ONCE_WITHIN:
            first = now
            raise StopSignal(number)

    before = {number: signal.signal(number, stop) for number in STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def without_saving() -> Iterator[None]:
    """While the body runs, but for where signals are ``noted``, SIGUSR1 does nothing, instead of ending the process."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def decline(number: int, frame: FrameType | None) -> None:
        logger.info("SIGUSR1: %s", NOTHING_TO_SAVE)

    before = signal.signal(SAVE, decline)
    try:
        yield
    finally:
        signal.signal(SAVE, before)


@contextmanager
def noted(leave: Callable[[int, bool], None], *, while_blocked: bool = True) -> Iterator[Wishes]:
    """While the body runs, Ctrl-C, SIGTERM and SIGUSR1 are noted instead of interrupting it.

    In a thread other than the main one, where Python sets no handlers, signals do what they did before.

    Args:
        leave: called with the number of the second signal that asks to stop, and whether the ranks could still heed the
            first; ends the process.
        while_blocked: a thread notes them, also while the main thread is inside a collective. A process without others
            is in none, and needs no thread.
    """
    wishes = Wishes()
    if threading.current_thread() is not threading.main_thread():
        yield wishes
        return
    note = _note(wishes, leave)
    with _read_by_a_thread(note) if while_blocked else nullcontext():
        handlers = {
            number: signal.signal(number, lambda number, frame: None if while_blocked else note(number))
            for number in (*STOP, SAVE)
        }
        try:
            yield wishes
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


@contextmanager
def _read_by_a_thread(note: Callable[[int], None]) -> Iterator[None]:
    """While the body runs, each signal that has a handler is noted by a thread."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)

    def read() -> None:
        while (byte := os.read(reading, 1)) != _NO_MORE:
            note(byte[0])

    thread = threading.Thread(target=read, name="ddp_manual signals", daemon=True)
    thread.start()
    wakeup_before = signal.set_wakeup_fd(writing, warn_on_full_buffer=False)
    try:
        yield
    finally:
        signal.set_wakeup_fd(wakeup_before)
        os.write(writing, _NO_MORE)
        thread.join(timeout=5)
        os.close(writing)
        os.close(reading)


def _note(wishes: Wishes, leave: Callable[[int, bool], None]) -> Callable[[int], None]:
    first = 0.0

    def note(number: int) -> None:
        nonlocal first
        if number == SAVE or (number in STOP and not wishes.stop):
            logger.info("%s", _answer(number, heeded=wishes.heeded))
            wishes.ask(number)
            first = time.monotonic()
        elif number in STOP and time.monotonic() - first > ONCE_WITHIN:
            leave(number, wishes.heeded)

    return note


def _answer(number: int, *, heeded: bool) -> str:
    if number == SAVE:
        return f"SIGUSR1: {'a checkpoint at the next step all ranks agree on' if heeded else NOTHING_TO_SAVE}"
    if not heeded:
        return f"{signal_name(number)}: this rank has done its part and is leaving; once more leaves at once"
    return f"{signal_name(number)}: stopping after the next step all ranks agree on; once more leaves at once"
