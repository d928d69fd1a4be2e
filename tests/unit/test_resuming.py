"""Runs of one process that go on, in their own folder or with what another has learnt, and the files they leave."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from ddp_manual import TrainConfig, train
from ddp_manual.errors import BadOption, CheckpointMismatch
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import result_text
from ddp_manual.tools.evaluate import evaluate
from ddp_manual.training import checkpoint_files, meter
from ddp_manual.training.checkpoint_state import History
from ddp_manual.training.evaluation import Evaluation
from ddp_manual.training.position import Position
from ddp_manual.training.trackers import Trackers
from ddp_manual.training.trainer import Trainer
from ddp_manual.training.write_run_files import RunFiles
from tests.alone import alone

STEPS_PER_EPOCH = 4
PREDICTIONS = ("predictions.csv", "mistakes.png", "confusion.csv", "confusion.png")


def images() -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    """40 to train on and as many to test on, of four greys."""
    labels = torch.arange(40) % 4
    grey = (60 * labels).to(torch.uint8).view(-1, 1, 1, 1).expand(-1, 1, 8, 8)
    return (grey, labels), (grey, labels)


def run(folder: Path, **options: Any) -> dict[str, Any]:
    """Train on them in 4 steps an epoch, in this process; the summary."""
    config = TrainConfig(
        **{"dataset": f"{__name__}:images", "model": "mlp", "batch_size": 10, "epochs": 2, "no_ddp": True, **options},
        run_dir=str(folder),
    )
    with alone() as world:
        return train(world, config)


def accuracies(folder: Path) -> list[float]:
    found: list[float] = json.loads(RunPaths(folder).accuracies.read_bytes())
    return found


def test_a_run_that_began_from_another_runs_checkpoint_resumes_even_if_it_died_before_its_own_first(
    tmp_path: Path,
) -> None:
    one, two, undisturbed = (tmp_path / name for name in ("one", "two", "undisturbed"))
    run(one, epochs=1)
    with patch.object(Trainer, "_train_step", side_effect=ZeroDivisionError), pytest.raises(ZeroDivisionError):
        run(two, resume=str(one))
    assert [found.step for found in checkpoint_files.find(RunPaths(two).checkpoints)] == [STEPS_PER_EPOCH]
    run(two, resume="auto")
    assert len(accuracies(two)) == 2 and accuracies(two)[0] == accuracies(one)[0]
    run(undisturbed, epochs=1)
    run(undisturbed, resume="auto")
    assert RunPaths(two).model.read_bytes() == RunPaths(undisturbed).model.read_bytes()


class Versioned(nn.Sequential):
    """Like torchvision's MNASNet, it loads only a state that has its version."""

    _version = 2

    def __init__(self, classes: int) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, classes))

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: dict[str, Any], *others: Any) -> None:
        if metadata.get("version") != self._version:
            raise ValueError("the version is missing")
        super()._load_from_state_dict(state, prefix, metadata, *others)


def test_what_a_run_saves_has_the_versions_of_the_modules_as_a_state_dict_has_them(tmp_path: Path) -> None:
    own = {"model": f"{__name__}:Versioned", "dataset": f"{__name__}:images"}
    run(tmp_path, epochs=1, **own)
    run(tmp_path, resume="auto", **own)
    saved = torch.load(RunPaths(tmp_path).model, weights_only=True)
    Versioned(4).load_state_dict(saved)
    for path in (RunPaths(tmp_path).model, checkpoint_files.find(RunPaths(tmp_path).checkpoints)[0].path):
        evaluate(path, tmp_path / "out", own)
    torch.save(dict(saved), RunPaths(tmp_path).model)
    with pytest.raises(CheckpointMismatch) as caught:
        evaluate(tmp_path, tmp_path / "out", own)
    assert caught.value.why == "the version is missing"


def test_the_predictions_of_a_complete_run_are_made_anew_only_where_one_is_missing(tmp_path: Path) -> None:
    run(tmp_path)
    before = {name: (tmp_path / name).read_bytes() for name in PREDICTIONS}
    run(tmp_path, resume="auto", classes="a,b,c,d")
    assert {name: (tmp_path / name).read_bytes() for name in PREDICTIONS} == before
    (tmp_path / "confusion.png").unlink()
    run(tmp_path, resume="auto")
    assert {name: (tmp_path / name).read_bytes() for name in PREDICTIONS} == before


