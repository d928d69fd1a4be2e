"""Ranks as children of one process, however they were started: which one failed first, and that none is left behind."""

from __future__ import annotations

import signal
import socket
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Protocol

from ddp_manual import signals
from ddp_manual.errors import StopSignal
from ddp_manual.launching.failure import Failure, root_cause

# Seconds. Ranks that lose a peer leave by themselves within 2 s, saying which; then they are made to.
LEAVE_BY_THEMSELVES = 3.0
TERM_GRACE = 3.0
# Ranks that are asked to stop agree on a step, save a checkpoint and leave in order.
STOP_IN_ORDER = 60.0
LOOK_EVERY = 0.02


class Child(Protocol):
    """One rank's process."""

    @property
    def number(self) -> int: ...

    @property
    def pid(self) -> int: ...

    def status(self) -> int | None:
        """Its exit code, or minus the signal that has killed it; None while it runs."""

    def ask(self, number: int) -> None:
        """Send a signal to the process, if it still runs."""

    def end(self, number: int) -> None:
        """Send a signal to the process and to all it has started, if it still runs."""


def say(line: str) -> None:
    """On stderr, unless its reader has gone: the ranks go on all the same."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def reserved_port() -> Iterator[int]:
    """A free port on loopback, kept for rank 0: bound but not listening, so rank 0 may listen on it and nobody else is
    given it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            # Elsewhere a bound socket keeps others from listening there, SO_REUSEADDR or not.
            holder.close()
        yield port


@contextmanager
def signals_deferred() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the body is done: a rank that is just being started is in no list yet."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    arrived: list[int] = []
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in signals.STOP}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise StopSignal(arrived[0])


@contextmanager
def saving_passed_on(rank_0: Child) -> Iterator[None]:
    """While the body runs, SIGUSR1 asks the ranks for a checkpoint; one of them tells the others."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.signal(signals.SAVE, lambda number, frame: rank_0.ask(number))
    try:
        yield
    finally:
        signal.signal(signals.SAVE, before)


def wait(children: Sequence[Child]) -> Failure | None:
    """Until all have ended, or one has failed and the others have had time to leave; the failure that began it."""
    failed: list[Failure] = []
    deadline = float("inf")
    running = list(children)
    while running and time.monotonic() < deadline:
        for child in list(running):
            status = child.status()
            if status is None:
                continue
            running.remove(child)
            if status != 0:
                failed.append(Failure(rank=child.number, pid=child.pid, status=status))
                grace = STOP_IN_ORDER if failed[0].asked_to_stop else LEAVE_BY_THEMSELVES
                deadline = min(deadline, time.monotonic() + grace)
        time.sleep(LOOK_EVERY)
    return root_cause(failed) if failed else None


def stop_in_order(children: Sequence[Child], number: int) -> None:
    """Pass a signal on, once, and let the ranks end by themselves; a second signal comes out of here as it came in."""
    running = [child for child in children if child.status() is None]
    if running:
        say("stopping; once more ends it at once")
    for child in running:
        child.ask(number)
    began = time.monotonic()
    while any(child.status() is None for child in children) and time.monotonic() < began + STOP_IN_ORDER:
        try:
            time.sleep(LOOK_EVERY)
        except StopSignal:
            if time.monotonic() - began > signals.ONCE_WITHIN:
                raise


def end(children: Sequence[Child]) -> None:
    """Leave no process: SIGTERM, then SIGKILL."""
    for number, grace in ((signal.SIGTERM, TERM_GRACE), (signal.SIGKILL, float("inf"))):
        for child in children:
            child.end(number)
        deadline = time.monotonic() + grace
        while any(child.status() is None for child in children) and time.monotonic() < deadline:
            time.sleep(LOOK_EVERY)
