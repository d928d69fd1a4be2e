"""``launch``: all ranks of this machine from one terminal.

One process has the agents of all ranks. Their workers are forks of a process that has imported torch once; each has a
session of its own, and its lines are shown with its rank in front and go to a log file. When one rank fails its agent
tells the others, as in any run; then, if another attempt is allowed, all ranks resume from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import socket
import subprocess
import sys
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from ddp_manual import launchers, signals, terminal
from ddp_manual.agent import tasks
from ddp_manual.agent.main import Agent
from ddp_manual.agent.worker_process import LOOK_EVERY, PROGRAM, Worker, check_torch_is_installed
from ddp_manual.errors import BadOption, DdpManualError, PeerFailed, PeerGone, Stopped, TrainingFailed
from ddp_manual.launchers import start_python
from ddp_manual.messages import LONGEST_LINE
from ddp_manual.run_folder import RunPaths, default_run_dir, new_run_id
from ddp_manual.terminal import RankOutput, say
from ddp_manual.training import checkpoint_files
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

# Another attempt may go well after an exception of the training or the loss of a peer. After other errors it would not:
# options, names, versions, files, data and devices would be the same. A rank that a signal has stopped was asked to.
MENDED_BY_A_RESTART = (TrainingFailed.exit_code, PeerGone.exit_code)
ASKED_TO_STOP = tuple(128 + number for number in signals.STOP)
# Seconds until ranks stop waiting for a rank that has left.
GIVE_UP_AFTER = 0.3
# Seconds to copy what a worker has written last.
LAST_LINES_WITHIN = 1.0

Failure = tuple[int, DdpManualError]
"""A rank, and the error that has ended it."""


def launch_ranks(
    nproc: int, spec: WorldSpec, config: TrainConfig, typed: Sequence[str], run_dir: str | None, max_restarts: int = 0
) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the rank that failed first, or 0.

    Args:
        spec: rank 0's options, without its place in the world.
        typed: the training options as they were typed.
        max_restarts: how often to start all ranks again, from the newest checkpoint, if the failure may not recur.

    Raises:
        BadOption: run_dir cannot be used. Stopped: by a signal, after all ranks have ended.
    """
    run_id = new_run_id()
    run_dir = run_dir or default_run_dir(run_id)
    paths = RunPaths(Path(run_dir)).create(resuming=config.resume is not None)
    program, _ = launchers.typed_command()
    restarts = ["--max_restarts", str(max_restarts)] if max_restarts else []
    words = [*program, "launch", "--nproc", str(nproc), *restarts, "--run_dir", str(paths.run_dir), "--"]
    launch = Launch(nproc, run_id, paths, max_restarts, go_on=shlex.join([*words, *from_the_newest(typed)]))
    with launchers.reserved_port() as port:
        return asyncio.run(launch.run(spec, config, port))


def from_the_newest(typed: Sequence[str]) -> list[str]:
    """Return the training options with which ranks resume from the newest checkpoint of their own run."""
    kept: list[str] = []
    options = iter(typed)
    for option in options:
        if option.split("=")[0] != "--resume":
            kept.append(option)
        elif "=" not in option:
            next(options, None)
    return [*kept, "--resume", "auto"]


def check_train_options(nproc: int, typed: Sequence[str]) -> None:
    """Check the options for the ranks' training.

    Raises:
        BadOption: ``launch`` would silently override an option, or is given a script, which it cannot start.
    """
    if typed and not typed[0].startswith("-"):
        program = typed[0]
        raise BadOption(
            f"launch starts no program, and was given {program}",
            why="its ranks are those of this package's own training; what follows are options of train",
            next=f"leave {program} out\n"
            f"or, if it is a script of your own: torchrun --nproc-per-node {nproc} {shlex.quote(program)}\n"
            "or call ddp_manual.spawn in it, and start it with python",
        )
    for option in typed:
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        if option.startswith("--") and name in tasks.PER_RANK_OPTIONS:
            raise BadOption(
                f"--{name} cannot be passed on by launch",
                why=f"launch gives every rank its --{name}",
                next="put --run_dir before the --" if name == "run_dir" else f"leave --{name} out",
            )


