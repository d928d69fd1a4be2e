"""One rank's life seen from inside: ready -> pin -> process group -> run -> goodbye.

``Rank.live`` is that life, in a worker that an agent has started (``task``) and in a person's own script (``join``).
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import asdict
from torch.distributed import TCPStore

from ddp_manual import errors, from_agent, from_worker, launchers
from ddp_manual.held_memory import HeldMemory
from ddp_manual.messages import ENDED, LEAVING, RUNNING, LastWords, Place, Ready, more_seconds, timeout_for
from ddp_manual.steps import Steps
from ddp_manual.terminal import counted
from ddp_manual.worker import device as devices
from ddp_manual.worker import process_group
from ddp_manual.worker.collective_errors import collective_error, first_line, is_broken_collective, was_raised_by_torch
from ddp_manual.worker.collectives import record_collectives
from ddp_manual.worker.reporter import Reporter, own_traceback, raised_at
from ddp_manual.worker.world import World
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

# Seconds. The agent says within 2.5 s why the run ends, and rank 0 stays for 60 s for ranks that still work.
VERDICT_WITHIN = 4.0
LEAVE_WITHIN = 70.0
# Verdicts about ranks that all live: no collective breaks before the first agent has ended its rank because of them.
ALL_LIVE = (errors.CollectiveMismatch.identifier, errors.PeerStalled.identifier)
Options = Mapping[str, tuple[Any, str]]


class Rank:
    """One rank of a run, in the process that has torch.

    Args:
        start: what the agent has told.
        held: the memory of this rank's agent, where there is one.
    """

    def __init__(self, reporter: Reporter, start: from_agent.Start, held: HeldMemory | None = None) -> None:
        self.reporter = reporter
        self.held = held
        self.spec = WorldSpec(**start.spec, sources=start.sources)
        self.steps = Steps()
        self._start = start

    @contextmanager
    def live(self, own_code: Options) -> Iterator[World]:
        """Meet the other ranks, run the body as one of them, and leave in order.

        An exception is told to all other ranks before anything is closed, which may take long.

        Args:
            own_code: option -> (value, source), for what the ranks must have in common of the user's own code.

        Raises:
            DeviceMissing, BackendUnavailable, BadOption: this rank cannot run here. PeerGone: the body failed because
                another rank did. DdpManualError: the ranks do not come together.
        """
        with ExitStack() as closing:
            try:
                device, backend, store = self._get_ready(own_code)
                if isinstance(self._start.work, from_agent.Training) and self._start.work.alone:
                    world = self._work_alone(self.reporter.wait(from_agent.WorkAlone), device, closing)
                else:
                    world = self._meet(self.reporter.wait(from_agent.TakePlace), device, backend, store, closing)
                yield world
                self._leave(world.device)
            except BaseException as error:
                cause = self._conclude(error)
                if cause is error:
                    raise
                raise cause from error

    def _get_ready(self, own_code: Options) -> tuple[str, str, TCPStore | None]:
        """Choose device and backend, host torch's store on rank 0, and tell the agent; return all three."""
        with self.steps.step("device") as step:
            device, backend, gpus = devices.choose(self.spec)
            chosen = f"{device} ({self.spec.source('device')}), {backend} ({self.spec.source('backend')})"
            step.detail = f"{chosen}, {counted(gpus, 'GPU')}"
        with self.steps.step("shared memory") as step:
            devices.check_shared_memory(step, backend, min(gpus, self.spec.world_size))
        process_group.check_none_open()
        store, where = process_group.host_store(self._start.store_address)
        ready = Ready(
            pid=os.getpid(),
            device=device,
            backend=backend,
            gpus=devices.gpu_uuids() if device == "cuda" else [],
            versions=devices.versions(),
            options={
                "device": (device, self.spec.source("device")),
                "backend": (backend, self.spec.source("backend")),
                **own_code,
            },
            store=where,
            may_use_cpu=devices.may_use_cpu(self.spec),
        )
        self.reporter.send(from_worker.Loaded(ready, self.steps))
        self.steps.clear()
        return device, backend, store

    def _meet(
        self, told: from_agent.TakePlace, device: str, backend: str, store: TCPStore | None, closing: ExitStack
    ) -> World:
        """Pin the device and open the process group, at the place that the agent has told."""
        placed, place, run = told.placed, told.placed.place, told.placed.run
        if placed.on_cpu:
            device, backend = "cpu", "gloo"
            logger.warning("%s", placed.on_cpu)
        if backend == "nccl" and place.rank == place.host_leader and told.wrong_for_nccl:
            named = told.interfaces["NCCL_SOCKET_IFNAME"]
            logger.info("NCCL_SOCKET_IFNAME=%s is set for NCCL: %s", named, told.wrong_for_nccl)
        closing.callback(setattr, self.reporter.progress, "phase", ENDED)
        closing.enter_context(launchers.set_rank_variables(place, *placed.store, told.interfaces))
        pinned = devices.pin(self.spec.rank, device, place.local_rank, place.local_world_size)
        closing.callback(record_collectives(self.spec, self.reporter.send))
        with self.steps.step("process group") as step:
            store = store or process_group.open_store(*placed.store)
            # torch's time-out names no rank, so it comes after that of the agents, which do.
            timeout = max(process_group.COLLECTIVE_TIMEOUT, timedelta(seconds=timeout_for(run.stall_timeout)))
            process_group.open_process_group(store, place.rank, place.world_size, backend, pinned, timeout)
            step.detail = f"{backend} on {pinned}"
        if self.spec.rank == 0:
            store.set("ddp_manual/roster", json.dumps(placed.roster))
        world = self._world(
            place,
            closing,
            device=pinned,
            backend=backend,
            run_id=run.run_id,
            rendezvous_seconds=time.monotonic() - self._start.started,
            run_dir=run.run_dir,
            run_dir_is_own=told.own,
            generation=placed.generation,
            held=self.held if placed.holds else None,
            state_from=placed.state_from,
            losses=asdict(placed.losses),
            _store=store,
            _roster=placed.roster,
        )
        logger.info(
            "process group ready after %.1f s: rank %d of %d on %s, %s, %s",
            *(world.rendezvous_seconds, world.rank, world.world_size, world.host, world.device, world.backend),
        )
        return world

    def _work_alone(self, told: from_agent.WorkAlone, device: str, closing: ExitStack) -> World:
        """Pin the device of a rank that has no others, and no coordinator that would make the roster."""
        place = told.place
        closing.callback(setattr, self.reporter.progress, "phase", ENDED)
        closing.enter_context(launchers.set_rank_variables(place, "", 0, {}))
        pinned = devices.pin(self.spec.rank, device, place.local_rank, place.local_world_size)
        versions = " ".join(f"{name} {version}" for name, version in devices.versions().items() if version)
        only = {"host": launchers.host_name(), "pid": os.getpid(), "device": str(pinned), "versions": versions}
        facts: dict[str, Any] = {"backend": "none", "run_id": told.run_id, "_roster": [{"rank": 0, **only}]}
        return self._world(place, closing, device=pinned, run_dir=told.run_dir, **facts)

    def _world(self, place: Place, closing: ExitStack, *, run_dir: str | None, **facts: Any) -> World:
        self.reporter.progress.phase = RUNNING  # a person's own script may leave it at that
        path = Path(run_dir) if run_dir else None
        return World(
            spec=self.spec,
            host=launchers.host_name(),
            progress=self.reporter.progress,
            run_dir=path,
            run_dir_of_join=path,
            _requests=self.reporter.requests,
            _tell=self.reporter.send,
            _own_process=self.reporter.own_process,
            _closing=closing,
            **vars(place),
            **facts,
        )

    def _leave(self, device: torch.device) -> None:
        """Close the process group, together with the other ranks if they have finished too."""
        self.reporter.progress.phase = LEAVING
        self.reporter.send_beat()  # the number of collectives it has begun is final
        self.reporter.send(from_worker.Finished())
        self.reporter.wait(from_agent.Close)
        if not process_group.close_process_group(device):
            within = process_group.CLOSE_WITHIN
            logger.warning("the process group does not close within %d s, and is left as it is", within)
        self.reporter.send(from_worker.Left())
        if not self.reporter.own_process:
            with suppress(TimeoutError):
                self.reporter.wait(from_agent.Over, LEAVE_WITHIN)

    def send_result(self, result: Any, stopped: errors.Stopped | None) -> None:
        """Tell the agent how this rank's run has ended, after the process group is closed.

        Args:
            result: what the training or the check returned; None if it was stopped.
            stopped: set if a signal has stopped all ranks after the same training step, which is no failure.
        """
        done = from_worker.Result(result)
        self.reporter.send(done if stopped is None else from_worker.StoppedInOrder(LastWords.of(stopped)))

    def tell(self, error: BaseException) -> None:
        """Tell the agent, once, that ``error`` ends this rank."""
        if self.reporter.unwinding:
            return
        self.reporter.unwinding = True
        self.reporter.send_beat()
        words, by_torch = LastWords.of(as_ours(self.spec.rank, error)), was_raised_by_torch(error)
        how = (is_broken_collective(error), by_torch, isinstance(error, SystemExit))
        self.reporter.send(from_worker.Failed(words, *how, place=raised_at(error)))

    def _conclude(self, error: BaseException) -> BaseException:
        """Tell the agent that ``error`` ends this rank; return that, or in a person's script the failure behind it."""
        if self.reporter.verdict is None:
            self.tell(error)
        if self.reporter.own_process:
            return error
        with suppress(TimeoutError, errors.DdpManualError):
            self.reporter.wait(from_agent.RunEnds, VERDICT_WITHIN + more_seconds(self.spec.world_size))
        verdict = self.reporter.verdict
        others = verdict.words if verdict is not None and not verdict.own else None
        if others is not None and others.identifier in ALL_LIVE and is_broken_collective(error):
            # The end of another rank has broken it, and the agent is about to end this one: which rank is ended first,
            # and which one raises, would be luck.
            self.reporter.unwinding = False  # nothing is being closed that the agent would wait for
            time.sleep(VERDICT_WITHIN)
        self.reporter.send(from_worker.Noticed())
        cause = others.error() if others is not None else None
        return cause if isinstance(cause, errors.PeerGone) else error


