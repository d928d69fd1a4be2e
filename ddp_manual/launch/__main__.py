"""The process that launches the ranks of ``spawn``: ``python .../ddp_manual/launch PARENT folder=FOLDER``."""

import sys
from pathlib import Path

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[2])  # instead of this folder

import asyncio
import os
import shutil
import signal
from concurrent.futures import ThreadPoolExecutor
from functools import partial

from ddp_manual import orphans, signal_handlers, unread
from ddp_manual.agent.what_to_run import Task
from ddp_manual.environment import machine
from ddp_manual.errors import DdpManualError, Stopped
from ddp_manual.launch.attempts import Launch, root_failure
from ddp_manual.launch.function import Call
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.launch.spawn import START_AGAIN
from ddp_manual.launch.this_host import Ranks
from ddp_manual.rank_options import WorldSpec
from ddp_manual.rank_output import RankOutput
from ddp_manual.run_folder import new_run_id
from ddp_manual.terminal import say
from ddp_manual.training.options import TrainConfig

# Seconds from the script's end to the second SIGTERM, which ends ranks that have not stopped after a step.
WITHOUT_PARENT = 10.0


class RanksOfFunction(Ranks):
    """The ranks that call the function of ``spawn``; the script raises the error of the rank that failed first."""

    def task(self, spec: WorldSpec, config: TrainConfig | None, restarts: int) -> Task:
        again = "(spawn has started rank {rank} too: look at what it does)"
        counts = restarts, self.job.max_restarts
        return Task(program=self.job.program, command=again, launched=self.job.go_on, restarts=counts)

    def print_error(self, rank: int, error: DdpManualError, output: RankOutput) -> None:
        """Print nothing: ``spawn`` raises the error in the script."""


async def launch(call: Call, writer: ThreadPoolExecutor) -> None:
    """Launch the ranks; write to the call's folder which rank failed first, and why."""
    spec: WorldSpec = call.get("spec")
    with machine.reserved_port() as port:
        job = Job(spec=spec, run_id=spec.run_id or new_run_id(), run_dir=None, go_on=START_AGAIN, program=call.program)
        ranks = RanksOfFunction(job.at(master_port=port), Hosts([spec.world_size]), writer)
        started = Launch(job, [ranks])
        with signal_handlers.handle_in_event_loop(started.take_signal), ranks.able_to_start():
            signal.pthread_sigmask(signal.SIG_UNBLOCK, signal_handlers.BLOCKED_AT_START)
            asyncio.get_running_loop().add_reader(0, _stop_without_parent, started)
            await started.attempts()
    failed = root_failure(started.failed)
    if failed is None and started.signalled:
        why = "spawn got the signal, and passed it on to all ranks"
        failed = 0, Stopped(started.signalled, why=why, next=START_AGAIN)
    if failed is not None:
        call.put("failed", failed)


def _stop_without_parent(started: Launch) -> None:
    """Stop the ranks, and end them at once after WITHOUT_PARENT seconds: the script has ended or closed the pipe."""
    loop = asyncio.get_running_loop()
    loop.remove_reader(0)
    say("the script no longer waits for spawn: its ranks are stopped")
    started.signalled = signal.SIGTERM
    started.take_signal(signal.SIGTERM)
    loop.call_later(WITHOUT_PARENT, partial(started.take_signal, signal.SIGTERM))


if __name__ == "__main__":
    orphans.adopt()
    folder = Path(sys.argv[-1].removeprefix("folder="))
    try:
        with ThreadPoolExecutor(1, "ddp_manual output") as writer, unread.never_block(unread.A_PERSON_READS_WITHIN):
            asyncio.run(launch(Call(folder), writer))
    finally:
        if os.getppid() != int(sys.argv[1]):  # spawn, which removes its folder, is gone
            shutil.rmtree(folder, ignore_errors=True)
