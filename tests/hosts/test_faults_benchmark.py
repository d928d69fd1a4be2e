"""That the benchmark of faults runs: of ours, since torchrun and accelerate take longer."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from tests.conftest import Start


@pytest.mark.usefixtures("_namespaces")
def test_the_table_of_faults_has_what_each_rank_said_and_when(start: Start, tmp_path: Path) -> None:
    file = tmp_path / "faults.json"
    provoked = ["--only", 7, "--by", "ddp-manual run", "--json", file]
    benchmark = start(sys.executable, "-m", "benchmarks.faults", *provoked)
    assert benchmark.wait() == 0, benchmark.err
    ((title, said),) = json.loads(file.read_text()).items()
    assert [one["exit code"] for one in said["ddp-manual run"]] == [14, 14, 1]
    (row,) = [line for line in benchmark.out.splitlines() if line.startswith(f"| {title} |")]
    assert "rank 2" in row and "ValueError: the labels of batch 20 are missing" in row
