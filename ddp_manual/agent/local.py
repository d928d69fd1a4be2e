"""``launch``: all ranks of this machine from one terminal, of our own training or of a program of the user's.

One process has the agents of all ranks. Their workers are forks of a process that has imported torch once; each has a
session of its own, and its lines are shown with its rank in front and go to a log file. When one rank fails its agent
tells the others, as in any run; then, if another attempt is allowed, all ranks start again: our training from the
newest checkpoint.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ddp_manual import launchers, orphans, signals, terminal
from ddp_manual.agent import tasks
from ddp_manual.agent.launched_worker import Forker, ProcessStarter
from ddp_manual.agent.main import Agent
from ddp_manual.agent.program_source import check_program, forkable_imports
from ddp_manual.agent.worker_process import check_torch_is_installed
from ddp_manual.errors import BadOption, DdpManualError, PeerFailed, PeerGone, Stopped, TrainingFailed, from_dict
from ddp_manual.options import as_flags, number_below
from ddp_manual.program import EXECUTABLE, Program, without_secrets
from ddp_manual.run_folder import RunPaths, default_run_dir, new_run_id
from ddp_manual.terminal import RankOutput, say
from ddp_manual.training import checkpoint_files
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.own_code import check_module, is_own_factory
from ddp_manual.world_spec import WorldSpec

# Another attempt may go well after an exception of the training or the loss of a peer. After other errors it would not:
# options, names, versions, files, data and devices would be the same. A rank that a signal has stopped was asked to.
FIXED_BY_A_RESTART = (TrainingFailed.exit_code, PeerGone.exit_code)
ASKED_TO_STOP = tuple(128 + number for number in signals.STOP)
# Options that say where the hosts meet, and that a command to go on needs too.
ADDRESS = ("master_addr", "master_port", "listen_addr")
STOPPING = "stopping; a second signal ends all ranks at once"
# Seconds until ranks stop waiting for a rank that has left.
GIVE_UP_AFTER = 0.3

Failure = tuple[int, DdpManualError]
"""A rank, and the error that has ended it."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """How many ranks there are on how many hosts, of which this is one."""

    nproc: int
    """The number of ranks on each host, or on this one where ``slots`` says how many the others have."""
    nnodes: int = 1
    node_rank: int = 0
    slots: Sequence[int] = ()
    """The number of ranks of each host, in order; empty where all have the same number."""

    @classmethod
    def of_slots(cls, slots: Sequence[int], node_rank: int) -> Hosts:
        """Return hosts of which each has a number of ranks of its own."""
        return cls(nproc=slots[node_rank], nnodes=len(slots), node_rank=node_rank, slots=tuple(slots))

    @property
    def world_size(self) -> int:
        return sum(self.slots) or self.nproc * self.nnodes

    @property
    def ranks(self) -> range:
        """The ranks of this host."""
        first = sum(self.slots[: self.node_rank]) if self.slots else self.node_rank * self.nproc
        return range(first, first + self.nproc)

    @property
    def flags(self) -> str:
        several = {"nnodes": self.nnodes, "node_rank": self.node_rank} if self.nnodes > 1 else {}
        return as_flags({"nproc": self.nproc, **several})

    def check(self, spec: WorldSpec) -> None:
        """Raise BadOption if the hosts cannot be these, or cannot meet."""
        if self.node_rank >= self.nnodes:
            raise BadOption(
                f"--node_rank {self.node_rank} does not exist among {self.nnodes} hosts",
                why=f"--nnodes is {self.nnodes}; hosts count from 0",
                next=number_below("node_rank", self.node_rank, "nnodes", self.nnodes, "hosts"),
            )
        if self.nnodes > 1 and spec.source("master_addr") == "default":
            raise BadOption(
                f"launch on {self.nnodes} hosts needs the address of the first one",
                why="no --master_addr was given, and 127.0.0.1 is another host on each",
                next="give --master_addr with the name or the IP address of the host with --node_rank 0",
            )


def program_launch(
    program: Program,
    hosts: Hosts,
    spec: WorldSpec,
    *,
    run_id: str,
    run_dir: str | None,
    max_restarts: int,
    may_differ: Sequence[str],
    start: str,
    go_on: str,
) -> Launch:
    """Return what starts this host's ranks of a user's own program.

    Args:
        spec: the options of each rank, without its place in the world.
        run_dir: where logs of the ranks go, and why they fail; None: nowhere.
        start: ``fork`` or ``exec``.
        go_on: the command that starts the run again.

    Raises:
        BadOption: the ranks would find the same, one by one.
    """
    check_program(program)
    launchers.token(spec.token_file)
    return Launch(
        hosts,
        spec.of_script(),
        run_id,
        RunPaths(Path(run_dir)).create(resuming=False) if run_dir is not None else None,
        max_restarts,
        go_on=go_on,
        program=program,
        may_differ=may_differ,
        forks=start == "fork" and program.kind != EXECUTABLE,
    )


def training_launch(
    config: TrainConfig,
    hosts: Hosts,
    spec: WorldSpec,
    *,
    run_id: str,
    run_dir: str,
    chose_folder: bool,
    max_restarts: int,
    go_on: str,
) -> Launch:
    """Return what starts this host's ranks of our own training.

    Args:
        spec: the options of each rank, without its place in the world.
        run_dir: where results go.
        chose_folder: whether the user has chosen that folder; otherwise it goes if no rank trains.
        max_restarts: how often to start all ranks again, from the newest checkpoint, if the failure may not recur.
        go_on: the command that resumes the run.

    Raises:
        BadOption, CheckpointMissing, BackendUnavailable: the ranks would find the same, one by one.
    """
    check_torch_is_installed()
    launchers.token(spec.token_file)
    for option in ("model", "dataset"):
        if is_own_factory(value := getattr(config, option)):
            check_module(option, value)
    config = config.in_folder(run_dir)
    tasks.check_options(dataclasses.replace(spec, world_size=hosts.world_size), config)
    paths = RunPaths(Path(str(config.run_dir))).create(resuming=config.resume is not None)
    launch = Launch(hosts, spec, run_id, paths, max_restarts, go_on=go_on, config=config)
    launch.chose_folder = chose_folder
    return launch


def launch_program(program: Program, hosts: Hosts, spec: WorldSpec, typed: Sequence[str], **options: Any) -> int:
    """Start this host's ranks of a user's own program and wait for them; returns the exit code of the rank that failed
    first, or 0.

    Args:
        typed: what was typed after ``launch``.
        options: of ``program_launch``.

    Raises:
        BadOption: the ranks would find the same, one by one. Stopped: by a signal, after all ranks have ended.
    """
    hosts.check(spec)
    command, _ = launchers.typed_command()
    go_on = shlex.join([*command, "launch", *typed])
    return program_launch(program, hosts, spec, run_id=new_run_id(), go_on=go_on, **options).run_at_a_port(command)


def launch_ranks(
    hosts: Hosts, spec: WorldSpec, config: TrainConfig, typed: Sequence[str], run_dir: str | None, max_restarts: int = 0
) -> int:
    """Start this host's ranks of our own training and wait for them; returns the exit code of the rank that failed
    first, or 0.

    Args:
        typed: the training options as they were typed.

    Raises:
        BadOption, CheckpointMissing, BackendUnavailable, Stopped: see ``training_launch`` and ``launch_program``.
    """
    hosts.check(spec)
    program, _ = launchers.typed_command()
    restarts = ["--max_restarts", str(max_restarts)] if max_restarts else []
    given = as_flags({name: value for name, value in spec.given_options().items() if name in ADDRESS})
    words = [*program, "launch", *hosts.flags.split(), *shlex.split(given), *restarts]
    run_id = new_run_id()
    folder = run_dir or default_run_dir(run_id)
    launch = training_launch(
        config,
        hosts,
        spec,
        run_id=run_id,
        run_dir=folder,
        chose_folder=run_dir is not None,
        max_restarts=max_restarts,
        go_on=command_to_resume(words, folder, typed),
    )
    try:
        return launch.run_at_a_port(program)
    finally:
        launch.tidy_up()


def command_to_resume(launch: Sequence[str], run_dir: str, typed: Sequence[str]) -> str:
    """Return the command that resumes our own training.

    Args:
        launch: what to type before ``--run_dir``.
        typed: the training options as they were typed.
    """
    training = [*tasks.without_options(typed, ["resume"]), "--resume", "auto"]
    return shlex.join([*launch, "--run_dir", run_dir, "--", *training])


def check_train_options(typed: Sequence[str]) -> None:
    """Check the options for the ranks' training.

    Raises:
        BadOption: ``launch`` would silently override an option.
    """
    for option in typed:
        name = option.removeprefix("--").split("=")[0].replace("-", "_")
        if option.startswith("--") and name in tasks.PER_RANK_OPTIONS:
            raise BadOption(
                f"--{name} cannot be passed on by launch",
                why=f"launch gives every rank its --{name}",
                next=f"put --{name} before the --" if name in ("run_dir", *ADDRESS) else f"leave --{name} out",
            )


@dataclass
class Launch:
    """A run of ranks on this machine, with all attempts at it."""

    hosts: Hosts
    spec: WorldSpec
    """The options of each rank, without its place in the world."""
    run_id: str
    paths: RunPaths | None
    """None: the run keeps no files."""
    max_restarts: int
    go_on: str
    """The command that resumes the run."""
    config: TrainConfig | None = None
    """Of our own training."""
    program: Program | None = None
    """Of the user's own; either this or ``config`` is given."""
    may_differ: Sequence[str] = ()
    forks: bool = True
    """Whether workers are forks of a process that has imported torch."""
    chose_folder: bool = True
    """Whether the user has chosen the run's folder, which is then kept."""
    agents: list[Agent] = field(default_factory=list)
    witness: signals.Witness | None = None
    signalled: int = 0
    restarts: int = 0
    has_trained: bool = False
    """Whether any attempt has taken a step."""
    said: dict[tuple[str, ...], int] = field(default_factory=dict)
    """What ranks have said why they end, in this attempt, and which rank said it first."""

    def run_at_a_port(self, command: Sequence[str]) -> int:
        """Run at the port that was chosen, otherwise at a free one if all ranks are on this host.

        Args:
            command: how this program was started.
        """
        is_chosen = self.hosts.nnodes > 1 or self.spec.source("master_port") != "default"
        with nullcontext(self.spec.master_port) if is_chosen else launchers.reserved_port() as port:
            self.spec = dataclasses.replace(self.spec, master_port=port)
            flags = as_flags(
                {
                    "master_addr": self.spec.master_addr if self.hosts.nnodes > 1 else None,
                    "master_port": port,
                    "token_file": self.spec.token_file,
                }
            )
            say(f"to look at this run from another terminal: {shlex.join([*command, 'status'])} --watch {flags}")
            return asyncio.run(self.run())

    async def run(self) -> int:
        with (
            signals.handle_in_event_loop(self._take_signal),
            ThreadPoolExecutor(1, "ddp_manual output") as writer,
            self.starter() as starter,
        ):
            while (failed := await self.attempt(starter, writer)) is not None and self._may_start_again(failed[1]):
                say(f"restart {self.restarts + 1} of {self.max_restarts} after {in_short(failed[1])}")
                self.begin_again(starter)
        return conclude(failed, self.signalled, self.go_on, has_saved=self.has_saved)

    @contextmanager
    def starter(self) -> Iterator[Forker | ProcessStarter]:
        """Start what starts the workers of this host, and end it after the body."""
        nproc = self.hosts.nproc
        imports = forkable_imports(self.program) if self.program is not None else tasks.TRAINING_IMPORTS
        starter = Forker(nproc, self.program, imports) if self.forks else ProcessStarter(nproc, self.program)
        with ExitStack() as stack:
            stack.enter_context(closing(starter))
            if self.program is not None:
                self.witness = stack.enter_context(closing(signals.Witness(own_session=True)))
            yield starter

    def _may_start_again(self, error: DdpManualError) -> bool:
        return not self.signalled and may_be_fixed(error) and self.restarts < self.max_restarts

    def begin_again(self, starter: Forker | ProcessStarter) -> None:
        """Prepare another attempt, of our own training from the newest checkpoint."""
        self.restarts += 1
        self.config = self._to_go_on(self.config) if self.config is not None else None
        starter.start_again()

    def tidy_up(self) -> None:
        """Remove the run's folder if nobody has chosen it and no rank has trained."""
        if not self.has_trained and not self.chose_folder and self.paths is not None:
            self.paths.remove_start()

    async def attempt(
        self, starter: Forker | ProcessStarter, writer: Executor, tell: Callable[[Failure], None] = lambda failure: None
    ) -> Failure | None:
        """Start all ranks of this host and wait for the last; returns the failure that has ended the attempt, if any.

        Args:
            writer: the thread that writes the output.
            tell: called with each failure at once.
        """
        with ExitStack() as stack:
            files = [self.paths.log(rank) if self.paths else Path(os.devnull) for rank in self.hosts.ranks]
            logs = [stack.enter_context(file.open("ab")) for file in files]
            outputs = [RankOutput(log, rank, writer) for rank, log in zip(self.hosts.ranks, logs, strict=True)]
            self.said.clear()
            ranks = [*zip(self.hosts.ranks, outputs, strict=True)]
            self.agents = [self._agent(rank, starter, output) for rank, output in ranks]
            failed: list[Failure] = []

            async def live(agent: Agent) -> None:
                rank, ended = agent.spec.rank, await agent.run()
                if ended.error is not None:
                    failed.append((rank, ended.error))
                    tell(failed[-1])
                    await asyncio.sleep(GIVE_UP_AFTER)  # the others may learn why, and then say it themselves
                    self.give_up(PeerFailed(f"rank {rank} has left", why="", next=""))
                elif rank == 0 and self.config is not None:
                    outputs[0].write(f"{terminal.result_text(ended.result)}\n".encode(), sys.stdout)

            try:
                await asyncio.gather(*map(live, self.agents))
                await orphans.Children().end()  # those in sessions of their own may be any rank's
            finally:  # before the logs are closed
                await asyncio.wrap_future(writer.submit(lambda: None))
        self.has_trained |= any(agent.protocol.has_trained for agent in self.agents)
        return first_of(failed)

    def give_up(self, error: DdpManualError) -> None:
        """End the ranks that still wait for others to join."""
        for agent in self.agents:
            agent.give_up(error)

    def _agent(self, rank: int, starter: Forker | ProcessStarter, output: RankOutput) -> Agent:
        # The options of a rank that is started by hand, so that its commands are what a person could type.
        world_size = self.hosts.world_size
        place: dict[str, Any] = {"world_size": world_size, "rank": rank, "run_id": self.run_id}
        sources = {**self.spec.sources, **dict.fromkeys([*place, "master_port"], "flag")}
        own = dataclasses.replace(self.spec, **place, sources=sources)
        if self.program is not None:
            task = tasks.program_task(
                own,
                self.program,
                run_dir=str(self.paths.run_dir) if self.paths else None,
                may_differ=self.may_differ,
                launched=shlex.join(without_secrets(shlex.split(self.go_on))),
                restarts=(self.restarts, self.max_restarts),
            )
        else:
            assert self.config is not None
            task = tasks.training_task(own, self.config, launched=self.go_on)
        first = self.hosts.ranks[0]
        speaker = 0 if self.hosts.slots else first  # with ssh the ranks of all hosts share one terminal
        agent = Agent(
            own,
            dataclasses.replace(task, waits_silently=rank != speaker, searches_silently=rank != first),
            start_worker=lambda held: starter.start(rank, world_size, held, output),
            log=lambda line: output.print(f"{terminal.tag(rank)} {line}"),
            print_error=lambda error: output.print(self._render(rank, error)),
        )
        agent.witness = self.witness
        return agent

    def _render(self, rank: int, error: DdpManualError) -> str:
        """Return the text of a rank's error without the way on, which ``launch`` says once, and in one line if another
        rank has said the same."""
        first = self.said.setdefault((error.identifier, error.what, error.why), rank)
        if first != rank:
            return f"error[{error.identifier}]: the same as on rank {first}"
        next = "\n".join(line for line in error.next.splitlines() if self.go_on not in line)
        return from_dict({**error.as_dict(), "next": next}).render()

    def _take_signal(self, number: int) -> None:
        if number != signals.SAVE and not self.signalled:
            say(STOPPING)
        self.take_signal(number)

    def take_signal(self, number: int) -> None:
        """Pass a signal on to the ranks."""
        if number != signals.SAVE:
            self.signalled = self.signalled or number
        # In our own training rank 0 saves for all.
        for agent in self.agents[: 1 if number == signals.SAVE and self.program is None else None]:
            agent.take_signal(number)

    @property
    def has_saved(self) -> bool:
        """Whether our own training has a checkpoint from which to go on."""
        if self.config is None or self.paths is None:
            return False
        return bool(checkpoint_files.find(self.paths.checkpoints))

    def _to_go_on(self, config: TrainConfig) -> TrainConfig:
        """Resume from the newest checkpoint of this run; if it has none yet, from the checkpoint it began with."""
        if config.resume is not None and not self.has_saved:
            return config
        return config.resumed()


