"""Samples per second compared with the plain tutorial loop: float32, one epoch of MNIST each; on GPUs if there are any.

python -m benchmarks.throughput --data_dir data
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import click
import torch

from benchmarks.measuring import REPOSITORY, free_port, interleave, machine, ratio


def environment(world_size: int, rank: int, port: int) -> dict[str, str]:
    identity = {"WORLD_SIZE": world_size, "RANK": rank, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {**os.environ, **{name: str(value) for name, value in identity.items()}, "PYTHONPATH": str(REPOSITORY)}


def run_ranks(command: list[str], world_size: int) -> str:
    """Run a command as every rank of a world; return rank 0's stdout."""
    port = free_port()
    ranks = [
        subprocess.Popen(
            command,
            env=environment(world_size, rank, port),
            cwd=REPOSITORY,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for rank in range(world_size)
    ]
    outputs = [rank.communicate()[0] for rank in ranks]
    if any(rank.returncode for rank in ranks):
        raise click.ClickException(f"{' '.join(command)} failed")
    return outputs[0]


def tutorial(world_size: int, data_dir: str) -> float:
    output = run_ranks([sys.executable, "benchmarks/plain_tutorial.py", data_dir], world_size)
    return float(json.loads(output.splitlines()[-1])["samples_per_second"])


def ours(world_size: int, data_dir: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data_dir", data_dir, "--run_dir", f"{folder}/run", "--epochs", "1"]
        run_ranks([sys.executable, "run_multi_gpu_train.py", *options], world_size)
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["samples_per_second"])


def unpacked(data_dir: str, folder: str) -> str:
    """Copy MNIST unpacked into ``folder``, since torchvision reads only unpacked files; return ``folder``."""
    from torchvision.datasets.utils import extract_archive

    raw = Path(folder, "MNIST", "raw")
    raw.mkdir(parents=True)
    for archive in Path(data_dir, "MNIST", "raw").glob("*.gz"):
        extract_archive(str(archive), str(raw))
    return folder


@click.command()
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=5, show_default=True)
def main(data_dir: str, repetitions: int) -> None:
    click.echo(machine())
    with tempfile.TemporaryDirectory() as folder:
        measure(unpacked(data_dir, folder), repetitions)


def measure(data_dir: str, repetitions: int) -> None:
    rows = []
    for world_size in (1,) if torch.cuda.device_count() == 1 else (1, 2):
        click.echo(f"{world_size} rank(s), samples per second:")
        results = interleave(
            {"tutorial": lambda: tutorial(world_size, data_dir), "ours": lambda: ours(world_size, data_dir)},  # noqa: B023
            repetitions,
        )
        medians = " | ".join(f"{statistics.median(results[side]):,.0f}" for side in ("tutorial", "ours"))
        rows.append(f"| {world_size} | {medians} | {ratio(results['ours'], results['tutorial'])} |")
    click.echo("| ranks | tutorial, samples/s | ours, samples/s | ours / tutorial |\n|---|---|---|---|")
    click.echo("\n".join(rows))


if __name__ == "__main__":
    main()
