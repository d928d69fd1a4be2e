from __future__ import annotations

import torch

from ddp_manual.training.data import Split
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.transforms import Augmentation
from tests.conftest import source


def varied(images: torch.Tensor, *, shift: int, shifts: list[list[int]], flips: list[bool] | None) -> torch.Tensor:
    drawn = Augmentation(shift=shift, shifts=torch.tensor(shifts), flips=None if flips is None else torch.tensor(flips))
    return drawn(images, torch.arange(len(images)))


def test_an_image_is_moved_by_its_own_shift_and_filled_with_black() -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    images[:, 0, 1, 1] = 9
    moved = varied(images, shift=2, shifts=[[1, 0], [-1, 2]], flips=None)
    assert moved.shape == images.shape
    assert moved.nonzero().tolist() == [[0, 0, 2, 1], [1, 0, 0, 3]]


def test_an_image_is_mirrored_by_its_own_draw_and_then_moved() -> None:
    images = torch.arange(2 * 3 * 2 * 5, dtype=torch.uint8).view(2, 3, 2, 5)
    for shift in (0, 2):
        mirrored = varied(images, shift=shift, shifts=[[0, 0], [0, 0]], flips=[False, True])
        assert torch.equal(mirrored, torch.stack([images[0], images[1].flip(-1)]))
    moved = varied(images, shift=2, shifts=[[0, 0], [0, 1]], flips=[False, True])[1]
    assert torch.equal(moved[:, :, 1:], images[1].flip(-1)[:, :, :-1]) and not moved[:, :, 0].any()


def test_a_sample_is_varied_alike_on_any_rank_and_anew_each_epoch() -> None:
    first, again, next_epoch = (
        Augmentation.draw(TrainConfig(shift=1, flip=True), epoch, 1000, torch.device("cpu")) for epoch in (0, 0, 1)
    )
    assert torch.equal(first.shifts, again.shifts) and first.flips is not None and again.flips is not None
    assert torch.equal(first.flips, again.flips)
    assert not torch.equal(first.shifts, next_epoch.shifts)
    assert set(first.shifts.flatten().tolist()) == {-1, 0, 1}
    assert 400 < int(first.flips.sum()) < 600
    images = torch.randint(0, 256, (1000, 3, 4, 4), dtype=torch.uint8)
    whole = first(images, torch.arange(1000))
    share = torch.arange(1, 1000, 2)
    assert torch.equal(first(images[share], share), whole[share])


def test_each_channel_is_normalised_by_its_own_mean_and_deviation() -> None:
    images = torch.randint(0, 256, (64, 3, 8, 8), dtype=torch.uint8)
    images[:, 1] //= 2
    images[:, 2] = 7  # without any contrast
    train = Split(images, torch.zeros(64, dtype=torch.int64), ("one",))
    normalised = source("folder:any").normalise(train)(images)
    assert normalised.is_contiguous(memory_format=torch.channels_last)
    means, deviations = normalised.mean(dim=(0, 2, 3)), normalised.std(dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(means, torch.zeros(3), atol=1e-5, rtol=0)
    torch.testing.assert_close(deviations, torch.tensor([1.0, 1.0, 0.0]), atol=1e-5, rtol=0)
