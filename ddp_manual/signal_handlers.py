"""What signals ask of a run: to stop after a step that all ranks agree on, or to save a checkpoint.

An agent handles them in its event loop (what they do is decided in ``protocol/stop_signals.py``) and tells its worker,
which ignores signals itself. A person's own script handles them with Python's handlers. The signal STACKS has a
process write its Python stacks.
"""

from __future__ import annotations

import faulthandler
import functools
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import FrameType
from typing import Any, NoReturn

from ddp_manual import orphans, process_status
from ddp_manual.errors import StopSignal

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
SAVE = signal.SIGUSR1
# Has faulthandler write the stacks of all threads; no library uses this signal.
STACKS: int = getattr(signal, "SIGRTMIN", signal.SIGUSR2)
# A new agent or worker starts with these blocked, and unblocks them once it can handle them.
BLOCKED_AT_START = (*STOP, SAVE, STACKS)
NOTHING_TO_SAVE = "nothing to save, since this rank is not training"
# Seconds. A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
ONCE_WITHIN = 0.3
# Seconds in which a signal that is sent to all processes of a rank, one by one, has come to each of them.
SENT_TO_ALL_WITHIN = 0.1

# The program of a witness: it clears what is pending each time that it gets STACKS.
COLLECT_SIGNALS = f"""
import signal
while True:
    signal.sigwait([{STACKS:d}])
    while signal.sigtimedwait({[*map(int, BLOCKED_AT_START)]}, 0):
        pass
"""

_sigterm_without_us: list[Any] = []
"""For each handler of SIGTERM that this package has set, the handler before it; the first is the user's own."""


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
    """Have the event loop call ``handle`` with the number of each signal that arrives while the body runs.

    A signal that arrives later is too late, and is ignored: this process has said how it ends, and is leaving.
    """
    import asyncio  # takes 0.05 s, which --help does without

    loop = asyncio.get_running_loop()
    numbers = [*handled(), SAVE]
    for number in numbers:
        # Not asyncio's own handlers: where these are removed, a signal has its default action for a moment. What this
        # process was sent before a signal, such as that the worker's program begins, is handled before it.
        signal.signal(number, lambda number, frame: loop.call_soon_threadsafe(loop.call_soon, handle, number))
    try:
        yield
    finally:
        for number in numbers:
            signal.signal(number, signal.SIG_IGN)


def end_by_default() -> None:
    """Let signals end this process again, which has nothing more to do than to wait for a reader of its last lines."""
    for number in STOP:
        if signal.getsignal(number) is signal.SIG_IGN:
            signal.signal(number, signal.SIG_DFL)


@contextmanager
def raise_on_stop() -> Iterator[None]:
    """Raise StopSignal in the body on Ctrl-C, SIGTERM or SIGHUP, so that the stack unwinds and open files are closed.

    A repetition within ``ONCE_WITHIN`` of the first signal is ignored. A signal that is ignored at the end of the body
    stays so: this process has said how it ends, and Python would still print a KeyboardInterrupt.
    """
    first = -ONCE_WITHIN

    def stop(number: int, frame: FrameType | None) -> None:
        nonlocal first
        now = time.monotonic()
        if now - first >= ONCE_WITHIN:
            first = now
            raise StopSignal(number)

    with _handlers(dict.fromkeys(handled(), stop), stay_ignored=True):
        yield


@contextmanager
def ignore_save() -> Iterator[None]:
    """Ignore SIGUSR1 while the body runs; by default the signal would end the process."""
    with _handlers({SAVE: lambda number, frame: None}):
        yield


@contextmanager
def handle_instead(take: Callable[[int], None]) -> Iterator[None]:
    """Call ``take`` with the number of each signal that asks to stop or to save, in place of interrupting the body."""
    with _handlers(dict.fromkeys([*handled(), SAVE], lambda number, frame: take(number))):
        yield


