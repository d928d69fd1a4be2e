"""Whether all ranks have read the same data, and a run that goes on has what it began with."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_manual import TrainConfig
from ddp_manual.errors import CheckpointMismatch, DataDiffers
from ddp_manual.training import checkpoint, ddp
from ddp_manual.training.agreement import compare_data, fingerprint
from ddp_manual.training.data import Split
from ddp_manual.training.epoch_plan import Position
from tests.conftest import REPOSITORY

SPLIT = Split(torch.arange(8, dtype=torch.uint8).view(2, 1, 2, 2), torch.tensor([0, 1]), ("cat", "dog"))


def compare(
    monkeypatch: pytest.MonkeyPatch, others: Split, hosts: list[str], *, own_factory: bool = False
) -> tuple[str, str]:
    """As rank 0 of two sees it, whose test part is the same as the other's."""

    def gathered(mine: Tensor) -> list[Tensor]:
        return [mine, torch.tensor([fingerprint(others), fingerprint(SPLIT)])]

    monkeypatch.setattr(ddp, "all_gather", gathered)
    world: Any = SimpleNamespace(device=torch.device("cpu"), roster=lambda: [{"host": host} for host in hosts])
    return compare_data(world, SPLIT, SPLIT, own_factory=own_factory)


@pytest.mark.parametrize(
    ("own_factory", "then"), [(False, "copy rank 0's --data_dir"), (True, "have the factory return the same data")]
)
def test_what_to_do_about_other_data_depends_on_what_returned_them(
    monkeypatch: pytest.MonkeyPatch, own_factory: bool, then: str
) -> None:
    other = replace(SPLIT, labels=torch.tensor([1, 0]))
    with pytest.raises(DataDiffers, match=r"the data on b are not those of rank 0") as caught:
        compare(monkeypatch, other, ["a", "b"], own_factory=own_factory)
    assert then in (caught.value.next or "")
    assert "train: rank 1" in caught.value.why and "test: " not in caught.value.why


def test_other_names_of_classes_are_other_data_but_the_same_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    renamed = replace(SPLIT, classes=("dog", "cat"))
    with pytest.raises(DataDiffers):
        compare(monkeypatch, renamed, ["a", "b"])
    train, test = compare(monkeypatch, SPLIT, ["a", "b"])
    assert train == test and len(train) == 32
    assert fingerprint(renamed)[:3] == fingerprint(SPLIT)[:3]


def test_a_run_does_not_resume_with_other_data(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(REPOSITORY / "examples"))
    config = TrainConfig(dataset="my_shapes:shapes")

    def options(digest: str) -> dict[str, Any]:
        return checkpoint.options_of(config, replace(SPLIT, digest=digest), SPLIT)

    def resume(then: dict[str, Any], now: dict[str, Any]) -> None:
        saved: Any = SimpleNamespace(options=then, position=Position())
        checkpoint._check_options(tmp_path / "step.pt", saved, config, now)

    then = options("1a")
    resume(then, options("1a"))
    with pytest.raises(CheckpointMismatch, match="is of a run on other data") as caught:
        resume(then, options("2b"))
    assert "1a in the checkpoint / 2b here" in caught.value.why
