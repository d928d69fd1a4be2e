"""The files of checkpoints and what is in them: written whole, read whole or not at all, listed, kept and removed."""

from __future__ import annotations

import errno
import json
import os
import random
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from ddp_manual import atomic_files
from ddp_manual.agent.by_hand import training_task
from ddp_manual.cli import main as cli
from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMismatch, CheckpointMissing, DiskFull
from ddp_manual.rank_options import WorldSpec
from ddp_manual.run_folder import RunPaths
from ddp_manual.tools.checkpoints import list_checkpoints
from ddp_manual.training import checkpoint_files, checkpoint_state, models
from ddp_manual.training.checkpoint_state import History
from ddp_manual.training.data import Split
from ddp_manual.training.evaluation import Evaluation
from ddp_manual.training.meter import Window
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.position import Position

EVALUATIONS = (Evaluation(loss=0.3, accuracy=0.9, samples=100), Evaluation(loss=0.2, accuracy=0.95, samples=100))
HISTORY = History(evaluations=EVALUATIONS, window=Window(1.5, 3.0, 4.0), train_seconds=2.5)


def trained(*, seed: int = 0) -> tuple[nn.Module, torch.optim.Optimizer]:
    network = models.build("convnet", device=torch.device("cpu"), seed=seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9)
    network(torch.ones(4, 1, 28, 28)).square().mean().backward()
    optimizer.step()
    return network, optimizer


def taken(network: nn.Module, optimizer: torch.optim.Optimizer, **options: Any) -> bytes:
    position = Position(epoch=2, taken=7, step=33)
    state = {"position": position, "history": HISTORY, "options": options, "world_size": 2}
    trainer: Any = SimpleNamespace(network=network, optimizer=optimizer, **state)
    return checkpoint_state.pack(trainer)


@pytest.fixture(scope="module")
def content() -> bytes:
    return taken(*trained())


@pytest.mark.parametrize("suffix", [".pt", ".json"])
def test_a_flipped_byte_anywhere_is_never_loaded(content: bytes, tmp_path: Path, suffix: str) -> None:
    path = checkpoint_files.write(tmp_path, 20, content, {"test_accuracy": 0.5}).with_suffix(suffix)
    before = path.read_bytes()
    order = random.Random(0)
    for place in sorted({0, len(before) - 2, *(order.randrange(len(before)) for _ in range(100))}):
        damaged = bytearray(before)
        damaged[place] ^= 1 << order.randrange(8)
        path.write_bytes(damaged)
        try:
            found = checkpoint_files.named(tmp_path)
        except CheckpointCorrupt:
            continue
        # White space in the description is nobody's loss.
        assert suffix == ".json" and found[1] == content and found[0].test_accuracy == 0.5


def test_what_is_restored_is_what_was_saved_and_a_state_of_another_optimizer_does_not_fit() -> None:
    path, content = Path("step.pt"), taken(*trained(), seed=5)
    saved, (network, optimizer) = checkpoint_state.unpack(path, content), trained(seed=1)
    assert (saved.position, saved.history) == (Position(epoch=2, taken=7, step=33), HISTORY)
    assert (saved.options, saved.world_size) == ({"seed": 5}, 2)
    checkpoint_state.restore(path, saved, network, optimizer)
    assert taken(network, optimizer, seed=5) == content
    momentum = {0: {"momentum_buffer": torch.zeros(3)}}
    with pytest.raises(CheckpointCorrupt, match=r"step\.pt is not the checkpoint that was written(.|\n)*another shape"):
        checkpoint_state.restore(path, replace(saved, optimizer=momentum), network, optimizer)


def test_pruning_keeps_the_newest_and_the_best_and_removes_no_other_file(tmp_path: Path) -> None:
    mine = tmp_path / "step-mine.pt"
    mine.touch()
    accuracies = {10: 0.5, 20: 0.9, 30: 0.9, 40: None, 50: 0.1, 60: None}
    for step, accuracy in accuracies.items():
        checkpoint_files.write(tmp_path, step, b"%d" % step, {"test_accuracy": accuracy})
        checkpoint_files.prune(tmp_path, 2)
    assert [found.step for found in checkpoint_files.find(tmp_path)] == [60, 50, 30]
    assert mine.exists()


