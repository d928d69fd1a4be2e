"""One rank's life in its worker: ready -> place -> pin -> process group -> the body of ``join`` -> goodbye.

Either an agent has started this process to run a program (``script``), or this process is a user's script and has
started its agent (``join``).
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

import torch.distributed as dist
from msgspec.structs import asdict
from torch.distributed import TCPStore

from ddp_manual import errors, from_agent, from_worker, messages
from ddp_manual.environment import machine, variables_for_a_rank
from ddp_manual.held_state_memory import HeldMemory
from ddp_manual.join_steps import Steps
from ddp_manual.longest_wait import timeout_for
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import ENDED, LEAVING, RUNNING, LastWords, Ready, more_seconds
from ddp_manual.wording import as_ranges, counted
from ddp_manual.worker import device_and_backend as devices
from ddp_manual.worker import private_torch, process_group, torch_store
from ddp_manual.worker.collective_recorder import Recorder
from ddp_manual.worker.explain_errors import (
    as_ours,
    is_broken_collective,
    was_raised_by_torch,
)
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.training_loss import LossRecord
from ddp_manual.worker.whereabouts import raised_at
from ddp_manual.worker.world import NO_GROUP, World

logger = logging.getLogger(__name__)

# Seconds. The agent says within 2.5 s why the run ends, and rank 0 stays for 60 s for ranks that still work.
VERDICT_WITHIN = 4.0
LEAVE_WITHIN = 70.0
# Seconds that rank 0 keeps torch's store after a failure, such as of a download: other ranks read the failure there.
STORE_STAYS = 0.5
# Verdicts while all ranks live: a collective breaks only once an agent has ended its rank because of the verdict.
ALL_LIVE = (errors.CollectiveMismatch.identifier, errors.PeerStalled.identifier)
Options = Mapping[str, tuple[Any, str]]


class Rank:
    """One rank of a run, in the process that has torch.

    Args:
        start: the agent's first message.
        held: the memory of this rank's agent; None in a script that has started its agent itself.
    """

    def __init__(self, reporter: Reporter, start: from_agent.Start, held: HeldMemory | None = None) -> None:
        self.reporter = reporter
        self.held = held
        self.pid = os.getpid()
        self.spec = WorldSpec(**start.spec, sources=start.sources)
        self.steps = Steps()
        self.has_left = False
        """Whether this rank has been in ``live``, and has left it in order."""
        self._start = start
        self._chosen: tuple[str, str] | None = None
        self._store: TCPStore | None = None
        self._told: from_agent.TakePlace | None = None
        self._loss_record: LossRecord | None = None

    def meet(self, own_code: Options | None) -> from_agent.TakePlace:
        """Host torch's store on rank 0, tell the agent the device and versions here, and wait until all ranks are here.

        Args:
            own_code: option -> (value, source), of the user's own code, that must be the same on all ranks. None: the
                program chooses its device itself, and may fork before it uses a GPU.

        Returns:
            This rank's place among them.

        Raises:
            DeviceMissing, BackendUnavailable, BadOption: this rank cannot run here.
        """
        if own_code is not None:
            device, backend = self._choose_device()
            gpus = devices.gpu_uuids() if device == "cuda" else []
        else:
            gpus = private_torch.gpus_without_cuda()
            device, backend = ("cuda" if gpus else "cpu"), "nccl" if gpus and dist.is_nccl_available() else "gloo"
        process_group.check_none_open()
        if self._start.store_address:
            self._store = torch_store.open_store(self._start.store_address)
        ready = Ready(
            pid=os.getpid(),
            device=device,
            backend=backend,
            gpus=gpus,
            versions=devices.versions(),
            options={
                "device": (device, self.spec.source("device")),
                "backend": (backend, self.spec.source("backend")),
                **(own_code or {}),
            },
            store=(self._store.host, self._store.port) if self._store is not None else None,
            may_use_cpu=own_code is not None and devices.may_use_cpu(self.spec),
            chooses_device=own_code is None,
            cores=as_ranges(machine.cores()),
        )
        self.reporter.send(from_worker.Loaded(ready, self.steps))
        self.steps.clear()
        self._told = self.reporter.wait(from_agent.TakePlace)
        return self._told

    def _choose_device(self) -> tuple[str, str]:
        with self.steps.step("device") as step:
            device, backend, gpus = devices.choose(self.spec)
            chosen = f"{device} ({self.spec.source('device')}), {backend} ({self.spec.source('backend')})"
            step.detail = f"{chosen}, {counted(gpus, 'GPU')}"
        with self.steps.step("shared memory") as step:
            devices.check_shared_memory(step, backend, min(gpus, self.spec.world_size))
        self._chosen = device, backend
        return self._chosen

    @contextmanager
    def live(self, *, open_group: bool) -> Iterator[World]:
        """Run the body as one of the ranks, leave in order, and tell the agent the result.

        All other ranks are told of an exception before anything is closed, as closing may take long. A script that ends
        with exit code 0 has done its work; Stopped is no failure, as all ranks stop after the same step.

        Args:
            open_group: whether to open the process group.

        Raises:
            DeviceMissing, BackendUnavailable, BadOption: this rank cannot run here. PeerGone: the body failed because
                another rank did. DdpManualError: the ranks do not come together.
        """
        ended: SystemExit | errors.Stopped | None = None
        with ExitStack() as closing:
            closing.callback(setattr, self.reporter.progress, "phase", ENDED)
            try:
                if self._told is None:
                    told = self.meet({})
                    closing.enter_context(variables_for_a_rank.set_rank_variables(told.placed, told.interfaces))
                    closing.callback(Recorder(self.spec, self.reporter.send).start())
                self.reporter.send(from_worker.Joins())
                world = self._open(closing, open_group=open_group)
                try:
                    yield world
                except SystemExit as exit:
                    if exit.code:
                        raise
                    ended = exit
                except errors.Stopped as stopped:
                    ended = stopped
                self._leave(world)
            except BaseException as error:
                cause = self._conclude(error)
                if cause is error:
                    raise
                raise cause from error
        self._send_result(world, ended)
        if ended is not None:
            raise ended

    def _open(self, closing: ExitStack, *, open_group: bool) -> World:
        """Pin the device and open the process group."""
        told = self._told
        assert told is not None
        placed, place, run = told.placed, told.placed.place, told.placed.run
        device, backend = self._chosen or self._choose_device()
        if placed.on_cpu:
            device, backend = "cpu", "gloo"
            logger.warning("%s", placed.on_cpu)
        if backend == "nccl" and place.rank == place.host_leader and told.wrong_for_nccl and place.world_size > 1:
            named = told.interfaces["NCCL_SOCKET_IFNAME"]
            logger.info("NCCL_SOCKET_IFNAME=%s is set for NCCL: %s", named, told.wrong_for_nccl)
        pinned = devices.pin(self.spec.rank, device, place.local_rank, place.cores_shared_by)
        store = self._store or torch_store.open_store(*placed.store)
        if open_group:
            with self.steps.step("process group") as step:
                # torch's time-out names no rank, so it comes after that of the agents, which do.
                timeout = max(process_group.COLLECTIVE_TIMEOUT, timedelta(seconds=timeout_for(run.stall_timeout)))
                process_group.open_process_group(store, place.rank, place.world_size, backend, pinned, timeout)
                step.detail = f"{backend} on {pinned}"
        if self.spec.rank == 0:
            store.set("ddp_manual/roster", json.dumps(placed.roster))
        self.reporter.progress.phase = RUNNING  # a script need not say any other phase
        path = Path(run.run_dir) if run.run_dir else None
        if path is not None and place.rank == 0:
            self._loss_record = LossRecord(path, self.reporter.progress)
        world = World(
            spec=self.spec,
            device=pinned,
            backend=backend if open_group else NO_GROUP,
            host=machine.host_name(),
            run_id=run.run_id,
            rendezvous_seconds=time.monotonic() - self._start.started,
            progress=self.reporter.progress,
            run_dir=path,
            run_dir_of_join=path,
            run_dir_is_own=told.own,
            generation=placed.generation,
            held=self.held if placed.holds else None,
            state_from=placed.state_from,
            losses=asdict(placed.losses),
            steps=self.steps,
            _store=store,
            _roster=placed.roster,
            _reporter=self.reporter,
            until_left=closing,
            **vars(place),
        )
        if open_group:
            logger.info(
                "process group ready after %.1f s: rank %d of %d on %s, %s, %s",
                *(world.rendezvous_seconds, world.rank, world.world_size, world.host, world.device, world.backend),
            )
        return world

    def _leave(self, world: World) -> None:
        """Close the process group, together with the other ranks if they have finished too."""
        self.reporter.progress.phase = LEAVING
        if self._loss_record is not None:
            self._loss_record.write()
        world.stop_heeding_signals()
        self.reporter.send_beat()  # the number of begun collectives is final now
        self.reporter.send(messages.Finished())
        self.reporter.wait(messages.Close)
        if not process_group.close_process_group(world.device):
            within = process_group.CLOSE_WITHIN
            logger.warning("the process group does not close within %d s, and is left as it is", within)
        self.has_left = True
        self.reporter.send(from_worker.Left())
        if self.held is None:  # a script's own process may not stay as the host of torch's store
            with suppress(TimeoutError):
                self.reporter.wait(from_agent.Over, LEAVE_WITHIN)

    def _send_result(self, world: World, ended: SystemExit | errors.Stopped | None) -> None:
        """Tell the agent the result of this rank, which has left, and whether a signal has stopped all ranks."""
        stopped = world.stopped() if ended is None and world.result is None else ended
        words = LastWords.of(stopped) if isinstance(stopped, errors.Stopped) else None
        continues = self.reporter.over = self.held is None  # the script goes on without its agent
        self.reporter.send(from_worker.Result(world.result, words, continues))
        self.reporter.flush()

    def wait_to_go(self) -> None:
        """Tell the agent that the program's work is done; on rank 0 wait until nobody needs torch's store."""
        if not self.has_left:
            self.reporter.send_beat()
            self.reporter.send(messages.Finished())
            if self._store is not None:
                self.reporter.send(from_worker.Left())
        if self._store is not None:
            with suppress(TimeoutError):  # the program has closed the channel to the agent
                self.reporter.wait(from_agent.Over)
        self.reporter.flush()
        self.reporter.over = True

    def tell(self, error: BaseException) -> None:
        """Tell the agent, once, that ``error`` ends this rank."""
        if self.reporter.unwinding:
            return
        self.reporter.unwinding = True
        self.reporter.send_beat()
        words = LastWords.of(as_ours(self.spec.rank, error, whole=self.spec.full_traceback))
        how = (is_broken_collective(error), was_raised_by_torch(error), isinstance(error, SystemExit))
        self.reporter.send(from_worker.Failed(words, *how, place=raised_at(error)))
        self.reporter.flush()

    def _conclude(self, error: BaseException) -> BaseException:
        """Tell the agent that ``error`` ends this rank; return the other rank's failure behind it, otherwise ``error``.

        If an agent has started this process, return ``error``: that agent explains it, and ends this process.
        """
        if self.reporter.verdict is None:
            self.tell(error)
        if self.held is not None:
            if isinstance(error, errors.DdpManualError) and self._store is not None and self.spec.world_size > 1:
                time.sleep(STORE_STAYS)
            return error
        with suppress(TimeoutError, errors.DdpManualError):
            self.reporter.wait(from_agent.RunEnds, VERDICT_WITHIN + more_seconds(self.spec.world_size))
        verdict = self.reporter.verdict
        others = verdict.words if verdict is not None and not verdict.own else None
        if others is not None and others.identifier in ALL_LIVE and is_broken_collective(error):
            # Another rank's end broke the collective, and the agent is about to end this rank too: wait for that, as
            # otherwise it would be chance which ranks raise.
            self.reporter.unwinding = False  # nothing is being closed that the agent would wait for
            time.sleep(VERDICT_WITHIN)
        self.reporter.send(from_worker.Noticed())
        cause = others.error() if others is not None else None
        return cause if isinstance(cause, errors.PeerGone) else error
