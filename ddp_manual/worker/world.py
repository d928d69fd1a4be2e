"""What a rank is to the body of ``with ddp_manual.join() as world:``: who it is, and what it does with the others."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ddp_manual import signals, terminal
from ddp_manual.errors import BadOption, DataMissing, DdpManualError, from_dict
from ddp_manual.messages import ENDED, Place, Progress
from ddp_manual.run_folder import RunFolder
from ddp_manual.signals import Requests
from ddp_manual.waiting import Waiting
from ddp_manual.world_spec import WorldSpec

if TYPE_CHECKING:
    from torch._C._distributed_c10d import Store


@dataclass(frozen=True, kw_only=True)
class World(Place):
    """A rank that has met all the others, or the only one of a run that needs none."""

    spec: WorldSpec
    """What this rank was told."""
    rank: int
    world_size: int
    device: torch.device
    backend: str
    """Of torch's default process group; "none" where there is none."""
    host: str
    run_id: str
    rendezvous_seconds: float
    """From the start of the agent until the first collective was done; 0 where there is nobody to meet."""
    progress: Progress
    """What this rank does, for ``ddp-manual status``; the body may keep it up to date."""
    _folder: RunFolder = field(repr=False)
    _store: Store | None = field(repr=False)
    _roster: Sequence[Mapping[str, Any]] = field(repr=False)
    """On rank 0; the others ask the store."""
    _wishes: Requests = field(repr=False)
    _tell: Callable[[Mapping[str, Any]], None] = field(repr=False)
    """Tells the agent."""
    _own_process: bool = field(repr=False)
    """Whether the process is ours; else it is a person's script, which takes its signals itself."""
    _afterwards: ExitStack = field(repr=False)
    _job_numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def check_open(self, call: str) -> None:
        """Raises BadOption where ``call`` comes too late: the others are gone."""
        if self.progress.phase == ENDED:
            raise BadOption(
                f"{call} was called when this rank had left",
                why="its world lasts as long as the with block: then the ranks leave, and the process group is closed",
                next=f"call {call} inside: with ddp_manual.join() as world:",
            )

    @property
    def run_dir(self) -> Path | None:
        """The same on every rank; on disk only where rank 0 is, unless the hosts share it. None: the run keeps no
        files, or the ranks have not agreed where."""
        return self._folder.path

    @property
    def run_dir_of_join(self) -> Path | None:
        """What rank 0 gave to ``join``, as opposed to ``agree``."""
        return self._folder.of_join

    def after_leaving(self, action: Callable[[], None]) -> None:
        """Have ``action`` called once the ranks have left, or this one has failed and told the others: nobody waits for
        what it does. The one that was asked for last comes first."""
        self._afterwards.callback(action)

    def take_folder(self, run_dir: str) -> None:
        """From here on ``run_dir`` is this folder, and what ends a rank is written there."""
        self._folder.path = Path(run_dir)
        self._tell({"run_dir": run_dir})

    def roster(self) -> list[Mapping[str, Any]]:
        """All ranks: ``rank``, ``host``, ``pid``, ``device``, ``address``, ``since``, ``versions``, a GPU's UUID."""
        if self._store is None or self.rank == 0:
            return list(self._roster)
        found: list[Mapping[str, Any]] = json.loads(self._store.get("ddp_manual/roster"))
        return found

    def gather(self, message: Any) -> list[Any]:
        """The message of every rank, in rank order and on every rank; a collective.

        Args:
            message: JSON of any length.
        """
        if self._store is None:
            return [json.loads(json.dumps(message))]
        # bytearray: torch wants memory it could write to.
        own = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.world_size)]
        dist.all_gather(lengths, torch.tensor([len(own)], device=self.device))
        padded = own.new_zeros(max(int(length) for length in lengths))
        padded[: len(own)] = own
        received = [torch.empty_like(padded) for _ in lengths]
        dist.all_gather(received, padded)
        pairs = zip(received, lengths, strict=True)
        return [json.loads(buffer[: int(length)].cpu().numpy().tobytes()) for buffer, length in pairs]

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
        if self._store is None:
            action()
            return
        # The same on every rank of the host; a job may be done again, as by a second run.
        key = f"ddp_manual/once/{self.node}/{next(self._job_numbers)}"
        if self.rank == self.host_leader:
            try:
                action()
            except DdpManualError as error:
                self._store.set(key, json.dumps(error.as_dict()))
                raise
            self._store.set(key, "null")
        elif (failed := json.loads(self._awaited(self._store, key, job, timeout))) is not None:
            raise from_dict(failed)

    def _awaited(self, store: Store, key: str, job: str, timeout: float) -> bytes:
        leader = f"rank {self.host_leader} on {self.host}"
        waiting = Waiting(timeout, terminal.log)
        # In short looks: Python hears of no signal inside torch's own wait.
        while not store.check([key]):
            if waiting.over:
                raise DataMissing(
                    f"{leader} did not {job} within {timeout:.0f} s",
                    why=f"rank {self.rank} waited for it, so that one rank per host writes the files",
                    next=f"look at what that rank says, or {job} beforehand",
                )
            waiting.about(f"waiting for {leader} to {terminal.escaped(job)}")
            time.sleep(0.02)
        return store.get(key)

    @contextmanager
    def noting_signals(self) -> Iterator[Requests]:
        """While the body runs, Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 are requests that the ranks agree on."""
        self._tell({"notes": True, "heeds": True})
        if self._own_process:
            yield self._wishes
            return
        try:
            with signals.noted(self._wishes, lambda number: self._tell({"signalled": number})):
                yield self._wishes
        finally:
            self._tell({"notes": False, "heeds": False})

    def no_longer_heeds(self) -> None:
        """The ranks have agreed to stop, or are done: who asks now is told that this rank is leaving."""
        self._tell({"notes": True, "heeds": False})
