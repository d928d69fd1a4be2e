"""``--track``: what TensorBoard, Weights & Biases and ``track.jsonl`` hold of a run, read back by their own readers."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests import tracked
from tests.conftest import SHORT, RankProcess, Start, wait_until

# 600 steps for one rank.
STEPS = ("--epochs", 4, "--batch_size", 40, "--log_every", 5, "--checkpoint_steps", 50)
OFFLINE = {"WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}


def json_lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def numbers(said: str, pattern: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, said)] or [0]


def wait_until_all_have_something_to_keep(rank: RankProcess, run: Path) -> None:
    """Wait until each tracker has written something, and metrics have followed the last checkpoint."""
    rank.wait_for("wandb: offline")
    (file,) = tracked.wandb_files(run)
    deadline = time.monotonic() + 60
    looked_at = 0
    while True:
        if (size := file.stat().st_size) > looked_at and "train/loss" in tracked.wandb_curves(file):
            break
        looked_at = size
        assert rank.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    rank.wait_for("saved ")
    while numbers(rank.err, r"] step (\d+)/")[-1] < numbers(rank.err, r"saved \S*step-0*(\d+)")[-1] + 15:
        assert rank.process.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_was_killed_and_resumed_is_one_run_in_every_tracker(
    start: Start, small_data: Path, tmp_path: Path
) -> None:
    """Resumed by launch, which does what a person would do, in a process that has torch already."""
    run = tmp_path / "run"
    launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 1, "--max_restarts", 1, "--run_dir", run, "--"]
    training = [*SHORT, *STEPS, "--data_dir", small_data, "--track", "tensorboard,wandb,jsonl"]
    rank = start(*launch, *training, **OFFLINE)
    wait_until_all_have_something_to_keep(rank, run)
    (worker,) = psutil.Process(rank.worker).children()
    worker.kill()
    assert rank.wait() == 0
    _, restarted, resumed = rank.err.partition("\nrestart 1 of 1 after error[master-lost]: rank 0 (")
    assert restarted and "the run goes on without it" not in resumed
    assert f"as WANDB_MODE or a settings file asks); to upload it: wandb sync {run}/wandb" in resumed

    metrics = json_lines(run / "metrics.jsonl")
    losses = {line["step"]: line["loss"] for line in metrics}
    assert max(losses) == 600 and len(losses) == 120

    board = tracked.tensorboard(run / "tensorboard")
    assert {scalar.step: scalar.value for scalar in board.Scalars("train/loss")} == pytest.approx(losses)
    assert board.Images("samples")[0].width > 500
    assert board.Images("predictions/images") and "predictions/text_summary" in board.Tags()["tensors"]
    assert "hyperparameters/text_summary" in board.Tags()["tensors"]

    lines = json_lines(run / "track.jsonl")
    assert {line["step"]: line["train/loss"] for line in lines if "train/loss" in line} == losses
    assert [line["event"] for line in lines if line["event"] != "scalars"] == [
        *("started", "image", "started", "image", "table", "result", "closed")
    ]
    assert lines[-1]["complete"] is True

    files = tracked.wandb_files(run)
    assert len(files) == 2 and files[0].name == files[1].name
    assert json.loads((run / "wandb.json").read_text())["id"] == tracked.wandb_run(files[1])["run_id"]
    curves = tracked.wandb_curves(*files)
    # Metrics that wandb had not received before the kill are lost.
    (gone_on,) = numbers(resumed, r"going on after step (\d+)")
    told = list(tracked.wandb_curves(files[0])["train/loss"])
    expected = {step: loss for step, loss in losses.items() if step <= told[-1] or step > gone_on}
    assert curves["train/loss"] == expected and len(expected) > 60
    assert list(curves["test/accuracy"])[-1] == 600
    wait_until(lambda: not tracked.wandb_processes(run), 10)  # one of them looks for its parent every few seconds
