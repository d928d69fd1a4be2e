"""Seconds from Enter to the first training step: by hand, with ``launch``, and with torchrun and the plain tutorial.

python -m benchmarks.startup
python -m benchmarks.startup --before ../before     # another checkout, for comparison

The first step has ended when rank 0 writes its metrics, or the tutorial prints "first step".
"""

from __future__ import annotations

import os
import signal
import statistics
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import count
from pathlib import Path

import click

from benchmarks.measuring import REPOSITORY, free_port, interleave, machine, ratio

WITHIN = 300.0
END_WITHIN = 20.0
LOOK_EVERY = 0.01
TORCHRUN = "torchrun, plain tutorial, 2 ranks"


def environment(tree: Path) -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(tree), "OMP_NUM_THREADS": "1"}


def until_first_step(commands: Sequence[Sequence[str]], tree: Path, stepped: Callable[[bytes], bool]) -> float:
    """Start the commands, wait until ``stepped(output)`` is true, and end them; return the seconds."""
    env = environment(tree)
    with tempfile.TemporaryFile() as output:
        started = time.perf_counter()
        processes = [
            subprocess.Popen(command, env=env, cwd=tree, stdout=output, stderr=output, start_new_session=True)
            for command in commands
        ]
        try:
            while not stepped(_content(output.fileno())):
                over = time.perf_counter() - started > WITHIN
                if over or any(process.poll() is not None for process in processes):
                    raise click.ClickException(f"{commands} made no step:\n{_content(output.fileno()).decode()}")
                time.sleep(LOOK_EVERY)
            return time.perf_counter() - started
        finally:
            _end(processes)


def _content(descriptor: int) -> bytes:
    return os.pread(descriptor, 1 << 20, 0)


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    for process in processes:
        process.send_signal(signal.SIGTERM)
    for process in processes:
        try:
            process.wait(END_WITHIN)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


class Training:
    """The training of one checkout; each run has a new folder."""

    def __init__(self, tree: Path, data_dir: str, folder: str) -> None:
        self._tree = tree
        self._options = [
            *("--dataset", "synthetic", "--data_dir", data_dir, "--model", "mlp"),
            *("--epochs", "1000", "--log_every", "1"),
        ]
        self._runs = (Path(folder, f"{tree.name}-{number}") for number in count())

    def by_hand(self, ranks: int) -> float:
        run_dir, port = next(self._runs), str(free_port())
        identity = ["--world_size", str(ranks), "--master_port", port, "--run_dir", str(run_dir)]
        start = [sys.executable, "run_multi_gpu_train.py", *identity, *self._options]
        return self._until_first_step([[*start, "--rank", str(rank)] for rank in range(ranks)], run_dir)

    def launch(self, ranks: int) -> float:
        run_dir = next(self._runs)
        start = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", str(ranks), "--run_dir", str(run_dir)]
        return self._until_first_step([[*start, "--", *self._options]], run_dir)

    def _until_first_step(self, commands: Sequence[Sequence[str]], run_dir: Path) -> float:
        metrics = run_dir / "metrics.jsonl"
        return until_first_step(commands, self._tree, lambda _: metrics.exists() and metrics.stat().st_size > 0)


def torchrun(data_dir: str) -> float:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command = [*start, "benchmarks/plain_tutorial.py", data_dir]
    return until_first_step([command], REPOSITORY, lambda printed: b"first step" in printed)


def write_images_like_mnist(data_dir: str) -> None:
    """Write as many bytes as MNIST has, in its format; the content of the images does not change the times."""
    raw = Path(data_dir, "MNIST", "raw")
    raw.mkdir(parents=True)
    for name, images in (("train", 60_000), ("t10k", 10_000)):
        content = struct.pack(">4i", 0x803, images, 28, 28) + bytes(images * 28 * 28)
        (raw / f"{name}-images-idx3-ubyte").write_bytes(content)
        (raw / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 0x801, images) + bytes(images))


@click.command()
@click.option("--repetitions", default=5, show_default=True)
@click.option("--before", type=click.Path(exists=True, file_okay=False), help="Another checkout, to compare with.")
def main(repetitions: int, before: str | None) -> None:
    click.echo(machine())
    trees = {"now": REPOSITORY, **({"before": Path(before).resolve()} if before else {})}
    ways = {
        "by hand, 2 ranks": lambda training: training.by_hand(2),
        "launch, 2 ranks": lambda training: training.launch(2),
        "launch, 8 ranks": lambda training: training.launch(8),
    }
    with tempfile.TemporaryDirectory() as folder:
        write_images_like_mnist(folder)
        trainings = {name: Training(tree, f"{folder}/data", folder) for name, tree in trees.items()}
        for training in trainings.values():
            training.by_hand(1)  # draws the data, and compiles changed modules
        sides = {
            f"{way}, {name}": partial(measure, training)
            for way, measure in ways.items()
            for name, training in trainings.items()
        }
        results = interleave({**sides, TORCHRUN: lambda: torchrun(folder)}, repetitions)
    click.echo("| | seconds to the first step | before, s | now / before | now / torchrun |\n|---|---|---|---|---|")
    for way in ways:
        now, earlier = results[f"{way}, now"], results.get(f"{way}, before")
        compared = f"{spread(earlier)} | {ratio(now, earlier)}" if earlier else "| "
        click.echo(f"| {way} | {spread(now)} | {compared} | {ratio(now, results[TORCHRUN])} |")
    click.echo(f"| {TORCHRUN} | {spread(results[TORCHRUN])} | | | |")


def spread(seconds: Sequence[float]) -> str:
    return f"{statistics.median(seconds):.2f} ({min(seconds):.2f} to {max(seconds):.2f})"


if __name__ == "__main__":
    main()
