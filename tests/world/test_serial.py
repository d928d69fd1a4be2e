"""``--no_ddp``: the plain loop of one process, with all that a run has besides its ranks."""

from __future__ import annotations

import json
import re
import signal
import sys
from pathlib import Path

import pytest

from ddp_manual import TrainConfig, WorldSpec
from ddp_manual.errors import BadOption
from tests.conftest import RankProcess, Start

SERIAL = ("--world_size", 1, "--no_ddp")


def test_no_ddp_needs_no_process_group_and_learns_the_same_parameters_bit_for_bit(
    start: Start, few_images: Path, tmp_path: Path, port: int
) -> None:
    """With batch statistics, and random numbers in every step."""

    def train(name: str, *options: object) -> RankProcess:
        command = [sys.executable, "-m", "tests.world.watched_rank", "--run_dir", tmp_path / name, "--batch_size", 20]
        return start(*command, "--model", "cifar-cnn", "--dataset", f"folder:{few_images}", "--epochs", 3, *options)

    serial, ddp = train("serial", *SERIAL, "--master_port", port), train("ddp")
    assert [serial.wait(), ddp.wait()] == [0, 0], serial.err
    assert " False DistributedDataParallel" not in serial.err and re.search(r"\] False \w+$", serial.err, re.MULTILINE)
    assert " True DistributedDataParallel" in ddp.err
    assert (tmp_path / "serial" / "model.pt").read_bytes() == (tmp_path / "ddp" / "model.pt").read_bytes()
    summary = json.loads((tmp_path / "serial" / "summary.json").read_text())
    assert (summary["world_size"], summary["backend"], summary["roster"][0]["rank"]) == (1, "none", 0)


def test_a_signal_stops_a_run_without_ddp_and_it_resumes_to_the_same_parameters(
    start_rank: Start, few_images: Path, tmp_path: Path
) -> None:
    options = (
        *SERIAL,
        "--dataset",
        f"folder:{few_images}",
        "--batch_size",
        10,
        "--epochs",
        30,
        "--checkpoint_every",
        0,
    )
    stopped = start_rank(0, 1, *options)
    stopped.wait_for(" epoch 3/30 ")
    stopped.process.send_signal(signal.SIGTERM)
    assert stopped.wait(10) == 143, stopped.err
    assert "SIGTERM: stopping after the next step" in stopped.err
    run = tmp_path / "run"
    failure = json.loads((run / "failure-rank0.json").read_text())
    assert failure["exit_code"] == 143
    assert "--no_ddp" in failure["next"]
    again, undisturbed = (
        start_rank(0, 1, *options, "--resume", "auto"),
        start_rank(0, 1, *options, "--run_dir", tmp_path / "undisturbed"),
    )
    assert [again.wait(), undisturbed.wait()] == [0, 0]
    assert "going on after step " in again.err
    assert (run / "model.pt").read_bytes() == (tmp_path / "undisturbed" / "model.pt").read_bytes()


def test_no_ddp_in_several_processes_is_refused_with_the_source_of_their_number(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(BadOption, match="--no_ddp is for one process, and this is one of 2") as caught:
        TrainConfig(no_ddp=True).check_world(WorldSpec.from_environment())
    assert "world_size 2 (from WORLD_SIZE)" in caught.value.why
