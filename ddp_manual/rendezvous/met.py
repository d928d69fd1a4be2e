"""A rank among others: what it does with them goes through the run's store or the process group."""

from __future__ import annotations

import itertools
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_manual.errors import DataMissing, DdpManualError, PeerLost, from_dict
from ddp_manual.rendezvous.comparing import other_training
from ddp_manual.rendezvous.exchanging import exchange
from ddp_manual.rendezvous.store import RunStore, interruptibly
from ddp_manual.rendezvous.verdicts import last_words
from ddp_manual.rendezvous.waiting import Waiting
from ddp_manual.rendezvous.watchdog import Watchdog, leave_at_once
from ddp_manual.rendezvous.world import World

logger = logging.getLogger(__name__)

# Seconds for the reports of all ranks, which have done the same until then.
REPORT_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class MetWorld(World):
    """A rank that has met all the others."""

    _store: RunStore = field(repr=False)
    _watchdog: Watchdog = field(repr=False)
    _job_numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def agree(self, options: Mapping[str, tuple[Any, str]], run_dir: str) -> None:
        who = f"rank {self.rank} ({self.host}, pid {os.getpid()})"
        found = exchange({"who": who, "options": options, "run_dir": run_dir}, self.device)
        self._folder.path = Path(found[0]["run_dir"])
        for other in found[1:]:
            if difference := other_training(found[0]["options"], other["who"], other["options"]):
                raise difference

    def roster(self) -> list[dict[str, Any]]:
        roster: list[dict[str, Any]] = self._store.summary()["ranks"]
        return roster

    def leave_at_once(self, error: DdpManualError) -> None:
        self._watchdog.main_thread_leaves()
        self._watchdog.tell(last_words(self.rank, error))
        leave_at_once(self._watchdog.watched.report, error)

    def gather(self, report: Mapping[str, Any]) -> list[Any]:
        self._store.set_report(self.rank, report)
        if self.rank != 0:
            return []
        store = self._store.clone()
        reports: list[Any] = []

        def read() -> None:
            reports.extend(store.report(rank) for rank in range(self.world_size))

        try:
            interruptibly(read, Waiting(REPORT_TIMEOUT, logger), "waiting for the reports of all ranks")
        except TimeoutError:
            raise PeerLost(
                f"rank {len(reports)} did not report within {REPORT_TIMEOUT:.0f} s",
                why="every other collective step was done together; its process has ended, or is frozen",
                next="look at that rank's last lines, then start all ranks again",
            ) from None
        return reports

    def once_per_host(self, job: str, action: Callable[[], None], *, timeout: float) -> None:
        number = next(
            self._job_numbers
        )  # the same on every rank of the host; a job may be done again, as by a second run
        if self.rank == self.host_leader:
            try:
                action()
            except DdpManualError as error:
                self._store.set_outcome(self.node, number, {"error": error.as_dict()})
                raise
            self._store.set_outcome(self.node, number, {"error": None})
            return
        store = self._store.clone()
        leader = f"rank {self.host_leader} on {self.host}"
        try:
            outcome = interruptibly(
                lambda: store.outcome(self.node, number),
                Waiting(timeout, logger),
                f"waiting for {leader} to {job}",
            )
        except TimeoutError:
            raise DataMissing(
                f"{leader} did not {job} within {timeout:.0f} s",
                why=f"rank {self.rank} waited for it, so that one rank per host writes the files",
                next=f"look at what that rank says, or {job} beforehand",
            ) from None
        if outcome["error"]:
            raise from_dict(outcome["error"])