def test_a_rewind_removes_later_checkpoints_and_what_a_killed_process_left_half_written(tmp_path: Path) -> None:
    for step in (10, 20, 30):
        checkpoint_files.write(tmp_path, step, b"%d" % step, {})
    half_written = "step-00000050-0123abcd.pt", ".step-00000050-0123abcd.json.123.tmp"
    left = [tmp_path / name for name in (".step-00000040-0123abcd.pt.123.tmp", *half_written)]
    others = [tmp_path / ".notes.123.tmp", tmp_path / "notes.pt"]
    for path in (*left, *others):
        path.touch()
    assert [found.step for found in checkpoint_files.find(tmp_path)] == [30, 20, 10]
    checkpoint_files.rewind(tmp_path, 20)
    assert [found.step for found in checkpoint_files.find(tmp_path)] == [20, 10]
    assert not any(path.exists() for path in left) and all(path.exists() for path in others)


def test_a_checkpoint_that_has_lost_its_description_is_named_and_set_aside(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    kept, newer = (checkpoint_files.write(tmp_path, step, b"%d" % step, {}) for step in (10, 20))
    newer.with_suffix(".json").unlink()
    assert [one["state"] for one in list_checkpoints(tmp_path)] == ["corrupt", "ok"]
    found = checkpoint_files.newest_whole(tmp_path)
    assert found and found[0].path == kept
    assert f"{newer} is not the checkpoint that was written" in caplog.text
    checkpoint_files.rewind(tmp_path, 10)
    newer.write_bytes(b"20")  # another of the same name does not take its place
    checkpoint_files.rewind(tmp_path, 10)
    assert {path.name for path in (tmp_path / "set-aside").iterdir()} == {newer.name, f"{newer.name}.1"}

    kept.with_suffix(".json").unlink()
    with pytest.raises(CheckpointCorrupt, match="none of the 1 checkpoints"):
        checkpoint_files.newest_whole(tmp_path)
    checkpoint_files.write(tmp_path, 30, b"30", {})
    checkpoint_files.prune(tmp_path, 1)
    assert kept.exists()


@pytest.mark.parametrize("trouble", [".pt", "format"])
def test_an_unreadable_checkpoint_does_not_count_as_damaged_and_is_set_aside_instead_of_removed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trouble: str
) -> None:
    with monkeypatch.context() as later:
        later.setattr(checkpoint_files, "FORMAT", 1)
        checkpoint_files.write(tmp_path, 10, b"10", {})
        later.setattr(checkpoint_files, "FORMAT", 3 if trouble == "format" else 2)
        newer = checkpoint_files.write(tmp_path, 20, b"20", {})
    if trouble == ".pt":
        newer.unlink()
        newer.mkdir()  # a file that gives an error, also to root
    with pytest.raises(BadOption, match="may be whole, but cannot be read here"):
        checkpoint_files.named(tmp_path)
    assert [one["state"] for one in list_checkpoints(tmp_path)] == ["unreadable", "ok"]
    checkpoint_files.rewind(tmp_path, 10)
    assert {path.name for path in (tmp_path / "set-aside").iterdir()} == {newer.name, f"{newer.stem}.json"}
    assert [found.step for found in checkpoint_files.find(tmp_path)] == [10]


def test_files_are_written_where_a_file_system_cannot_sync_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def of_files(descriptor: int) -> None:
        if os.path.isdir(f"/proc/self/fd/{descriptor}"):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "fsync", of_files)
    checkpoint_files.write(tmp_path, 10, b"ten", {})
    assert [found.step for found in checkpoint_files.find(tmp_path)] == [10]


