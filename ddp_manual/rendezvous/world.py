"""What a rank is to the body of ``with rendezvous(...) as world``: who it is, and what it does with the others."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual.config import WorldSpec
from ddp_manual.errors import DataMissing, DdpManualError, PeerLost, from_dict
from ddp_manual.rendezvous.comparing import other_training
from ddp_manual.rendezvous.exchanging import exchange
from ddp_manual.rendezvous.progress import Progress
from ddp_manual.rendezvous.store import RunStore, interruptibly
from ddp_manual.rendezvous.verdicts import last_words
from ddp_manual.rendezvous.waiting import Waiting
from ddp_manual.rendezvous.watchdog import Watchdog, leave_at_once
from ddp_manual.rundir import RunFolder

if TYPE_CHECKING:
    import torch

logger = logging.getLogger(__name__)

# Seconds for the reports of all ranks, which have done the same until then.
REPORT_TIMEOUT = 30.0


@dataclass(frozen=True, kw_only=True)
class World:
    """A rank that has met all the others. Its process group is torch's default one."""

    spec: WorldSpec
    """What this rank was told; where that is port 0, the port in use is in the variable MASTER_PORT."""
    rank: int
    world_size: int
    local_rank: int
    local_world_size: int
    node: int
    """Which of the run's hosts this rank is on, counted from 0 in rank order."""
    nodes: int
    device: torch.device
    backend: str
    host: str
    run_id: str
    rendezvous_seconds: float
    """From the call of ``rendezvous`` until the first collective was done."""
    host_leader: int
    """The first rank of this rank's host."""
    progress: Progress
    """What this rank does, for ``ddp-manual status``; the body may keep it up to date."""
    _folder: RunFolder = field(repr=False)
    _store: RunStore = field(repr=False)
    _watchdog: Watchdog = field(repr=False)

    @property
    def run_dir(self) -> Path | None:
        """The same on every rank; on disk only where rank 0 is, unless the hosts share it. None: the run keeps no
        files, or the ranks have not agreed where."""
        return self._folder.path

    @property
    def run_dir_of_rendezvous(self) -> Path | None:
        """What rank 0 gave to ``rendezvous``, as opposed to ``agree``."""
        return self._folder.of_rendezvous

    def agree(self, options: Mapping[str, tuple[Any, str]], run_dir: str) -> None:
        """Compare every rank's options with rank 0's, and take rank 0's folder for the run's files; a collective.

        From here on ``run_dir`` is that folder, and what ends a rank is written there.

        Args:
            options: option -> (value, source), for all that the ranks must have in common.

        Raises:
            ConfigMismatch: on every rank alike, naming the first rank whose options are not rank 0's.
        """
        who = f"rank {self.rank} ({self.host}, pid {os.getpid()})"
        found = exchange({"who": who, "options": options, "run_dir": run_dir}, self.device)
        self._folder.path = Path(found[0]["run_dir"])
        for other in found[1:]:
            if difference := other_training(found[0]["options"], other["who"], other["options"]):
                raise difference

    def roster(self) -> list[dict[str, Any]]:
        """All ranks: ``rank``, ``host``, ``pid``, ``device``, ``address``, ``since``, ``versions``, a GPU's UUID."""
        roster: list[dict[str, Any]] = self._store.summary()["ranks"]
        return roster

    def leave_at_once(self, error: DdpManualError) -> None:
        """Tell the other ranks why, say it here, and end the process; from any thread, whatever the others do."""
        self._watchdog.main_thread_leaves()
        self._watchdog.tell(last_words(self.rank, error))
        leave_at_once(self._watchdog.watched.report, error)

    def gather(self, report: Mapping[str, Any]) -> list[Any]:
        """Every rank's report, on rank 0 and in rank order; [] on the others. Once a run: JSON of up to 4 MiB.

        Raises:
            PeerLost: one did not come within 30 s.
        """
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
        """Have the first rank of each host do ``action`` while the others of that host wait for it.

        Args:
            job: what is done, for the line that says what is waited for, such as "download mnist".
            timeout: seconds the others wait.

        Raises:
            DdpManualError: ``action`` raised it, on this rank or on the one waited for.
            DataMissing: the time is up.
        """
        if self.rank == self.host_leader:
            try:
                action()
            except DdpManualError as error:
                self._store.set_outcome(self.node, job, {"error": error.as_dict()})
                raise
            self._store.set_outcome(self.node, job, {"error": None})
            return
        store = self._store.clone()
        leader = f"rank {self.host_leader} on {self.host}"
        try:
            outcome = interruptibly(
                lambda: store.outcome(self.node, job),
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
