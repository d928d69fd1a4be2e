"""Whether all ranks have read the same data."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from ddp_manual.errors import DataDiffers
from ddp_manual.training import ddp
from ddp_manual.training.agreement import compare_data, fingerprint
from ddp_manual.training.data import Split

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
