"""``launch`` and torchrun with the same scripts: seconds from Enter to the first step and to the end of a script that
takes 22 steps, and steps per second.

python -m benchmarks.any_script                       # 25 minutes
python -m benchmarks.any_script --only "2 ranks" --repetitions 3
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import click

from benchmarks.measuring import REPOSITORY, interleave, machine, ratio
from benchmarks.startup import environment, until_first_step, write_images_like_mnist

STEPS_WITHIN = 240.0
STEPS = "benchmarks/plain_steps.py"
TUTORIAL = "benchmarks/plain_tutorial.py"


def torchrun(ranks: int, script: Sequence[str]) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, *script]


def launch(ranks: int, script: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "ddp_manual", "launch", "--nproc", str(ranks), *script]


SIDES = {"launch": launch, "torchrun": torchrun}


def to_the_first_step(command: list[str]) -> float:
    return until_first_step([command], REPOSITORY, lambda printed: b"first step" in printed)


def to_the_end(command: list[str]) -> float:
    started = time.perf_counter()
    subprocess.run(command, env=environment(REPOSITORY), cwd=REPOSITORY, check=True, capture_output=True)
    return time.perf_counter() - started


def in_turn(seconds: Callable[[list[str]], float], row: Row, repetitions: int) -> dict[str, list[float]]:
    """Return each side's ``seconds`` of its command, which count from Enter; the sides are started in turn."""
    sides = {name: partial(seconds, start(row.ranks, row.script)) for name, start in SIDES.items()}
    return interleave(sides, repetitions)


def steps_per_second(row: Row, repetitions: int) -> dict[str, list[float]]:
    """Return each side's steps per second, by blocks of steps that the two running jobs take in turn.

    Raises:
        ClickException: one of the jobs has failed.
    """
    with tempfile.TemporaryDirectory() as folder:
        turns = Path(folder, "turns")
        turns.touch()
        blocks = [*row.script, "--blocks", str(repetitions), "--turns", str(turns)]
        jobs = {
            name: subprocess.Popen(
                start(row.ranks, [*blocks, "--me", str(me)]),
                env=environment(REPOSITORY),
                cwd=REPOSITORY,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
            )
            for me, (name, start) in enumerate(SIDES.items())
        }
        found = {}
        for name, job in jobs.items():
            output, _ = job.communicate(timeout=STEPS_WITHIN)
            found[name] = [float(figure) for figure in re.findall(r"steps per second: ([\d.]+)", output)]
            if job.returncode or len(found[name]) != repetitions:
                raise click.ClickException(f"{name} failed with exit code {job.returncode}:\n{output}")
    return found


@dataclass(frozen=True)
class Row:
    title: str
    measure: Callable[[Row, int], dict[str, list[float]]]
    ranks: int
    script: tuple[str, ...]
    repetitions: int


def rows(data_dir: str) -> list[Row]:
    plain, tutorial, few = (STEPS,), (TUTORIAL, data_dir), (STEPS, "--steps", "1")
    small = (STEPS, "--width", "64", "--layers", "2", "--steps", "100")
    usual = (STEPS, "--width", "1024", "--layers", "4", "--steps", "10")
    first_steps, whole_runs = partial(in_turn, to_the_first_step), partial(in_turn, to_the_end)
    return [
        Row("seconds to the first step, 8 ranks", first_steps, 8, plain, 3),
        Row("seconds to the first step, 8 ranks, with torchvision", first_steps, 8, tutorial, 3),
        Row("seconds to the first step, 2 ranks", first_steps, 2, plain, 5),
        Row("seconds to the first step, 2 ranks, with torchvision", first_steps, 2, tutorial, 5),
        Row("seconds until 22 steps are done and all ranks have ended, 4 ranks", whole_runs, 4, few, 5),
        Row("small steps per second, 1 rank", steps_per_second, 1, small, 20),
        Row("small steps per second, 2 ranks", steps_per_second, 2, small, 20),
        Row("usual steps per second, 2 ranks", steps_per_second, 2, usual, 20),
    ]


@click.command()
@click.option("--repetitions", type=int, help="Pairs of each row; by default 3 to 20.")
@click.option("--only", default="", help="Only the rows with this in their title.")
def main(repetitions: int | None, only: str) -> None:
    click.echo(machine())
    lines = ["| | launch | torchrun | launch / torchrun |", "|---|---|---|---|"]
    with tempfile.TemporaryDirectory() as folder:
        write_images_like_mnist(folder)
        for row in rows(folder):
            if only not in row.title:
                continue
            click.echo(f"{row.title}:")
            found = row.measure(row, repetitions or row.repetitions)
            medians = " | ".join(f"{statistics.median(found[name]):,.4g}" for name in SIDES)
            lines.append(f"| {row.title} | {medians} | {ratio(found['launch'], found['torchrun'], digits=3)} |")
            click.echo(lines[-1])
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
