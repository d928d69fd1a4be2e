from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import DistributedSampler

from ddp_manual.errors import BadOption
from ddp_manual.training import ddp, meter, models, options
from ddp_manual.training.options import TrainConfig
from ddp_manual.training.position import EpochPlan, Position, steps_until_sync
from tests.conftest import source


def shares_of_an_epoch(count: int, world_size: int, batch: int, *, start: int = 0) -> list[list[torch.Tensor]]:
    """By rank, what it takes in each step from ``start`` on."""
    plan = EpochPlan(TrainConfig(seed=7), count, world_size, batch // world_size)
    order, steps = plan.order(3), range(start, count, batch)
    return [
        [plan.share(order, first, min(count, first + batch), rank) for first in steps] for rank in range(world_size)
    ]


@pytest.mark.parametrize("world_size", [1, 4])
def test_the_shares_are_those_of_distributed_sampler_where_the_ranks_divide_the_samples(world_size: int) -> None:
    for rank, steps in enumerate(shares_of_an_epoch(60, world_size, 3 * world_size)):
        sampler = DistributedSampler(range(60), num_replicas=world_size, rank=rank, seed=7)  # type: ignore[arg-type]
        sampler.set_epoch(3)
        assert torch.cat(steps).tolist() == list(sampler)


@pytest.mark.parametrize("then", [1, 3, 4])
def test_two_ranks_stop_and_others_take_what_remains_of_the_epoch(then: int) -> None:
    """Each sample once, though 61 can be divided by no number of ranks."""
    before = [torch.cat(steps[:5]) for steps in shares_of_an_epoch(61, 2, 6)]
    after = [torch.cat(steps) for steps in shares_of_an_epoch(61, then, 3 * then, start=5 * 6)]
    assert sorted(torch.cat([*before, *after]).tolist()) == list(range(61))


def test_a_batch_larger_than_a_ranks_share_and_synchronised_batch_normalisation_without_a_gpu_are_bad_options() -> None:
    assert EpochPlan(TrainConfig(), 100, 2, 50).batch == 100
    with pytest.raises(BadOption, match="batch of 51"):
        EpochPlan(TrainConfig(), 100, 2, 51)
    with pytest.raises(BadOption):
        EpochPlan(TrainConfig(), 3, 4, 1)
    with pytest.raises(BadOption, match="--sync_bn needs GPUs"):
        models.build("convnet", device=torch.device("cpu"), seed=0, sync_bn=True)


@pytest.mark.parametrize("name", options.MODELS)
@pytest.mark.parametrize(("shape", "classes"), [((1, 28, 28), 10), ((3, 32, 32), 2), ((3, 33, 40), 7)])
def test_a_network_fits_its_images_and_has_the_same_weights_for_the_same_seed(
    name: str, shape: tuple[int, int, int], classes: int
) -> None:
    first, second, other = (
        models.build(name, device=torch.device("cpu"), seed=seed, shape=shape, classes=classes) for seed in (1, 1, 2)
    )
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(first.parameters(), other.parameters(), strict=True))
    assert first(torch.zeros(3, *shape)).shape == (3, classes)


@pytest.mark.parametrize("name", options.MODELS)
def test_images_that_a_network_would_pool_to_nothing_are_refused(name: str) -> None:
    def build(height: int, width: int) -> nn.Module:
        return models.build(name, device=torch.device("cpu"), seed=0, shape=(1, height, width))

    smallest = models.MODELS[name].smallest
    for side in range(1, smallest):
        with pytest.raises(BadOption, match=f"--model {name} needs images of at least {smallest}x{smallest}"):
            build(28, side)
    assert build(smallest, smallest)(torch.zeros(2, 1, smallest, smallest)).shape == (2, 10)


def test_every_name_that_an_option_accepts_exists() -> None:
    assert set(options.MODELS) == set(models.MODELS)
    assert [source(name).name for name in options.DATASETS] == list(options.DATASETS)


