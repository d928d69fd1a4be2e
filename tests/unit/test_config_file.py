from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_manual import cli
from ddp_manual.agent.tasks import program_task
from ddp_manual.agent.to_type import rank_command
from ddp_manual.errors import BadOption
from ddp_manual.program import SCRIPT, Program
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.config import TrainConfig
from ddp_manual.world_spec import WorldSpec


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.json"


def test_what_is_written_as_json_is_read_as_the_same_config_in_a_folder_of_its_own(file: Path) -> None:
    config = TrainConfig(
        model="mlp", lr=0.1, batch_size=7, sync_bn=True, data_dir="my data", run_dir="mine", resume="x"
    )
    file.write_text(json.dumps({**config.values(), "run": {}}))
    assert TrainConfig.from_file(str(file)) == dataclasses.replace(config, run_dir=None, resume=None)


def test_a_file_need_not_give_all_options_and_each_value_remembers_where_it_is_from(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + b'{"epochs": 3, "lr": 1, "batch_size": null, "seed": null}')  # as on Windows
    config = TrainConfig.from_file(str(file), epochs=4)
    assert config.named("epochs") == "epochs 4 (flag)"
    assert config.named("lr") == f"lr 1 (from {file})"
    assert config.named("batch_size") == "batch_size None (default)"
    assert config.named("seed") == "seed 0 (default)"
    assert TrainConfig.from_file(None, epochs=4) == TrainConfig(epochs=4)


def test_a_batch_size_that_is_typed_replaces_the_other_kind_in_the_file(file: Path) -> None:
    for in_the_file, flag in itertools.permutations(("batch_size", "global_batch_size")):
        file.write_text(json.dumps({in_the_file: 60}))
        config = TrainConfig.from_file(str(file), **{flag: 80})
        assert (getattr(config, in_the_file), getattr(config, flag)) == (None, 80)
    file.write_text('{"batch_size": 60, "global_batch_size": 60}')
    with pytest.raises(BadOption, match="cannot both be given"):
        TrainConfig.from_file(str(file))


@pytest.mark.parametrize(
    ("dataset", "image_size", "classes"),
    [("folder:pets", 64, "cat,dog"), ("folder:birds", 64, None), ("mnist", None, None), (None, 64, "cat,dog")],
)
def test_the_names_and_the_size_of_another_data_set_do_not_count(
    file: Path, dataset: str | None, image_size: int | None, classes: str | None
) -> None:
    file.write_text('{"dataset": "folder:pets", "image_size": 64, "classes": "cat,dog"}')
    config = TrainConfig.from_file(str(file), **({} if dataset is None else {"dataset": dataset}))
    assert (config.image_size, config.classes) == (image_size, classes)
    file.write_text('{"classes": "cat,dog"}')
    assert TrainConfig.from_file(str(file), dataset="folder:pets").classes == "cat,dog"


def test_the_config_json_of_a_run_repeats_it_in_a_new_folder(file: Path) -> None:
    config, path = TrainConfig(epochs=3, run_dir="runs/first", resume="auto"), file.with_name("config.json")
    path.write_text(json.dumps({**config.values(), "run": {"run_id": "1c5ad2c6", "world_size": 2, "mean": [33.3]}}))
    for named in (path, path.parent):
        read = TrainConfig.from_file(str(named))
        assert read == TrainConfig(epochs=3) and read.source("epochs") == f"from {path}"


def test_a_flag_switches_off_what_the_file_has_switched_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('{"no_ddp": true, "flip": true, "sync_bn": true, "epochs": 0}')
    assert cli.run(["train", "--config", str(file), "--epochs", "1", "--world_size", "2"]) == 2
    said = capsys.readouterr().err
    assert "--no_ddp is for one process" in said and f"or change it in {file}\n" in said
    flags = ["--ddp", "--no-flip", "--no_sync_bn"]
    assert cli.run(["train", "--config", str(file), *flags, "--world_size", "2"]) == 2
    assert "--epochs 0 is below 1" in capsys.readouterr().err
    off = TrainConfig.from_file(str(file), epochs=1, no_ddp=False, flip=False, sync_bn=False)
    assert off == TrainConfig(epochs=1) and off.source("flip") == "flag"


def test_the_command_for_another_rank_has_plain_flags_for_what_is_not_a_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["run_multi_gpu_train.py", "--config", str(file)])
    monkeypatch.setattr(sys, "orig_argv", ["python", "run_multi_gpu_train.py", "--config", str(file)])
    file.write_text(json.dumps(TrainConfig(model="mlp", lr=0.5, sync_bn=True).values()))
    options = TrainConfig.from_file(str(file), epochs=2).given_options()
    command = rank_command(WorldSpec(world_size=2), "train", options)
    assert command == (
        "python run_multi_gpu_train.py --world_size 2 --rank {rank} --model mlp --epochs 2 --lr 0.5 --sync_bn"
    )
    given = {"world_size": 2, "master_addr": "node0", "master_port": 29501, "join_timeout": 1800.0, "device": "cpu"}
    spec, config = WorldSpec.from_environment(**given), TrainConfig.from_file(None, epochs=2, seed=3)
    assert rank_command(spec, "train", config.given_options()) == (
        "python run_multi_gpu_train.py --world_size 2 --rank {rank} --master_addr node0 --master_port {master_port} "
        "--device cpu --seed 3"
    )
    script = Program(kind=SCRIPT, name="train.py", arguments=("5",))
    task = program_task(WorldSpec(world_size=2), script, run_dir="runs/own", may_differ=["seed"], restarts=(0, 0))
    assert task.command == (
        "python run_multi_gpu_train.py --world_size 2 --rank {rank} --run_dir runs/own --may_differ seed train.py 5"
    ), "what was typed and a rank that is given back needs"


