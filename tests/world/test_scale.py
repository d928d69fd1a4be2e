"""The roll call of more ranks than a machine has room for: the real rank 0, and light clients of its store."""

from __future__ import annotations

import sys

import pytest

from tests.conftest import Start


@pytest.mark.alone
def test_64_ranks_that_come_at_once_cost_the_store_a_request_and_one_answer_each(start: Start) -> None:
    sizes = ["--ranks", 64, "--repetitions", 1, "--trickle", 64]
    benchmark = start(sys.executable, "-m", "benchmarks.rollcall", *sizes)
    assert benchmark.wait() == 0
    row = next(line for line in benchmark.out.splitlines() if line.startswith("| 64 |"))
    operations, with_a_token = (float(cell) for cell in row.strip("| ").split("|")[-2:])
    # Its request, taken off the queue; the verdict, written and read. With a token, the hello.
    assert operations == pytest.approx(4, abs=0.5)
    assert with_a_token == pytest.approx(5, abs=0.5)
    assert "64 ranks over 5 s: " in benchmark.out
