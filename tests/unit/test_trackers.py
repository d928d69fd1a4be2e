"""Trackers that raise, hang or fall behind: training goes on, and a user is told once."""

from __future__ import annotations

import json
import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ddp_manual import cli, join, launchers
from ddp_manual.errors import BadOption
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import config as train_config
from ddp_manual.training import trackers
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.data import Split
from ddp_manual.training.metrics import Metrics
from ddp_manual.training.predictions import Predictions
from ddp_manual.training.trackers import followed, run_name, wandb
from ddp_manual.training.trackers.background import Background
from ddp_manual.training.trackers.followed import Followed
from ddp_manual.training.trackers.jsonl import JsonLines
from ddp_manual.training.trackers.sink import About, Sink


class Remembering(Sink):
    """Keeps the steps; at one of them it does what a test has it do."""

    name = "jsonl"

    def __init__(self, at_step_3: Callable[[], None] = lambda: None) -> None:
        self.steps: list[int] = []
        self.abandoned = False
        self._at_step_3 = at_step_3

    def open(self, about: About) -> None:
        self.about = about

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        if step == 3:
            self._at_step_3()
        self.steps.append(step)

    def image(self, step: int, name: str, file: Path) -> None: ...

    def table(self, step: int, name: str, table: object) -> None: ...

    def result(self, summary: Mapping[str, object]) -> None: ...

    def close(self, *, complete: bool) -> None:
        self.complete = complete

    def abandon(self) -> None:
        self.abandoned = True


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(followed, "STOP_WITHIN", 0.3)


@pytest.fixture
def warnings(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> Callable[[], list[str]]:
    monkeypatch.setattr(logging.getLogger("ddp_manual"), "propagate", True)
    return lambda: [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.fixture
def about(tmp_path: Path) -> About:
    return About(name="mlp-mnist-2ranks-0123abcd", hyperparameters={"world_size": 2}, paths=RunPaths(tmp_path))


def at_once(wait: Callable[[], None]) -> None:
    wait()


def followed_by(sinks: Sequence[Sink], about: About) -> Followed:
    return Followed(sinks, about, afterwards=at_once)


def train(tracker: Followed, steps: int) -> float:
    """Seconds it takes to tell a tracker of so many."""
    started = time.perf_counter()
    for step in range(1, steps + 1):
        line: dict[str, Any] = {"epoch": 1, "loss": 0.5, "accuracy": 0.9, "lr": 0.1, "samples_per_second": 1e4}
        tracker.trained(Metrics(step=step, seconds=step / 10, **line))
    return time.perf_counter() - started


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()]


def test_a_tracker_that_raises_is_warned_of_once_and_the_others_go_on(
    about: About, warnings: Callable[[], list[str]]
) -> None:
    def fail() -> None:
        raise ValueError("out of\nluck")

    failing, healthy = Remembering(fail), Remembering()
    tracker = followed_by([failing, healthy], about)
    train(tracker, 10)
    tracker.closed()
    assert warnings() == ["--track jsonl: ValueError: out of; the run goes on without it"]
    assert (failing.steps, failing.abandoned) == ([1, 2], True)
    assert (healthy.steps, healthy.abandoned, healthy.complete) == (list(range(1, 11)), False, False)


def test_one_that_exits_the_way_a_program_does_is_dropped_like_one_that_raises(
    about: About, warnings: Callable[[], list[str]]
) -> None:
    def leave() -> None:
        raise SystemExit(3)

    tracker = followed_by([Remembering(leave)], about)
    train(tracker, 4)
    tracker.closed()
    assert warnings() == ["--track jsonl: SystemExit: 3; the run goes on without it"]


def test_a_tracker_that_hangs_never_slows_training_and_is_given_up_at_the_end(
    about: About, warnings: Callable[[], list[str]]
) -> None:
    """Nobody reads the other end of a pipe: whoever opens it to write waits."""
    os.mkfifo(about.paths.track)
    tracker = followed_by([JsonLines()], about)
    assert train(tracker, 5000) < 1
    started = time.monotonic()
    tracker.closed()
    assert time.monotonic() - started < 2
    assert warnings() == ["--track jsonl: it did not finish within 0.3 s"]
    with about.paths.track.open():  # its thread ends, having nothing more to do
        pass


def test_a_signal_ends_the_wait_for_a_tracker_that_hangs_and_nothing_else(
    about: About, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "STOP_WITHIN", 30)
    os.mkfifo(about.paths.track)
    tracker = followed_by([JsonLines()], about)
    train(tracker, 3)
    before = signal.signal(signal.SIGUSR2, signal.default_int_handler)
    timer = threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGUSR2))
    timer.start()
    try:
        started = time.monotonic()
        tracker.closed()
    finally:
        timer.join()
        signal.signal(signal.SIGUSR2, before)
    assert time.monotonic() - started < 5
    assert warnings() == ["--track jsonl: a signal came before it had finished"]
    with about.paths.track.open():
        pass


