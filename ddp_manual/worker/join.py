"""``with ddp_manual.join() as world:`` - a rank in a person's own script, from its number to a process group.

The script's process is the worker. Its agent is a helper process, started here, that joins, watches and explains; it
ends with the script, and the script with it.
"""

from __future__ import annotations

import faulthandler
import itertools
import os
import resource
import socket
import subprocess
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from ddp_manual import launchers, terminal
from ddp_manual.errors import DdpManualError, PeerGone, Stopped, from_dict
from ddp_manual.messages import last_words
from ddp_manual.processes import start_python
from ddp_manual.training import own_code
from ddp_manual.worker import birth
from ddp_manual.worker.process_group import check_none_open
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.session import Session
from ddp_manual.worker.world import World
from ddp_manual.world_spec import WorldSpec

AGENT = Path(__file__).parent.parent / "agent"
# Seconds. The agent says within 2.5 s why the run ends, and rank 0 stays for 60 s for ranks that still work.
VERDICT_WITHIN = 4.0
LEAVE_WITHIN = 70.0
AGENT_ENDS_WITHIN = 5.0
# torchrun's store outlives a join; the next one of the same script must not find the last one's key.
_joined_before = itertools.count()


@contextmanager
def join(*, run_dir: str | None = None, **options: Any) -> Iterator[World]:
    """Meet the other ranks, run the body as one of them, and leave in order.

    An exception in the body is told to all other ranks, which then leave too, before it goes on to the caller. Stopped,
    which ``train`` raises on all of them, is not a failure: they leave in order, and then it goes on. After leaving,
    the process's environment, signal handlers, log configuration and limits are as they were.

    Args:
        run_dir: where files of this run go, with ``{run_id}`` for its name; rank 0's counts. None: no files.
        options: of WorldSpec, such as ``world_size=2, rank=0, join_timeout=60``; the rest comes from the variables that
            a launcher sets, as for the command line, else from the defaults.

    Raises:
        DdpManualError: an option cannot work, the ranks do not come together, or a peer has ended the run. Otherwise
            what the body raises.
    """
    with joined(WorldSpec.from_environment(**options), run_dir=run_dir) as world:
        yield world


@contextmanager
def joined(
    spec: WorldSpec,
    *,
    run_dir: str | None = None,
    command: str | None = None,
    tell: Callable[[DdpManualError], None] | None = None,
) -> Iterator[World]:
    """``join`` with options that are known already.

    Args:
        command: what ranks are told to type for one that is missing, with ``{rank}`` for its number.
        tell: told why this process ends, where its agent has to end it since it is blocked.
    """
    own_code.refuse_while_importing("join")
    check_none_open()
    launchers.token(spec.token_file)  # its agent would come upon what is wrong with it too late to say so
    with ExitStack() as undo:
        _leave_as_found(undo)
        terminal.log_to_stderr(spec.rank)
        reporter = _start_agent(spec, run_dir, command, undo)
        reporter.on_exit = lambda status: _exit(reporter, tell, status)
        session = Session(reporter, spec, reporter.wait("start")["start"])
        done: dict[str, Any] = {"done": None}
        ended: SystemExit | Stopped | None = None
        with session.afterwards:
            try:
                session.get_ready({})
                world = session.meet()
                try:
                    yield world
                except SystemExit as asked:
                    if asked.code:
                        raise
                    ended = asked  # a script that ends so has done its work
                except Stopped as agreed:  # by all ranks, after the same step: none of them has failed
                    ended, done["stopped"] = agreed, last_words(agreed)
                session.leave()
                with suppress(TimeoutError):
                    reporter.wait("over", LEAVE_WITHIN)
            except BaseException as error:
                failure = _conclude(session, error)
                if isinstance(failure, PeerGone) and failure is not error:
                    raise failure from error
                raise
        reporter.over = True  # the agent goes when it has heard of it
        reporter.send(done)
    if ended is not None:
        raise ended


def _conclude(session: Session, error: BaseException) -> DdpManualError | BaseException:
    """Tell the run that ``error`` ends this rank; returns it, or the root cause if a peer is that."""
    reporter = session.reporter
    if reporter.verdict is None:
        session.tell(error)
        with suppress(TimeoutError):
            reporter.wait("verdict", VERDICT_WITHIN)
    reporter.send({"noticed": True})
    verdict = reporter.verdict
    return error if verdict is None or verdict["own"] else from_dict(verdict, verdict["exit_code"])


def _start_agent(spec: WorldSpec, run_dir: str | None, command: str | None, undo: ExitStack) -> Reporter:
    ours, theirs = socket.socketpair()
    reading, writing = os.pipe()
    with theirs:
        agent = start_python(AGENT, [theirs.fileno(), reading], stdin=subprocess.DEVNULL)
    os.close(reading)
    undo.callback(os.close, writing)
    undo.callback(birth.leave_no_stacks, was_enabled=faulthandler.is_enabled())
    undo.callback(_await_end, agent)  # before that: it may be about to ask for stacks, by a signal
    birth.leave_stacks_in(writing)
    program, arguments = launchers.typed_command()
    script = launchers.program_file()
    attach = {
        "spec": spec.values(),
        "sources": dict(spec.sources),
        "run_dir": run_dir,
        "command": command,
        "typed": [*program, *arguments],
        "script": str(script.absolute()) if script else None,
        "attempt": f"{launchers.restart_count()}.{next(_joined_before)}",
        "pid": os.getpid(),
    }
    reporter = Reporter(ours, {"attach": attach}, own_process=False)
    undo.callback(reporter.close)
    return reporter


def _await_end(agent: subprocess.Popen[bytes]) -> None:
    """Of the agent, which ends when the channel does."""
    try:
        agent.wait(AGENT_ENDS_WITHIN)
    except subprocess.TimeoutExpired:
        agent.kill()
        agent.wait()


def _leave_as_found(undo: ExitStack) -> None:
    """Put back, in the end, what joining changes in this process besides its environment."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    undo.callback(resource.setrlimit, resource.RLIMIT_NOFILE, limits)
    with suppress(ValueError, OSError):  # rank 0's worker hosts torch's store, which each rank connects to
        resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    undo.enter_context(terminal.log_as_found())


def _exit(reporter: Reporter, tell: Callable[[DdpManualError], None] | None, status: int) -> None:
    """End this process, whose main thread is blocked: only so does its exit code say why."""
    verdict = reporter.verdict
    if tell is not None and verdict is not None:
        tell(from_dict(verdict, status))
    birth.end_process(status)
