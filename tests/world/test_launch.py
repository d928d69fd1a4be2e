"""The small orchestrator, on real processes."""

from __future__ import annotations

import json
import shlex
import signal
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGER, SHORT, RankProcess, Start


@pytest.fixture
def launch(start: Start, small_data: Path, tmp_path: Path) -> Start:
    """Launch ranks on synthetic digits into ``tmp_path / "run"``."""

    def launch(nproc: int, *options: object, **env: str) -> RankProcess:
        command = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", nproc, "--run_dir", tmp_path / "run", "--"]
        return start(*command, *SHORT, "--data_dir", small_data, *options, **env)

    return launch


def ranks_of(launcher: RankProcess) -> list[psutil.Process]:
    return [
        child for child in psutil.Process(launcher.process.pid).children(recursive=True) if "train" in child.cmdline()
    ]


def gone(processes: list[psutil.Process], timeout: float) -> bool:
    _, alive = psutil.wait_procs(processes, timeout)
    return not alive


def test_all_ranks_are_started_tagged_and_logged(launch: Start, tmp_path: Path) -> None:
    launcher = launch(2)
    assert launcher.wait() == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    for rank in (0, 1):
        assert f"[rank {rank}] process group ready" in launcher.err
        assert "process group ready" in (tmp_path / "run" / f"log-rank{rank}.txt").read_text()
        assert f"[rank {rank}] [rank {rank}]" not in launcher.err
    assert launcher.out.startswith("[rank 0] mlp on synthetic: ")


def test_the_exit_code_is_that_of_the_rank_that_failed_first(launch: Start) -> None:
    launcher = launch(2, "--batch_size", 60_000)
    assert launcher.wait() == 2
    assert "error[bad-option]" in launcher.err


def test_a_killed_rank_ends_the_others_and_gives_its_exit_code(launch: Start) -> None:
    launcher = launch(3, *LONGER, 200)
    launcher.wait_for("[rank 2] step 100/")
    ranks = ranks_of(launcher)
    assert len(ranks) == 3
    ranks[1].kill()
    assert launcher.wait(20) == 128 + signal.SIGKILL
    assert "rank 1 failed first, with exit code 137" in launcher.err
    assert gone(ranks, 1)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", ["starting", "training"])
def test_ctrl_c_ends_every_rank_within_5_seconds(launch: Start, number: int, moment: str) -> None:
    launcher = launch(2, *LONGER, 200)
    if moment == "training":
        launcher.wait_for("[rank 1] step 100/")
    else:
        while len(ranks_of(launcher)) < 2:
            time.sleep(0.01)
    ranks = ranks_of(launcher)
    launcher.process.send_signal(number)
    assert launcher.wait(5) == 128 + number
    assert gone(ranks, 0.5)


@pytest.mark.parametrize("presses", [1, 2])
def test_a_rank_that_does_not_end_at_ctrl_c_is_killed(launch: Start, presses: int) -> None:
    launcher = launch(2, *LONGER, 200)
    launcher.wait_for("[rank 1] step 100/")
    ranks = ranks_of(launcher)
    for rank in ranks:
        rank.suspend()
    for _ in range(presses):
        launcher.process.send_signal(signal.SIGINT)
        time.sleep(0.5)  # the moment between two presses
    assert launcher.wait(6) == 130
    assert gone(ranks, 0.5)


def test_a_reader_that_goes_away_does_not_stop_the_ranks(start: Start, small_data: Path, tmp_path: Path) -> None:
    options = shlex.join(map(str, [*SHORT, "--data_dir", small_data, "--log_every", 1]))
    command = f"{sys.executable} -m ddp_manual launch --nproc 2 --run_dir {tmp_path / 'run'} -- {options}"
    assert start("bash", "-c", f"{command} 2>&1 | head -n 3").wait() == 0
    assert (tmp_path / "run" / "summary.json").exists()


def test_ranks_do_not_outlive_an_orchestrator_that_is_killed(launch: Start) -> None:
    launcher = launch(2, *LONGER, 200)
    launcher.wait_for("[rank 1] step 100/")
    ranks = ranks_of(launcher)
    launcher.process.send_signal(signal.SIGKILL)
    assert gone(ranks, 5)


def test_variables_of_another_launcher_do_not_reach_the_ranks(launch: Start) -> None:
    launcher = launch(2, RANK="7", WORLD_SIZE="9", LOCAL_RANK="5", TORCHELASTIC_USE_AGENT_STORE="True")
    assert launcher.wait() == 0


def test_two_launches_at_once_do_not_meet(launch: Start, start: Start, small_data: Path, tmp_path: Path) -> None:
    other = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, "--run_dir", tmp_path / "other", "--"]
    other += [*SHORT, "--data_dir", small_data]
    assert [process.wait() for process in (launch(2), start(*other))] == [0, 0]
    ids = {json.loads((tmp_path / name / "summary.json").read_text())["run_id"] for name in ("run", "other")}
    assert len(ids) == 2