def test_a_slow_tracker_has_some_time_to_finish(
    about: About, warnings: Callable[[], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(followed, "STOP_WITHIN", 10)
    os.mkfifo(about.paths.track)
    tracker = followed_by([JsonLines()], about)
    train(tracker, 50)
    read = bytearray()

    def read_late() -> None:
        time.sleep(0.2)
        with about.paths.track.open("rb", buffering=0) as file:
            while b'"closed"' not in read:  # between two lines nobody writes, and the end seems to have come
                read.extend(file.read(4096))

    reader = threading.Thread(target=read_late)
    reader.start()
    tracker.closed()
    reader.join(10)
    assert [json.loads(line)["step"] for line in read.splitlines()] == [0, *range(1, 51), 50]
    assert warnings() == []


def test_a_tracker_that_falls_behind_by_the_whole_queue_is_dropped_at_once(
    about: About, warnings: Callable[[], list[str]]
) -> None:
    waiting = threading.Event()
    background = Background(Remembering(lambda: assert_set(waiting)), capacity=3)
    for step in range(1, 10):
        background.put(lambda sink, step=step: sink.scalars(3, {}))  # type: ignore[misc]
    assert warnings() == ["--track jsonl: it does not keep up: 3 events wait for it; the run goes on without it"]
    assert background.wait(0)
    waiting.set()


def assert_set(event: threading.Event) -> None:
    assert event.wait(30)


def test_a_full_disk_is_named(about: About, warnings: Callable[[], list[str]]) -> None:
    about.paths.track.symlink_to("/dev/full")
    tracker = followed_by([JsonLines()], about)
    train(tracker, 10)
    tracker.closed()
    assert warnings() == [
        f"--track jsonl: no space left to write {about.paths.track}; the run goes on without it",
    ]


def test_nothing_is_waited_for_until_no_other_rank_waits(about: About, warnings: Callable[[], list[str]]) -> None:
    let_go, waits = threading.Event(), list[Callable[[], None]]()
    sink = Remembering(lambda: assert_set(let_go))
    tracker = Followed([sink], about, afterwards=waits.append)
    train(tracker, 3)
    started = time.monotonic()
    tracker.closed()
    assert time.monotonic() - started < 0.2
    let_go.set()
    (wait,) = waits
    wait()
    assert sink.steps == [1, 2, 3] and sink.complete is False
    assert warnings() == []


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


def test_variables_say_where_wandb_keeps_files_for_one_run_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("WANDB_DATA_DIR", raising=False)
    monkeypatch.setenv("WANDB_CACHE_DIR", "/the/users/own")
    for run in (tmp_path / "first", tmp_path / "second"):
        with launchers.wandb_files_below(run):
            assert os.environ["WANDB_DATA_DIR"] == str(run / "data")
            assert os.environ["WANDB_CACHE_DIR"] == "/the/users/own"
        assert "WANDB_DATA_DIR" not in os.environ
    assert os.environ["WANDB_CACHE_DIR"] == "/the/users/own"


@pytest.mark.parametrize(
    ("there_before", "another_sink", "latest_run", "ends_it"),
    [
        (False, False, "ours", True),
        (False, False, None, True),
        (False, False, "the user's own", False),
        (True, False, "ours", False),
        (False, True, "ours", False),
    ],
)
def test_a_wandb_that_fails_ends_its_process_only_if_no_other_run_needs_it(
    about: About,
    monkeypatch: pytest.MonkeyPatch,
    there_before: bool,
    another_sink: bool,
    latest_run: str | None,
    ends_it: bool,
) -> None:
    with psutil.Popen(["sleep", "60"]) as process:
        running = [process] if there_before else []
        monkeypatch.setattr(wandb, "_processes", lambda: running)
        monkeypatch.setattr(wandb, "_service", service := wandb._Service())
        sink: Any = wandb.WeightsAndBiases(about.paths)
        service.joined_by(sink)
        if another_sink:
            service.joined_by(wandb.WeightsAndBiases(about.paths))
        running = [process]
        sink.run, sink.session = "ours", SimpleNamespace(most_recent_active_run=latest_run)
        sink.abandon()
        sink.abandon()  # nothing is left to do
        assert (process.poll() is not None) is ends_it
        with suppress(psutil.NoSuchProcess):
            process.kill()


def test_what_has_never_begun_is_not_opened(about: About) -> None:
    sink = Remembering()
    followed_by([sink], about).closed()
    assert not hasattr(sink, "about")


def test_the_table_has_the_first_100_predictions_as_they_are_ordered(about: About) -> None:
    images = torch.arange(120, dtype=torch.uint8)[:, None, None, None].expand(-1, 3, 4, 5)
    split = Split(images, torch.zeros(120, dtype=torch.int64), ("cat", "dog"))

    probabilities = torch.stack([1 - torch.arange(120) / 200, torch.arange(120) / 200], dim=1)
    predictions = Predictions(probabilities, split)
    table = followed.table_of(predictions)
    assert [sample.number for sample in table.samples] == predictions.order[:100].tolist()
    first = table.samples[0]
    assert (first.number, first.guess, first.truth) == (119, "dog", "cat")
    assert first.scores == pytest.approx((0.405, 0.595))
    assert first.image.shape == (4, 5, 3) and (first.image == 119).all()


def test_names_that_are_not_utf_8_reach_a_tracker_with_escapes(tmp_path: Path) -> None:
    """protobuf, which TensorBoard writes, takes no others."""
    name = b"caf\xe9".decode("utf-8", "surrogateescape")
    config = TrainConfig(dataset=f"folder:{name}", track="jsonl")
    split = Split(torch.zeros(2, 1, 4, 4, dtype=torch.uint8), torch.tensor([0, 1]), (name, "dog"))
    described = {**config.values(), "run": {"world_size": 1, "classes": split.classes}}
    paths = RunPaths(tmp_path)
    tracker = trackers.of_rank_0(config, paths, described, "0123abcd", over=False, afterwards=at_once)
    tracker.predicted(Predictions(torch.eye(2), split))
    tracker.closed()
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
    assert run_name(TrainConfig(model=model, dataset=dataset), 4, "1c5ad2c6") == name


@pytest.mark.parametrize(
    ("track", "named"),
    [
        ("mlflow", "names 'mlflow', which is not known"),
        ("wandb,", "names '', which is not known"),
        ("", "names '', which is not known"),
        ("jsonl, wandb,jsonl", "names 'jsonl' twice"),
        ("wandb;jsonl", "names 'wandb;jsonl', which is not known"),
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
    assert set(named) == {*train_config.PACKAGES, "dev"}
    for extra, packages in train_config.PACKAGES.items():
        assert {line.split(">")[0] for line in named[extra].split()} == set(packages)
    assert f"ddp_manual[{','.join(sorted(train_config.PACKAGES))}]" in named["dev"]
