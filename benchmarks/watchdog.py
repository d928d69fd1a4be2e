"""What watching over one another costs: samples per second of two ranks with the watchdog and without it.

python -m benchmarks.watchdog --data_dir ../shared/data
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections import defaultdict
from pathlib import Path

import click

from benchmarks.measuring import interleave, machine, ratio
from benchmarks.throughput import run_ranks

RANKS = 2


def train(side: str, data_dir: str, epochs: int, costs: dict[str, list[float]]) -> float:
    """Samples per second; what the threads took, in percent of a core, is added to ``costs``."""
    with tempfile.TemporaryDirectory() as folder:
        options = ["--data_dir", data_dir, "--run_dir", f"{folder}/run", "--epochs", str(epochs)]
        run_ranks([sys.executable, "benchmarks/watched.py", side, folder, *options], RANKS)
        for rank in range(RANKS):
            cost = json.loads(Path(folder, f"cost-rank{rank}.json").read_text())
            costs[f"watchdog of rank {rank}"].append(100 * cost["watchdog"] / cost["seconds"])
            if rank == 0:
                costs["store of rank 0"].append(100 * cost["store"] / cost["seconds"])
        return float(json.loads(Path(folder, "run", "summary.json").read_text())["samples_per_second"])


@click.command()
@click.option("--data_dir", required=True, type=click.Path(exists=True, resolve_path=True))
@click.option("--repetitions", default=10, show_default=True)
@click.option("--epochs", default=1, show_default=True)
def main(data_dir: str, repetitions: int, epochs: int) -> None:
    click.echo(f"{machine()}; {RANKS} ranks, samples per second:")
    costs: dict[str, dict[str, list[float]]] = {"on": defaultdict(list), "off": defaultdict(list)}
    results = interleave(
        {side: lambda side=side: train(side, data_dir, epochs, costs[side]) for side in costs},  # type: ignore[misc]
        repetitions,
    )
    medians = " | ".join(f"{statistics.median(results[side]):,.0f}" for side in ("off", "on"))
    click.echo("| ranks | without, samples/s | with, samples/s | with / without |\n|---|---|---|---|")
    click.echo(f"| {RANKS} | {medians} | {ratio(results['on'], results['off'], digits=3)} |\n")
    click.echo("| thread | % of a core with | % of a core without |\n|---|---|---|")
    for thread in costs["on"]:
        with_it, without = (spread(costs[side][thread]) for side in ("on", "off"))
        click.echo(f"| {thread} | {with_it} | {without} |")


def spread(values: list[float]) -> str:
    return f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})"


if __name__ == "__main__":
    main()
