"""The small orchestrator: all ranks of this machine from one terminal.

One process has the agents of all ranks. Their workers are forks of one that has torch imported, once; each has a
session of its own, and its lines come out with its rank in front and go to a log file. When one rank fails the others
are told by its agent, as anywhere; then, if there may be another attempt, all go on from the newest checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
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
from ddp_manual.agent.commands import command_to_go_on_with_launch
from ddp_manual.agent.main import Agent
from ddp_manual.agent.worker_process import LOOK_EVERY, Worker, first_of
from ddp_manual.errors import DdpManualError, PeerFailed, PeerGone, Stopped, TrainingFailed
from ddp_manual.launchers import start_python
from ddp_manual.messages import LONGEST_LINE
from ddp_manual.run_folder import RunPaths, default_run_dir, new_run_id
from ddp_manual.terminal import RankOutput, say
from ddp_manual.training import checkpoint_files
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec

FORKER = Path(__file__).parent.parent / "worker" / "forker.py"
# What another attempt may escape: an exception of the training, a peer that is gone. Not so the rest: options, names,
# versions, files, data and devices are the same again. A rank that a signal has stopped was asked to.
MENDED_BY_A_RESTART = (TrainingFailed.exit_code, PeerGone.exit_code)
ASKED_TO_STOP = tuple(128 + number for number in signals.STOP)
# Seconds, for ranks that wait for one that has left.
GIVE_UP_AFTER = 0.3
# Seconds, for what a worker has written last.
LAST_LINES_WITHIN = 1.0


def launch_ranks(
    nproc: int, spec: WorldSpec, config: TrainConfig, typed: Sequence[str], run_dir: str | None, max_restarts: int = 0
) -> int:
    """Start ``nproc`` ranks and wait for them; returns the exit code of the one that failed first, else 0.

    Args:
        spec: rank 0's, without its place in the world.
        typed: the training options as they were typed.
        max_restarts: how often to start them all again, from the newest checkpoint, after a failure that this may mend.

    Raises:
        BadOption: a run_dir that cannot be used. Stopped: by a signal, after all ranks have ended.
    """
    run_id = new_run_id()
    run_dir = run_dir or default_run_dir(run_id)
    paths = RunPaths(Path(run_dir)).create(resuming=config.resume is not None)
    go_on = command_to_go_on_with_launch(nproc, max_restarts, paths.run_dir, typed)
    launch = Launch(nproc, run_id, paths, max_restarts, go_on)
    with launchers.reserved_port() as port:
        return asyncio.run(launch.run(spec, config, port))


@dataclass
class Launch:
    """A run of ranks on this machine, through all attempts at it."""

    nproc: int
    run_id: str
    paths: RunPaths
    max_restarts: int
    go_on: str
    """The command that goes on with the run."""
    agents: list[Agent] = field(default_factory=list)
    signalled: int = 0

    async def run(self, spec: WorldSpec, config: TrainConfig, port: int) -> int:
        with signals.handle_in_event_loop(self._take_signal), ExitStack() as closing:
            forker = Forker(self.nproc)
            closing.callback(forker.close)
            restarts = 0
            while (failed := await self._attempt(spec, config, port, forker)) is not None:
                if self.signalled or not failed.may_be_mended or restarts >= self.max_restarts:
                    break
                say(f"restart {restarts + 1} of {self.max_restarts} after {failed.told}")
                for rank in range(self.nproc):
                    self.paths.set_failure_aside(rank, restarts)
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
        say(f"rank {failed.rank} failed first, with exit code {failed.error.exit_code}: {failed.told}")
        if saved:
            say(f"to go on from the newest checkpoint:\n  {self.go_on}")
        return failed.error.exit_code

    async def _attempt(self, spec: WorldSpec, config: TrainConfig, port: int, forker: Forker) -> Failed | None:
        """From the start of the first rank to the end of the last; returns what has ended it, if not its end."""
        with ExitStack() as closing:
            logs = [closing.enter_context(self.paths.log(rank).open("ab")) for rank in range(self.nproc)]
            outputs = [RankOutput(log, rank) for rank, log in enumerate(logs)]
            self.agents = [self._agent(rank, spec, config, port, forker, output) for rank, output in enumerate(outputs)]
            failed: list[Failed] = []

            async def live(rank: int) -> None:
                ended = await self.agents[rank].run()
                if ended.error is not None:
                    failed.append(Failed(rank, ended.error))
                    await asyncio.sleep(GIVE_UP_AFTER)  # they may be told why, and then say it themselves
                    for agent in self.agents:
                        agent.give_up(PeerFailed(f"rank {rank} has left", why=ended.error.what, next=ended.error.next))
                elif rank == 0:
                    outputs[0].write(f"{terminal.result_text(ended.result)}\n".encode(), sys.stdout)

            await asyncio.gather(*(live(rank) for rank in range(self.nproc)))
        # A rank that lost a peer may have ended before the one that was lost.
        return next((one for one in failed if one.error.exit_code != PeerGone.exit_code), failed[0]) if failed else None

    def _agent(
        self, rank: int, spec: WorldSpec, config: TrainConfig, port: int, forker: Forker, output: RankOutput
    ) -> Agent:
        # The options of a rank that is started by hand, so that its commands are what a person could type.
        place: dict[str, Any] = {"world_size": self.nproc, "rank": rank, "master_port": port, "run_id": self.run_id}
        own = dataclasses.replace(spec, **place, sources={**spec.sources, **dict.fromkeys(place, "flag")})
        return Agent(
            own,
            tasks.training(own, config.in_folder(str(self.paths.run_dir)), launched=self.go_on),
            start_worker=lambda: forker.fork(output),
            say=lambda line: output.write(f"{terminal.tag(rank)} {line}\n".encode()),
            tell=lambda error: output.write(f"{error.render()}\n".encode()),
        )

    def _take_signal(self, number: int) -> None:
        if number == signals.SAVE:
            self.agents[0].take_signal(number)
            return
        if not self.signalled:
            say("stopping; once more ends it at once")
        self.signalled = self.signalled or number
        for agent in self.agents:
            agent.take_signal(number)

    def _to_go_on(self, config: TrainConfig) -> TrainConfig:
        """The newest checkpoint of the run itself, unless it has none yet and began with another's."""
        if config.resume is not None and not checkpoint_files.find(self.paths.checkpoints):
            return config
        return config.resumed()


