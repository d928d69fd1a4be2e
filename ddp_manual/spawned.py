"""A rank that ``spawn`` has started, in its own process: it calls the function, and tells its parent what ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.reduction import ForkingPickler
from typing import Any

from ddp_manual import signals
from ddp_manual.errors import DdpManualError, StopSignal, TrainingFailed, stopped_by
from ddp_manual.world_spec import WorldSpec

# What a rank cannot heed until it has got so far as to set a handler.
HELD_BACK = (signal.SIGINT, signals.SAVE)
# What ranks are told to do about one that is missing.
COMMAND = "(spawn has started rank {rank} too: look at what it does)"
# What to do after a signal, unless it was ``train`` that it has stopped: that says how to go on.
START_AGAIN = "start the script again"
# The kinds of what a rank says to its parent.
BEGAN, ERROR, CAUSE = "began", "error", "cause"
# Seconds a rank has to stop in order, once its parent is gone.
WITHOUT_PARENT = 10.0


class _Words:
    """What a rank says to its parent; from any thread."""

    def __init__(self, sending: Connection) -> None:
        self._sending = sending
        self._turn = threading.Lock()

    def begin(self) -> None:
        self._send(BEGAN, None)

    def leave(self, error: DdpManualError, cause: BaseException | None = None) -> None:
        """Why this rank ends, and the user's own exception if that is the reason."""
        try:
            self._send(ERROR, error)
        except Exception:  # an exception of the user's own, below ours, that cannot be copied
            self._send(ERROR, TrainingFailed(error.what, why=error.why, next=error.next))
        with suppress(Exception):  # whatever the user's own class does when it is copied
            if cause is not None:
                self._send(CAUSE, bytes(ForkingPickler.dumps(cause)))

    def _send(self, kind: str, said: Any) -> None:
        with self._turn, suppress(BrokenPipeError):
            self._sending.send((kind, said))


def become(spec: WorldSpec, train_fn: Callable[..., object], args: tuple[Any, ...], sending: Connection) -> None:
    """The life of a rank, in its own process: as long as its parent lives, and in a session of its own, since it hears
    of a terminal's Ctrl-C from its parent."""
    os.setsid()
    threading.Thread(target=_end_without_parent, name="ddp_manual parent", daemon=True).start()
    words = _Words(sending)
    with signals.as_errors(), signals.without_saving():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            words.begin()
            from ddp_manual.rendezvous import rendezvous

            with rendezvous(spec, command=COMMAND, tell=words.leave) as world:
                train_fn(world, *args)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return
            from ddp_manual.rendezvous.watchdog import exit_now

            ours = as_ours(spec.rank, error)
            words.leave(ours, None if ours is error else error)
            exit_now(ours.exit_code)


def as_ours(rank: int, error: BaseException) -> DdpManualError:
    """What ends a rank, for its parent."""
    from ddp_manual.rendezvous import lastwords

    if isinstance(error, (StopSignal, KeyboardInterrupt)):
        return stopped_by(error, next=START_AGAIN)
    return lastwords.as_ours(rank, error)


def _end_without_parent() -> None:
    """Once the parent is gone: stop in order, or else at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])

    from ddp_manual.rendezvous.watchdog import exit_now

    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(WITHOUT_PARENT)
    exit_now(128 + signal.SIGTERM, flush_within=1.0)
