"""Trackers that raise, hang on a signal, or have nothing to do: the run goes on, and a user is warned once."""

from __future__ import annotations

import configparser
import json
import logging
import os
import re
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from ddp_manual import join
from ddp_manual.cli import main as cli
from ddp_manual.environment import variables_for_a_rank
from ddp_manual.errors import BadOption, DiskFull, StopSignal
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import options as train_options
from ddp_manual.training import trackers
from ddp_manual.training.data import Split
from ddp_manual.training.evaluation import Predictions
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.trackers import Tracker, Trackers, WeightsAndBiases, table_of
from tests.conftest import REPOSITORY, log_to_root

Opened = Callable[..., Trackers]
Warnings = Callable[[], list[str]]
SETTINGS = {"model": "mlp", "dataset": "mnist", "run": {"world_size": 2, "run_id": "0123abcd", "goes_on_after_step": 0}}


def tracker() -> Any:
    remembering = Mock(advice="look elsewhere")
    remembering.name = "remembering"
    return remembering


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Warnings:
    log_to_root(monkeypatch)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Opened:
    """Open these trackers for a run in ``tmp_path``."""

    def opened(*some: Tracker) -> Trackers:
        monkeypatch.setattr(trackers, "KINDS", {str(number): lambda t=t: t for number, t in enumerate(some)})
        several = Trackers([str(number) for number in range(len(some))])
        several.open(SETTINGS, RunPaths(tmp_path))
        return several

    return opened


def train(several: Trackers, steps: int) -> None:
    for step in range(1, steps + 1):
        several.scalars(step, {"train/loss": 0.5})


@pytest.mark.parametrize(
    ("raised", "named"),
    [
        (ValueError("out of\nluck"), "ValueError: out of"),
        (SystemExit(3), "SystemExit: 3"),
        (DiskFull("no space left to write x", why="", next=""), "no space left to write x"),
    ],
)
def test_a_tracker_that_raises_is_warned_of_once_and_the_others_go_on(
    opened: Opened, warnings: Warnings, raised: BaseException, named: str
) -> None:
    failing, healthy = tracker(), tracker()
    failing.scalars.side_effect = [None, None, raised]
    several = opened(failing, healthy)
    train(several, 10)
    several.close()
    assert warnings() == [f"--track remembering: {named}; the run goes on without it (look elsewhere)"]
    assert (failing.scalars.call_count, failing.close.call_count) == (3, 0)
    assert healthy.scalars.call_count == 10
    healthy.close.assert_called_once_with(None)


def test_a_signal_ends_the_wait_for_a_tracker_at_the_end_and_nothing_else(opened: Opened, warnings: Warnings) -> None:
    waiting, healthy = tracker(), tracker()
    waiting.close.side_effect = StopSignal(signal.SIGTERM)
    opened(waiting, healthy).close()
    assert warnings() == ["--track remembering: a signal came before it had finished (look elsewhere)"]
    healthy.close.assert_called_once_with(None)
    waiting.scalars.side_effect = StopSignal(signal.SIGTERM)
    with pytest.raises(StopSignal):
        train(opened(waiting), 3)


def test_wandb_that_never_finishes_is_waited_for_no_longer_than_said(
    opened: Opened, warnings: Warnings, monkeypatch: pytest.MonkeyPatch
) -> None:
    def begin(tracker: WeightsAndBiases, *run: object) -> None:
        tracker.advice = "to upload it: wandb sync runs/one"
        tracker._run, tracker._uploads = SimpleNamespace(finish=lambda exit_code: threading.Event().wait()), True

    monkeypatch.setattr(trackers, "UPLOAD_WITHIN", 0.5)
    monkeypatch.setattr(WeightsAndBiases, "open", begin)
    opened(WeightsAndBiases()).close()
    said = "TimeoutError: wandb has not finished within 0.5 s (to upload it: wandb sync runs/one)"
    assert warnings() == [f"--track wandb: {said}"]


