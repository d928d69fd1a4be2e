"""The small orchestrator: N ranks on this machine, one terminal.

Each rank is a child in a session of its own. Its lines come out with its rank in front and go to a log file; when one
rank fails the others get a moment to say why they leave, then SIGTERM, then SIGKILL; then, if there may be another
attempt, all go on from the newest checkpoint. Ctrl-C and SIGTERM are passed on, and the ranks stop in order. No torch
is imported here.
"""

from __future__ import annotations

import ctypes
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from ddp_manual import checkpoints, console, environment, signals
from ddp_manual.errors import Stopped, StopSignal
from ddp_manual.launching.command import (
    check_train_options,
    from_the_newest,
    launch_command,
    options_to_go_on,
    rank_command,
    resumes,
)
from ddp_manual.launching.failure import Failure, root_cause
from ddp_manual.rundir import RunPaths, default_run_dir, new_run_id

# Seconds. Ranks that lose a peer leave by themselves within 2 s, saying which; then they are made to.
LEAVE_BY_THEMSELVES = 3.0
TERM_GRACE = 3.0
# Ranks that are asked to stop agree on a step, save a checkpoint and leave in order.
STOP_IN_ORDER = 60.0
COLOURS = (36, 33, 32, 35, 34, 31)
PR_SET_PDEATHSIG = 1
LIBC = ctypes.CDLL(None)


@dataclass
class Rank:
    """A child process and the threads that copy what it says."""

    number: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    copiers: list[threading.Thread] = field(default_factory=list)

    def copy_output(self) -> None:
        """Begin to read what the child says; after all children are started, since they are forked."""
        for source, sink in ((self.process.stdout, sys.stdout), (self.process.stderr, sys.stderr)):
            assert source is not None
            thread = threading.Thread(target=_copy_lines, args=(self, source, sink), daemon=True)
            thread.start()
            self.copiers.append(thread)

    def signal(self, number: int) -> None:
        """To the child and all it has started, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def launch_ranks(nproc: int, train_options: Sequence[str], run_dir: str | None, max_restarts: int = 0) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the one that failed first, else 0.

    Args:
        max_restarts: how often to start them all again, from the newest checkpoint, after a failure that this may mend.

    Raises:
        BadOption: an option that launch itself decides, or a run_dir that cannot be used. Stopped: by a signal, after
            all ranks have ended.
    """
    check_train_options(train_options)
    run_id = new_run_id()
    paths = RunPaths(Path(run_dir or default_run_dir(run_id))).create(resuming=resumes(train_options))
    launch = Launch(nproc=nproc, run_id=run_id, paths=paths, max_restarts=max_restarts)
    options = list(train_options)
    with _reserved_port() as port:
        try:
            restarts = 0
            while (failure := launch.run(port, options)) and failure.may_be_mended and restarts < max_restarts:
                _say(f"restart {restarts + 1} of {max_restarts} after {failure.told(paths)}")
                for rank in range(nproc):
                    paths.set_failure_aside(rank, restarts)
                options = options_to_go_on(options, paths)
                restarts += 1
        except StopSignal as stop:
            raise Stopped(
                stop.number,
                why="the signal came to launch, which has passed it on; all ranks have ended",
                next=f"to go on from the newest checkpoint:\n{launch.command_to_go_on(options)}"
                if checkpoints.find(paths.checkpoints)
                else None,
            ) from None
    if failure is None:
        return 0
    _say(f"rank {failure.rank} failed first, with exit code {failure.exit_code}: {failure.told(paths)}")
    if checkpoints.find(paths.checkpoints):
        _say(f"to go on from the newest checkpoint:\n  {launch.command_to_go_on(options)}")
    return failure.exit_code


@dataclass(frozen=True, kw_only=True)
class Launch:
    """What all attempts at a run have in common."""

    nproc: int
    run_id: str
    paths: RunPaths
    max_restarts: int

    def run(self, port: int, train_options: Sequence[str]) -> Failure | None:
        """From the start of the first rank to the end of the last; returns what has ended it, if not its end.

        Raises:
            StopSignal: after all ranks have ended.
        """
        ranks: list[Rank] = []
        try:
            with _signals_deferred():
                for number in range(self.nproc):
                    ranks.append(self._start(number, port, train_options))
                for rank in ranks:
                    rank.copy_output()
            with _saving_passed_on(ranks[0]):
                return _wait(ranks)
        except StopSignal as stop:
            _stop_in_order(ranks, stop.number)
            raise
        finally:
            with _signals_deferred():
                _end(ranks)

    def command_to_go_on(self, train_options: Sequence[str]) -> str:
        return launch_command(self.nproc, self.max_restarts, str(self.paths.run_dir), from_the_newest(train_options))

    def _start(self, number: int, port: int, train_options: Sequence[str]) -> Rank:
        process = subprocess.Popen(
            rank_command(number, self.nproc, port, self.run_id, str(self.paths.run_dir), train_options),
            env=environment.for_child(self.nproc, self.command_to_go_on(train_options)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
            preexec_fn=_in_the_child,
        )
        log = self.paths.log(number).open("ab")
        if log.tell():
            log.write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())
        return Rank(number, process, log)