def as_ours(rank: int, error: BaseException, after_a_signal: str = "start all ranks again") -> errors.DdpManualError:
    """Turn any exception that ends a rank into one of ours; an exception of the user's code keeps its traceback's end.

    Args:
        after_a_signal: what to do next if a signal ended the rank.
    """
    if isinstance(error, errors.DdpManualError):
        return error
    if isinstance(error, (errors.StopSignal, KeyboardInterrupt)):
        return errors.stopped_by(error, next=after_a_signal)
    where = f"rank {rank} on {launchers.host_name()}"
    if isinstance(error, torch.OutOfMemoryError):
        return errors.OutOfMemory(
            f"{where} ran out of GPU memory",
            why=first_line(error),
            next="choose a smaller --batch_size, or end what else uses that GPU: nvidia-smi",
        )
    if (of_collective := collective_error(error, rank)) is not None:
        return of_collective
    opened_twice = isinstance(error, ValueError) and "default process group twice" in str(error)
    code = error.code if isinstance(error, SystemExit) and isinstance(error.code, int) else None
    failed = errors.TrainingFailed(
        f"{where}: {first_line(error) if code is None else f'the program exited with code {code}'}",
        why=own_traceback(error),
        next="leave init_process_group out: the process group is open, and is closed at the end"
        if opened_twice
        else "fix the code or the data that raised it, then start all ranks again",
    )
    if code is not None and code & 0xFF:
        failed.exit_code = code & 0xFF
        failed.next = "look at why it exits on this line, then start all ranks again"
    return failed
