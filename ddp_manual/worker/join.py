"""``with ddp_manual.join() as world:`` makes a person's own script a rank; so does ``world = ddp_manual.join()`` in a
notebook, until ``world.close()``.

The script's process is the worker. Under ``run`` or ``launch`` it has an agent. Otherwise it starts its agent, a
helper process that joins, watches and explains; the agent ends with the script, and the script with the agent.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import resource
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_manual import signal_handlers, terminal
from ddp_manual.environment import command_line, torchrun, user_variables
from ddp_manual.environment.start_python import start_python
from ddp_manual.errors import BadOption, DdpManualError
from ddp_manual.from_agent import Start
from ddp_manual.from_worker import Attach
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.rank_options import WorldSpec
from ddp_manual.training import own_factory
from ddp_manual.worker.main import Rank
from ddp_manual.worker.process_group import check_none_open
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.world import World

AGENT = Path(__file__).parent.parent / "agent"
AGENT_ENDS_WITHIN = 5.0
# Numbers the joins of this process: torchrun's store keeps its keys, so that each join needs keys of its own.
_joins = itertools.count()


here: Rank | None = None
"""The rank that this process is, if an agent has started it, otherwise None; ``script`` sets it."""


def join(*, run_dir: str | Path | None = None, open_group: bool = True, **options: Any) -> World:
    """Meet the other ranks, run the body of ``with`` as one of them, and leave in order; or without ``with``, leave at
    ``world.close()``, at the latest when the interpreter ends.

    An exception in the body is told to all other ranks, which then leave too, before it is re-raised. Stopped, which
    ``train`` raises on all ranks, is not a failure: all ranks leave in order, then the exception is re-raised. After
    leaving, the process's environment, signal handlers, log configuration and limits are as before.

    Under ``ddp-manual run`` or ``launch`` the ranks have met already, and this opens the process group: of the options
    only ``device`` and ``backend`` count; another ``world_size`` or ``rank`` than the run's is refused.

    Args:
        run_dir: where files of this run go, with ``{run_id}`` for its name; rank 0's value counts. None: no files.
        open_group: False if the body opens the default process group itself, or needs none.
        options: of WorldSpec, such as ``world_size=2, rank=0, join_timeout=60``. As on the command line, an option that
            is not given comes from a launcher's variable, otherwise from the default.

    Raises:
        DdpManualError: an option cannot work, the ranks do not come together, or another rank has ended the run.
            Otherwise whatever the body raises.
    """
    own_factory.refuse_while_importing("join")
    if here is not None:
        block = _attached(here, options, open_group=open_group)
    else:
        block = _joined(WorldSpec.from_environment(**options), str(run_dir) if run_dir else None, open_group=open_group)
    with ExitStack() as stack:
        try:
            world = stack.enter_context(block)
        except DdpManualError as error:
            raise error.with_traceback(None) from None  # the traceback then ends at the user's own line
        world.begin(stack.pop_all())
    return world


@contextmanager
def _attached(rank: Rank, options: Mapping[str, Any], *, open_group: bool) -> Iterator[World]:
    """Run the body as the rank for which an agent has started this process."""
    if rank.pid != os.getpid():
        raise BadOption(
            f"join was called in process {os.getpid()}, a child of rank {rank.spec.rank}",
            why=f"ddp-manual has started process {rank.pid} as this rank, and no other one can be it too",
            next="call join there, and give the child what it needs of it",
        )
    if open_group:
        check_none_open()
    for name in ("world_size", "rank"):
        if options.get(name) not in (None, getattr(rank.spec, name)):
            raise BadOption(
                f"join was called with {name}={options[name]}, and this is {name} {getattr(rank.spec, name)}",
                why="ddp-manual has started this process as a rank, and join takes part in that run",
                next=f"leave {name} out",
            )
    if rank.has_left:
        raise BadOption(
            "join was called again after this rank had left",
            why="a process that ddp-manual has started is one rank of one run",
            next="call join once, around all that the ranks do together",
        )
    with terminal.log_as_found():
        terminal.log_to_stderr(rank.spec.rank)
        chosen = {name: options[name] for name in ("device", "backend") if options.get(name)}
        rank.spec = replace(rank.spec, **chosen)
        with rank.live(open_group=open_group) as world:
            yield world


@contextmanager
def _joined(spec: WorldSpec, run_dir: str | None, *, open_group: bool) -> Iterator[World]:
    """Run the body as a rank whose agent this process starts itself."""
    if spec.on_loss != LEAVE:
        raise BadOption(
            f"--on_loss {spec.on_loss} cannot work in a script that calls join()",
            why=f"{spec.named('on_loss')}: after a loss all ranks need other processes, and this one is the script",
            next="leave on_loss out, or start the script with ddp-manual run --on_loss wait",
        )
    check_none_open()
    user_variables.token(spec.token_file)  # complain here, since the agent could not
    with ExitStack() as undo:
        limits = resource.getrlimit(resource.RLIMIT_NOFILE)
        undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
        with suppress(ValueError, OSError):  # rank 0's worker hosts torch's store, to which each rank connects
            resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
        undo.enter_context(terminal.log_as_found())
        terminal.log_to_stderr(spec.rank)
        reporter = _start_agent(spec.of_script(), run_dir, undo)
        with Rank(reporter, reporter.wait(Start)).live(open_group=open_group) as world:
            yield world


def _start_agent(spec: WorldSpec, run_dir: str | None, undo: ExitStack) -> Reporter:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        agent = start_python(AGENT, [theirs.fileno(), reading], is_worker=False, stdin=subprocess.DEVNULL)
    os.close(reading)
    undo.callback(os.close, writing)
    undo.callback(signal_handlers.write_no_stacks, was_enabled=faulthandler.is_enabled())
    undo.callback(_await_end, agent)  # while stacks can still be written: the agent may be about to ask for them
    signal_handlers.write_stacks_to(writing)
    program, arguments = command_line.typed_command()
    script = command_line.program_file()
    attach = Attach(
        pid=os.getpid(),
        spec=spec.values(),
        sources=dict(spec.sources),
        run_dir=run_dir,
        typed=[] if hasattr(sys, "ps1") else [*program, *arguments],
        script=str(script.absolute()) if script else None,
        attempt=f"{torchrun.restart_count()}.{next(_joins)}",
    )
    reporter = Reporter(ours, attach)
    undo.callback(reporter.close)
    return reporter


def _await_end(agent: subprocess.Popen[bytes]) -> None:
    """Wait until the agent has ended, as it does when the channel is closed."""
    try:
        agent.wait(AGENT_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()