def test_what_is_left_to_do_after_a_world_of_one_is_done_even_if_it_fails(tmp_path: Path) -> None:
    done: list[int] = []
    with suppress(ZeroDivisionError), join(world_size=1, rank=0, device="cpu", run_dir=str(tmp_path)) as world:
        for number in range(2):
            world.until_left.callback(done.append, number)
        assert done == [] and 1 / 0
    assert done == [1, 0]
    torch.distributed.destroy_process_group()  # a join that fails leaves it open: its process is to end


def test_variables_say_where_wandb_keeps_files_for_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "/the/users/own")
    with variables_for_a_rank.wandb_files_below(tmp_path):
        assert (os.environ["WANDB_DATA_DIR"], os.environ["WANDB_CACHE_DIR"]) == (f"{tmp_path}/data", "/the/users/own")
    assert "WANDB_DATA_DIR" not in os.environ and os.environ["WANDB_CACHE_DIR"] == "/the/users/own"


def test_the_table_has_the_first_100_predictions_as_they_are_ordered() -> None:
    images = torch.arange(120, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 5)
    sure = torch.arange(120) / 200
    split = Split(images, torch.zeros(120, dtype=torch.int64), ("cat", "dog"))
    found = table_of(predictions := Predictions(torch.stack([1 - sure, sure], dim=1), split))
    assert [row[0] for row in found.rows] == predictions.order[:100].tolist()
    assert found.rows[0] == [119, "dog", "cat", pytest.approx(0.405), pytest.approx(0.595)]
    assert found.images.shape == (100, 4, 5, 3) and (found.images[0] == 119).all()


def test_names_that_are_not_utf_8_reach_a_tracker_with_escapes(tmp_path: Path) -> None:
    """protobuf, which TensorBoard writes, takes no others."""
    name = b"my caf\xe9".decode("utf-8", "surrogateescape")
    config = TrainConfig(dataset=f"folder:/data/{name}/", track="jsonl")
    split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), (name, "dog"))
    run = {"world_size": 4, "run_id": "0123abcd", "goes_on_after_step": 0, "classes": split.classes}
    several = Trackers(config.trackers)
    several.open({**config.values(), "run": run}, RunPaths(tmp_path))
    several.predictions(4, Predictions(torch.eye(2), split))
    started, table = map(json.loads, RunPaths(tmp_path).track.read_text().splitlines())
    assert started["name"] == "convnet-my caf\\udce9-4ranks-0123abcd"
    assert started["hyperparameters"]["classes"] == list(table["rows"][0]["scores"]) == ["my caf\\udce9", "dog"]


@pytest.mark.parametrize(
    ("track", "named"),
    [("wandb,", "names '', which is not known"), ("jsonl, wandb,jsonl", "names 'jsonl' twice")],
)
def test_a_tracker_that_cannot_be_is_a_bad_option(track: str, named: str) -> None:
    with pytest.raises(BadOption, match=named):
        TrainConfig(track=track)


def test_a_tracker_whose_package_is_missing_is_refused_by_rank_0_before_anything_starts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_options, "find_spec", lambda package: None)
    assert cli.run(["train", "--track", "jsonl,wandb", "--run_dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert "error[bad-option]: --track wandb needs wandb, which this Python does not have" in said
    assert "next: pip install wandb\n" in said and "pip install -e '.[wandb]'" in said
    assert not (tmp_path / "run").exists()


def test_every_extra_is_one_of_setup_cfg_and_the_developers_have_them_all() -> None:
    setup = configparser.ConfigParser()
    setup.read(REPOSITORY / "setup.cfg")
    named = setup["options.extras_require"]
    extras = {**{name: {name} for name in train_options.PACKAGES}, "flyte": {"flytekit"}}
    extras["notebook"] = {"nbclient", "ipykernel", "matplotlib"}
    assert set(named) == {*extras, "test", "dev"}
    for extra, packages in extras.items():
        assert {re.split("[>;]", line)[0] for line in named[extra].strip().splitlines()} == packages
    assert f"ddp_manual[{','.join(sorted([*extras, 'test']))}]" in named["dev"]