@contextmanager
def _handlers(
    wanted: dict[signal.Signals, Callable[[int, FrameType | None], None]], *, stay_ignored: bool = False
) -> Iterator[None]:
    """Set handlers while the body runs; only in the main thread, since Python allows it in no other."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    _watch_forks()
    before = {number: signal.signal(number, handler) for number, handler in wanted.items()}
    ours = [before[number] for number in before if number == signal.SIGTERM]
    _sigterm_without_us.extend(ours)
    try:
        yield
    finally:
        del _sigterm_without_us[len(_sigterm_without_us) - len(ours) :]
        for number, handler in before.items():
            if not (stay_ignored and signal.getsignal(number) is signal.SIG_IGN):
                signal.signal(number, handler)


def leave_signals_to_the_agent() -> None:
    """Ignore signals: the terminal sends Ctrl-C to agent and worker alike, and the agent tells the worker to stop."""
    for number in (*STOP, SAVE):
        signal.signal(number, signal.SIG_IGN)
    # A handler that does nothing: unlike SIG_IGN, programs that the worker starts do not inherit it.
    signal.signal(signal.SIGTERM, lambda number, frame: None)
    signal.siginterrupt(signal.SIGTERM, False)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, BLOCKED_AT_START)


def ignored_at_start() -> list[int]:
    """Return the signals that this process was told to ignore, as nohup does with SIGHUP."""
    return [number for number in (*STOP, SAVE) if signal.getsignal(number) is signal.SIG_IGN]


def handle_as_any_program(ignored: Iterable[int]) -> None:
    """Undo ``leave_signals_to_the_agent``: each signal does from now on what it does to a new Python.

    Args:
        ignored: what ``ignored_at_start`` has returned.
    """
    for number in (*STOP, SAVE):
        usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
        signal.signal(number, signal.SIG_IGN if number in ignored else usual)


def _terminal_tells_children() -> bool:
    """Return whether a terminal sends Ctrl-C to this process, and so to its children too."""
    with suppress(OSError), open("/dev/tty", "rb") as terminal:
        return os.tcgetpgrp(terminal.fileno()) == os.getpgrp()
    return False


class Witness:
    """A process that gets each signal that is sent to all processes of this rank: to their process group, cgroup or
    host, or by a name that a worker has too. It keeps such signals blocked, and the kernel shows which are pending: see
    proc(5).

    Args:
        own_session: whether workers have sessions of their own, so that no signal to this process's group reaches them.
        words: what is on a worker's command line, by which somebody may look for it.
    """

    def __init__(self, *, own_session: bool, words: Sequence[str]) -> None:
        self._answers: dict[int, tuple[float, bool]] = {}
        self._own_session = own_session
        self.pid, parent = 0, os.getpid()
        """Its pid; 0 where there is none."""
        if sys.platform == "linux":
            with block_in_children():
                self.pid = os.fork()
                if not self.pid:
                    _collect_signals(parent, words, own_session=own_session)

    def was_sent_to(self, number: int, program: int) -> bool:
        """Return whether the witness has got this signal too, and so the program. All who ask about a signal within
        ONCE_WITHIN seconds get one answer.

        Args:
            program: its pid. A program in another process group does not get what is sent to the witness's group.
        """
        now = time.monotonic()
        if not self.pid:
            return number == signal.SIGINT and _terminal_tells_children()
        with suppress(OSError):  # it has ended
            if not self._own_session and os.getpgid(program) != os.getpgid(self.pid):
                return False
        if number not in self._answers or now - self._answers[number][0] > ONCE_WITHIN:
            self._answers[number] = now, False
            with suppress(OSError):  # somebody has killed it
                self._answers[number] = now, number in process_status.signals_of(self.pid, "ShdPnd")
            self.forget()
        return self._answers[number][1]

    def forget(self) -> None:
        """Clear the signals that the witness has pending: nobody will ask about them any more."""
        with suppress(OSError):
            if self.pid:
                os.kill(self.pid, STACKS)

    def close(self) -> None:
        if self.pid:
            with suppress(OSError):
                os.kill(self.pid, signal.SIGKILL)
                os.waitpid(self.pid, 0)


def _collect_signals(parent: int, words: Sequence[str], *, own_session: bool) -> NoReturn:
    """Be the witness, which is as good as idle, until the kernel or ``parent``, whose fork this is, kills it."""
    try:
        os.closerange(0, 1 << 16)
        if own_session:
            os.setsid()
        orphans.die_with_parent(parent)
        os.execv(sys.executable, [sys.executable, "-I", "-S", "-c", COLLECT_SIGNALS, *words])
    finally:
        os.kill(os.getpid(), signal.SIGKILL)


@functools.cache
def _watch_forks() -> None:
    """Have forked children handle SIGTERM as without this package, since it would neither end them nor reach the run.

    They keep ignoring Ctrl-C and SIGHUP, which a terminal sends to them too: the ranks stop together, and need them
    until then.
    """
    held = threading.local()

    def block() -> None:
        held.mask = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])

    def unblock() -> None:
        signal.pthread_sigmask(signal.SIG_SETMASK, held.mask)

    def restore() -> None:  # in a child, which may have been sent a SIGTERM before it ran at all
        if _sigterm_without_us:
            signal.signal(signal.SIGTERM, _sigterm_without_us[0] or signal.SIG_DFL)
        unblock()

    os.register_at_fork(before=block, after_in_parent=unblock, after_in_child=restore)


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
