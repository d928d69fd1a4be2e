"""More ranks than a machine has room for: the real coordinator on real sockets, and simulated ranks."""

from __future__ import annotations

import sys

from benchmarks.limits import COMPUTED_FOR, measure, table
from tests.conftest import Start


def test_no_message_grows_with_the_ranks() -> None:
    """Short form of benchmarks.limits. News of 1,024 ranks had 4.8 KB and their replies about collectives 8 KB."""
    few = measure(64, stacks=False)
    many = measure(256, stacks=False, runs=("differ",))
    # Their number grows with the time that has passed, to 256 for each rank, of 16 bytes.
    records = "records of collectives of each rank, bytes"
    assert many[records] < 5000
    for name in (name for name in many if name.endswith("bytes") and name != records):
        assert many[name] < 1.3 * few[name] + 50, name
    assert many["open files"] < 256 + 20
    assert many["memory for each rank, KB"] < 30
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in table({64: few, 256: many})}
    assert set(many) < set(rows)
    computed = [many["open files"] + more - 256 for more in COMPUTED_FOR]
    assert [cell.strip() for cell in rows["open files"][2:4]] == [f"{files:,.0f}" for files in computed]


def test_64_ranks_that_come_at_once_meet_also_with_a_token(start: Start) -> None:
    benchmark = start(sys.executable, "-m", "benchmarks.rollcall", "--ranks", 64, "--repetitions", 1)
    assert benchmark.wait() == 0
    (row,) = [line for line in benchmark.out.splitlines() if line.startswith("| 64 |")]
    assert len(row.strip("| ").split("|")) == 5
