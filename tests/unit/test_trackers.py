"""Trackers that raise, hang on a signal, or have nothing to do: the run goes on, and a user is warned once."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from ddp_manual import cli, join
from ddp_manual.environment import rank_variables
from ddp_manual.errors import BadOption, StopSignal
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import config as train_config
from ddp_manual.training import trackers
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import Split
from ddp_manual.training.evaluate import Predictions
from ddp_manual.training.metrics import Metrics
from ddp_manual.training.results import RunFiles
from ddp_manual.training.trackers import Table, Tracker, Trackers, WeightsAndBiases, run_name, table_of
from ddp_manual.world_spec import WorldSpec
from tests.conftest import log_to_root

SETTINGS = {"model": "mlp", "dataset": "mnist", "run": {"world_size": 2, "run_id": "0123abcd"}}


class Remembering(Tracker):
    """Keeps the steps; at one of them, or at its end, it does what a test has it do."""

    name = "remembering"
    advice = "look elsewhere"

    def __init__(self, at_step_3: Callable[[], None] = lambda: None, at_the_end: Callable[[], None] = lambda: None):
        self.steps: list[int] = []
        self.complete: bool | None = None
        self._at_step_3 = at_step_3
        self._at_the_end = at_the_end

    def open(self, name: str, options: Mapping[str, Any], paths: RunPaths, resumes_after: int | None) -> None: ...

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            self._at_step_3()
        self.steps.append(step)

    def predictions(self, step: int, table: Table) -> None: ...

    def close(self, summary: Mapping[str, Any] | None) -> None:
        self._at_the_end()
        self.complete = summary is not None


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    log_to_root(monkeypatch)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Trackers]:
    """Open these trackers for a run in ``tmp_path``."""

    def opened(*some: Tracker) -> Trackers:
        monkeypatch.setattr(trackers, "KINDS", {str(number): lambda t=t: t for number, t in enumerate(some)})
        several = Trackers([str(number) for number in range(len(some))])
        several.open(SETTINGS, RunPaths(tmp_path), None)
        return several

    return opened


def train(several: Trackers, steps: int) -> None:
    for step in range(1, steps + 1):
        several.scalars(step, {"train/loss": 0.5})


def fail(error: BaseException) -> None:
    raise error


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


@pytest.mark.parametrize(
    ("raised", "named"), [(ValueError("out of\nluck"), "ValueError: out of"), (SystemExit(3), "SystemExit: 3")]
)
def test_a_tracker_that_raises_is_warned_of_once_and_the_others_go_on(
    opened: Callable[..., Trackers], warnings: Callable[[], list[str]], raised: BaseException, named: str
) -> None:
    failing, healthy = Remembering(partial(fail, raised)), Remembering()
    several = opened(failing, healthy)
    train(several, 10)
    several.close()
    assert warnings() == [f"--track remembering: {named}; the run goes on without it (look elsewhere)"]
    assert (failing.steps, failing.complete) == ([1, 2], None)
    assert (healthy.steps, healthy.complete) == (list(range(1, 11)), False)


def test_a_signal_ends_the_wait_for_a_tracker_at_the_end_and_nothing_else(
    opened: Callable[..., Trackers], warnings: Callable[[], list[str]]
) -> None:
    stop = partial(fail, StopSignal(signal.SIGTERM))
    waiting, healthy = Remembering(at_the_end=stop), Remembering()
    several = opened(waiting, healthy)
    train(several, 3)
    several.close()
    assert warnings() == ["--track remembering: a signal came before it had finished (look elsewhere)"]
    assert healthy.complete is False
    with pytest.raises(StopSignal):
        train(opened(Remembering(stop)), 3)


@pytest.mark.parametrize("raises", [False, True])
def test_wandb_that_never_finishes_is_waited_for_no_longer_than_said_and_what_it_raises_is_named(
    opened: Callable[..., Trackers], warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch, raises: bool
) -> None:
    thawed = threading.Event()
    finish = partial(fail, ConnectionError("the server is gone")) if raises else thawed.wait

    def begin(tracker: WeightsAndBiases, *run: object) -> None:
        tracker.advice = "to upload it: wandb sync runs/one"
        tracker._run, tracker._uploads = SimpleNamespace(finish=lambda exit_code: finish()), True

    monkeypatch.setattr(trackers, "UPLOAD_WITHIN", 0.5)
    monkeypatch.setattr(WeightsAndBiases, "open", begin)
    opened(WeightsAndBiases()).close()
    thawed.set()
    named = "ConnectionError: the server is gone" if raises else "TimeoutError: wandb has not finished within 0.5 s"
    assert warnings() == [f"--track wandb: {named} (to upload it: wandb sync runs/one)"]


def test_a_full_disk_is_named_and_the_run_keeps_its_own_files(
    tmp_path: Path, warnings: Callable[[], list[str]]
) -> None:
    paths = RunPaths(tmp_path)
    paths.track.symlink_to("/dev/full")
    several = Trackers(["jsonl"])
    files = RunFiles(paths, keep=1, trackers=several)
    files.follow(SETTINGS)
    files.start(SETTINGS, Split(torch.zeros(2, 1, 8, 8, dtype=torch.uint8), torch.tensor([0, 1]), ("cat", "dog")))
    line: dict[str, Any] = {"epoch": 1, "loss": 0.5, "accuracy": 0.9, "lr": 0.1, "samples_per_second": 1e4}
    for step in range(1, 4):
        files.add_metrics(Metrics(step=step, seconds=step / 10, **line))
    several.close()
    assert warnings() == [
        f"--track jsonl: no space left to write {paths.track}; the run goes on without it "
        "(metrics.jsonl has the same numbers)"
    ]
    assert [line["step"] for line in lines(paths.metrics)] == [1, 2, 3]


@pytest.mark.parametrize("fails", [False, True])
def test_what_is_left_to_do_after_a_world_of_one_is_done_whatever_its_end(tmp_path: Path, fails: bool) -> None:
    done = []
    with suppress(ZeroDivisionError), join(world_size=1, rank=0, device="cpu", run_dir=str(tmp_path)) as world:
        for number in range(2):
            world.after_leaving(partial(done.append, number))
        assert done == []
        if fails:
            1 / 0  # noqa: B018
    assert done == [1, 0]
    assert (tmp_path / "failure-rank0.json").exists() is fails
    if fails:
        torch.distributed.destroy_process_group()  # a join that fails leaves it open: its process is to end


def test_variables_say_where_wandb_keeps_files_for_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "/the/users/own")
    for run in (tmp_path / "first", tmp_path / "second"):
        with rank_variables.wandb_files_below(run):
            assert os.environ["WANDB_DATA_DIR"] == str(run / "data")
            assert os.environ["WANDB_CACHE_DIR"] == "/the/users/own"
        assert "WANDB_DATA_DIR" not in os.environ
    assert os.environ["WANDB_CACHE_DIR"] == "/the/users/own"


def test_the_table_has_the_first_100_predictions_as_they_are_ordered() -> None:
    images = torch.arange(120, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 5)
    split = Split(images, torch.zeros(120, dtype=torch.int64), ("cat", "dog"))

    probabilities = torch.stack([1 - torch.arange(120) / 200, torch.arange(120) / 200], dim=1)
    predictions = Predictions(probabilities, split)
    found = table_of(predictions)
    assert [row[0] for row in found.rows] == predictions.order[:100].tolist()
    number, guess, truth, *scores = found.rows[0]
    assert (number, guess, truth, found.classes) == (119, "dog", "cat", ("cat", "dog"))
    assert scores == pytest.approx([0.405, 0.595])
    assert found.images.shape == (100, 4, 5, 3) and (found.images[0] == 119).all()


def test_names_that_are_not_utf_8_reach_a_tracker_with_escapes(tmp_path: Path) -> None:
    """protobuf, which TensorBoard writes, takes no others."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    config = TrainConfig(dataset=f"folder:{name}", track="jsonl")
    split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), (name, "dog"))
    run = {"world_size": 1, "run_id": "0123abcd", "classes": split.classes}
    paths = RunPaths(tmp_path)
    several = Trackers(config.trackers)
    several.open({**config.values(), "run": run}, paths, None)
    several.predictions(4, Predictions(torch.eye(2), split))
    several.close()
    started, table, _ = lines(paths.track)
    assert started["name"] == "convnet-folder:caf\\udce9-1ranks-0123abcd"
    assert started["hyperparameters"]["dataset"] == "folder:caf\\udce9"
    assert started["hyperparameters"]["classes"] == list(table["rows"][0]["scores"]) == ["caf\\udce9", "dog"]


