"""A network of the user's own is tried out before the ranks train with it."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace

import numpy
import pytest
import torch
from torch import Tensor, nn

from ddp_manual import TrainConfig, progress_bar
from ddp_manual.errors import BadOption, TrainingFailed
from ddp_manual.training import data, models, own_factory
from ddp_manual.training.data import Split
from ddp_manual.training.trainer import Trainer
from ddp_manual.training.transforms import unit_scale
from tests.alone import alone

CPU = torch.device("cpu")
SHAPE, CLASSES = (3, 8, 8), 2
Build = Callable[..., nn.Module]


@pytest.fixture
def build(monkeypatch: pytest.MonkeyPatch) -> Build:
    """The network that ``--model mine:net`` is where its factory returns this one."""

    def build(returned: nn.Module, channels: int = 3) -> nn.Module:
        monkeypatch.setattr(own_factory, "factory", lambda *_: lambda: returned)
        return models.build("mine:net", device=CPU, seed=0, shape=(channels, 8, 8), classes=CLASSES)

    return build


def fewest_samples(network: nn.Module, *, with_ddp: bool = False) -> int:
    return models.fewest_samples("mine:net", network, CPU, SHAPE, CLASSES, with_ddp=with_ddp)


class Convolved(nn.Module):
    """As in the tutorials, with a view of what comes out of a convolution."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.convolution, self.fc = nn.Conv2d(channels, 4, 3, padding=1), nn.Linear(4 * 8 * 8, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.fc(self.convolution(images).view(-1, 4 * 8 * 8))
        return scores


