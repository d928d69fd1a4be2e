"""What a rank is to the body of ``with rendezvous(...) as world``: who it is, and what it does with the others."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual.errors import BadOption, DdpManualError
from ddp_manual.rendezvous.progress import ENDED, Progress
from ddp_manual.rundir import RunFolder
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, kw_only=True)
class World(ABC):
    """A rank that has met all the others, or the only one of a run that needs none: see ``alone.py``."""

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
    """Of torch's default process group; "none" where there is none."""
    host: str
    run_id: str
    rendezvous_seconds: float
    """From the call of ``rendezvous`` until the first collective was done; 0 where there is nobody to meet."""
    host_leader: int
    """The first rank of this rank's host."""
    progress: Progress
    """What this rank does, for ``ddp-manual status``; the body may keep it up to date."""
    _folder: RunFolder = field(repr=False)
    _afterwards: ExitStack = field(repr=False)

    def __post_init__(self) -> None:
        self._afterwards.callback(setattr, self.progress, "phase", ENDED)

    def check_open(self, call: str) -> None:
        """Raises BadOption where ``call`` comes too late: the others are gone."""
        if self.progress.phase == ENDED:
            raise BadOption(
                f"{call} was called when the rendezvous had ended",
                why="its world lasts as long as the with block: then the ranks leave, and the process group is closed",
                next=f"call {call} inside: with rendezvous(...) as world:",
            )

    @property
    def run_dir(self) -> Path | None:
        """The same on every rank; on disk only where rank 0 is, unless the hosts share it. None: the run keeps no
        files, or the ranks have not agreed where."""
        return self._folder.path

    @property
    def run_dir_of_rendezvous(self) -> Path | None:
        """What rank 0 gave to ``rendezvous``, as opposed to ``agree``."""
        return self._folder.of_rendezvous

    def after_leaving(self, action: Callable[[], None]) -> None:
        """Have ``action`` called once the ranks have left, or this one has failed and told the others: nobody waits for
        what it does. The one that was asked for last comes first."""
        self._afterwards.callback(action)

    @abstractmethod
    def agree(self, options: Mapping[str, tuple[Any, str]], run_dir: str) -> None:
        """Compare every rank's options with rank 0's, and take rank 0's folder for the run's files; a collective.

        From here on ``run_dir`` is that folder, and what ends a rank is written there.

        Args:
            options: option -> (value, source), for all that the ranks must have in common.

        Raises:
            ConfigMismatch: on every rank alike, naming the first rank whose options are not rank 0's.
        """

    @abstractmethod
    def roster(self) -> list[dict[str, Any]]:
        """All ranks: ``rank``, ``host``, ``pid``, ``device``, ``address``, ``since``, ``versions``, a GPU's UUID."""

    @abstractmethod
    def leave_at_once(self, error: DdpManualError) -> None:
        """Tell the other ranks why, say it here, and end the process; from any thread, whatever the others do."""

    @abstractmethod
    def gather(self, report: Mapping[str, Any]) -> list[Any]:
        """Every rank's report, on rank 0 and in rank order; [] on the others. Once a run: JSON of up to 4 MiB.

        Raises:
            PeerLost: one did not come within 30 s.
        """

    @abstractmethod
    def once_per_host(self, job: str, action: Callable[[], None], *, timeout: float) -> None:
        """Have the first rank of each host do ``action`` while the others of that host wait for it.

        Every rank of a host calls this for the same jobs in the same order.

        Args:
            job: what is done, for the line that says what is waited for, such as "download mnist".
            timeout: seconds the others wait.

        Raises:
            DdpManualError: ``action`` raised it, on this rank or on the one waited for.
            DataMissing: the time is up.
        """