@dataclass
class Launch:
    """A run of ranks on this machine, with all attempts at it."""

    nproc: int
    run_id: str
    paths: RunPaths
    max_restarts: int
    go_on: str
    """The command that resumes the run."""
    agents: list[Agent] = field(default_factory=list)
    signalled: int = 0

    async def run(self, spec: WorldSpec, config: TrainConfig, port: int) -> int:
        with signals.handle_in_event_loop(self._take_signal), ExitStack() as closing:
            forker = Forker(self.nproc)
            closing.callback(forker.close)
            restarts = 0
            while (failed := await self._attempt(spec, config, port, forker)) is not None:
                rank, error = failed
                what = f"error[{error.identifier}]: {error.what}"
                if self.signalled or not may_be_mended(error) or restarts >= self.max_restarts:
                    break
                say(f"restart {restarts + 1} of {self.max_restarts} after {what}")
                for other in range(self.nproc):
                    self.paths.set_failure_aside(other, restarts)
                config = self._to_go_on(config)
                forker.start_again()
                restarts += 1
        saved = bool(checkpoint_files.find(self.paths.checkpoints))
        if self.signalled:
            raise Stopped(
                self.signalled,
                why="the signal came to launch, which has passed it on; all ranks have ended",
                next=f"to go on from the newest checkpoint:\n{self.go_on}" if saved else None,
            )
        if failed is None:
            return 0
        say(f"rank {rank} failed first, with exit code {error.exit_code}: {what}")
        if saved:
            say(f"to go on from the newest checkpoint:\n  {self.go_on}")
        return error.exit_code

    async def _attempt(self, spec: WorldSpec, config: TrainConfig, port: int, forker: Forker) -> Failure | None:
        """Start all ranks and wait for the last; returns the failure that has ended the attempt, if any."""
        with ExitStack() as closing:
            logs = [closing.enter_context(self.paths.log(rank).open("ab")) for rank in range(self.nproc)]
            outputs = [RankOutput(log, rank) for rank, log in enumerate(logs)]
            self.agents = [self._agent(rank, spec, config, port, forker, output) for rank, output in enumerate(outputs)]
            failed: list[Failure] = []

            async def live(rank: int) -> None:
                ended = await self.agents[rank].run()
                if ended.error is not None:
                    failed.append((rank, ended.error))
                    await asyncio.sleep(GIVE_UP_AFTER)  # the others may learn why, and then say it themselves
                    for agent in self.agents:
                        agent.give_up(PeerFailed(f"rank {rank} has left", why=ended.error.what, next=ended.error.next))
                elif rank == 0:
                    outputs[0].write(f"{terminal.result_text(ended.result)}\n".encode(), sys.stdout)

            await asyncio.gather(*(live(rank) for rank in range(self.nproc)))
        # A rank that has lost a peer may have ended before that peer.
        return min(failed, key=lambda failure: failure[1].exit_code == PeerGone.exit_code, default=None)

    def _agent(
        self, rank: int, spec: WorldSpec, config: TrainConfig, port: int, forker: Forker, output: RankOutput
    ) -> Agent:
        # The options of a rank that is started by hand, so that its commands are what a person could type.
        place: dict[str, Any] = {"world_size": self.nproc, "rank": rank, "master_port": port, "run_id": self.run_id}
        own = dataclasses.replace(spec, **place, sources={**spec.sources, **dict.fromkeys(place, "flag")})
        return Agent(
            own,
            tasks.training_task(own, config.in_folder(str(self.paths.run_dir)), launched=self.go_on),
            start_worker=lambda: forker.fork(output),
            log=lambda line: output.write(f"{terminal.tag(rank)} {line}\n".encode()),
            print_error=lambda error: output.write(f"{error.render()}\n".encode()),
        )

    def _take_signal(self, number: int) -> None:
        if number == signals.SAVE:
            self.agents[0].take_signal(number)
            return
        if not self.signalled:
            say("stopping; a second signal ends all ranks at once")
        self.signalled = self.signalled or number
        for agent in self.agents:
            agent.take_signal(number)

    def _to_go_on(self, config: TrainConfig) -> TrainConfig:
        """Resume from the newest checkpoint of this run; if it has none yet, from the checkpoint it began with."""
        if config.resume is not None and not checkpoint_files.find(self.paths.checkpoints):
            return config
        return config.resumed()


