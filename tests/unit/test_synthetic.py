from __future__ import annotations

import time

import pytest
import torch
from torch import Tensor

from ddp_manual.training.synthetic import IMAGE_SIZE, draw_digits


@pytest.fixture(scope="module")
def digits() -> tuple[Tensor, Tensor]:
    """More than are drawn at once, which are 2,048."""
    return draw_digits(2100, seed=1)


def test_images_are_28x28_bytes_and_labels_are_int64(digits: tuple[Tensor, Tensor]) -> None:
    images, labels = digits
    assert images.shape == (2100, IMAGE_SIZE, IMAGE_SIZE) and images.dtype == torch.uint8
    assert labels.shape == (2100,) and labels.dtype == torch.int64


def test_the_same_seed_draws_the_same_digits_with_any_number_of_threads(digits: tuple[Tensor, Tensor]) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1 if threads > 1 else 2)
    try:
        images, labels = draw_digits(2100, seed=1)
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(images, digits[0]) and torch.equal(labels, digits[1])


def test_another_seed_draws_other_digits(digits: tuple[Tensor, Tensor]) -> None:
    images, labels = draw_digits(300, seed=2)
    assert not torch.equal(labels, digits[1][:300])
    assert not (images.flatten(1) == digits[0][:300].flatten(1)).all(dim=1).any()


def test_no_two_digits_are_the_same(digits: tuple[Tensor, Tensor]) -> None:
    assert len(digits[0].flatten(1).unique(dim=0)) == len(digits[0])


def test_drawing_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    draw_digits(10, seed=1)
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("count", [1, 7, 2048, 2049])
def test_a_smaller_count_draws_the_first_digits(count: int, digits: tuple[Tensor, Tensor]) -> None:
    images, labels = draw_digits(count, seed=1)
    assert torch.equal(images, digits[0][:count]) and torch.equal(labels, digits[1][:count])


def test_a_count_of_zero_draws_nothing() -> None:
    images, labels = draw_digits(0, seed=1)
    assert images.shape == (0, IMAGE_SIZE, IMAGE_SIZE) and images.dtype == torch.uint8
    assert labels.shape == (0,) and labels.dtype == torch.int64


def test_every_digit_is_drawn_about_equally_often(digits: tuple[Tensor, Tensor]) -> None:
    share = digits[1].bincount(minlength=10) / len(digits[1])
    assert len(share) == 10
    # 2,100 draws: five standard deviations of a tenth are 0.033.
    assert (share - 0.1).abs().max() < 0.033


def test_the_order_of_the_digits_is_mixed(digits: tuple[Tensor, Tensor]) -> None:
    repeats = (digits[1][1:] == digits[1][:-1]).float().mean()
    assert 0.05 < repeats < 0.15


def test_every_image_has_full_ink_and_bare_paper(digits: tuple[Tensor, Tensor]) -> None:
    pixels = digits[0].flatten(1)
    assert (pixels.amin(dim=1) == 0).all()
    assert (pixels.amax(dim=1) > 150).all()


def test_brightness_is_like_mnist(digits: tuple[Tensor, Tensor]) -> None:
    pixels = digits[0].float()
    # MNIST's training images: mean 33.3, standard deviation 78.6.
    assert 30 < pixels.mean() < 40
    assert 72 < pixels.std() < 86


def test_ink_is_centred(digits: tuple[Tensor, Tensor]) -> None:
    ink = digits[0].double()
    pixel = torch.arange(IMAGE_SIZE, dtype=torch.float64)
    total = ink.sum(dim=(1, 2))
    for centre in (ink.sum(dim=1) @ pixel / total, ink.sum(dim=2) @ pixel / total):
        assert abs(centre.mean() - 13.5) < 1.5
        assert ((centre - 13.5).abs() < 3).all()


def test_hardly_any_ink_is_near_the_border(digits: tuple[Tensor, Tensor]) -> None:
    ink = digits[0].double()
    assert 1 - ink[:, 2:-2, 2:-2].sum() / ink.sum() < 0.01


def test_shapes_of_one_digit_are_more_alike_than_shapes_of_two(digits: tuple[Tensor, Tensor]) -> None:
    pixels, labels = digits[0].flatten(1).float(), digits[1]
    means = torch.stack([pixels[labels == digit].mean(dim=0) for digit in range(10)])
    nearest = torch.cdist(pixels, means).argmin(dim=1)
    # Chance is 0.1; nearest means read about 0.8 of MNIST's digits.
    assert (nearest == labels).float().mean() > 0.6


def test_2000_digits_are_drawn_within_5_seconds() -> None:
    start = time.process_time()  # the machine has other work too
    draw_digits(2000, seed=3)
    assert time.process_time() - start < 5
