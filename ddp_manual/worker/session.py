"""From torch to a process group that works, and out again: what every worker does, whoever has started it."""

from __future__ import annotations

import json
import logging
import os
import time
import traceback
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from ddp_manual import launchers
from ddp_manual.errors import DdpManualError, OutOfMemory, PeerLost, StopSignal, TrainingFailed, stopped_by
from ddp_manual.messages import ENDED, LEAVING, RUNNING, Place, Ready, last_words
from ddp_manual.run_folder import RunFolder
from ddp_manual.steps import Steps
from ddp_manual.worker import device as devices
from ddp_manual.worker.process_group import (
    CLOSE_WITHIN,
    check_none_open,
    close_process_group,
    first_line,
    is_broken_collective,
    is_opened_twice,
    listen_for_store,
    open_process_group,
    open_store,
)
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.whereabouts import raised_at
from ddp_manual.worker.world import World
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

TRACEBACK_FRAMES = 10
Options = Mapping[str, tuple[Any, str]]


class Session:
    """One rank's part in a run, as its worker.

    Args:
        start: what the agent has told.
    """

    def __init__(self, reporter: Reporter, spec: WorldSpec, start: Mapping[str, Any]) -> None:
        self.reporter = reporter
        self.spec = spec
        self.steps = Steps()
        self.afterwards = ExitStack()
        self.alone = bool(start.get("alone"))
        self._start = start
        self._device = self._backend = ""
        self._store: Any = None

    def get_ready(self, own_code: Options) -> None:
        """Find the device, and tell what only torch and the user's own code can tell.

        Args:
            own_code: option -> (value, source), for what the ranks must have in common of the user's own.

        Raises:
            DeviceMissing, BackendUnavailable, BadOption: this rank cannot run here.
        """
        with self.steps.step("device") as step:
            self._device, self._backend, gpus = devices.choose(self.spec)
            chosen = f"{self._device} ({self.spec.source('device')}), {self._backend} ({self.spec.source('backend')})"
            step.detail = f"{chosen}, {gpus} GPU(s)"
        with self.steps.step("shared memory") as step:
            devices.look_at_shared_memory(step, self._backend, min(gpus, self.spec.world_size))
        check_none_open()
        store: list[Any] = []
        if address := self._start.get("store_address"):
            listener = listen_for_store(address)
            store = [address, listener.getsockname()[1]]
            self._store = open_store(address, store[1], listener)
        ready = Ready(
            pid=os.getpid(),
            device=self._device,
            backend=self._backend,
            gpus=devices.gpu_uuids() if self._device == "cuda" else [],
            versions=devices.versions(),
            # Lists, as they come out of JSON on the other side, where they are compared.
            options={
                "device": [self._device, self.spec.source("device")],
                "backend": [self._backend, self.spec.source("backend")],
                **{name: list(option) for name, option in own_code.items()},
            },
            store=store,
        )
        self.reporter.send({"ready": vars(ready), "steps": self.steps.as_dicts()})
        self.steps.clear()

    def meet(self) -> World:
        """Wait for the others, pin the device, and open the process group."""
        message = self.reporter.wait("place")
        place, run = Place(**message["place"]), message["run"]
        path = Path(run["run_dir"]) if run["run_dir"] else None
        address, port = ("", 0) if self.alone else message["store"]
        self.afterwards.callback(setattr, self.reporter.progress, "phase", ENDED)
        self.afterwards.enter_context(
            launchers.of_a_rank(self.spec.world_size, self.spec.rank, place, address, port, message.get("interface"))
        )
        self._pinned = device = devices.pin(self.spec.rank, self._device, place.local_rank, place.local_world_size)
        if not self.alone:
            with self.steps.step("process group") as step:
                self._store = self._store or open_store(address, port)
                open_process_group(self._store, self.spec.rank, self.spec.world_size, self._backend, device)
                step.detail = f"{self._backend} on {device}"
            if self.spec.rank == 0:
                self._store.set("ddp_manual/roster", json.dumps(message["roster"]))
        world = World(
            spec=self.spec,
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            device=device,
            backend="none" if self.alone else self._backend,
            host=launchers.host_name(),
            run_id=run["run_id"],
            rendezvous_seconds=0.0 if self.alone else time.monotonic() - self._start["started"],
            progress=self.reporter.progress,
            _folder=RunFolder(path, path),
            _store=self._store,
            _roster=message["roster"] or [_line_of_the_only_rank(device)],
            _wishes=self.reporter.requests,
            _tell=self.reporter.send,
            _own_process=self.reporter.own_process,
            _afterwards=self.afterwards,
            **vars(place),
        )
        self.reporter.progress.phase = RUNNING  # a script of the user's own need not say more
        if not self.alone:
            logger.info(
                "process group ready after %.1f s: rank %d of %d on %s, %s, %s",
                *(world.rendezvous_seconds, world.rank, world.world_size, world.host, world.device, world.backend),
            )
        return world

    def leave(self) -> None:
        """This rank has done its work: close the process group, together with the others if they have too."""
        self.reporter.progress.phase = LEAVING
        self.reporter.send_beat()  # how many collectives it has begun is final
        self.reporter.send({"finished": True})
        answer = self.reporter.wait("close")
        if not close_process_group(self._pinned, all_finished=bool(answer["close"])):
            logger.warning("the process group does not close within %d s, and is left as it is", CLOSE_WITHIN)
        self.reporter.send({"left": True})

    def tell(self, error: BaseException) -> DdpManualError:
        """Tell the agent, once, that ``error`` ends this rank; returns it as one of ours."""
        ours = as_ours(self.spec.rank, error)
        if self.reporter.unwinding:
            return ours
        self.reporter.unwinding = True
        broken = is_broken_collective(error)
        self.reporter.send_beat()
        self.reporter.send({"failed": last_words(ours), "broken": broken, "place": raised_at(error)})
        return ours


def _line_of_the_only_rank(device: torch.device) -> dict[str, Any]:
    versions = " ".join(f"{name} {version}" for name, version in devices.versions().items() if version)
    host, pid = launchers.host_name(), os.getpid()
    return {"rank": 0, "host": host, "pid": pid, "device": str(device), "versions": versions}


def as_ours(rank: int, error: BaseException, after_a_signal: str | None = None) -> DdpManualError:
    """Any exception that ends a rank, as one that has an identifier; the user's own with the end of its traceback.

    Args:
        after_a_signal: what to do where that has ended it, if not what Stopped says.
    """
    if isinstance(error, DdpManualError):
        return error
    if isinstance(error, (StopSignal, KeyboardInterrupt)):
        return stopped_by(error, next=after_a_signal)
    if isinstance(error, torch.OutOfMemoryError):
        return OutOfMemory(
            f"rank {rank} on {launchers.host_name()} ran out of GPU memory",
            why=first_line(error),
            next="choose a smaller --batch_size, or end what else uses that GPU: nvidia-smi",
        )
    if is_broken_collective(error):
        return PeerLost(
            f"a peer of rank {rank} is gone without last words",
            why=f"a collective broke: {first_line(error)}",
            next="look for the rank whose process has ended (killed, out of memory?), then start all ranks again",
        )
    failed = TrainingFailed(
        f"rank {rank} on {launchers.host_name()}: {first_line(error)}",
        why="".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES)).rstrip(),
        next="leave init_process_group out: the process group is open, and is closed at the end"
        if is_opened_twice(error)
        else "mend the code or the data that raised it, then start all ranks again",
    )
    if isinstance(error, SystemExit) and isinstance(error.code, int) and error.code & 0xFF:
        failed.exit_code = error.code & 0xFF  # type: ignore[misc]
    return failed
