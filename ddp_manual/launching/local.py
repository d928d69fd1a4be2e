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
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, BinaryIO, TextIO

from ddp_manual import checkpoints, console, environment, signals
from ddp_manual.errors import Stopped, StopSignal
from ddp_manual.launching import children
from ddp_manual.launching.command import (
    check_train_options,
    from_the_newest,
    launch_command,
    options_to_go_on,
    rank_command,
    resumes,
)
from ddp_manual.launching.failure import Failure
from ddp_manual.rundir import RunPaths, default_run_dir, new_run_id

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

    @property
    def pid(self) -> int:
        return self.process.pid

    def status(self) -> int | None:
        return self.process.poll()

    def ask(self, number: int) -> None:
        self.process.send_signal(number)

    def end(self, number: int) -> None:
        if self.status() is None:
            os.killpg(self.pid, number)

    def close(self) -> None:
        """Once it has ended: let the copiers finish."""
        for thread in self.copiers:
            thread.join(timeout=1)
        self.log.close()


def launch_ranks(nproc: int, train_options: Sequence[str], run_dir: str | None, max_restarts: int = 0) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the one that failed first, else 0.

    Args:
        max_restarts: how often to start them all again, from the newest checkpoint, after a failure that this may mend.

    Raises:
        BadOption: an option that launch itself decides, a script, or a run_dir that cannot be used. Stopped: by a
            signal, after all ranks have ended.
    """
    check_train_options(nproc, train_options)
    run_id = new_run_id()
    paths = RunPaths(Path(run_dir or default_run_dir(run_id))).create(resuming=resumes(train_options))
    launch = Launch(nproc=nproc, run_id=run_id, paths=paths, max_restarts=max_restarts)
    options = list(train_options)
    with children.reserved_port() as port:
        try:
            restarts = 0
            while (failure := launch.run(port, options)) and failure.may_be_mended and restarts < max_restarts:
                children.say(f"restart {restarts + 1} of {max_restarts} after {failure.told(paths)}")
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
    children.say(f"rank {failure.rank} failed first, with exit code {failure.exit_code}: {failure.told(paths)}")
    if checkpoints.find(paths.checkpoints):
        children.say(f"to go on from the newest checkpoint:\n  {launch.command_to_go_on(options)}")
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
            with children.signals_deferred():
                for number in range(self.nproc):
                    ranks.append(self._start(number, port, train_options))
                for rank in ranks:
                    rank.copy_output()
            with children.saving_passed_on(ranks[0]):
                return children.wait(ranks)
        except StopSignal as stop:
            children.stop_in_order(ranks, stop.number)
            raise
        finally:
            with children.signals_deferred():
                children.end(ranks)
                for rank in ranks:
                    rank.close()

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