@pytest.mark.parametrize("call", ["fsync", "replace"])
def test_a_disk_that_is_full_before_both_files_have_their_names_leaves_no_half_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    checkpoint_files.write(tmp_path, 10, b"ten", {})
    works, calls = getattr(os, call), []

    def full(*arguments: Any) -> None:
        calls.append(arguments)
        if len(calls) == 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        works(*arguments)

    monkeypatch.setattr(os, call, full)
    with pytest.raises(DiskFull):
        checkpoint_files.write(tmp_path, 20, b"twenty", {})
    assert [path.name[:13] for path in tmp_path.iterdir()] == ["step-00000010"] * 2


def test_the_list_has_step_accuracy_size_verdict_and_marks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = RunPaths(tmp_path).checkpoints
    assert cli.run(["checkpoints", str(tmp_path)]) == 15
    about = {"epochs": 1.0, "test_accuracy": 0.9876}
    checkpoint_files.write(folder, 10, bytes(3 << 20), about)
    checkpoint_files.write(folder, 20, b"twenty", {"epochs": 1.5, "test_accuracy": None})
    checkpoint_files.write(folder, 30, b"thirty", {**about, "epochs": 2.0}).write_bytes(b"thirsty")
    assert cli.run(["checkpoints", str(tmp_path)]) == 0
    folder_line, _, *rows, damaged = capsys.readouterr().out.splitlines()
    assert folder_line == f"in {folder}:"
    assert [row.split()[0] for row in rows] == ["30", "20", "10"]
    assert "corrupt" in rows[0] and "ok, newest" in rows[1] and "98.76%" in rows[2] and "ok, best" in rows[2]
    assert "3 MB" in rows[2] and "it has 7 bytes instead of 6" in damaged
    assert cli.run(["checkpoints", str(folder), "--json"]) == 0
    assert [one["marks"] for one in json.loads(capsys.readouterr().out)] == [[], ["newest"], ["best"]]


def test_resume_auto_needs_a_folder_to_look_in_and_only_a_resumed_run_may_be_there_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(resume: object, run_dir: Path = tmp_path) -> None:
        checkpoint_files.check_run_dir(TrainConfig(run_dir=str(run_dir), resume=resume and str(resume)))

    with pytest.raises(BadOption, match="--resume auto needs a --run_dir"):
        checkpoint_files.check_run_dir(TrainConfig(resume="auto"))
    (tmp_path / "another").mkdir()
    path, within_another = (
        checkpoint_files.write(RunPaths(run).checkpoints, 10, b"ten", {}) for run in (tmp_path, tmp_path / "another")
    )
    for resume in (None, tmp_path / "another", within_another):
        with pytest.raises(BadOption, match="already holds a run"):
            check(resume)
    with pytest.raises(CheckpointMissing, match=r"no checkpoint at .*nowhere"):
        check(tmp_path / "nowhere", run_dir=tmp_path / "new")
    assert not (tmp_path / "new").exists()
    aside = path.parent / "set-aside" / path.name
    aside.parent.mkdir()
    aside.touch()
    monkeypatch.chdir(aside.parent)
    for resume in ("auto", path, path.parent, tmp_path, aside, aside.name):
        check(resume)


def test_starting_from_the_beginning_overwrites_neither_another_run_nor_a_complete_one(tmp_path: Path) -> None:
    paths, config = RunPaths(tmp_path), TrainConfig(run_dir=str(tmp_path), resume="auto")
    ours, another = (json.dumps(TrainConfig(**options).values()) for options in ({}, {"seed": 1}))
    paths.config.write_text(ours)
    assert checkpoint_state.find_resumed(config, paths) is None
    for written in (another, "[]", '{"option_of_another_version": 1}'):
        paths.config.write_text(written)
        with pytest.raises(BadOption, match="holds another run") as caught:
            checkpoint_state.find_resumed(config, paths)
        assert caught.value.next.startswith("choose another --run_dir")
    paths.config.write_text(ours)
    paths.summary.write_text("{}")
    with pytest.raises(BadOption, match="holds a complete run"):
        checkpoint_state.find_resumed(config, paths)


