"""What goes between rank 0's watchdog and the store: progress, stacks and the failure for whoever looks on, and what
they ask for.

In a thread of its own: where an agent hosts the store it may be slow, and rank 0 would seem silent meanwhile.
"""

from __future__ import annotations

import logging
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ddp_manual.errors import MasterLost
from ddp_manual.rendezvous import verdicts
from ddp_manual.rendezvous.stacks import OWN_THREADS
from ddp_manual.rendezvous.store import RunStore

logger = logging.getLogger(__name__)

POST_EVERY = 0.5
# Seconds that an answer stays in the store for the one who asked.
ANSWER_STAYS = 30.0
# Letters, of the stacks of all ranks together.
LONGEST_ANSWER = 2_000_000


class NoticeBoard:
    """Writes what it is given, and tells ``notice`` what it reads.

    Args:
        store: a client for this thread alone; closed at the end.
        notice: told ``{"failure": words}`` or ``{"stacks": a key of the asker's choice}``.
    """

    def __init__(self, store: RunStore, notice: Callable[[Mapping[str, Any]], None]) -> None:
        self._store = store
        self._notice = notice
        self._lock = threading.Lock()
        self._progress: Sequence[Mapping[str, Any]] | None = None
        self._answers: dict[str, Mapping[int, str]] = {}
        self._failure: Mapping[str, Any] | None = None
        self._answered: deque[tuple[float, str]] = deque()
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}notice board", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        self._thread.join(timeout=5)

    def post(self, progress: Sequence[Mapping[str, Any]]) -> None:
        with self._lock:
            self._progress = progress

    def answer(self, key: str, found: Mapping[int, str]) -> None:
        """The stacks that were asked for under ``key``, by rank."""
        with self._lock:
            self._answers[key] = found

    def fail(self, failure: Mapping[str, Any]) -> None:
        with self._lock:
            self._failure = failure

    def _run(self) -> None:
        try:
            while not self._stopping.wait(POST_EVERY):
                self._write()
                self._read()
            self._write()
            self._store.close()
        except MasterLost as lost:
            self._notice({"failure": verdicts.last_words(0, lost)})
        except (ValueError, TypeError, KeyError) as error:
            logger.warning("a stranger put something unreadable into the store, so status shows no more: %s", error)

    def _write(self) -> None:
        with self._lock:
            progress, self._progress = self._progress, None
            answers, self._answers = self._answers, {}
            failure, self._failure = self._failure, None
        if progress is not None:
            self._store.set_progress(progress)
        for key, found in answers.items():
            most = LONGEST_ANSWER // max(1, len(found))
            self._store.set_stacks(key, {str(rank): text[-most:] for rank, text in found.items()})
            self._answered.append((time.monotonic(), key))
        if failure is not None:
            self._store.publish_failure(dict(failure))
        while self._answered and time.monotonic() - self._answered[0][0] > ANSWER_STAYS:
            self._store.forget_stacks(self._answered.popleft()[1])

    def _read(self) -> None:
        failure = self._store.failure_if_any()
        if failure is not None:
            self._notice({"failure": verdicts.from_store(failure)})
        while (asked := self._store.next_asked_for_stacks()) is not None:
            if re.fullmatch("[0-9a-f]{16}", asked):
                self._notice({"stacks": asked})
