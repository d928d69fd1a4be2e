"""A world of one rank in this process and without an agent, as the worker of a rank with ``--no_ddp`` has it."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, cast

import torch

from ddp_manual.from_worker import FromWorker, Progress
from ddp_manual.messages import StopAfter
from ddp_manual.rank_options import WorldSpec
from ddp_manual.worker.steps_done import Stops
from ddp_manual.worker.world import World


class Silent:
    """A reporter that tells nobody."""

    def __init__(self) -> None:
        self.said: list[FromWorker] = []
        self.send = self.said.append
        self.stops = Stops(self.send, lambda: StopAfter(self.stop_after, signal.SIGTERM, [0]))
        self.stop_after = 1
        self.save_is_asked = False


@contextmanager
def alone() -> Iterator[World]:
    with ExitStack() as closing:
        yield World(
            spec=WorldSpec(world_size=1, rank=0, device="cpu"),
            rank=0,
            world_size=1,
            local_rank=0,
            local_world_size=1,
            cores_shared_by=1,
            node=0,
            nodes=1,
            device=torch.device("cpu"),
            backend="none",
            host="here",
            run_id="0" * 32,
            rendezvous_seconds=0.0,
            host_leader=0,
            progress=Progress(),
            run_dir=None,
            run_dir_of_join=None,
            _store=cast(Any, None),
            _roster=[{"rank": 0, "host": "here"}],
            _reporter=cast(Any, Silent()),
            until_left=closing,
        )
