"""What an option costs: samples per second of a training with and without it, one epoch of MNIST each, interleaved.

python -m benchmarks.options --data_dir data --only "--on_loss wait" --images cifar10

With --images, class folders of images, the option is tried with the CIFAR network on these too.
"""

from __future__ import annotations

import itertools
import json
import statistics
import sys
import tempfile
from functools import partial
from pathlib import Path

import click

from benchmarks.measuring import interleave, machine, ratio
from benchmarks.throughput import run_ranks

# Number of ranks, and the option.
ROWS = ((1, "--no_ddp"), (2, "--track tensorboard,wandb,jsonl"), (2, "--flip"), (2, "--on_loss wait"))


def train(world_size: int, option: str, training: str) -> float:
    with tempfile.TemporaryDirectory() as folder:
        options = ["--run_dir", f"{folder}/run", "--epochs", "1", *training.split(), *option.split()]
        run_ranks([sys.executable, "run_multi_gpu_train.py", *options], world_size)
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["samples_per_second"])


@click.command()
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=7, show_default=True)
@click.option("--only", help="One of the options.")
@click.option("--images", type=click.Path(exists=True, resolve_path=True))
def main(data_dir: str, repetitions: int, only: str | None, images: str | None) -> None:
    click.echo(machine())
    rows = []
    trainings = {"convnet": f"--data_dir {data_dir}"}
    if images is not None:
        trainings["cifar-cnn"] = f"--model cifar-cnn --dataset folder:{images} --stall_timeout 900"
    for (world_size, option), (network, training) in itertools.product(ROWS, trainings.items()):
        if only not in (None, option):
            continue
        click.echo(f"{option}, {network}, {world_size} rank(s), samples per second:")
        sides = {side: partial(train, world_size, side, training) for side in ("", option)}
        results = interleave(sides, repetitions)
        medians = " | ".join(f"{statistics.median(results[side]):,.0f}" for side in ("", option))
        rows.append(f"| `{option}` | {network} | {world_size} | {medians} | {ratio(results[option], results[''])} |")
    columns = ("option", "network", "ranks", "without, samples/s", "with, samples/s", "with / without")
    click.echo(f"| {' | '.join(columns)} |\n{'|---' * len(columns)}|")
    click.echo("\n".join(rows))


if __name__ == "__main__":
    main()
