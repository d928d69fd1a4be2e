"""The small orchestrator: N ranks on this machine, one terminal.

Each rank is a child in a session of its own. Its lines come out with its rank in front and go to a log file; when one
rank fails the others get a moment to say why they leave, then SIGTERM, then SIGKILL. No torch is imported here.
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

from ddp_manual import console, environment
from ddp_manual.errors import PeerGone, StopSignal
from ddp_manual.launching.command import check_train_options, rank_command
from ddp_manual.rundir import RunPaths, default_run_dir, new_run_id

# Seconds. Ranks that lose a peer leave by themselves within 2 s, saying which; then they are made to.
LEAVE_BY_THEMSELVES = 3.0
TERM_GRACE = 3.0
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


def launch_ranks(nproc: int, train_options: Sequence[str], run_dir: str | None) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the one that failed first, else 0.

    Raises:
        BadOption: an option that launch itself decides, or a run_dir that cannot be used. StopSignal: after all ranks
            have ended.
    """
    check_train_options(train_options)
    run_id = new_run_id()
    paths = RunPaths(Path(run_dir or default_run_dir(run_id))).create()
    ranks: list[Rank] = []
    with _reserved_port() as port:
        try:
            with _signals_deferred():
                for number in range(nproc):
                    ranks.append(_start(number, nproc, port, run_id, paths, train_options))
            for rank in ranks:
                rank.copy_output()
            return _wait(ranks)
        except StopSignal as stop:
            _end(ranks, signal.Signals(stop.number))
            raise
        finally:
            _end(ranks, signal.SIGTERM)


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


def _start(number: int, nproc: int, port: int, run_id: str, paths: RunPaths, train_options: Sequence[str]) -> Rank:
    process = subprocess.Popen(
        rank_command(number, nproc, port, run_id, str(paths.run_dir), train_options),
        env=environment.for_child(nproc),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=_die_with_parent,
    )
    return Rank(number, process, paths.log(number).open("wb"))


def _die_with_parent() -> None:
    """Linux: have the kernel end this rank when the orchestrator is killed and cannot. Runs in the forked child."""
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


def _wait(ranks: Sequence[Rank]) -> int:
    """Until all have ended, or one has failed and the others have had time to leave."""
    failed: list[tuple[int, int]] = []
    deadline = float("inf")
    running = list(ranks)
    while running and time.monotonic() < deadline:
        for rank in list(running):
            status = rank.process.poll()
            if status is None:
                continue
            running.remove(rank)
            if status != 0:
                failed.append((rank.number, status if status > 0 else 128 - status))
                deadline = min(deadline, time.monotonic() + LEAVE_BY_THEMSELVES)
        time.sleep(0.02)
    if not failed:
        return 0
    # A rank that lost a peer may be reaped before the one that was lost; that one is the cause.
    causes = [entry for entry in failed if entry[1] != PeerGone.exit_code] or failed
    number, status = causes[0]
    print(f"rank {number} failed first, with exit code {status}", file=sys.stderr, flush=True)
    return status


def _end(ranks: Sequence[Rank], number: signal.Signals) -> None:
    """Leave no process: the signal, then KILL; then let the copiers finish. A second Ctrl-C does not cut this short."""
    for impatient in (signal.SIGINT, signal.SIGTERM):
        signal.signal(impatient, signal.SIG_IGN)
    for rank in ranks:
        rank.signal(number)
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
