from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import DistributedSampler

from ddp_manual import config
from ddp_manual.errors import BadOption
from ddp_manual.training import data, models
from ddp_manual.training.models import ConvNet
from ddp_manual.training.schedule import Schedule


@pytest.mark.parametrize(("count", "world_size"), [(60, 4), (61, 4), (3, 8), (1, 3)])
@pytest.mark.parametrize("epoch", [0, 3])
def test_the_shards_are_those_of_distributed_sampler(count: int, world_size: int, epoch: int) -> None:
    for rank in range(world_size):
        sampler = DistributedSampler(range(count), num_replicas=world_size, rank=rank, seed=7)  # type: ignore[arg-type]
        sampler.set_epoch(epoch)
        ours = data.shard(count, rank=rank, world_size=world_size, seed=7, epoch=epoch)
        assert ours.tolist() == list(sampler)


def test_the_shards_of_an_epoch_are_disjoint_and_whole() -> None:
    shards = [data.shard(100, rank=rank, world_size=4, seed=0, epoch=1) for rank in range(4)]
    assert sorted(torch.cat(shards).tolist()) == list(range(100))


def test_the_global_batch_is_the_same_whatever_the_world_size() -> None:
    alone = data.shard(120, rank=0, world_size=1, seed=0, epoch=0).split(12)
    for world_size in (2, 4):
        shards = [data.shard(120, rank=r, world_size=world_size, seed=0, epoch=0) for r in range(world_size)]
        for batch, expected in enumerate(alone):
            together = torch.cat([shard.split(12 // world_size)[batch] for shard in shards])
            assert sorted(together.tolist()) == sorted(expected.tolist())


def test_an_image_is_moved_by_its_own_shift_and_filled_with_black() -> None:
    images = torch.zeros(2, 1, 4, 4, dtype=torch.uint8)
    images[:, 0, 1, 1] = 9
    moved = data.shifted(images, torch.tensor([[1, 0], [-1, 2]]), most=2)
    assert moved.shape == images.shape
    assert moved[0].nonzero().tolist() == [[0, 2, 1]]
    assert moved[1].nonzero().tolist() == [[0, 0, 3]]
    assert torch.equal(data.shifted(images, torch.zeros(2, 2, dtype=torch.int64), most=1), images)


def test_shifts_are_the_same_for_a_sample_on_any_rank_and_new_each_epoch() -> None:
    first = data.draw_shifts(1000, 1, seed=0, epoch=0)
    assert torch.equal(first, data.draw_shifts(1000, 1, seed=0, epoch=0))
    assert not torch.equal(first, data.draw_shifts(1000, 1, seed=0, epoch=1))
    assert set(first.flatten().tolist()) == {-1, 0, 1}


def test_a_batch_larger_than_a_ranks_share_is_a_bad_option() -> None:
    data.check_batch_fits(100, 50, 2)
    with pytest.raises(BadOption, match="batch of 51"):
        data.check_batch_fits(100, 51, 2)
    with pytest.raises(BadOption):
        data.check_batch_fits(3, 1, 4)


def test_pooling_before_relu_computes_what_relu_before_pooling_does() -> None:
    torch.manual_seed(0)
    ours = ConvNet()
    textbook = nn.Sequential(
        ours.layer1[0], ours.layer1[1], nn.ReLU(), nn.MaxPool2d(2),
        ours.layer2[0], ours.layer2[1], nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), ours.fc,
    )  # fmt: skip
    images = torch.randn(16, 1, 28, 28)
    gradients = []
    for network in (ours, textbook):
        ours.zero_grad()
        network(images).square().sum().backward()
        gradients.append([parameter.grad.clone() for parameter in ours.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)
    ours.eval(), textbook.eval()
    torch.testing.assert_close(ours(images), textbook(images))


@pytest.mark.parametrize("name", config.MODELS)
def test_a_network_has_the_same_weights_for_the_same_seed(name: str) -> None:
    first, second, other = (models.build(name, device=torch.device("cpu"), seed=seed) for seed in (1, 1, 2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first(torch.zeros(3, 1, 28, 28)).shape == (3, 10)


def test_synchronised_batch_normalisation_is_refused_where_torch_has_none() -> None:
    with pytest.raises(BadOption, match="--sync_bn needs GPUs"):
        models.build("convnet", device=torch.device("cpu"), seed=0, sync_bn=True)


def test_every_name_an_option_accepts_is_there() -> None:
    assert set(config.MODELS) == set(models.MODELS)
    assert set(config.DATASETS) == set(data.SOURCES)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
def test_the_learning_rate_warms_up_to_its_peak_and_then_decays(shape: str) -> None:
    schedule = Schedule(peak=1.0, warmup_steps=10, total_steps=110, shape=shape)
    rates = [schedule.lr(step) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == pytest.approx(1.0 if shape == "constant" else 0.5)
    assert rates[-1] == pytest.approx(1.0 if shape == "constant" else 0.0, abs=0.02)


def test_a_run_shorter_than_its_warm_up_still_has_a_learning_rate_at_each_step() -> None:
    schedule = Schedule(peak=1.0, warmup_steps=5, total_steps=5, shape="linear")
    assert [schedule.lr(step) for step in range(5)] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
