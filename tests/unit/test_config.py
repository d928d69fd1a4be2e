"""Options of a training and of a rank: their bounds, what follows from them, and files of options."""

from __future__ import annotations

import dataclasses
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from ddp_manual.agent import open_files
from ddp_manual.agent.by_hand import program_task
from ddp_manual.agent.to_type import rank_command, script_command
from ddp_manual.cli import main as cli
from ddp_manual.errors import BadOption
from ddp_manual.program import SCRIPT, Program
from ddp_manual.rank_options import WorldSpec
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.position import EpochPlan


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (WorldSpec, {"master_port": 0, "world_size": 2, "rank": 1}, "port 0"),
        (WorldSpec, {"master_addr": " "}, "--master_addr is empty"),
        (WorldSpec, {"master_addr": "0.0.0.0"}, "--master_addr 0.0.0.0"),
        (WorldSpec, {"run_id": "../up"}, "--run_id"),
        (WorldSpec, {"join_timeout": 0.0}, "--join_timeout 0.0 is not above 0"),
        (TrainConfig, {"dataset": "my-data:make"}, "--dataset my-data:make"),
        (TrainConfig, {"image_size": 32}, "--image_size is for --dataset folder:PATH"),
        (TrainConfig, {"classes": "cat,cat"}, "--classes 'cat,cat'"),
        (TrainConfig, {"lr": 1e308}, "--lr 1e+308 is above 1000000.0"),
        (TrainConfig, {"warmup_epochs": 3.0, "epochs": 2}, "--warmup_epochs 3 is longer"),
        (TrainConfig, {"run_dir": ""}, "--run_dir is empty"),
    ],
)
def test_an_option_that_cannot_work_is_a_bad_option_that_names_it(
    kind: type[WorldSpec | TrainConfig], options: dict[str, Any], named: str
) -> None:
    with pytest.raises(BadOption) as caught:
        kind(**options)
    assert named in caught.value.what
    assert caught.value.next


def test_the_agent_store_is_believed_only_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert WorldSpec.from_environment().agent_store
    assert not WorldSpec.from_environment(master_port=29500).agent_store


def test_the_learning_rate_grows_with_the_world_unless_the_global_batch_is_fixed() -> None:
    for options, peak in (
        ({}, 0.4),
        ({"lr_scaling": "sqrt"}, 0.2),
        ({"lr_scaling": "none"}, 0.1),
        ({"global_batch_size": 200}, 0.1),
    ):
        assert EpochPlan(TrainConfig(**{"lr": 0.1, **options}), 100, 4, 1).peak_lr == pytest.approx(peak)


def test_the_global_batch_is_divided_over_the_ranks_and_refused_with_one_that_can_be() -> None:
    assert TrainConfig().batch_size_per_rank(3) == 100
    assert TrainConfig(global_batch_size=200).batch_size_per_rank(4) == 50
    assert TrainConfig(global_batch_size=200).batch_size_per_rank(3, has_shrunk=True) == 66
    for world_size, advice in ((3, "198 or 201"), (400, "400")):
        with pytest.raises(BadOption) as caught:
            TrainConfig(global_batch_size=200).batch_size_per_rank(world_size)
        assert advice in caught.value.next


# -- files of options -----------------------------------------------------------------------------------------------


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "options.json"


def test_what_a_run_has_written_is_read_as_the_same_config_in_a_folder_of_its_own(tmp_path: Path) -> None:
    config = TrainConfig(model="mlp", lr=0.1, sync_bn=True, data_dir="my data", run_dir="runs/first", resume="auto")
    path = RunPaths(tmp_path).config
    path.write_text(json.dumps({**config.values(), "run": {"run_id": "1c5ad2c6", "world_size": 2, "mean": [33.3]}}))
    for named in (path, tmp_path):
        read = TrainConfig.from_file(str(named))
        assert read == dataclasses.replace(config, run_dir=None, resume=None)
        assert read.source("lr") == f"from {path}"


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
    ("flags", "image_size", "classes"),
    [({"dataset": "folder:birds"}, 64, None), ({"dataset": "mnist"}, None, None), ({}, 64, "cat,dog")],
)
def test_the_names_and_the_size_of_another_data_set_do_not_count(
    file: Path, flags: dict[str, Any], image_size: int | None, classes: str | None
) -> None:
    file.write_text('{"dataset": "folder:pets", "image_size": 64, "classes": "cat,dog"}')
    config = TrainConfig.from_file(str(file), **flags)
    assert (config.image_size, config.classes) == (image_size, classes)


