"""``launch`` on this host: the agents of all its ranks in one process, for our own training or a program of the user's.

The workers are forks of a process that has imported torch once. Each has a session of its own; its lines are shown
with its rank in front, and go to a log file. If a rank fails, its agent tells the other ranks, as in any run.
"""

from __future__ import annotations

import asyncio
import copy
import dataclasses
import os
import sys
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager, nullcontext
from pathlib import Path
from typing import Any

from ddp_manual import orphans, signal_handlers, terminal
from ddp_manual.agent import by_hand
from ddp_manual.agent.main import Agent
from ddp_manual.agent.program_source import check_program
from ddp_manual.agent.start_worker import Forker, Starter, check_torch_is_installed, witness_of
from ddp_manual.agent.what_to_run import Task
from ddp_manual.environment import machine, user_variables
from ddp_manual.errors import DdpManualError, PeerFailed, RankTaken, Stopped, writing
from ddp_manual.launch.attempts import Launch, Tell, say_how_to_look
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.rank_options import WorldSpec
from ddp_manual.rank_output import RankOutput
from ddp_manual.ranks_and_runs import from_last_checkpoint
from ddp_manual.run_folder import RunPaths
from ddp_manual.text_wrapping import whole
from ddp_manual.training import checkpoint_files
from ddp_manual.training.options import TrainConfig

# Seconds after a rank has left until ranks that still wait for others to join give up.
GIVE_UP_AFTER = 0.3


def launch_here(job: Job, hosts: Hosts) -> int:
    """Start the ranks of this host and wait for them; return the exit code of the rank that failed first, or 0. They
    meet at the port that was chosen; if none was and all ranks are here, at a free port.

    Raises:
        BadOption, CheckpointMissing, BackendUnavailable: the ranks cannot run here. Stopped: a signal has stopped
            the ranks, and all have ended.
    """
    hosts.check(job.spec)
    job = prepared(job, hosts)
    spec = job.spec
    several = len(hosts.slots) > 1
    is_chosen = several or (spec.master_port and spec.source("master_port") != "default")
    with (
        ThreadPoolExecutor(1, "ddp_manual output") as writer,
        nullcontext(spec.master_port) if is_chosen else machine.reserved_port() as port,
    ):
        address = None if spec.source("master_addr") == "default" else spec.master_addr
        say_how_to_look({"master_addr": address, "master_port": port, "token_file": spec.token_file})
        return asyncio.run(_run(job, Ranks(job.at(master_port=port), hosts, writer)))


async def _run(job: Job, ranks: Ranks) -> int:
    launch = Launch(job, [ranks])
    with signal_handlers.handle_in_event_loop(launch.take_signal), ranks.able_to_start():
        await launch.attempts()
    return launch.conclude()


def prepared(job: Job, hosts: Hosts) -> Job:
    """Check once what every rank of this host would check, make the folder of the run, and return the job with the
    options that this host's ranks get.

    Raises:
        BadOption, CheckpointMissing, BackendUnavailable: the ranks cannot run here.
    """
    user_variables.token(job.spec.token_file)
    if job.program is not None:
        check_program(job.program)
        job = dataclasses.replace(job, spec=job.spec.of_script())
    else:
        assert job.config is not None and job.run_dir is not None
        check_torch_is_installed()
        config = job.config.with_flags(run_dir=job.run_dir)
        by_hand.check_options(dataclasses.replace(job.spec, world_size=hosts.world_size), config)
        job = dataclasses.replace(job, config=config)
    if job.run_dir is not None:
        goes_on = job.config is None or job.config.resume is not None  # what a program writes there is its own affair
        # A rank that takes the seat of a lost rank finds the files of its run in the folder.
        paths = RunPaths(Path(job.run_dir))
        paths.create(resuming=goes_on or job.spec.on_loss != LEAVE)
        for rank in hosts.ranks:
            with writing(paths.log(rank), "--run_dir"):  # one may be there, of another user
                paths.log(rank).open("ab").close()
    return job


