"""What an option costs: samples per second of a training with and without it, one epoch of MNIST each, interleaved.

python -m benchmarks.options --data_dir data
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from pathlib import Path

import click

from benchmarks.measuring import interleave, machine, ratio
from benchmarks.throughput import run_ranks

# Number of ranks, and the option.
ROWS = ((1, "--no_ddp"), (2, "--track tensorboard,wandb,jsonl"), (2, "--flip"))


def train(world_size: int, option: str, data_dir: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data_dir", data_dir, "--run_dir", f"{folder}/run", "--epochs", "1", *option.split()]
        run_ranks([sys.executable, "run_multi_gpu_train.py", *options], world_size)
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["samples_per_second"])


@click.command()
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=7, show_default=True)
def main(data_dir: str, repetitions: int) -> None:
    click.echo(machine())
    rows = []
    for world_size, option in ROWS:
        click.echo(f"{option}, {world_size} rank(s), samples per second:")
        results = interleave(
            {side: lambda side=side: train(world_size, side, data_dir) for side in ("", option)},  # type: ignore[misc]  # noqa: B023
            repetitions,
        )
        medians = " | ".join(f"{statistics.median(results[side]):,.0f}" for side in ("", option))
        rows.append(f"| `{option}` | {world_size} | {medians} | {ratio(results[option], results[''])} |")
    click.echo("| option | ranks | without, samples/s | with, samples/s | with / without |\n|---|---|---|---|---|")
    click.echo("\n".join(rows))


if __name__ == "__main__":
    main()