def test_metrics_after_a_step_and_a_line_that_was_cut_off_are_removed(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    atomic_files.keep_json_lines(path, lambda line: True)
    assert not path.exists()
    for step in (10, 20, 30):
        atomic_files.append_json_line(path, {"step": step})
    path.write_text(path.read_text() + '{"step": 1')
    atomic_files.keep_json_lines(path, lambda line: line["step"] <= 20)
    assert path.read_text() == '{"step": 10}\n{"step": 20}\n'


def test_a_run_is_resumed_with_what_was_typed_except_for_what_it_resumed_from_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rank 0 has typed it; where it listens is in no other rank's command."""
    typed = ["train.py", "--seed", "3", "--resume", "auto", "--run-dir=a b", "--listen_addr", "10.0.0.7"]
    monkeypatch.setattr(sys, "orig_argv", ["python", *typed])
    monkeypatch.setattr(sys, "argv", typed)
    spec = WorldSpec.from_environment(world_size=2, rank=0, master_addr="forwarder", listen_addr="10.0.0.7")
    task = training_task(spec, TrainConfig.from_file(None, seed=3, resume="auto", run_dir="a b"))
    assert task.go_on == "python train.py --seed 3 --listen_addr 10.0.0.7"
    common = "python train.py --world_size 2 --rank {rank} --master_addr forwarder --seed 3 --run_dir 'a b'"
    assert task.command == common
    assert task.for_rank_0 == "--listen_addr 10.0.0.7 --resume auto"


BLACK = Split(torch.zeros(8, 1, 28, 28, dtype=torch.uint8), torch.zeros(8, dtype=torch.int64), ("a", "b"), digest="one")


def resume(path: Path, then: dict[str, Any], now: dict[str, Any], train: Split = BLACK) -> None:
    """Compare the options of a run that goes on with these images with those of a checkpoint of one with black ones."""
    began, config = (TrainConfig(**{"epochs": 9, **options}) for options in (then, now))
    options = checkpoint_state.options_of(began, BLACK, BLACK)
    saved: Any = SimpleNamespace(options=options, position=Position(epoch=2, taken=7))
    checkpoint_state._check_options(path, saved, config, checkpoint_state.options_of(config, train, BLACK))


def test_a_checkpoint_of_other_images_or_options_is_a_mismatch(tmp_path: Path) -> None:
    pictures, path = {"dataset": "folder:here", "image_size": 28}, RunPaths(tmp_path).checkpoints / "step.pt"
    larger = replace(BLACK, images=torch.zeros(8, 1, 32, 32, dtype=torch.uint8), classes=("a", "b", "c"))
    with pytest.raises(CheckpointMismatch, match="another run") as caught:
        resume(path, pictures, {**pictures, "image_size": 32, "normalization": "none"}, larger)
    assert caught.value.why.splitlines() == [
        "image_size: 28 in the checkpoint / 32 here (argument)",
        "normalization: dataset in the checkpoint / none here (argument)",
        "shape: [1, 28, 28] in the checkpoint / [1, 32, 32] here",
        "class_count: 2 in the checkpoint / 3 here",
    ]
    assert caught.value.next.startswith("give the options it was saved with, which are in ")
    with pytest.raises(CheckpointMismatch, match="is of a run on other data"):
        resume(path, {}, {}, replace(BLACK, digest="another"))
    path.parent.mkdir()
    RunPaths(tmp_path).config.write_text("{}")
    for now in ({"seed": 1}, {"epochs": 1}):
        with pytest.raises(CheckpointMismatch) as caught:
            resume(path, {}, now)
        again = f"leave those options out, which --resume auto --run_dir {tmp_path} takes from that run\n"
        assert caught.value.next.startswith(again)


def test_a_checkpoint_whose_parameters_do_not_fit_the_network_is_a_mismatch_that_names_them(content: bytes) -> None:
    saved = checkpoint_state.unpack(Path("step.pt"), content)
    network = models.build("convnet", device=torch.device("cpu"), seed=0, shape=(1, 32, 32), classes=10)
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoint_state.check_parameters(Path("step.pt"), saved, network)
    assert caught.value.why == "fc.weight: (10, 1568) in the checkpoint / (10, 2048) here"
