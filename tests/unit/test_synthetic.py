from __future__ import annotations

import pytest
import torch
from torch import Tensor

from ddp_manual.training.synthetic import IMAGE_SIZE, draw_digits


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """More than are drawn at once, which are 2,048."""
    return draw_digits(2100, seed=1)


@pytest.mark.parametrize("count", [0, 2049])
def test_the_same_seed_draws_the_same_digits_and_a_smaller_count_the_first_of_them(
    count: int, digits: tuple[Tensor, Tensor]
) -> None:
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        images, labels = draw_digits(count, seed=1)
    finally:
        torch.set_num_threads(threads)
    assert images.shape == (count, IMAGE_SIZE, IMAGE_SIZE) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert torch.equal(images, digits[0][:count]) and torch.equal(labels, digits[1][:count])
    assert torch.equal(torch.get_rng_state(), before)


def test_every_digit_is_drawn_about_equally_often_and_in_mixed_order(digits: tuple[Tensor, Tensor]) -> None:
    labels = digits[1]
    # 2,100 draws: five standard deviations of a tenth are 0.033.
    assert (labels.bincount(minlength=10) / len(labels) - 0.1).abs().max() < 0.033
    assert 0.05 < (labels[1:] == labels[:-1]).float().mean() < 0.15
