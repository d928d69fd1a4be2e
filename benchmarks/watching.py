"""What watching over a run costs, in percent of a core: the coordinator, and the agent and the reporter of a rank.

python -m benchmarks.watching

The coordinator is the real one, in a process that does no training. 1,024 or 4,096 simulated ranks send it heartbeats
at the usual rate, each with something new. Agent and reporter are those of two ranks that train.
"""

from __future__ import annotations

import secrets
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import click

from benchmarks.coordinator_process import hosted, simulated_ranks
from benchmarks.measuring import REPOSITORY, free_port, machine
from benchmarks.simulated_ranks import Order

RANKS = 2
STARTED_WITHIN = 120.0
# Seconds after the start that are not measured, because some work is done only in them.
SETTLE = 3.0


def coordinator(ranks: int, seconds: float) -> float:
    """Return the percentage of a core that the coordinator uses while ``ranks`` ranks send heartbeats."""
    nonce = secrets.token_hex(16)
    with hosted(ranks, nonce, token=None) as (port, cpu_seconds):
        with simulated_ranks(Order(ranks, port, "watching", nonce=nonce)) as ranks_do:
            ranks_do("go")
            time.sleep(SETTLE)
            began, used = time.monotonic(), float(cpu_seconds("now"))
            time.sleep(seconds)
            used, passed = float(cpu_seconds("now")) - used, time.monotonic() - began
        return 100 * used / passed


def training(seconds: float, data_dir: str | None) -> dict[str, float]:
    """Return the percentage of a core that each agent and reporter of two training ranks uses."""
    with tempfile.TemporaryDirectory() as folder:
        data = ["--data_dir", data_dir] if data_dir else ["--dataset", "synthetic", "--data_dir", f"{folder}/data"]
        options = ["--world_size", str(RANKS), "--master_port", str(free_port()), "--run_dir", f"{folder}/run", *data]
        command = [sys.executable, "benchmarks/watched.py", folder, *options, "--epochs", "1000", "--log_every", "1"]
        said = Path(folder, "said")
        with said.open("wb") as file:
            processes = [
                subprocess.Popen([*command, "--rank", str(rank)], cwd=REPOSITORY, stdout=file, stderr=file)
                for rank in range(RANKS)
            ]
        try:
            if not _appears(Path(folder, "run", "metrics.jsonl"), processes):
                raise click.ClickException(f"the ranks do not train:\n{said.read_text(errors='replace')}")
            time.sleep(SETTLE)
            before, began = _cpu_seconds(folder, processes), time.monotonic()
            time.sleep(seconds)
            after, passed = _cpu_seconds(folder, processes), time.monotonic() - began
        finally:
            for process in processes:
                process.send_signal(signal.SIGTERM)
            for process in processes:
                process.wait()
    return {name: 100 * (after[name] - before[name]) / passed for name in before}


def _appears(file: Path, processes: list[subprocess.Popen[bytes]]) -> bool:
    """Wait for the first line of ``file``; return False if a process ends before that, or after STARTED_WITHIN."""
    deadline = time.monotonic() + STARTED_WITHIN
    while not file.exists() or not file.read_text():
        if time.monotonic() > deadline or any(process.poll() is not None for process in processes):
            return False
        time.sleep(0.05)
    return True


def _cpu_seconds(folder: str, processes: list[subprocess.Popen[bytes]]) -> dict[str, float]:
    """Return the CPU seconds of each agent and reporter, from the first number in /proc/.../schedstat (nanoseconds)."""
    seconds = {}
    for rank, process in enumerate(processes):
        pid, thread = Path(folder, f"reporter-rank={rank}").read_text().split()
        tasks = {
            "agent": list(Path(f"/proc/{process.pid}/task").iterdir()),
            "reporter": [Path(f"/proc/{pid}/task/{thread}")],
        }
        for name, found in tasks.items():
            used = [int((task / "schedstat").read_text().split()[0]) for task in found]
            seconds[f"{name} of rank {rank}"] = sum(used) / 1e9
    return seconds


def spread(values: list[float], digits: int) -> str:
    return f"{statistics.median(values):.{digits}f} ({min(values):.{digits}f} to {max(values):.{digits}f})"


@click.command()
@click.option("--ranks", "sizes", multiple=True, type=int, default=(1024, 4096), show_default=True)
@click.option("--repetitions", default=5, show_default=True)
@click.option("--seconds", default=10.0, show_default=True, help="How long to watch each time.")
@click.option(
    "--data_dir",
    type=click.Path(exists=True, resolve_path=True),
    help="Has MNIST; otherwise synthetic data.",
)
def main(sizes: tuple[int, ...], repetitions: int, seconds: float, data_dir: str | None) -> None:
    click.echo(machine())
    costs: dict[str, list[float]] = defaultdict(list)
    for repetition in range(repetitions):
        for size in sizes:
            costs[f"coordinator of {size:,} ranks"].append(coordinator(size, seconds))
        for name, cost in training(seconds, data_dir).items():
            costs[name].append(cost)
        click.echo(f"  {repetition + 1}/{repetitions}: {', '.join(f'{name} {costs[name][-1]:.3g}' for name in costs)}")
    click.echo("| | % of a core |\n|---|---|")
    for name, values in costs.items():
        click.echo(f"| {name} | {spread(values, 1 if name.startswith('coordinator') else 3)} |")


if __name__ == "__main__":
    main()