@pytest.mark.parametrize("shape", ["linear", "cosine", "constant"])
def test_the_learning_rate_warms_up_to_its_peak_and_then_decays(shape: str) -> None:
    """By samples, so that steps of another size come as far."""
    plan = EpochPlan(TrainConfig(lr=1.0, warmup_epochs=1, epochs=11, lr_schedule=shape), 30, 1, 3)
    rates = [plan.lr(3 * step, 3) for step in range(110)]
    assert rates[:10] == pytest.approx([(step + 1) / 10 for step in range(10)])
    assert rates[10] == pytest.approx(1.0)
    assert rates[60] == plan.lr(180, 12) == pytest.approx(1.0 if shape == "constant" else 0.5)
    assert rates[-1] == pytest.approx(1.0 if shape == "constant" else 0.0, abs=0.02)
    assert plan.lr(27, 6) == 1.0  # the middle of a step counts


def test_positions_add_up_to_the_epoch_and_the_last_step_takes_what_is_left() -> None:
    plan = EpochPlan(TrainConfig(epochs=2, checkpoint_every=1, checkpoint_steps=2), 25, 1, 10)
    position, taken = Position(), []
    while not plan.epoch_ended(position):
        position = plan.after_a_step(position)
        taken.append(position.taken)
    assert taken == [10, 20, 25]
    assert plan.steps(position.next_epoch()) == plan.steps(Position()) == 6
    assert plan.seen(position.next_epoch()) == 25


def test_a_checkpoint_is_due_every_so_many_steps_and_epochs_and_at_the_end() -> None:
    plan = EpochPlan(TrainConfig(epochs=5, checkpoint_every=2, checkpoint_steps=3), 20, 1, 10)
    assert [step for step in range(1, 10) if plan.saves(Position(step=step))] == [3, 6, 9]
    assert [n for n in range(1, 6) if plan.saves_epoch(Position(epoch=n, step=2 * n))] == [2, 3, 4, 5]
    by_steps = EpochPlan(TrainConfig(epochs=5, checkpoint_every=0, checkpoint_steps=7), 20, 1, 10)
    assert [n for n in range(1, 6) if by_steps.saves_epoch(Position(epoch=n, step=2 * n))] == [5]
    never = EpochPlan(TrainConfig(epochs=5, checkpoint_every=0, checkpoint_steps=0), 20, 1, 10)
    assert not any(never.saves_epoch(Position(epoch=n, step=2 * n)) or never.saves(Position(step=n)) for n in range(6))


@pytest.mark.parametrize(("seconds", "steps"), [(1.0, [1, 1, 1, 1]), (0.24, [1, 4, 4, 4]), (0.01, [1, 90, 99, 99])])
def test_steps_that_a_device_takes_after_their_launch_has_returned_count_once_they_are_done(
    monkeypatch: pytest.MonkeyPatch, seconds: float, steps: list[int]
) -> None:
    """The device is a fake, for want of a GPU: a launch takes 1 ms, a step ``seconds``, and only a copy to the host
    waits for the steps."""
    now = done = 0.0

    def wait(tensor: Tensor) -> Tensor:
        nonlocal now
        now = max(now, done)
        return tensor

    monkeypatch.setattr(meter, "time", SimpleNamespace(perf_counter=lambda: now))
    monkeypatch.setattr(ddp, "to_host", wait)
    measured, taken = meter.Meter(torch.device("cpu")), []
    measured.begin(0)
    for _ in steps:
        taken.append(steps_until_sync(measured.seconds_per_step))
        for _ in range(taken[-1]):
            now += 0.001
            done = max(done, now) + seconds
            measured.add(sum(taken), torch.tensor(0.5), torch.eye(3), torch.arange(3))
        measured.sync(sum(taken), 0.1)
    assert taken == steps


@pytest.mark.gpu
def test_steps_of_a_gpu_count_once_they_are_done() -> None:
    device = torch.device("cuda", 0)
    measured, taken = meter.Meter(device), []
    batch = [tensor.to(device) for tensor in (torch.tensor(0.5), torch.eye(3), torch.arange(3))]
    measured.begin(0)
    for _ in range(4):
        taken.append(steps_until_sync(measured.seconds_per_step))
        for _ in range(taken[-1]):
            torch.cuda._sleep(400_000_000)  # about 0.2 s
            measured.own_work.start()
            measured.own_work.stop()
            measured.add(sum(taken), *batch)
        measured.sync(sum(taken), 0.1)
    assert taken[0] == 1 and all(2 <= steps <= 12 for steps in taken[1:]), taken
