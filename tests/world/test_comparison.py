"""``ddp-manual compare`` on real runs: one that is complete, and one while it trains and after it was stopped."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path

import pytest

from ddp_manual.run_folder import RunPaths
from ddp_manual.tools import compare
from tests.conftest import LONGER, Start


def test_a_run_is_compared_while_it_trains_and_after_it_was_stopped(start_rank: Start, tmp_path: Path) -> None:
    finished, other = tmp_path / "finished", tmp_path / "other"
    assert start_rank(0, 1, "--log_every", 20, "--run_dir", finished).wait() == 0
    ranks = [start_rank(rank, 2, *LONGER, 1000, "--log_every", 20, "--run_dir", other) for rank in range(2)]
    ranks[0].wait_for("step 40/")
    while not RunPaths(other).metrics.exists():
        time.sleep(0.02)
    before = compare.compare([finished, other]).as_dict()["runs"]
    lines = RunPaths(other).metrics.read_text().count("\n")
    while RunPaths(other).metrics.read_text().count("\n") <= lines:  # it has gone on since
        time.sleep(0.02)
    ranks[1].process.send_signal(signal.SIGINT)
    assert [rank.wait(30) for rank in ranks] == [130, 130]
    compared = compare.compare([finished, other])
    after = compared.as_dict()["runs"]
    assert [run["state"] for run in before + after] == ["finished", "running", "finished", "stopped"]
    summary = json.loads(RunPaths(finished).summary.read_bytes())
    assert after[0]["samples_per_second"] == summary["samples_per_second"]
    assert after[0]["train_seconds"] == pytest.approx(summary["train_seconds"])
    assert (after[0]["world_size"], after[1]["world_size"]) == (1, 2)
    assert (after[0]["global_batch_size"], after[1]["global_batch_size"]) == (100, 20)
    assert after[0]["efficiency"] == 1 and after[1]["efficiency"] > 0
    assert after[1]["train_seconds"] > before[1]["train_seconds"] > 0
    assert set(compared.differing_options()) == {"batch_size"}
    assert [note for run in after for note in run["notes"]] == []
