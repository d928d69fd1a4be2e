"""A sink in a thread of its own, behind a queue with an end: whatever it does, training neither waits nor fails."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

from ddp_manual.errors import DdpManualError
from ddp_manual.training.trackers.sink import Sink

logger = logging.getLogger(__name__)

# With --log_every 1 and 1,000 steps a second, what comes in while a slow sink takes ten seconds to open.
CAPACITY = 10_000

GOES_ON = "the run goes on without it"

Job = Callable[[Sink], None]


class Background:
    """The thread. A sink that raises, or falls behind by the whole queue, is warned of once and gets nothing more.

    Args:
        capacity: jobs that may wait.
    """

    def __init__(self, sink: Sink, *, capacity: int = CAPACITY) -> None:
        self.sink = sink
        self._jobs: queue.Queue[Job | None] = queue.Queue(capacity)
        self._turn = threading.Lock()
        self._dropped = False
        # Not what the thread itself says: to Python it has ended once a signal has interrupted a join (bpo-45274).
        self._ended = threading.Event()
        # A daemon: one that hangs for good keeps no process from ending.
        threading.Thread(target=self._work, name=f"ddp_manual {sink.name}", daemon=True).start()

    def put(self, job: Job | None) -> None:
        """Have the thread call ``job`` after those before; never waits. None: there are no more."""
        if self._dropped:
            return
        try:
            self._jobs.put_nowait(job)
        except queue.Full:
            self._drop(f"it does not keep up: {self._jobs.maxsize:,} events wait for it; {GOES_ON}")

    def wait(self, timeout: float) -> bool:
        """Whether all jobs are done within ``timeout`` seconds, or it has been dropped."""
        return self._dropped or self._ended.wait(max(0.0, timeout))

    def give_up(self, reason: str) -> None:
        """At the end: drop the sink if its thread still runs, and what it has started with it."""
        if not self._ended.is_set():
            self._drop(reason)
            self._abandon()

    def _work(self) -> None:
        try:
            while (job := self._jobs.get()) is not None and not self._dropped:
                job(self.sink)
        except BaseException as error:  # wandb has a sys.exit on its way out
            self._drop(f"{_in_one_line(error)}; {GOES_ON}")
            self._abandon()
        finally:
            self._ended.set()

    def _drop(self, reason: str) -> None:
        with self._turn:
            if self._dropped:
                return
            self._dropped = True
        advice = self.sink.still_to_do()
        logger.warning("--track %s: %s%s", self.sink.name, reason, f" ({advice})" if advice else "")

    def _abandon(self) -> None:
        try:
            self.sink.abandon()
        except Exception as error:
            logger.warning("--track %s: %s", self.sink.name, _in_one_line(error))


def _in_one_line(error: BaseException) -> str:
    if isinstance(error, DdpManualError):
        return error.what
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
