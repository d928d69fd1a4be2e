"""Samples per second of two ranks, and the memory of four ranks of one host, compared with another checkout.

python -m benchmarks.versions --before ../before --data_dir data

Memory is the sum of the proportional set sizes of all agents and workers, at its peak: a page that several processes
share counts once.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import click
import psutil

from benchmarks.measuring import REPOSITORY, free_port, interleave, machine, ratio

LOOK_EVERY = 0.5
SAMPLES = ("--model", "convnet", "--batch_size", "100")
MEMORY = ("--model", "mlp", "--batch_size", "500")


def train(tree: Path, data_dir: str, ranks: int, options: tuple[str, ...]) -> tuple[float, float]:
    """Train one epoch of MNIST with the code of ``tree``; return samples per second and the peak memory in MB."""
    with tempfile.TemporaryDirectory() as folder:
        run = [
            *("--epochs", "1"),
            *("--warmup_epochs", "0.5"),
            *("--data_dir", data_dir),
            *("--run_dir", f"{folder}/run"),
        ]
        identity = ["--world_size", str(ranks), "--master_port", str(free_port())]
        start = [sys.executable, "run_multi_gpu_train.py", *identity, *run, *options]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        env = {**os.environ, "PYTHONPATH": str(tree)}
        agents = [psutil.Popen([*start, "--rank", str(rank)], cwd=tree, env=env, **quiet) for rank in range(ranks)]
        peak = 0.0
        while any(agent.poll() is None for agent in agents):
            peak = max(peak, sum(map(memory, agents)))
            time.sleep(LOOK_EVERY)
        if any(agent.returncode for agent in agents):
            raise click.ClickException(f"{' '.join(start)} failed in {tree}")
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["samples_per_second"]), peak


def memory(agent: psutil.Process) -> float:
    """Return the MB of an agent and its worker."""
    total = 0.0
    with suppress(psutil.Error):
        for process in (agent, *agent.children(recursive=True)):
            total += process.memory_full_info().pss / 2**20
    return total


@click.command()
@click.option("--before", required=True, type=click.Path(exists=True, file_okay=False), help="The other checkout.")
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=4, show_default=True)
def main(before: str, data_dir: str, repetitions: int) -> None:
    click.echo(machine())
    trees = {"now": REPOSITORY, "before": Path(before).resolve()}
    with tempfile.TemporaryDirectory() as folder:
        # Each checkout has its own copy of the data: a later version may keep a cache beside them.
        data = {name: f"{folder}/{name}" for name in trees}
        for name, tree in trees.items():
            shutil.copytree(Path(data_dir, "MNIST", "raw"), Path(data[name], "MNIST", "raw"))
            train(tree, data[name], 1, MEMORY)  # compiles changed modules, and reads the data once
        click.echo("| | now | before | now / before |\n|---|---|---|---|")
        for title, ranks, options, figure in (
            ("samples/s, 2 ranks", 2, SAMPLES, 0),
            ("memory of 4 ranks, MB", 4, MEMORY, 1),
        ):
            sides = {name: partial(measured, tree, data[name], ranks, options, figure) for name, tree in trees.items()}
            found = interleave(sides, repetitions)
            medians = " | ".join(f"{statistics.median(found[name]):,.0f}" for name in trees)
            click.echo(f"| {title} | {medians} | {ratio(found['now'], found['before'])} |")


def measured(tree: Path, data_dir: str, ranks: int, options: tuple[str, ...], figure: int) -> float:
    return train(tree, data_dir, ranks, options)[figure]


if __name__ == "__main__":
    main()