def _say(line: str) -> None:
    """On stderr, unless its reader has gone: the ranks go on all the same."""
    with suppress(OSError):
        print(line, file=sys.stderr, flush=True)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port on loopback, kept for rank 0: bound but not listening, so rank 0 may listen on it and nobody else is
    given it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        port = holder.getsockname()[1]
        if sys.platform != "linux":
            # Elsewhere a bound socket keeps others from listening there, SO_REUSEADDR or not.
            holder.close()
        yield port


@contextmanager
def _signals_deferred() -> Iterator[None]:
    """Hold Ctrl-C and SIGTERM back until the body is done: a rank that is just being started is in no list yet."""
    arrived: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    before = {number: signal.signal(number, lambda number, frame: arrived.append(number)) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if arrived:
        raise StopSignal(arrived[0])


@contextmanager
def _saving_passed_on(rank: Rank) -> Iterator[None]:
    """While the body runs, SIGUSR1 asks the ranks for a checkpoint; one of them tells the others."""
    before = signal.signal(signals.SAVE, lambda number, frame: rank.process.send_signal(number))
    try:
        yield
    finally:
        signal.signal(signals.SAVE, before)


def _in_the_child() -> None:
    """Before the rank's own program: SIGUSR1 must not end it while it loads torch; and on Linux the kernel ends it when
    the orchestrator is killed and cannot."""
    signal.signal(signals.SAVE, signal.SIG_IGN)
    if sys.platform == "linux":
        LIBC.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy_lines(rank: Rank, source: IO[bytes], sink: TextIO) -> None:
    """Each line to the log as it is, and to the terminal with the rank in front."""
    tag = console.tag(rank.number)
    colour = sink.isatty() and environment.colour_allowed()
    shown_tag = f"\x1b[{COLOURS[rank.number % len(COLOURS)]}m{tag}\x1b[0m" if colour else tag
    for line in source:
        # Whatever becomes of the log or the terminal, the rank must not block on a pipe that nobody reads.
        with suppress(OSError, ValueError):
            rank.log.write(line)
            rank.log.flush()
        with suppress(OSError, ValueError):
            text = line.decode(errors="replace").removeprefix(tag + " ")
            sink.write(f"{shown_tag} {text}")
            sink.flush()


def _wait(ranks: Sequence[Rank]) -> Failure | None:
    """Until all have ended, or one has failed and the others have had time to leave; the failure that began it."""
    failed: list[Failure] = []
    deadline = float("inf")
    running = list(ranks)
    while running and time.monotonic() < deadline:
        for rank in list(running):
            status = rank.process.poll()
            if status is None:
                continue
            running.remove(rank)
            if status != 0:
                failed.append(Failure(rank=rank.number, pid=rank.process.pid, status=status))
                grace = STOP_IN_ORDER if failed[0].asked_to_stop else LEAVE_BY_THEMSELVES
                deadline = min(deadline, time.monotonic() + grace)
        time.sleep(0.02)
    return root_cause(failed) if failed else None


def _stop_in_order(ranks: Sequence[Rank], number: int) -> None:
    """Pass a signal on, once, and let the ranks end by themselves; a second signal comes out of here as it came in."""
    running = [rank for rank in ranks if rank.process.poll() is None]
    if running:
        _say("stopping; once more ends it at once")
    for rank in running:
        rank.process.send_signal(number)
    began = time.monotonic()
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < began + STOP_IN_ORDER:
        try:
            time.sleep(0.02)
        except StopSignal:
            if time.monotonic() - began > signals.ONCE_WITHIN:
                raise


def _end(ranks: Sequence[Rank]) -> None:
    """Leave no process: SIGTERM, then SIGKILL; then let the copiers finish."""
    for rank in ranks:
        rank.signal(signal.SIGTERM)
    deadline = time.monotonic() + TERM_GRACE
    for rank in ranks:
        try:
            rank.process.wait(timeout=max(0.0, deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            rank.signal(signal.SIGKILL)
            rank.process.wait()
    for rank in ranks:
        for thread in rank.copiers:
            thread.join(timeout=1)
        rank.log.close()
