"""Long trials: the tests run a few rounds of each, ``./scripts/soak`` all of them."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import SHORT, Start

HEALTHY_STARTS = int(os.environ.get("DDP_MANUAL_SOAK_STARTS", "1"))


@pytest.fixture
def busy_cores(start: Start) -> None:
    """Keep every core busy with something else."""
    for _ in range(len(os.sched_getaffinity(0))):
        start(sys.executable, "-c", "while True: pass")


@pytest.mark.soak(only=True)
@pytest.mark.alone
@pytest.mark.timeout(3600)
@pytest.mark.usefixtures("busy_cores")
def test_healthy_starts_under_load_report_no_fault(start: Start, port: int, small_data: Path, tmp_path: Path) -> None:
    order = random.Random(0)
    for number in range(HEALTHY_STARTS):
        world_size = order.choice((2, 3))
        ranks = list(range(world_size))
        order.shuffle(ranks)
        training = [*SHORT, "--data_dir", small_data]
        meeting = [
            "--world_size",
            world_size,
            "--master_port",
            port + number % 50,
            "--run_dir",
            tmp_path / f"run{number}",
        ]
        token = {"DDP_MANUAL_TOKEN": "of the soak"} if number % 2 else {}
        processes = []
        for rank in ranks:
            command = [sys.executable, "run_multi_gpu_train.py", *meeting, "--rank", rank, *training]
            processes.append(start(*command, **token))
            time.sleep(order.random())  # people do not type at the same moment
        assert [process.wait(120) for process in processes] == [0] * world_size
        said = "".join(process.err + process.out for process in processes)
        assert "error[" not in said
        assert "was refused" not in said