def test_the_checkpoint_is_written_before_the_files_that_can_be_rebuilt_from_it(tmp_path: Path) -> None:
    run(tmp_path, epochs=1)
    (saved,) = checkpoint_files.find(RunPaths(tmp_path).checkpoints)
    names = ("accuracies.json", "model.pt", *PREDICTIONS, "summary.json")
    assert saved.path.stat().st_mtime_ns < min((tmp_path / name).stat().st_mtime_ns for name in names)


def test_a_damaged_summary_is_written_again(tmp_path: Path) -> None:
    whole = run(tmp_path, epochs=1)
    RunPaths(tmp_path).summary.write_text('{"final_test_accuracy": 1}')
    again = run(tmp_path, epochs=1, resume="auto")
    assert json.loads(RunPaths(tmp_path).summary.read_bytes()) == again
    assert again["final_test_accuracy"] == whole["final_test_accuracy"]


def test_a_run_that_goes_back_to_an_earlier_end_has_the_summary_of_that_one(tmp_path: Path) -> None:
    run(tmp_path)
    first = checkpoint_files.find(RunPaths(tmp_path).checkpoints)[-1]
    summary = run(tmp_path, epochs=1, resume=str(first.path))
    for written in (RunPaths(tmp_path).summary, RunPaths(tmp_path).config):
        assert json.loads(written.read_bytes())["epochs"] == summary["epochs"] == 1
    (line,) = result_text(summary).splitlines()
    assert " after 1 epoch on 1 rank (" in line and line.endswith(f"; files in {tmp_path}")


def test_samples_per_second_are_those_since_the_run_was_last_resumed_without_the_seconds_of_its_saves(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock, step_takes = SimpleNamespace(now=0.0), iter([1.0] * STEPS_PER_EPOCH + [0.1] * STEPS_PER_EPOCH)
    train_step, write = Trainer._train_step, checkpoint_files.write

    def timed_step(*arguments: Any) -> Any:
        clock.now += next(step_takes)
        return train_step(*arguments)

    def slow_write(*arguments: Any) -> Path:
        clock.now += 100
        return write(*arguments)

    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: clock.now))
    monkeypatch.setattr(Trainer, "_train_step", timed_step)
    monkeypatch.setattr(checkpoint_files, "write", slow_write)
    assert run(tmp_path, epochs=1, checkpoint_steps=1)["samples_per_second"] == pytest.approx(10)
    resumed = run(tmp_path, resume="auto", checkpoint_steps=1)
    assert resumed["samples_per_second"] == pytest.approx(100)
    assert resumed["train_seconds"] == pytest.approx(STEPS_PER_EPOCH * 1.1)


@pytest.mark.parametrize(
    ("there", "position", "stays"),
    [
        ("[0.5]", Position(epoch=1, taken=10, step=5), True),
        ("[0.5, 0.75]", Position(epoch=1, taken=10, step=5), False),
        (None, Position(), True),
    ],
)
def test_a_model_of_an_epoch_that_is_trained_again_is_removed(
    tmp_path: Path, there: str | None, position: Position, stays: bool
) -> None:
    paths = RunPaths(tmp_path)
    paths.model.write_bytes(b"model")
    if there is not None:
        paths.accuracies.write_text(there)
    history = History(evaluations=(Evaluation(loss=1.0, accuracy=0.5, samples=40),) * position.epoch)
    RunFiles(paths, keep=3, trackers=Trackers(())).rewind(position, history, nn.Linear(1, 1), complete=False)
    assert paths.model.exists() is stays
    assert accuracies(tmp_path) == [0.5] * position.epoch


def test_a_folder_is_checked_without_being_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Launches on two hosts share one: a folder that one had made and removed again could be missing for the other."""
    monkeypatch.setattr(Path, "mkdir", lambda *_, **__: pytest.fail("a folder was made"))
    RunPaths(tmp_path / "new" / "run").check(resuming=False)
    (tmp_path / "file").touch()
    with pytest.raises(BadOption, match="cannot be written"):
        RunPaths(tmp_path / "file" / "run").check(resuming=False)
