"""Seconds from the loss of a rank until all ranks train again, if its agent replaces the worker, and if its
command is typed again at once; and a survivor's processes, threads, descriptors and memory after first and last losses.

python -m benchmarks.lost_ranks --data_dir data
"""

from __future__ import annotations

import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.measuring import free_port, machine
from tests.seats import steps_done_of, worker_below

# What the spare of a newly typed rank imports before it can fork a worker.
IMPORTS = "from ddp_manual.training import program"


class Ranks:
    """Ranks that keep their seats, each started as a person would."""

    def __init__(self, world_size: int, data_dir: str, folder: str) -> None:
        meeting = ["--world_size", world_size, "--master_port", free_port(), "--on_loss", "wait"]
        training = ["--data_dir", data_dir, "--epochs", 1000, "--run_dir", f"{folder}/run"]
        self._words = [sys.executable, "run_multi_gpu_train.py", *map(str, [*meeting, *training])]
        self.processes = [self.start(rank) for rank in range(world_size)]

    def start(self, rank: int) -> psutil.Popen:
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        quiet: dict[str, Any] = dict.fromkeys(("stdin", "stdout", "stderr"), subprocess.DEVNULL)
        return psutil.Popen([*self._words, "--rank", str(rank)], env=env, **quiet)

    def until_a_step_after(self, done: int) -> None:
        while steps_done_of(self.processes[0].pid) <= done:
            time.sleep(0.005)

    def lose(self, rank: int) -> float:
        """Kill a rank's worker; return the seconds until all have done another step."""
        began, done = time.monotonic(), steps_done_of(self.processes[0].pid)
        os.kill(worker_below(self.processes[rank].pid), signal.SIGKILL)
        if rank:
            self.processes[rank].wait()
            self.processes[rank] = self.start(rank)
        self.until_a_step_after(done + 1)  # one step may have been under way
        return time.monotonic() - began

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def taken_by(agent: psutil.Process) -> list[str]:
    """Return what a rank takes of the machine, its agent, spare and worker together: the columns of the table."""
    processes = [agent, *agent.children(recursive=True)]
    memory = [process.memory_full_info().pss / 1e6 for process in processes]
    counts = (
        len(processes),
        sum(process.num_threads() for process in processes),
        sum(process.num_fds() for process in processes),
        sum(len(process.net_connections()) for process in processes),
    )
    return [*map(str, counts), f"{memory[0]:.1f}", f"{sum(memory):.0f}"]


def seconds(times: Sequence[float]) -> str:
    return f"{statistics.median(times):.2f} ({min(times):.2f} to {max(times):.2f})"


@click.command()
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=10, show_default=True)
@click.option("--ranks", default=3, show_default=True)
def main(data_dir: str, repetitions: int, ranks: int) -> None:
    click.echo(machine())
    imports, survivors, newcomers = list[float](), list[float](), list[float]()
    taken = list[list[str]]()
    for _ in range(repetitions):
        began = time.monotonic()
        subprocess.run([sys.executable, "-c", IMPORTS], check=True)
        imports.append(time.monotonic() - began)
    with tempfile.TemporaryDirectory() as folder:
        started = Ranks(ranks, data_dir, folder)
        try:
            while not Path(folder, "run", "config.json").exists():
                time.sleep(0.1)
            started.until_a_step_after(20)
            for _ in range(repetitions):
                for rank, times in ((0, survivors), (ranks - 1, newcomers)):
                    time.sleep(1)
                    times.append(started.lose(rank))
                time.sleep(1)
                taken.append(taken_by(started.processes[1]))
        finally:
            started.end()
    click.echo("| what | seconds: median (least to most) |\n|---|---|")
    click.echo(f"| import of torch and dynamo, in a new Python | {seconds(imports)} |")
    click.echo(f"| rank 0's worker is killed; until all have done another step | {seconds(survivors)} |")
    click.echo(
        f"| rank {ranks - 1}'s worker is killed, its command is typed at once; the same | {seconds(newcomers)} |"
    )
    click.echo("| after losses | processes | threads | descriptors | sockets | MB of the agent | MB |")
    click.echo("|---|---|---|---|---|---|---|")
    for losses in (2, repetitions, 2 * repetitions):
        click.echo(f"| {losses} | {' | '.join(taken[losses // 2 - 1])} |")


if __name__ == "__main__":
    main()