def test_a_run_that_is_resumed_has_the_options_in_its_folder_unless_others_are_given(tmp_path: Path) -> None:
    paths, other = RunPaths(tmp_path), tmp_path / "other.json"
    began = TrainConfig(model="mlp", dataset="folder:pictures", image_size=8, classes="a,b", batch_size=7, epochs=9)
    paths.config.write_text(json.dumps({**began.values(), "run_dir": "x", "resume": "y", "run": {"a": 1}}))
    run_dir = str(tmp_path)
    resumed = TrainConfig.from_file(None, run_dir=run_dir, resume="auto")
    assert resumed == dataclasses.replace(began, run_dir=run_dir, resume="auto")
    assert resumed.source("epochs") == f"from {paths.config}"
    other.write_text('{"epochs": 5, "global_batch_size": 6, "seed": 1}')
    resumed = TrainConfig.from_file(str(other), run_dir=run_dir, resume="auto", dataset="mnist", seed=0)
    assert (resumed.model, resumed.epochs, resumed.seed, resumed.classes, resumed.image_size) == (
        "mlp",
        5,
        0,
        None,
        None,
    )
    assert (resumed.batch_size, resumed.global_batch_size) == (None, 6)
    for flags in ({"run_dir": run_dir}, {"run_dir": run_dir, "resume": "x.pt"}, {"run_dir": "none", "resume": "auto"}):
        assert TrainConfig.from_file(None, **flags).model == "convnet"


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("", "Expecting value"),
        ('{"epochs": 3', "line 1 column 13"),
        ("[1, 2]", "it is JSON, but no object"),
        ("[" * 100_000, "recursion"),
        ('{"epochs": 3, "epochs": 4}', '"epochs" is there twice'),
        (b"\xff\xfe{\x00}\x00", "codec can't decode"),
    ],
    ids=range(6),
)
def test_a_file_without_a_json_object_is_refused_with_its_name_and_the_place(
    file: Path, text: str | bytes, told: str
) -> None:
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    with pytest.raises(BadOption) as caught:
        TrainConfig.from_file(str(file))
    assert caught.value.what == f"{file} holds no options"
    assert told in caught.value.why


@pytest.mark.parametrize(
    ("options", "what", "next"),
    [
        ({"epoch": 3}, '"epoch" is no option', "write epochs"),
        ({"colour": "red"}, '"colour" is no option', "leave it out"),
        ({"rank": 1}, "rank cannot be given in a file", "--rank"),
        ({"run_dir": "runs/mine"}, "run_dir cannot be given in a file", "--run_dir"),
        ({"resume": "auto"}, "resume cannot be given in a file", "--resume"),
    ],
    ids=str,
)
def test_a_key_that_cannot_be_used_is_named_with_the_file(
    file: Path, options: dict[str, Any], what: str, next: str
) -> None:
    file.write_text(json.dumps(options))
    with pytest.raises(BadOption) as caught:
        TrainConfig.from_file(str(file))
    assert caught.value.what == f"{file}: {what}"
    assert next in caught.value.next


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ('{"epochs": 0}', "--epochs 0 is below 1"),
        ('{"epochs": 3.0}', "--epochs 3.0 is not a whole number"),
        ('{"epochs": true}', "--epochs True is not a whole number"),
        ('{"lr": false}', "--lr False is not a number"),
        ('{"sync_bn": 1}', "--sync_bn 1 is not true or false"),
        ('{"lr": NaN}', "--lr nan is not a finite number"),
        ('{"model": "resnet"}', "--model resnet is not known"),
    ],
)
def test_a_value_of_another_type_or_out_of_bounds_is_refused_with_its_file(file: Path, text: str, what: str) -> None:
    file.write_text(text)
    with pytest.raises(BadOption) as caught:
        TrainConfig.from_file(str(file))
    assert caught.value.what == what
    assert f"(from {file})" in caught.value.why
    assert caught.value.next.endswith(f"or change it in {file}")


@pytest.mark.parametrize("kind", ["missing", "a folder", "a pipe", "not allowed"])
def test_a_file_that_cannot_be_read_exits_2_and_is_named(
    tmp_path: Path, kind: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "options.json"
    if kind == "a folder":
        path.mkdir()
    elif kind == "a pipe":
        os.mkfifo(path)
    elif kind == "not allowed":
        path.write_text("{}")
        path.chmod(0)
        if os.access(path, os.R_OK):  # root may read everything; a file of the kernel refuses all the same
            path = Path("/proc/self/mem")
    assert cli.run(["train", "--config", str(path)]) == 2
    assert f"error[bad-option]: --config {path} cannot be read" in capsys.readouterr().err