class Ranks:
    """The ranks of this host, as a part of a launch.

    Args:
        job: as ``prepared`` returns it.
        writer: the thread that writes the output.
    """

    def __init__(self, job: Job, hosts: Hosts, writer: Executor) -> None:
        self.job, self.hosts = job, hosts
        self.starter: Starter
        self.agents: list[Agent] = []
        """The agents of the ranks in this attempt; none between two attempts."""
        self._signals_before: list[int] = []
        """Signals that came while there were no agents: they get them as soon as they are here."""
        self._paths = RunPaths(Path(job.run_dir)) if job.run_dir is not None else None
        self._writer = writer
        self._witness: signal_handlers.Witness | None = None
        self._has_trained = False
        """Whether any attempt has taken a step."""
        self._said: set[tuple[str, ...]] = set()
        """The (identifier, what, why) of the errors that have ended ranks in this attempt."""
        self._lines: Counter[str] = Counter()
        """Line that all ranks are told -> how often it was shown in this attempt."""
        self._is_stopping = self._passes_on = False
        """Whether a signal has asked all ranks to stop; whether such a signal is being passed on just now."""

    @contextmanager
    def able_to_start(self) -> Iterator[None]:
        """Have ``starter``, which starts the workers of this host, in the body. Remove the run's folder after the body
        if the user has not chosen the folder and no rank has trained."""
        job, nproc = self.job, len(self.hosts.ranks)
        program = job.program if job.program is not None else by_hand.TRAINING
        with ExitStack() as stack:
            stack.callback(self._tidy_up)
            self.starter = Forker(program, nproc) if job.forks else Starter(program, nproc)
            stack.enter_context(closing(self.starter))
            if job.program is not None:
                self._witness = stack.enter_context(closing(witness_of(program, own_session=True)))
            yield

    async def attempt(self, restarts: int, tell: Tell) -> None:
        """Start all ranks of this host and wait for the last; after a failure our own training goes on from the newest
        checkpoint."""
        with ExitStack() as stack:
            self._said.clear()
            self._lines.clear()
            config, ranks = self._to_go_on() if restarts else self.job.config, []
            for rank in self.hosts.ranks:
                log = self._paths.log(rank) if self._paths else Path(os.devnull)
                output = RankOutput(stack.enter_context(log.open("ab", buffering=0)), rank, self._writer)
                ranks.append((self._agent(rank, config, restarts, output), output))
            self.agents = [agent for agent, _ in ranks]
            while self._signals_before:
                self.take_signal(self._signals_before.pop(0))
            try:
                await asyncio.gather(*(self._live(agent, output, tell) for agent, output in ranks))
                await orphans.Children().end()  # an orphan in a session of its own may be any rank's
            finally:  # write all lines before the logs are closed
                await asyncio.wrap_future(self._writer.submit(lambda: None))
        self._has_trained |= any(agent.protocol.has_trained for agent in self.agents)
        self.agents = []

    async def _live(self, agent: Agent, output: RankOutput, tell: Tell) -> None:
        rank, ended = agent.spec.rank, await agent.run()
        if ended.error is not None:
            tell((rank, ended.error))
            if not (isinstance(ended.error, RankTaken) and self.job.spec.on_loss != LEAVE):
                await asyncio.sleep(GIVE_UP_AFTER)  # the others may learn why, and then say it themselves
                self.give_up(PeerFailed(f"rank {rank} has left", why="", next=""))
        elif rank == 0 and self.job.config is not None:
            output.print(terminal.result_text(ended.result), sys.stdout)

    def give_up(self, error: DdpManualError) -> None:
        """End the ranks that still wait for others to join."""
        for agent in self.agents:
            agent.protocol.give_up(error)

    def _agent(self, rank: int, config: TrainConfig | None, restarts: int, output: RankOutput) -> Agent:
        # The options of a rank that is started by hand, so that its commands are what a person could type.
        job, world_size = self.job, self.hosts.world_size
        place: dict[str, Any] = {"world_size": world_size, "rank": rank, "run_id": job.run_id}
        own = dataclasses.replace(job.spec, **place, sources={**job.spec.sources, **dict.fromkeys(place, "flag")})
        first, by_ssh = self.hosts.ranks[0], self.hosts.by_ssh
        speaks = first == 0 or not by_ssh  # with ssh, the ranks of all hosts share one terminal
        told: Counter[str] = Counter()

        def is_news(line: str) -> bool:
            told[line] += 1
            is_first = speaks and told[line] > self._lines[line]
            self._lines[line] += is_first
            return is_first

        task = dataclasses.replace(
            self.task(own, config, restarts),
            is_news=is_news,
            in_one_terminal=by_ssh or len(self.hosts.ranks) == world_size,
            waits_silently=not speaks or rank != first,
            searches_silently=rank != first,
        )
        agent = Agent(
            own,
            task,
            start_worker=lambda held: self.starter.start(rank, world_size, held, output),
            log=lambda line: output.print(f"{terminal.tag(rank)} {line}", shown=not self._passes_on),
            print_error=lambda error: self.print_error(rank, error, output),
        )
        agent.witness = self._witness
        return agent

    def task(self, spec: WorldSpec, config: TrainConfig | None, restarts: int) -> Task:
        """Return what a rank is to do."""
        job = self.job
        if job.program is None:
            assert config is not None
            return by_hand.training_task(spec, config, launched=job.go_on)
        return by_hand.program_task(
            spec,
            job.program,
            run_dir=job.run_dir,
            may_differ=job.may_differ,
            launched=job.go_on,
            restarts=(restarts, job.max_restarts),
        )

    def print_error(self, rank: int, error: DdpManualError, output: RankOutput) -> None:
        output.print_error(self._without_way_on(error), shown=self._is_news(error))

    def _is_news(self, error: DdpManualError) -> bool:
        """Return whether to show a rank's error in this terminal. Do not show it if it is about another rank that shows
        its own, if a rank has said the same, or if ``launch`` itself reports the signal that has stopped all."""
        identifier, _ = error.on_its_rank or (error.identifier, 0)
        shares_terminal = error.of_rank in self.hosts.ranks or (error.of_rank is not None and self.hosts.by_ssh)
        is_said = (error.identifier, error.what, error.why) in self._said
        self._said.add((error.identifier, error.what, error.why))
        return not (is_said or shares_terminal or (self._is_stopping and identifier == Stopped.identifier))

    def _without_way_on(self, error: DdpManualError) -> DdpManualError:
        """Return the error without how to go on: ``launch`` says that once for all ranks."""
        again = from_last_checkpoint(self.job.go_on, self.job.run_dir or "")
        next = error.next.removesuffix(again).removesuffix("\nthen ").removesuffix(f"go on:\n{whole(self.job.go_on)}")
        said = copy.copy(error)
        said.next = next
        return said

    def take_signal(self, number: int) -> None:
        self._is_stopping |= number in signal_handlers.STOP
        self._passes_on = number in signal_handlers.STOP  # no rank shows a line about it: launch says it for all
        if not self.agents:
            self._signals_before.append(number)
        # In our own training rank 0 saves for all.
        for agent in self.agents[: 1 if number == signal_handlers.SAVE and self.job.program is None else None]:
            agent.take_signal(number)
        self._passes_on = False

    @property
    def has_saved(self) -> bool:
        if self.job.config is None or self._paths is None:
            return False
        return bool(checkpoint_files.find(self._paths.checkpoints))

    def _to_go_on(self) -> TrainConfig | None:
        """Return options that resume from this run's newest checkpoint, otherwise from the one that it began with."""
        config = self.job.config
        begins_with_another = config is not None and config.resume is not None and not self.has_saved
        return config if config is None or begins_with_another else config.with_flags(resume=checkpoint_files.AUTO)

    def _tidy_up(self) -> None:
        if not self._has_trained and not self.job.chose_folder and self._paths is not None:
            self._paths.remove_start()
