"""What a worker that its agent has started does as one rank: train, or measure for ``check``."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

from ddp_manual import terminal
from ddp_manual.errors import Stopped
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.main import check_own_code, train_as_agreed
from ddp_manual.worker import process
from ddp_manual.worker.main import Rank
from ddp_manual.worker.measure import check
from ddp_manual.worker.process_group import import_dynamo
from ddp_manual.worker.reporter import Reporter
from ddp_manual.world_spec import WorldSpec

# Here, so that a worker has it before it joins, and ``launch``'s forker before it forks.
import_dynamo()


def main(channel: int) -> None:
    """Live as a rank; never return, since the agent ends the process without a teardown that could hang."""
    process.let_children_be_terminated()
    reporter = Reporter(socket.socket(fileno=channel), {"born": os.getpid()}, own_process=True)
    start = reporter.wait("start")["start"]
    spec = WorldSpec(**start["spec"], sources=start["sources"])
    terminal.log_to_stderr(spec.rank)
    terminal.escape_what_cannot_be_shown()
    sys.path[0] = start["path"]
    rank = Rank(reporter, spec, start)
    try:
        train_or_check(rank, start)
    except BaseException as error:
        rank.tell(error)
    reporter.unwinding = False
    threading.Event().wait()


def train_or_check(rank: Rank, start: Mapping[str, Any]) -> None:
    """Join the process group, train (or measure, for ``ddp-manual check``), leave, and send the result to the agent.

    Args:
        start: the agent's first message: ``config`` if the rank is to train, and how to ``go_on`` after a signal.

    Raises:
        BaseException: what ends the rank; the caller tells the agent.
    """
    config = TrainConfig(**start["config"], sources=start["config_sources"]) if "config" in start else None
    own_code = check_own_code(config, rank.spec.rank) if config is not None else {}
    with rank.live(own_code) as world:
        try:
            if config is None:
                rank.result = check(world, rank.steps)
            else:
                command = start["go_on"].replace("{run_dir}", shlex.quote(str(world.run_dir)))
                rank.result = train_as_agreed(world, config, f"go on, with any number of ranks:\n{command}")
        except Stopped as stopped:  # all ranks have stopped after the same step, and leave in order
            rank.stopped = stopped
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    rank.send_result()