@dataclass(frozen=True)
class Failed:
    """A rank that has failed."""

    rank: int
    error: DdpManualError

    @property
    def may_be_mended(self) -> bool:
        """Whether to start all ranks again; also one that was killed, as by the kernel when memory is short."""
        code = self.error.exit_code
        return code in MENDED_BY_A_RESTART or (code > 128 and code not in ASKED_TO_STOP)

    @property
    def told(self) -> str:
        return f"error[{self.error.identifier}]: {self.error.what}"


async def copy(descriptor: int, output: RankOutput, sink: TextIO) -> None:
    """What the worker writes to this pipe, line by line, until its end."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    rest = b""
    while piece := await reader.read(1 << 16):
        # A bar that goes on in one line is shown as it grows.
        *lines, rest = (rest + piece).replace(b"\r\n", b"\n").replace(b"\r", b"\n").split(b"\n")
        if len(rest) > LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        if lines:
            output.write(b"\n".join(lines) + b"\n", sink)
    if rest:
        output.write(rest + b"\n", sink)


class Forker:
    """The process that imports torch, and then forks each worker: see ``worker/forker.py``."""

    def __init__(self, nproc: int) -> None:
        self._nproc = nproc
        self._start()

    def _start(self) -> None:
        self._control, theirs = socket.socketpair()
        with theirs, launchers.clean_variables(self._nproc):
            self._process = start_python(
                FORKER, [theirs.fileno()], [f"ranks={self._nproc}"], stdin=subprocess.DEVNULL, start_new_session=True
            )

    def start_again(self) -> None:
        """Where it has been killed, as by the kernel when memory is short; its workers went with it."""
        if self._process.poll() is not None:
            self.close()
            self._start()

    def close(self) -> None:
        self._control.close()
        self._process.kill()
        self._process.wait()

    def fork(self, output: RankOutput) -> Worker:
        """Ask for a worker; it is there once the forker has torch."""
        channel, theirs = socket.socketpair()
        (faults, *ours), their_pipes = zip(*(os.pipe() for _ in ("faults", "stdout", "stderr")), strict=True)
        with theirs, suppress(BrokenPipeError):  # it has just ended; the worker's channel tells that too
            socket.send_fds(self._control, [b"."], [theirs.fileno(), *their_pipes])
        for descriptor in their_pipes:
            os.close(descriptor)
        sinks = zip(ours, (sys.stdout, sys.stderr), strict=True)
        copies = [asyncio.ensure_future(copy(pipe, output, sink)) for pipe, sink in sinks]
        return ForkedWorker(self._process, channel, faults, copies)


class ForkedWorker(Worker):
    """A worker that is there only once its forker has torch, and says so itself.

    Args:
        forker: which ends, if it cannot import torch.
        copies: done when all is read that the worker has written.
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
        await first_of(self._speaks, self._hung_up)
        if self._speaks.is_set():
            await super()._watch(gone)
            return
        await asyncio.sleep(LOOK_EVERY)  # the forker may only be about to end, and a child of it may have ended alone
        self.status = self._forker.poll()
        self.ended.set()
        gone()

    async def end(self, error: DdpManualError | None, *, own: bool) -> None:
        if self._speaks.is_set():
            await super().end(error, own=own)
            await asyncio.wait(self._copies, timeout=LAST_LINES_WITHIN)
        else:  # it ends at once when it is forked, since nobody is there any more
            self.close()
        for copy in self._copies:
            copy.cancel()