def may_be_mended(error: DdpManualError) -> bool:
    """Return whether to start all ranks again, as also after the kernel has killed a rank because memory ran out."""
    code = error.exit_code
    return code in MENDED_BY_A_RESTART or (code > 128 and code not in ASKED_TO_STOP)


async def copy(descriptor: int, output: RankOutput, sink: TextIO) -> None:
    """Copy what the worker writes to this pipe, line by line, until its end."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    rest = b""
    while piece := await reader.read(1 << 16):
        # A progress bar rewrites its line with \r: each state of it counts as a line.
        *lines, rest = (rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        if lines:
            output.write(b"\n".join(lines) + b"\n", sink)
    if rest:
        output.write(rest + b"\n", sink)


class Forker:
    """The process that imports torch, and then forks each worker: see ``worker/__main__.py``."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, launchers.clean_variables(self._nproc):
            self._process = start_python(
                PROGRAM, [theirs.fileno()], [f"ranks={self._nproc}"], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_again(self) -> None:
        """Start it again if it has been killed, as by the kernel when memory runs out; its workers died with it."""
        if self._process.poll() is not None:
            self.close()
            self._start()

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def fork(self, output: RankOutput) -> Worker:
        """Ask for a worker; it exists once the forker has torch."""
        check_torch_is_installed()
        channel, theirs = socket.socketpair()
        (faults, *ours), their_pipes = zip(*(os.pipe() for _ in ("faults", "stdout", "stderr")), strict=True)
        with theirs, suppress(BrokenPipeError):  # the forker has just ended; the worker's channel shows that too
            socket.send_fds(self._control, [b"."], [theirs.fileno(), *their_pipes])
        for descriptor in their_pipes:
            os.close(descriptor)
        sinks = zip(ours, (sys.stdout, sys.stderr), strict=True)
        copies = [asyncio.ensure_future(copy(pipe, output, sink)) for pipe, sink in sinks]
        return ForkedWorker(self._process, channel, faults, copies)


class ForkedWorker(Worker):
    """A worker that exists only once its forker has torch, and says so itself.

    Args:
        forker: the process that forks it; it ends if it cannot import torch.
        copies: done when everything is read that the worker has written.
    """

    def __init__(
        self,
        forker: subprocess.Popen[bytes],
        channel: socket.socket,
        faults: int,
        copies: Sequence[asyncio.Future[None]],
    ) -> None:
        super().__init__(forker.pid, channel, faults)
        self._forker = forker
        self._copies = copies

    async def _watch(self, gone: Callable[[], None]) -> None:
        while not self.said and not self.is_gone:
            await asyncio.sleep(0.01)
        if self.said:
            await super()._watch(gone)
            return
        await asyncio.sleep(LOOK_EVERY)  # perhaps only its child has ended, or the forker is about to end
        self.status = self._forker.poll()
        self.ended = True
        gone()

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if self.said:
            await super().end(error, own=own)
            await asyncio.wait(self._copies, timeout=LAST_LINES_WITHIN)
        else:  # once it is forked it finds the channel closed, and ends
            self.close()
        for copy in self._copies:
            copy.cancel()
