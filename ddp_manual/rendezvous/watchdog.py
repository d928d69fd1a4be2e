"""The first failure of a run reaches every rank, even one that is blocked inside a collective.

A thread in each rank says in the store what the rank does and looks for the run's failure, with a client of its own.
When another rank has failed, the main thread gets a moment to notice by itself (its collective breaks, or it fails in
the same way); then the thread prints the cause and ends the process. ``os._exit`` is the only way out of a blocked gloo
call: aborting the group does nothing there, and ``sys.exit`` in a thread ends the thread alone.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from collections.abc import Callable

from ddp_manual.errors import DdpManualError, MasterLost
from ddp_manual.rendezvous.lastwords import peer_failure
from ddp_manual.rendezvous.progress import Heartbeat
from ddp_manual.rendezvous.store import RunStore

# Seconds. Together below the 2 s in which every rank has to be gone.
LOOK_EVERY = 0.4
GRACE = 1.0


class Watchdog:
    """Watches for the run's failure until told to stand down.

    Args:
        store: a client for this thread alone.
        nonce: tells rank 0 that this process needs the store no more.
        heartbeat: over the same client.
        report: told the error before the process ends.
    """

    def __init__(
        self, store: RunStore, nonce: str, heartbeat: Heartbeat, report: Callable[[DdpManualError], None]
    ) -> None:
        self._store = store
        self._nonce = nonce
        self._heartbeat = heartbeat
        self._report = report
        self._standing_down = threading.Event()
        self._seen: DdpManualError | None = None
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stand_down(self) -> DdpManualError | None:
        """The main thread is leaving, in order or with an error of its own; returns the failure seen by then.

        The thread is waited for: one that is still inside torch when the interpreter ends aborts the process.
        """
        self._standing_down.set()
        self._thread.join(timeout=5)
        return self._seen

    def _watch(self) -> None:
        while not self._standing_down.wait(LOOK_EVERY):
            try:
                self._heartbeat.beat_if_due()
                failure = self._store.failure_if_any()
                if failure is None:
                    continue
                self._seen = peer_failure(failure)
                # Rank 0 keeps the store until all have read what happened.
                self._store.set_left(self._nonce)
            except MasterLost as lost:
                self._seen = self._seen or lost
            if not self._standing_down.wait(GRACE):
                try:
                    self._report(self._seen)
                finally:
                    exit_now(self._seen.exit_code)
            return


def exit_now(status: int) -> None:
    """End the process from any thread, without the interpreter's teardown.

    After a failure the teardown may block (a process group with a broken peer) or abort (a thread inside torch).
    """
    try:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()
    finally:
        os._exit(status)
