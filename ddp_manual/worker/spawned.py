"""A rank that ``spawn`` has started, in its own process: it calls the function, and tells its parent what ends it."""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import wait as wait_for_any
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

from ddp_manual import signals
from ddp_manual.errors import DdpManualError, TrainingFailed
from ddp_manual.worker import session
from ddp_manual.worker.birth import end_process
from ddp_manual.worker.join import joined
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


@dataclass(frozen=True)
class Words:
    """What a rank says to its parent, each kind in a file of its own; the parent reads them once the rank has ended."""

    folder: Path
    rank: int

    def say(self, kind: str, said: object) -> None:
        with suppress(Exception):  # whatever the user's own class does when it is copied
            self._file(kind).write_bytes(ForkingPickler.dumps(said))

    def said(self, kind: str) -> Any:
        """None: nothing, or what the user's own class cannot make anew."""
        with suppress(Exception):
            return ForkingPickler.loads(self._file(kind).read_bytes())

    def leave(self, error: DdpManualError, cause: BaseException | None = None) -> None:
        """Why this rank ends, and the user's own exception if that is the reason."""
        # In case that the error cannot be copied, as one of the user's own below ours.
        self.say(ERROR, TrainingFailed(error.what, why=error.why, next=error.next))
        self.say(ERROR, error)
        self.say(CAUSE, cause)

    def _file(self, kind: str) -> Path:
        return self.folder / f"{kind}-rank{self.rank}"


def become(spec: WorldSpec, train_fn: Callable[..., object], args: tuple[Any, ...], words: Words) -> None:
    """The life of a rank, in its own process: as long as its parent lives, and in a session of its own, since it hears
    of a terminal's Ctrl-C from its parent."""
    os.setsid()
    threading.Thread(target=_end_without_parent, name="ddp_manual parent", daemon=True).start()
    with signals.as_errors(), signals.without_saving():
        try:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
            words.say(BEGAN, True)
            with joined(spec, command=COMMAND, tell=words.leave) as world:
                train_fn(world, *args)
        except BaseException as error:
            if isinstance(error, SystemExit) and not error.code:
                return
            ours = session.as_ours(spec.rank, error, after_a_signal=START_AGAIN)
            words.leave(ours, None if ours is error else error)
            end_process(ours.exit_code)


def _end_without_parent() -> None:
    """Once the parent is gone: stop in order, or else at once."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait_for_any([parent.sentinel])
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(WITHOUT_PARENT)
    end_process(128 + signal.SIGTERM)
