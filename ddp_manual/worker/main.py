"""One rank's life seen from inside: ready -> meet -> work -> leave. The agent has started this process, and ends it."""

from __future__ import annotations

import os
import shlex
import socket
import sys
import threading
from collections.abc import Mapping
from typing import Any

import torch._dynamo  # which DDP's constructor and the first step of an optimizer import: 2 to 4 s
import torch.nn.parallel  # noqa: F401

from ddp_manual import terminal
from ddp_manual.errors import Stopped
from ddp_manual.messages import last_words
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.main import check_own_code, train_as_agreed
from ddp_manual.worker import birth
from ddp_manual.worker.measure import check
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.session import Session
from ddp_manual.world_spec import WorldSpec


def main(channel: int) -> None:
    """Never returns: the agent ends the process, which so has no teardown that could hang."""
    birth.let_children_be_terminated()
    reporter = Reporter(socket.socket(fileno=channel), {"born": os.getpid()}, own_process=True)
    start = reporter.wait("start")["start"]
    spec = WorldSpec(**start["spec"], sources=start["sources"])
    terminal.log_to_stderr(spec.rank)
    terminal.escape_what_cannot_be_shown()
    sys.path[0] = start["path"]
    session = Session(reporter, spec, start)
    try:
        work(session, start)
    except BaseException as error:
        session.tell(error)
    reporter.unwinding = False
    threading.Event().wait()


def work(session: Session, start: Mapping[str, Any]) -> None:
    """Train, or check, as one rank; what came of it goes to the agent."""
    config = TrainConfig(**start["config"], sources=start["config_sources"]) if "config" in start else None
    session.get_ready(check_own_code(config, session.spec.rank) if config is not None else {})
    world = session.meet()
    done: dict[str, Any] = {"done": None}
    with session.afterwards:
        try:
            if config is None:
                done["done"] = check(world, session.steps)
            else:
                go_on = f"go on, with any number of ranks:\n{start['go_on']}"
                done["done"] = train_as_agreed(
                    world, config, lambda paths: go_on.replace("{run_dir}", shlex.quote(str(paths.run_dir)))
                )
        except Stopped as agreed:  # by all ranks, after the same step: they leave in order
            done["stopped"] = last_words(agreed)
        except BaseException as error:
            session.tell(error)  # before anything is closed, which may take its time
            raise
        session.leave()
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    session.reporter.send(done)
