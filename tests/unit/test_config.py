from __future__ import annotations

from typing import Any

import pytest

from ddp_manual.errors import BadOption
from ddp_manual.training.config import TrainConfig
from ddp_manual.training.learning_rate import peak_lr
from ddp_manual.training.own_code import is_own_factory
from ddp_manual.world_spec import WorldSpec


@pytest.mark.parametrize(
    ("kind", "options", "named"),
    [
        (WorldSpec, {"world_size": 4, "rank": 4}, "--rank 4"),
        (WorldSpec, {"master_port": 65536}, "--master_port 65536 is above 65535"),
        (WorldSpec, {"master_port": 0, "world_size": 2, "rank": 1}, "port 0"),
        (WorldSpec, {"master_addr": " "}, "--master_addr is empty"),
        (WorldSpec, {"master_addr": "0.0.0.0"}, "--master_addr 0.0.0.0"),
        (WorldSpec, {"run_id": "../up"}, "--run_id"),
        (WorldSpec, {"join_timeout": 0.0}, "--join_timeout 0.0 is not above 0"),
        (TrainConfig, {"model": "folder:x/y"}, "--model folder:x/y"),
        (TrainConfig, {"dataset": "folder:"}, "--dataset folder:"),
        (TrainConfig, {"dataset": "my-data:make"}, "--dataset my-data:make"),
        (TrainConfig, {"image_size": 32}, "--image_size is for --dataset folder:PATH"),
        (TrainConfig, {"classes": "cat,,dog"}, "--classes 'cat,,dog'"),
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


def test_a_flag_comes_before_a_variable_and_a_variable_before_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "8")
    monkeypatch.setenv("RANK", "3")
    spec = WorldSpec.from_environment(rank=5)
    assert (spec.rank, spec.world_size, spec.master_port) == (5, 8, 29500)
    assert spec.named("rank") == "rank 5 (flag)"
    assert spec.named("world_size") == "world_size 8 (from WORLD_SIZE)"
    assert spec.named("master_port") == "master_port 29500 (default)"


def test_the_agent_store_is_believed_only_at_its_own_address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    monkeypatch.setenv("MASTER_PORT", "4000")
    assert WorldSpec.from_environment().agent_store
    assert not WorldSpec.from_environment(master_port=29500).agent_store


def test_the_learning_rate_grows_with_the_world_unless_the_global_batch_is_fixed() -> None:
    assert peak_lr(TrainConfig(lr=0.1), 4) == pytest.approx(0.4)
    assert peak_lr(TrainConfig(lr=0.1, lr_scaling="sqrt"), 4) == pytest.approx(0.2)
    assert peak_lr(TrainConfig(lr=0.1, lr_scaling="none"), 4) == pytest.approx(0.1)
    assert peak_lr(TrainConfig(lr=0.1, global_batch_size=200), 4) == pytest.approx(0.1)


def test_the_global_batch_is_divided_over_the_ranks_and_refused_with_one_that_can_be() -> None:
    assert TrainConfig().batch_size_per_rank(3) == 100
    assert TrainConfig(global_batch_size=200).batch_size_per_rank(4) == 50
    assert TrainConfig(global_batch_size=200).batch_size_per_rank(3, has_shrunk=True) == 66
    for world_size, advice in ((3, "198 or 201"), (400, "400")):
        with pytest.raises(BadOption) as caught:
            TrainConfig(global_batch_size=200).batch_size_per_rank(world_size)
        assert advice in caught.value.next


def test_the_ranks_must_agree_on_everything_except_the_paths() -> None:
    shared = TrainConfig(lr=0.5, sources={"lr": "flag"}).shared_options()
    assert shared["lr"] == (0.5, "flag")
    assert shared["epochs"] == (2, "default")
    assert not {"data_dir", "run_dir", "resume", "keep"} & set(shared)


def test_a_folder_whose_name_could_be_that_of_a_factory_is_a_folder() -> None:
    assert not is_own_factory(TrainConfig(dataset="folder:my_images").dataset)


def test_gradients_are_clipped_unless_sgd_is_to_be_plain() -> None:
    assert TrainConfig().most_grad_norm == 1.0
    assert TrainConfig(momentum=0.0).most_grad_norm == 0.0
    assert TrainConfig(momentum=0.0, clip_grad_norm=2.0).most_grad_norm == 2.0
    assert TrainConfig(clip_grad_norm=0.0).most_grad_norm == 0.0
