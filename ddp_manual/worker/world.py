"""World: what a rank knows once it has met the others, and what it does together with them."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.distributed import Store

from ddp_manual import from_worker, signals, terminal
from ddp_manual.errors import BadOption, DataMissing, DdpManualError, escaped, from_dict
from ddp_manual.held_memory import HeldMemory
from ddp_manual.messages import ENDED, Place
from ddp_manual.run_folder import own_run_dir
from ddp_manual.signals import Requests
from ddp_manual.terminal import Waiting
from ddp_manual.training.ddp import gather_messages
from ddp_manual.wire import decode
from ddp_manual.world_spec import WorldSpec


@dataclass(kw_only=True)
class World(Place):
    """A rank that has met all the others, or the only rank of its run."""

    spec: WorldSpec
    """The options of this rank."""
    device: torch.device
    backend: str
    """The backend of torch's default process group; "none" if the run has no process group."""
    host: str
    run_id: str
    rendezvous_seconds: float = 0.0
    """Seconds from the start of the agent to the end of the first collective; 0 in a run without other ranks."""
    progress: from_worker.Progress
    """What this rank is doing, which ``ddp-manual status`` shows; the body keeps it up to date with
    ``world.progress(step=120, epoch=2)``."""
    run_dir: Path | None
    """The folder of the run, the same on every rank; on disk only on rank 0's host, unless the hosts share it. None
    if the run keeps no files, or the ranks have not agreed on a folder. On other ranks it is what rank 0 has
    named, which may not be what they were given."""
    run_dir_is_own: bool = True
    """Whether this rank writes its failure there: rank 0, and a rank whose own option or default it is."""
    run_dir_of_join: Path | None
    """The folder that rank 0 gave to ``join``."""
    generation: int = 0
    """How often ranks were lost and others took their places, before this world."""
    held: HeldMemory | None = None
    """Where to hold the state of the training, so that it outlives this process; None: nowhere."""
    state_from: int | None = None
    """The rank from whose state to go on; None: no state is held."""
    losses: Mapping[str, float] = field(default_factory=dict)
    """Of ranks in this run so far: their ``count``, and the ``seconds`` until all ranks went on."""
    _store: Store | None = field(default=None, repr=False)
    _roster: Sequence[Mapping[str, Any]] = field(repr=False)
    """Complete on rank 0; the other ranks read it from the store."""
    _requests: Requests = field(repr=False)
    _tell: Callable[[from_worker.FromWorker], None] = field(repr=False)
    """Sends a message to the agent."""
    _own_process: bool = field(repr=False)
    """False in a person's own script, which handles its signals itself."""
    _closing: ExitStack = field(repr=False)
    _job_numbers: Iterator[int] = field(default_factory=itertools.count, repr=False)

    def check_open(self, call: str) -> None:
        """Raise BadOption if this rank has left, so that ``call`` comes too late."""
        if self.progress.phase == ENDED:
            raise BadOption(
                f"{call} was called after this rank had left",
                why="at the end of the with block the ranks leave, and the process group is closed",
                next=f"call {call} inside: with ddp_manual.join() as world:",
            )

    def after_leaving(self, action: Callable[[], None]) -> None:
        """Call ``action`` after this rank has left, or has failed and told the others, so that no rank waits for it.

        Actions are called in reverse order.
        """
        self._closing.callback(action)

    def take_folder(self, named: str, *, own: str, chosen: bool) -> None:
        """Make the folder that rank 0 has named the ``run_dir``; this rank writes there only if it is its ``own``.

        Args:
            chosen: whether the user has named ``own``.
        """
        mine = own_run_dir(named, own)
        self.run_dir, self.run_dir_is_own = Path(mine or named), mine is not None
        self._tell(from_worker.RunFolder(str(self.run_dir), self.run_dir_is_own, chosen))

    def roster(self) -> list[Mapping[str, Any]]:
        """Describe all ranks: ``rank``, ``host``, ``pid``, ``device``, ``address``, ``since``, ``versions``, UUID."""
        if self._store is None or self.rank == 0:
            return list(self._roster)
        found: list[Mapping[str, Any]] = decode(self._store.get("ddp_manual/roster").decode())
        return found

    def gather(self, message: Any) -> list[Any]:
        """Return the messages of all ranks in rank order, on every rank; a collective.

        Args:
            message: JSON of any length.
        """
        if self._store is None:
            return [json.loads(json.dumps(message))]
        return gather_messages(message, self.device)

    def once_per_host(self, job: str, action: Callable[[], None], *, timeout: float) -> None:
        """Call ``action`` on the first rank of each host, while the other ranks of that host wait for it.

        Every rank of a host must call this for the same jobs in the same order.

        Args:
            job: what ``action`` does, such as "download mnist", for the line that the other ranks show.
            timeout: seconds that the others wait.

        Raises:
            DdpManualError: ``action`` raised it, on this rank or on the first rank of the host.
            DataMissing: the first rank took longer than ``timeout``.
        """
        if self._store is None:
            action()
            return
        # The same on every rank of the host. The number tells a job from an earlier one of the same name.
        key = f"ddp_manual/once/{self.node}/{next(self._job_numbers)}"
        if self.rank == self.host_leader:
            try:
                action()
            except DdpManualError as error:
                self._store.set(key, json.dumps(error.as_dict()))
                raise
            self._store.set(key, "null")
            return
        leader = f"rank {self.host_leader} on {self.host}"
        waiting = Waiting(timeout, terminal.log)
        # Polls, because Python handles no signal inside torch's own wait.
        while not self._store.check([key]):
            if waiting.over:
                raise DataMissing(
                    f"{leader} did not {job} within {timeout:.0f} s",
                    why=f"rank {self.rank} waited for it, so that one rank per host writes the files",
                    next=f"look at the output of that rank, or {job} beforehand",
                )
            waiting.about(f"waiting for {leader} to {escaped(job)}")
            time.sleep(0.02)
        if (failed := decode(self._store.get(key).decode())) is not None:
            raise from_dict(failed)

    @contextmanager
    def collect_signals(self) -> Iterator[Requests]:
        """Yield the requests that Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 become in the body; the ranks agree on them.

        After the body a person's script takes its signals itself again; in a process of ours a later signal is told
        that this rank is leaving, as after ``stop_heeding_signals``.
        """
        self._tell(from_worker.TakesRequests())
        try:
            if self._own_process:
                yield self._requests
            else:
                with signals.collect_requests(self._requests, lambda number: self._tell(from_worker.Signalled(number))):
                    yield self._requests
        finally:
            self._tell(from_worker.TakesNoRequests() if self._own_process else from_worker.TakesSignals())

    def stop_heeding_signals(self) -> None:
        """Answer a signal that comes from now on with: this rank is done, and is leaving."""
        self._tell(from_worker.TakesNoRequests())