class Linear(nn.Module):
    def __init__(self, *between: nn.Module) -> None:
        super().__init__()
        self.all = nn.Sequential(nn.Flatten(), nn.Linear(192, 6), *between, nn.Linear(6, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        scores: Tensor = self.all(images)
        return scores


@pytest.mark.parametrize("channels", [1, 3])
def test_a_users_network_may_call_view_after_a_convolution_or_be_lazy(build: Build, channels: int) -> None:
    moved = torch.zeros(5, 8, 8, channels).permute(0, 3, 1, 2)
    for network in (Convolved(channels), nn.Sequential(nn.Flatten(), nn.LazyLinear(CLASSES))):
        built = build(network, channels)
        assert built(moved).shape == (5, CLASSES)
        assert set(built.state_dict()) == set(network.state_dict())


def test_a_layer_that_a_factory_has_put_into_eval_mode_stays_there(build: Build) -> None:
    frozen = nn.BatchNorm1d(6).eval()
    network = build(Linear(frozen))
    assert network.training and not frozen.training
    with models.evaluating(network):
        assert not network.training
    assert network.training and not frozen.training
    assert build(Linear(frozen).eval()).training and frozen.training, "a network that is not in training at all"


def test_a_network_that_cannot_be_trained_on_one_sample_is_found_before_training(build: Build) -> None:
    network = build(Linear(nn.BatchNorm1d(6), nn.Dropout()))
    state = {name: value.clone() for name, value in network.state_dict().items()}
    drawn = torch.get_rng_state()
    assert fewest_samples(network) == 2
    assert fewest_samples(build(Linear())) == fewest_samples(build(Convolved(3))) == 1
    assert all(torch.equal(value, state[name]) for name, value in network.state_dict().items())
    assert torch.equal(torch.get_rng_state(), drawn)
    assert network.training and all(parameter.grad is None for parameter in network.parameters())


def test_parameters_without_a_gradient_are_named_where_ddp_would_wait_for_them(build: Build) -> None:
    network = Linear()
    network.spare = nn.Linear(3, 3)
    build(network)
    assert fewest_samples(network) == 1
    with pytest.raises(BadOption, match=r"spare.weight, spare.bias") as caught:
        fewest_samples(network, with_ddp=True)
    assert "requires_grad_(False)" in caught.value.next
    network.spare.requires_grad_(False)
    assert fewest_samples(network, with_ddp=True) == 1


def test_a_state_that_no_checkpoint_can_hold_is_refused(build: Build) -> None:
    class Remembering(Linear):
        state: object = {"seen": 3, "names": ["a"]}

        def get_extra_state(self) -> object:
            return self.state

    build(Remembering())
    Remembering.state = lambda: None
    with pytest.raises(BadOption, match="cannot be read back without running code, in _extra_state"):
        build(Remembering())


def trainer_of(network: nn.Module, samples: int, *, fewest: int = 1, no_ddp: bool = True) -> Trainer:
    """For an epoch of batches of four."""
    drawn = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (samples, *SHAPE), generator=drawn, dtype=torch.uint8)
    split = Split(images, torch.arange(samples) % CLASSES, data.DIGITS[:CLASSES])
    config = TrainConfig(batch_size=4, epochs=1, no_ddp=no_ddp, lr_schedule="constant")
    with alone() as world:
        return Trainer(world, config, network, data.Data(split, split, unit_scale(3)), fewest_samples=fewest)


def trained(network: nn.Module, *, samples: int, fewest: int, no_ddp: bool = True) -> list[Tensor]:
    """The parameters after an epoch."""
    trainer = trainer_of(network, samples, fewest=fewest, no_ddp=no_ddp)
    trainer.train_epoch(progress_bar.ProgressLines())
    assert trainer.position.taken == samples
    return [parameter.detach().clone() for parameter in network.parameters()]


def test_a_last_batch_of_one_sample_is_filled_with_another_that_does_not_count() -> None:
    alone, filled = (
        trained(models.build("mlp", device=CPU, seed=0, shape=SHAPE, classes=CLASSES), samples=9, fewest=fewest)
        for fewest in (1, 2)
    )
    for one, other in zip(alone, filled, strict=True):
        torch.testing.assert_close(one, other)
    trained(Linear(nn.BatchNorm1d(6)), samples=9, fewest=2)
    trainer_of(Linear(nn.BatchNorm1d(6)), 9, fewest=2).settle_buckets()


@pytest.mark.parametrize(("name", "fewest"), [("mlp", 0), (f"{__name__}:Linear", 1)])
def test_with_sync_bn_only_our_own_networks_have_to_take_no_samples(name: str, fewest: int) -> None:
    images, config = torch.zeros(9, *SHAPE, dtype=torch.uint8), TrainConfig(model=name, batch_size=4, sync_bn=True)
    split = Split(images, torch.zeros(9, dtype=torch.int64), data.DIGITS[:CLASSES])
    with alone() as world:
        second = replace(world, rank=1, world_size=2)
        trainer = Trainer(second, replace(config, no_ddp=True), Linear(), data.Data(split, split, unit_scale(3)))
    taken, labels, counted = trainer._share_of_step(*trainer._draw_epoch(0), 8, 9)
    assert (len(taken), len(labels), counted) == (fewest, fewest, 0)


def test_what_a_network_draws_in_a_step_follows_from_the_seed_of_the_run_and_the_step() -> None:
    drawn: list[tuple[float, ...]] = []
    for drawn_before in range(2):
        random.seed(drawn_before)
        numpy.random.seed(drawn_before)
        network = Linear()
        network.register_forward_hook(
            lambda *_: drawn.append((random.random(), numpy.random.random(), torch.rand(()).item()))
        )
        trained(network, samples=8, fewest=1)
    assert drawn[:2] == drawn[2:] and not {*drawn[0]} & {*drawn[1]}


def test_parameters_that_only_some_steps_use_are_named(process_group: None) -> None:
    class Varying(Linear):
        steps = 0

        def forward(self, images: Tensor) -> Tensor:
            self.steps += 1
            scores = super().forward(images)
            return scores if self.steps > 2 else scores + self.get_submodule("12")(scores)

    network = Varying()
    network.add_module("12", nn.Linear(CLASSES, CLASSES))  # as in a Sequential
    with pytest.raises(TrainingFailed, match=r"in a step: 12\.weight, 12\.bias\n") as caught:
        trained(network, samples=16, fewest=1, no_ddp=False)
    assert "--no_ddp" in caught.value.next


def test_a_compiled_network_is_saved_and_read_under_its_own_names(build: Build) -> None:
    plain = Linear(nn.BatchNorm1d(6))
    compiled = build(torch.compile(plain, backend="eager"))
    state = compiled.state_dict()
    assert list(state) == list(plain.state_dict())
    normalised, loaded = nn.BatchNorm1d(6), list[object]()
    normalised.register_load_state_dict_pre_hook(lambda *arguments: loaded.append(arguments[3]))
    other = build(torch.compile(Linear(normalised), backend="eager"))
    other.load_state_dict(state)
    assert loaded == [{"version": 2}]
    assert all(torch.equal(one, state[name]) for name, one in other.state_dict().items())
    assert fewest_samples(other) == 2


def test_a_test_loss_that_is_not_finite_is_told_from_a_divergence() -> None:
    network, never_the_first = Linear(), torch.tensor([-torch.inf, 0.0])
    network.register_forward_hook(lambda network, _, scores: scores if network.training else scores + never_the_first)
    trainer = trainer_of(network, 8)
    trainer.train_epoch(progress_bar.ProgressLines())
    with pytest.raises(TrainingFailed, match="the test loss is inf after epoch 1") as caught:
        trainer.evaluate()
    assert "in eval() mode only" in caught.value.why
