"""The digits that are drawn in code."""

from __future__ import annotations

import pytest
import torch

from ddp_manual.training.synthetic import IMAGE_SIZE, draw_digits


@pytest.mark.parametrize("count", [0, 2049])
def test_the_same_seed_draws_the_same_digits_and_a_smaller_count_the_first_of_them(count: int) -> None:
    """At once 2,048 are drawn."""
    more_images, more_labels = draw_digits(2100, seed=1)
    threads, before = torch.get_num_threads(), torch.get_rng_state()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        images, labels = draw_digits(count, seed=1)
    finally:
        torch.set_num_threads(threads)
    assert images.shape == (count, IMAGE_SIZE, IMAGE_SIZE) and images.dtype == torch.uint8
    assert labels.shape == (count,) and labels.dtype == torch.int64
    assert torch.equal(images, more_images[:count]) and torch.equal(labels, more_labels[:count])
    assert torch.equal(torch.get_rng_state(), before)