def test_a_flag_switches_off_what_the_file_has_switched_on(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file.write_text('{"no_ddp": true, "flip": true, "sync_bn": true, "epochs": 0}')
    flags = ["--ddp", "--no-flip", "--no_sync_bn"]
    assert cli.run(["train", "--config", str(file), *flags, "--world_size", "2"]) == 2
    assert "--epochs 0 is below 1" in capsys.readouterr().err
    off = TrainConfig.from_file(str(file), epochs=1, no_ddp=False, flip=False, sync_bn=False)
    assert off == TrainConfig(epochs=1) and off.source("flip") == "flag"


def test_the_command_for_another_rank_has_plain_flags_for_what_is_not_a_default(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["train.py", "--config", str(file)])
    monkeypatch.setattr(sys, "orig_argv", ["python", "train.py", "--config", str(file)])
    file.write_text(json.dumps(TrainConfig(model="mlp", lr=0.5, sync_bn=True).values()))
    given = {"world_size": 2, "master_addr": "node0", "master_port": 29501, "join_timeout": 1800.0, "device": "cpu"}
    config = TrainConfig.from_file(str(file), epochs=2)
    assert rank_command(WorldSpec.from_environment(**given), "train", config.given_options()) == (
        "python train.py --world_size 2 --rank {rank} --master_addr node0 --master_port {master_port} --device cpu "
        "--model mlp --epochs 2 --lr 0.5 --sync_bn"
    )
    script = Program(kind=SCRIPT, name="own.py", arguments=("5", "a\nb"))
    task = program_task(WorldSpec(world_size=2), script, run_dir="runs/own", may_differ=["seed"], restarts=(0, 0))
    assert task.command == (
        "python train.py --world_size 2 --rank {rank} --run_dir runs/own --may_differ seed own.py 5 $'a\\nb'"
    ), "what was typed and a rank that is given back needs"


REMARK = "\n(with what makes it rank {rank} in place of rank 0)"


@pytest.mark.parametrize(
    ("keywords", "typed", "command"),
    [
        ("", "s.py 0", "WORLD_SIZE=2 RANK={rank} MASTER_PORT={master_port} s.py 0"),
        ("rank", "s.py 0", f"WORLD_SIZE=2 MASTER_PORT={{master_port}} s.py 0{REMARK}"),
        ("rank master_port", "s.py --rank 01 --ranks 0", f"WORLD_SIZE=2 s.py --rank 01 --ranks 0{REMARK}"),
        (
            "rank world_size master_port",
            "s.py --rank 0 --world-size=2",
            "WORLD_SIZE=2 s.py --rank {rank} --world-size=2",
        ),
        (
            "rank master_port",
            "s.py --master_port=9 --rank=0",
            "WORLD_SIZE=2 s.py --master_port={master_port} --rank={rank}",
        ),
    ],
)
def test_the_command_for_another_rank_of_a_script_changes_what_its_join_was_given(
    keywords: str, typed: str, command: str
) -> None:
    spec = WorldSpec(world_size=2, master_port=9, sources=dict.fromkeys(keywords.split(), "flag"))
    assert script_command(spec, typed.split()) == command


def test_a_run_that_is_resumed_has_the_options_in_its_folder_unless_others_are_given(tmp_path: Path) -> None:
    paths, other, run_dir = RunPaths(tmp_path), tmp_path / "other.json", str(tmp_path)
    began = TrainConfig(model="mlp", dataset="folder:pictures", image_size=8, classes="a,b", batch_size=7, epochs=9)
    paths.config.write_text(json.dumps({**began.values(), "run_dir": "x", "resume": "y", "run": {"a": 1}}))
    resumed = TrainConfig.from_file(None, run_dir=run_dir, resume="auto")
    assert resumed == dataclasses.replace(began, run_dir=run_dir, resume="auto")
    other.write_text('{"epochs": 5, "global_batch_size": 6, "seed": 1}')
    resumed = TrainConfig.from_file(str(other), run_dir=run_dir, resume="auto", dataset="mnist", seed=0)
    changed = {"dataset": "mnist", "seed": 0, "epochs": 5, "global_batch_size": 6, "model": "mlp"}
    assert resumed == TrainConfig(run_dir=run_dir, resume="auto", **changed)
    for flags in ({"run_dir": run_dir}, {"run_dir": run_dir, "resume": "x.pt"}, {"run_dir": "none", "resume": "auto"}):
        assert TrainConfig.from_file(None, **flags).model == "convnet"


@pytest.mark.parametrize(
    ("text", "what", "said"),
    [
        ("", "{} holds no options", "Expecting value"),
        ('{"epochs": 3', "{} holds no options", "line 1 column 13"),
        ("[1, 2]", "{} holds no options", "it is JSON, but no object"),
        ("[" * 100_000, "{} holds no options", "recursion"),
        ('{"epochs": 3, "epochs": 4}', "{} holds no options", '"epochs" is there twice'),
        ('{"epoch": 3}', '{}: "epoch" is no option', "write epochs"),
        ('{"colour": "red"}', '{}: "colour" is no option', "leave it out"),
        ('{"rank": 1}', "{}: rank cannot be given in a file", "--rank"),
        ('{"run_dir": "runs/mine"}', "{}: run_dir cannot be given in a file", "--run_dir"),
        ('{"epochs": 0}', "--epochs 0 is below 1", "or change it in {}"),
        ('{"epochs": 3.0}', "--epochs 3.0 is not a whole number", "or change it in {}"),
        ('{"epochs": true}', "--epochs True is not a whole number", "or change it in {}"),
        ('{"lr": false}', "--lr False is not a number", "or change it in {}"),
        ('{"sync_bn": 1}', "--sync_bn 1 is not true or false", "or change it in {}"),
        ('{"lr": NaN}', "--lr nan is not a finite number", "or change it in {}"),
    ],
    ids=range(15),
)
def test_what_is_wrong_with_a_file_is_said_with_its_name(file: Path, text: str, what: str, said: str) -> None:
    file.write_text(text)
    with pytest.raises(BadOption) as caught:
        TrainConfig.from_file(str(file))
    assert caught.value.what == what.format(file)
    assert said.format(file) in f"{caught.value.why}\n{caught.value.next}"


def test_a_file_that_cannot_be_read_exits_2_and_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    os.mkfifo(tmp_path / "a pipe")  # reading it would wait for whoever writes to it
    for path in (tmp_path / "missing", tmp_path, tmp_path / "a pipe"):
        assert cli.run(["train", "--config", str(path)]) == 2
        assert f"error[bad-option]: --config {path} cannot be read" in capsys.readouterr().err


@pytest.mark.parametrize(("user", "advice"), [(0, "started: ulimit -n 300"), (1000, "docker run --ulimit nofile=300")])
def test_too_low_a_limit_of_open_files_is_answered_with_what_this_user_can_do(
    user: int, advice: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: user)
    monkeypatch.setattr(open_files, "raise_soft_limit", lambda: (200, 200))
    with pytest.raises(BadOption, match="may open 200 files, and a run of 100 ranks needs 300") as caught:
        open_files.raise_descriptor_limit(WorldSpec(world_size=100))
    assert caught.value.next.endswith(advice)
