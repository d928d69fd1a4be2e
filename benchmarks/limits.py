"""What grows with the number of ranks at rank 0's agent: processor time, bytes, memory and open files.

python -m benchmarks.limits

The coordinator is the real one, in a process that also has the connection of rank 0's own agent and does nothing else.
A second process simulates all other ranks, 8 per host: each is a TCP connection that speaks the real messages. Only the
processor time of the coordinator's process counts, so other processes on the machine hardly change it. For more ranks
than were measured the figures are computed: a figure of one rank or one message stays the same; any other follows the
straight line through the two largest sizes or, if it grows faster than in proportion, the power of N through
them.
"""

from __future__ import annotations

import json
import math
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import click

from benchmarks.coordinator_process import Tell, hosted, talking_to
from benchmarks.measuring import machine
from benchmarks.simulated_ranks import Order, allow_many_connections, run_info

COMPUTED_FOR = (16_384, 100_000)
# A figure that grows with a higher power of N than this is computed by that power, not by a straight line.
IN_PROPORTION = 1.25
# The units of figures of one rank or one message.
OF_ONE = ("bytes", "us", "KB")

Figures = dict[str, float]
"""The name of a figure -> its value."""


class Stages:
    """A run whose ranks go from stage to stage: see ``benchmarks.crowd.Crowd``."""

    def __init__(self, coordinator: Tell, crowd: Tell) -> None:
        self._coordinator, self._crowd = coordinator, crowd
        self.cpu = self.seconds = 0.0
        self.counts: Mapping[str, Any] = {}

    def __call__(self, stage: str) -> None:
        """Let the ranks go through a stage; then ``cpu`` has the CPU seconds of rank 0's process."""
        before = self.now()["cpu"]
        self.counts = json.loads(self._crowd(stage))
        self.seconds = self.counts["seconds"]
        self.cpu = self.now()["cpu"] - before

    def tell_rank_0(self, what: str) -> None:
        """Have rank 0's own agent ``join`` or ``finish``."""
        self._coordinator(what)

    def now(self) -> dict[str, float]:
        """Return CPU seconds, bytes of memory and open files of rank 0's process."""
        return dict(json.loads(self._coordinator("figures")))

    def messages(self, way: str, kind: str) -> int:
        return int(self.counts[way]["messages"].get(kind, 0))

    def bytes(self, way: str, *kinds: str) -> int:
        found = self.counts[way]["bytes"]
        return sum(found.get(kind, 0) for kind in kinds or found)


@contextmanager
def run_of(ranks: int) -> Iterator[Stages]:
    nonce = secrets.token_hex(16)
    with hosted(ranks, nonce, token=None) as (port, coordinator), talking_to("crowd") as crowd:
        crowd(json.dumps(asdict(Order(ranks, port, "limits", nonce=nonce))))
        yield Stages(coordinator, crowd)


