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
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from ddp_manual import console, environment
from ddp_manual.errors import PeerGone
from ddp_manual.launching.command import check_train_options, rank_command
from ddp_manual.rundir import RunPaths, default_run_dir, new_run_id

# Seconds. Ranks that lose a peer leave by themselves within 2 s, saying which; then they are made to.
LEAVE_BY_THEMSELVES = 3.0
TERM_GRACE = 3.0
COLOURS = (36, 33, 32, 35, 34, 31)
PR_SET_PDEATHSIG = 1


@dataclass
class Rank:
    """A child process and the threads that copy what it says."""

    number: int
    process: subprocess.Popen[bytes]
    log: BinaryIO
    copiers: list[threading.Thread] = field(default_factory=list)

    def signal(self, number: int) -> None:
        """To the child and all it has started, if it still runs."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, number)


def launch_ranks(nproc: int, train_options: Sequence[str], run_dir: str | None) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the one that failed first, else 0.

    Raises:
        BadOption: an option that launch itself decides, or a run_dir that cannot be used. Stopped: by a signal, after
            all ranks have ended.
    """
    check_train_options(train_options)
    run_id = new_run_id()
    paths = RunPaths(Path(run_dir or default_run_dir(run_id))).create()
    ranks: list[Rank] = []
    with _reserved_port() as port:
        try:
            for number in range(nproc):
                ranks.append(_start(number, nproc, port, run_id, paths, train_options))
            return _wait(ranks)
        finally:
            _end(ranks)


@contextmanager
def _reserved_port() -> Iterator[int]:
    """A free port on loopback, kept for rank 0: bound but not listening, so rank 0 may listen on it and nobody else is
    given it."""
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind(("127.0.0.1", 0))
        yield holder.getsockname()[1]


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
    rank = Rank(number, process, paths.log(number).open("wb"))
    for source, sink in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
        assert source is not None
        thread = threading.Thread(target=_copy_lines, args=(rank, source, sink), daemon=True)
        thread.start()
        rank.copiers.append(thread)
    return rank


def _die_with_parent() -> None:
    """Linux: have the kernel end this rank when the orchestrator is killed and cannot."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def _copy_lines(rank: Rank, source: IO[bytes], sink: TextIO) -> None:
    """Each line to the log as it is, and to the terminal with the rank in front."""
    tag = console.tag(rank.number)
    colour = sink.isatty() and environment.colour_allowed()
    shown_tag = f"\x1b[{COLOURS[rank.number % len(COLOURS)]}m{tag}\x1b[0m" if colour else tag
    for line in source:
        rank.log.write(line)
        rank.log.flush()
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


def _end(ranks: Sequence[Rank]) -> None:
    """Leave no process: TERM, then KILL; then let the copiers finish."""
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
