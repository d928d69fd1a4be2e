"""More ranks than a machine has room for: the real coordinator, and simulated ranks; and that the benchmarks run."""

from __future__ import annotations

import secrets
import sys
from pathlib import Path

from benchmarks.coordinator_process import hosted, simulated_ranks
from benchmarks.simulated_ranks import Order
from tests.conftest import Start


def cpu_seconds_of_a_roll_call(ranks: int) -> float:
    """Return the CPU seconds of the coordinator until all ranks have their place; a busy machine hardly adds any."""
    nonce = secrets.token_hex(16)
    with (
        hosted(ranks, nonce, token=None) as (port, cpu_seconds),
        simulated_ranks(Order(ranks, port, "roll call", nonce=nonce)) as ranks_do,
    ):
        before = float(cpu_seconds("now"))
        ranks_do("go")
        return float(cpu_seconds("now")) - before


def test_four_times_as_many_ranks_take_the_coordinator_about_four_times_as_long() -> None:
    """A coordinator that looked at all ranks for each rank took 19 times as long."""
    few, many = (min(cpu_seconds_of_a_roll_call(ranks) for _ in range(3)) for ranks in (256, 1024))
    assert many < 8 * few


def test_64_ranks_that_come_at_once_meet_also_with_a_token(start: Start) -> None:
    benchmark = start(sys.executable, "-m", "benchmarks.rollcall", "--ranks", 64, "--repetitions", 1)
    assert benchmark.wait() == 0
    (row,) = [line for line in benchmark.out.splitlines() if line.startswith("| 64 |")]
    assert len(row.strip("| ").split("|")) == 5


def test_the_watching_benchmark_measures_coordinator_agents_and_reporters(start: Start, digits: Path) -> None:
    sizes = ["--ranks", 64, "--repetitions", 1, "--seconds", 1, "--data_dir", digits]
    benchmark = start(sys.executable, "-m", "benchmarks.watching", *sizes)
    assert benchmark.wait() == 0
    rows = [line.split("|")[1].strip() for line in benchmark.out.splitlines() if line.startswith("| ")]
    assert rows == [
        "",
        "coordinator of 64 ranks",
        *(f"{part} of rank {rank}" for rank in (0, 1) for part in ("agent", "reporter")),
    ]