@pytest.mark.parametrize(
    ("model", "dataset", "name"),
    [
        ("convnet", "mnist", "convnet-mnist-4ranks-1c5ad2c6"),
        ("cifar-cnn", "folder:/data/my images/", "cifar-cnn-my images-4ranks-1c5ad2c6"),
        ("mine:net", "pets.data:load", "mine:net-pets.data:load-4ranks-1c5ad2c6"),
    ],
)
def test_the_name_of_a_run_carries_its_world_size(model: str, dataset: str, name: str) -> None:
    assert run_name({"model": model, "dataset": dataset, "world_size": 4, "run_id": "1c5ad2c6"}) == name


@pytest.mark.parametrize(
    ("track", "named"),
    [
        ("mlflow", "names 'mlflow', which is not known"),
        ("wandb,", "names '', which is not known"),
        ("jsonl, wandb,jsonl", "names 'jsonl' twice"),
    ],
)
def test_a_tracker_that_cannot_be_is_a_bad_option(track: str, named: str) -> None:
    with pytest.raises(BadOption, match=named) as caught:
        TrainConfig(track=track)
    assert "tensorboard, wandb, jsonl" in caught.value.next


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_tracker_whose_package_is_missing_is_refused_by_rank_0_before_anything_starts(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(train_config, "find_spec", lambda package: None)
    assert cli.run(["train", "--track", f"jsonl,{name}", "--run_dir", str(tmp_path / "run")]) == 2
    said = capsys.readouterr().err
    assert f"error[bad-option]: --track {name} needs {name}, which this Python does not have" in said
    assert f"next: pip install {name}\n" in said and f"pip install -e '.[{name}]'" in said
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(
    ("track", "world_size", "stall_timeout", "warned"),
    [("wandb", 2, 20, True), ("wandb", 1, 20, False), ("wandb", 2, 30, False), ("jsonl", 2, 20, False)],
)
def test_a_stall_timeout_that_is_shorter_than_wandb_may_take_to_begin_is_warned_of(
    warnings: Callable[[], list[str]], track: str, world_size: int, stall_timeout: float, warned: bool
) -> None:
    TrainConfig(track=track).check_trackers(WorldSpec(world_size=world_size, stall_timeout=stall_timeout))
    expected = (
        "--stall_timeout 20 may be too short for --track wandb: all ranks wait while rank 0 begins the run, for up to "
        "30 s"
    )
    assert warnings() == ([expected] if warned else [])


def test_a_folder_that_has_a_packages_name_is_not_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "flytekit_of_another_name").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(train_config.PACKAGES, "flyte", ("flytekit_of_another_name",))
    with pytest.raises(BadOption, match=r"examples/flyte_workflow\.py needs flytekit_of_another_name"):
        train_config.require("flyte", "examples/flyte_workflow.py")


def test_every_extra_is_one_of_setup_cfg_and_the_developers_have_them_all() -> None:
    import configparser

    setup = configparser.ConfigParser()
    setup.read(Path(__file__).resolve().parents[2] / "setup.cfg")
    named = setup["options.extras_require"]
    assert set(named) == {*train_config.PACKAGES, "test", "dev"}
    for extra, packages in train_config.PACKAGES.items():
        assert {line.split(">")[0] for line in named[extra].split()} == set(packages)
    assert f"ddp_manual[{','.join(sorted([*train_config.PACKAGES, 'test']))}]" in named["dev"]
