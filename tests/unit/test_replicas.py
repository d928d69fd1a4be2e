"""What ranks compare of their replicas, and the digest that they compare first."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import ddp_manual
from ddp_manual.errors import BadOption
from ddp_manual.training import check_replicas, replica_digests
from ddp_manual.training.replica_digests import SMALL, Value, collect, digest

DTYPES = (
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128),
)


def of(*tensors: Tensor) -> int:
    return digest([Value(str(number), tensor) for number, tensor in enumerate(tensors)])


def network() -> nn.Sequential:
    return nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(72, 3))


def names(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> list[str]:
    return list(collect(model, optimizer).structure())


def after_a_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    def loss() -> float:
        optimizer.zero_grad()
        total = model(torch.ones(4, 1, 8, 8)).square().sum()
        total.backward()
        return total.item()

    optimizer.step(loss)
    return optimizer


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3,), (5, 7), (3, SMALL, 9)], ids=str)
def test_each_bit_of_a_tensor_counts_in_its_digest(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    drawn = random.Random(0)
    size = torch.zeros(shape, dtype=dtype).nbytes
    data = bytearray(drawn.randbytes(size) if dtype is not torch.bool else bytes(drawn.choices((0, 1), k=size)))
    before = of(torch.frombuffer(data, dtype=dtype).reshape(shape))
    assert before == of(torch.frombuffer(bytearray(data), dtype=dtype).reshape(shape).clone())
    for _ in range(10):
        place, bit = drawn.randrange(size), 0 if dtype is torch.bool else drawn.randrange(8)
        data[place] ^= 1 << bit
        assert of(torch.frombuffer(data, dtype=dtype).reshape(shape)) != before
        data[place] ^= 1 << bit


def test_the_digest_depends_on_places_and_on_which_tensor_has_a_value() -> None:
    one, other = torch.randn(100), torch.randn(100)
    assert of(one, other) != of(other, one)
    assert of(one) != of(one.flip(0))
    big = torch.randn(3 * replica_digests.PIECE["cpu"])
    assert of(big) != of(big.roll(2 * replica_digests.PIECE["cpu"]))


def test_constants_and_powers_of_two_do_not_collide() -> None:
    """Their bits are few, and the same in every word, so that a plain sum of products would often be the same."""
    constants = {of(torch.full((count,), 2.0**power)) for count in range(64, 512, 64) for power in range(-60, 60)}
    assert len(constants) == 7 * 120
    one_negative = torch.ones(64, 64) - 2 * torch.eye(64)
    pairs = {of(0.0 * one * other) for place, one in enumerate(one_negative) for other in one_negative[:place]}
    assert len(pairs) == 64 * 63 // 2


@pytest.mark.parametrize(("copied", "compared"), [(True, []), (False, ["table"])])
def test_what_ddp_copies_from_rank_0_or_was_told_to_ignore_is_not_compared(
    process_group: None, copied: bool, compared: list[str]
) -> None:
    model: Any = nn.Linear(2, 2)
    model.register_buffer("table", torch.arange(4))
    model._ddp_params_and_buffers_to_ignore = ["bias"]
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer = torch.optim.Adam(model.parameters())
    optimizer.step()
    wrapped = DistributedDataParallel(model)
    wrapped.broadcast_buffers = copied  # torch 2.15 renamed the option, not the attribute
    assert names(wrapped) == ["weight", *compared]
    found = names(wrapped, optimizer)
    assert "exp_avg of weight" in found and not [name for name in found if "bias" in name]


def test_the_state_of_an_optimizer_is_named_by_its_parameter_and_none_is_created() -> None:
    model = network()
    assert names(model) == ["0.weight", "0.bias", "1.weight", "1.bias", "3.weight", "3.bias"]  # and no statistics
    optimizer: torch.optim.Optimizer = torch.optim.Adam(model.parameters())
    collect(model, optimizer)
    assert len(optimizer.state) == 0
    found = collect(model, after_a_step(model, optimizer)).structure()
    assert found["exp_avg of 3.weight"] == "float32[3, 72]"
    assert found["step of 0.bias"] == "float32[]"
    assert found["betas of parameter group 0[1]"] == "number"
    found = collect(model, after_a_step(model, torch.optim.LBFGS(model.parameters(), max_iter=3))).structure()
    assert "old_dirs of 0.weight[0]" in found and "func_evals of 0.weight" in found


def test_replicated_tensors_of_a_mesh_are_compared_and_sharded_ones_are_left_out(process_group: None) -> None:
    mesh = init_device_mesh("cpu", (1,))
    model = nn.Linear(4, 4)
    model.weight = nn.Parameter(distribute_tensor(model.weight.detach(), mesh, [Shard(0)]))
    model.bias = nn.Parameter(distribute_tensor(model.bias.detach(), mesh, [Replicate()]))
    optimizer = torch.optim.Adam(model.parameters())
    model.weight.grad, model.bias.grad = torch.ones_like(model.weight), torch.ones_like(model.bias)
    optimizer.step()
    state = collect(model, optimizer)
    assert state.left_out == ["weight", "exp_avg of weight", "exp_avg_sq of weight"]
    assert "bias" in state.structure() and "exp_avg of bias" in state.structure()


def test_parameters_that_fsdp1_shards_are_left_out() -> None:
    class FullyShardedDataParallel(nn.Sequential):
        """Named as torch's, which shards on a GPU only."""

    model = nn.Sequential(nn.Linear(2, 2), FullyShardedDataParallel(nn.Linear(2, 2)))
    assert collect(model, None).left_out == ["1.0.weight", "1.0.bias"]


def test_alone_and_without_a_process_group_there_is_nothing_to_compare(process_group: None) -> None:
    ddp_manual.check_replicas(nn.LazyLinear(3))
    with pytest.raises(BadOption, match="check_replicas cannot take the tolerance"):
        ddp_manual.check_replicas(nn.Linear(1, 1), tolerance=float("nan"))
    dist.destroy_process_group()
    ddp_manual.check_replicas(nn.LazyLinear(3))


def test_most_ranks_are_right_and_of_two_the_lower_one() -> None:
    assert check_replicas._majority([7, 8, 8]) == [1, 2]
    assert check_replicas._majority([8, 7]) == [0]
    assert check_replicas._majority([1, 2, 2, 1]) == [0, 3]