def may_be_fixed(error: DdpManualError) -> bool:
    """Return whether to start all ranks again, as also after the kernel has killed a rank because memory ran out.

    Of a failure of another rank, which may be on another host, decide as is decided there: no host starts again alone.
    """
    identifier, code = error.on_its_rank or (error.identifier, error.exit_code)
    if identifier == TrainingFailed.identifier:  # whose exit code is the program's own
        return True
    return code in FIXED_BY_A_RESTART or (code > 128 and code not in ASKED_TO_STOP)


def first_of(failed: Sequence[Failure]) -> Failure | None:
    """Return the failure that has ended the others: a rank that has lost a peer may have ended before that peer."""
    return min(failed, key=lambda failure: failure[1].exit_code == PeerGone.exit_code, default=None)


def in_short(error: DdpManualError) -> str:
    return f"error[{error.identifier}]: {error.what}"


def conclude(failed: Failure | None, signalled: int, go_on: str, *, has_saved: bool) -> int:
    """Say why all ranks have ended, and how to go on; returns the exit code.

    Args:
        signalled: the signal that has asked the run to stop, or 0.
        go_on: the command that starts the run again, from its newest checkpoint if it has one.

    Raises:
        Stopped: a signal has.
    """
    if signalled:
        raise Stopped(
            signalled,
            why="the signal came to launch, which has passed it on; all ranks have ended",
            next=f"to go on from the newest checkpoint:\n{go_on}" if has_saved else "",
        )
    if failed is None:
        return 0
    rank, error = failed
    # Of a peer that is gone all ranks say the same, none of which has failed itself.
    first = "the run has ended" if error.exit_code == PeerGone.exit_code else f"rank {rank} failed first"
    say(f"{first}, with exit code {error.exit_code}: {in_short(error)}")
    if has_saved or may_be_fixed(error):
        say(f"to {'go on from the newest checkpoint' if has_saved else 'start again'}:\n  {go_on}")
    return error.exit_code