def measure(ranks: int, *, stacks: bool, runs: Sequence[str] = ("differ", "fail", "finish")) -> Figures:
    """Measure one number of ranks.

    Args:
        stacks: whether to ask for the stacks of all ranks too.
        runs: how each run ends; the first run, which ends with "differ", is measured in all its stages.
    """
    figures: Figures = {}
    with run_of(ranks) as stage:
        empty = stage.now()
        stage.tell_rank_0("join")
        stage("half")
        joining = stage.cpu
        figures["hello and ready of a rank, bytes"] = stage.bytes("sent") / (ranks // 2)
        news = max(1, stage.messages("received", "news"))
        figures["news while every second rank is missing, bytes"] = stage.bytes("received", "news") / news
        stage("wait")
        figures["a heartbeat of a rank that waits: CPU, us"] = (
            1e6 * stage.cpu / max(1, stage.messages("sent", "heartbeat"))
        )
        stage("rest")
        joining += stage.cpu
        stage("begin")
        figures["all ranks join: CPU, s"] = joining + stage.cpu
        figures["from the last hello to all places: CPU, s"] = stage.cpu
        full = stage.now()
        figures["open files"] = full["files"]
        figures["memory, MB"] = full["memory"] / 1e6
        figures["memory for each rank, KB"] = (full["memory"] - empty["memory"]) / 1e3 / ranks
        stage("work")
        stage("work")
        beats = stage.messages("sent", "heartbeat")
        figures["a heartbeat of a rank that trains, bytes"] = stage.bytes("sent", "heartbeat") / max(1, beats)
        of_beat = stage.cpu / max(1, beats)
        figures["a heartbeat of a rank that trains, and its answer: CPU, us"] = 1e6 * of_beat
        stage("look")
        figures["status, of each rank, bytes"] = stage.bytes("received", "seen") / ranks
        if stacks:
            stage("stacks")
            figures["status --stacks, of each rank, bytes"] = stage.bytes("received", "seen") / ranks
        stage("differ")
        figures["records of collectives of each rank, bytes"] = stage.bytes("sent", "records_reply") / ranks
        beats = stage.messages("sent", "heartbeat")
        figures["collectives differ, until all ranks know: CPU, s"] = max(0.0, stage.cpu - of_beat * beats)
    for end in runs[1:]:
        with run_of(ranks) as stage:
            stage.tell_rank_0("join")
            for before in ("half", "rest", "begin", "work"):
                stage(before)
            if end == "finish":
                stage.tell_rank_0("finish")
            stage(end)
            what = "a rank fails, until all ranks know" if end == "fail" else "all ranks finish and leave"
            figures[f"{what}: CPU, s"] = stage.cpu
    return figures


def computed(sizes: Sequence[int], values: Sequence[float], ranks: int) -> float:
    """Return the value for more ranks than were measured."""
    (fewer, more), (low, high) = sizes[-2:], values[-2:]
    power = growth(sizes, values)
    if power > IN_PROPORTION:
        return high * float((ranks / more) ** power)
    return max(0.0, high + (high - low) / (more - fewer) * (ranks - more))


def growth(sizes: Sequence[int], values: Sequence[float]) -> float:
    """Return the power of N in which a value grows, between the two largest sizes."""
    if len(sizes) < 2 or min(values[-2:]) <= 0:
        return 0.0
    return math.log(values[-1] / values[-2]) / math.log(sizes[-1] / sizes[-2])


def shown(value: float) -> str:
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def table(found: Mapping[int, Figures]) -> Iterator[str]:
    """Return the rows of the table: what was measured, and what is computed from it for more ranks."""
    sizes = sorted(found)
    more = COMPUTED_FOR if len(sizes) > 1 else ()
    columns = [*(f"{size:,}" for size in sizes), *(f"{size:,} (computed)" for size in more)]
    yield f"| ranks | {' | '.join(columns)} | power of N |\n|{'---|' * (len(columns) + 2)}"
    for name in found[sizes[-1]]:
        values = [found[size][name] for size in sizes]
        # A figure of one rank or one message is the same for any number of them, up to noise.
        one = name.endswith(OF_ONE)
        cells = [*values, *(values[-1] if one else computed(sizes, values, size) for size in more)]
        yield f"| {name} | {' | '.join(map(shown, cells))} | {growth(sizes, values):.2f} |"
    beat = {size: found.get(size, found[sizes[-1]]) for size in (*sizes, *more)}
    rates = {size: size / run_info(size).heartbeat_period for size in beat}
    for name, of_beat in (("CPU, % of a core", "and its answer: CPU, us"), ("KB per second", "trains, bytes")):
        scale = 1e-4 if "CPU" in name else 1e-3
        cells = [
            scale * rates[size] * next(value for what, value in figures.items() if what.endswith(of_beat))
            for size, figures in beat.items()
        ]
        yield f"| all ranks train: {name} | {' | '.join(map(shown, cells))} | |"
    yield f"| heartbeats that rank 0 reads per second, by rule | {' | '.join(map(shown, rates.values()))} | |"
    runs = [run_info(size) for size in (*sizes, *more)]
    for name, cells in (
        ("between heartbeats", [run.heartbeat_period for run in runs]),
        ("until a silent rank ends the run", [run.silent_after for run in runs]),
    ):
        yield f"| seconds {name}, by rule | {' | '.join(map(shown, cells))} | |"


@click.command()
@click.option("--ranks", "sizes", multiple=True, type=int, default=(64, 256, 1024, 4096), show_default=True)
@click.option("--stacks/--no-stacks", default=True, show_default=True, help="Also ask for the stacks of all ranks.")
def main(sizes: tuple[int, ...], stacks: bool) -> None:
    allow_many_connections()
    click.echo(machine())
    found: dict[int, Figures] = {}
    for size in sizes:
        found[size] = measure(size, stacks=stacks)
        click.echo(f"  {size:,}: " + "; ".join(f"{name} {shown(value)}" for name, value in found[size].items()))
    for row in table(found):
        click.echo(row)


if __name__ == "__main__":
    main()
