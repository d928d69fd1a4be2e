"""Ranks whose parameters or optimizer states differ, in real processes: in our training, in a script that joins, and in
one that opens its process group itself."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
import time
from pathlib import Path

import pytest
import torch

from tests.catalogue import record
from tests.clock import said
from tests.conftest import REPOSITORY, RankProcess, Start
from tests.world.test_rendezvous import last_error

# One rank changes a weight of its own, once, and says when.
CHANGING = """
import os, time
import torch
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer1 = nn.Linear(256, 8)
        self.layer2 = nn.Linear(8, 2)
        self.calls = 0

    def forward(self, images):
        self.calls += self.training  # also a few before the first step
        if self.calls == 8 and self.training and os.environ["RANK"] == "{rank}":
            with torch.no_grad():
                self.layer1.weight[2, 7] += 64
            print("changed at", time.monotonic(), flush=True)
        return self.layer2(self.layer1(images.flatten(1)))

def network():
    return Network()
"""


@pytest.fixture
def train_changing(start: Start, port: int, tmp_path: Path) -> Start:
    """Start the ranks of a training in which ``rank`` changes one of its weights."""

    def train_changing(rank: int, world_size: int, *options: object) -> list[RankProcess]:
        folder = tmp_path / "code"
        folder.mkdir()
        shutil.copy(REPOSITORY / "examples" / "my_shapes.py", folder)
        (folder / "changing.py").write_text(CHANGING.format(rank=rank))
        words = ["--world_size", world_size, "--master_port", port, "--run_dir", tmp_path / "run", "--epochs", 3]
        words += ["--model", "changing:network", "--dataset", "my_shapes:shapes", "--batch_size", 8, *options]
        program = (sys.executable, REPOSITORY / "run_multi_gpu_train.py")
        return [start(*program, "--rank", number, *words, cwd=folder) for number in range(world_size)]

    return train_changing  # type: ignore[return-value]


def changed_at(rank: RankProcess) -> float:
    found = re.search(r"changed at ([\d.]+)", rank.out)
    assert found, rank.out
    return float(found[1])


def ended_together(ranks: list[RankProcess], code: int) -> tuple[str, float]:
    """Assert that all ranks end with the same error and this exit code; return the error and when the last one left."""
    codes = [rank.wait(60) for rank in ranks]
    ended = time.monotonic()
    assert codes == [code] * len(ranks), "\n".join(rank.err for rank in ranks)
    # Outside join, torch begins each line of a traceback with the rank.
    texts = [re.sub(r"^\[rank\d\]: ?", "", rank.err, flags=re.MULTILINE) for rank in ranks]
    errors = {last_error(text) if code != 1 else text.rpartition("ddp_manual.errors.")[2] for text in texts}
    assert len(errors) == 1, errors
    return errors.pop(), ended


@pytest.mark.parametrize(("odd", "others"), [(0, "ranks 1-2"), (2, "ranks 0-1")])
def test_a_rank_that_changes_a_weight_ends_the_training_at_that_step_and_its_weight_is_in_no_checkpoint(
    train_changing: Start, tmp_path: Path, odd: int, others: str
) -> None:
    every_step = ("--check_replicas", 1, "--checkpoint_steps", 1, "--keep", 1000)
    ranks: list[RankProcess] = train_changing(odd, 3, *every_step)  # type: ignore[assignment]
    error, ended = ended_together(ranks, 14)
    what = f"rank {odd} differs from {others} in layer1.weight, after step"
    assert error.startswith(f"error[replicas-differ]: {what} "), error
    step = int(error.split("after step ")[1].split(":")[0])
    assert ": 1 of 2048 values, largest difference 64\n" in error
    assert f"rank {odd}: 1 of 2048 values, the first at [2, 7]: " in error
    assert "layer1.weight is float32[8, 256], compared bit for bit" in error
    for number in range(3):
        failure = json.loads((tmp_path / "run" / f"failure-rank{number}.json").read_text())
        assert (failure["identifier"], failure["exit_code"]) == ("replicas-differ", 14)
    saved = sorted((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert len(saved) == step - 1 > 0
    for file in saved:
        assert float(torch.load(file, weights_only=True)["model"]["layer1.weight"].max()) < 32
    record(
        f"rank {odd} of 3 changes one weight; --check_replicas 1",
        "replicas-differ",
        "rank, the others, parameter, step, how many values, how far, where",
        seconds=ended - changed_at(ranks[odd]),
        within=3,
        codes=[14] * 3,
        row=37,
    )


def test_ranks_are_compared_before_a_checkpoint_too(train_changing: Start, tmp_path: Path) -> None:
    ranks: list[RankProcess] = train_changing(0, 2, "--check_replicas", 1000, "--checkpoint_steps", 2)  # type: ignore[assignment]
    error, _ = ended_together(ranks, 14)
    step = int(error.split("after step ")[1].split(":")[0])
    assert step % 2 == 0
    assert "error[replicas-differ]: rank 1 differs from rank 0 in layer1.weight" in error
    names = [file.name for file in (tmp_path / "run" / "checkpoints").glob("*.pt")]
    assert names and not [name for name in names if f"{step:08d}" in name], names


def test_ranks_are_compared_at_the_end_of_an_epoch_too(train_changing: Start, tmp_path: Path) -> None:
    options = ("--check_replicas", 1000, "--checkpoint_every", 0)
    ranks: list[RankProcess] = train_changing(1, 2, *options)  # type: ignore[assignment]
    error, _ = ended_together(ranks, 14)
    assert "rank 1 differs from rank 0 in layer1.weight, after step 25: " in error
    assert not (tmp_path / "run" / "model.pt").exists()


def test_a_training_whose_ranks_agree_compares_them_and_goes_on(start_rank: Start) -> None:
    options = ("--model", "convnet", "--check_replicas", 1, "--batch_size", 500)
    ranks = [start_rank(rank, 3, *options) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[0].err


SCRIPT = """
import os, sys, time
import torch, torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
import ddp_manual

def train():
    rank = dist.get_rank()
    torch.manual_seed(0)
    {before}
    model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
    {changed_model}
    wrapped = {wrapped}
    optimizer = torch.optim.AdamW(wrapped.parameters())
    ddp_manual.check_replicas(wrapped, optimizer)
    for step in range(1, 4):
        torch.manual_seed(100 * rank + step)
        wrapped(torch.randn(6, 4)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        ddp_manual.check_replicas(wrapped, optimizer, step=step)
    print("agree", flush=True)
    print("changed at", time.monotonic(), flush=True)
    if rank == dist.get_world_size() - 1:
        {change}
    ddp_manual.check_replicas(wrapped, optimizer, step=4 {options})
    print("still agree", flush=True)

{start}
"""
JOINED = "with ddp_manual.join(device='cpu'): train()"
ON_ITS_OWN = "dist.init_process_group('gloo'); train(); dist.destroy_process_group()"
IN_DDP = "DistributedDataParallel(model)"
MOMENTUM = "optimizer.state[model[2].bias]['exp_avg'][1] += 0.5"


def start_script(
    start: Start,
    tmp_path: Path,
    port: int,
    world_size: int,
    change: str = "pass",
    *,
    how: str = ON_ITS_OWN,
    changed_model: str = "pass",
    options: str = "",
    wrapped: str = IN_DDP,
    before: str = "pass",
) -> list[RankProcess]:
    script = tmp_path / "script.py"
    parts = {"change": change, "changed_model": changed_model, "options": options, "wrapped": wrapped}
    script.write_text(textwrap.dedent(SCRIPT).format(**parts, before=before, start=how))
    meeting = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    return [start(sys.executable, script, RANK=str(rank), **meeting) for rank in range(world_size)]


@pytest.mark.parametrize(("how", "where"), [(JOINED, "in a script that joins"), (ON_ITS_OWN, "in a script of its own")])
@pytest.mark.parametrize(("size", "others"), [(2, "rank 0"), (3, "ranks 0-1")])
def test_a_rank_whose_optimizer_state_differs_is_named_in_a_script(
    start: Start, tmp_path: Path, port: int, how: str, where: str, size: int, others: str
) -> None:
    ranks = start_script(start, tmp_path, port, size, MOMENTUM, how=how)
    told = max(said(rank, "ReplicasDiffer: ") for rank in ranks)  # Python's own teardown may take seconds
    error, _ = ended_together(ranks, 1)
    assert [rank.out.splitlines()[0] for rank in ranks] == ["agree"] * size
    what = f"rank {size - 1} differs from {others} in exp_avg of 2.bias, after step 4"
    assert error.startswith(f"ReplicasDiffer: {what}: 1 of 2 values, largest difference 0.5\n"), error
    record(
        f"the optimizer state of rank {size - 1} of {size} differs, {where}",
        "replicas-differ",
        "rank, the others, parameter, step, how many values, how far, where",
        seconds=told - min(map(changed_at, ranks)),
        within=5,
        codes=[1] * size,
        row=37,
    )


def test_a_rank_without_a_parameter_is_named_and_no_rank_hangs(start: Start, tmp_path: Path, port: int) -> None:
    missing = "model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2, bias=rank < 2))"
    ranks = start_script(start, tmp_path, port, 3, changed_model=missing, wrapped="model")
    error, _ = ended_together(ranks, 1)
    assert "ReplicasDiffer: rank 2 has no 2.bias, which ranks 0-1 have\n" in error
    record(
        "rank 2 of 3 has a model without one parameter; a script compares it",
        "replicas-differ",
        "rank, the others, parameter",
        seconds=None,
        within=None,
        codes=[1] * 3,
        row=37,
    )


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ("optimizer.param_groups[0]['lr'] = 0.5", "differs from rank 0 in lr of parameter group 0, after step 4\n"),
        ("model[0].bias.data[3] = float('nan')", "in 0.bias, after step 4: 1 of 8 values, some not finite on one side"),
        ("model[0].weight.data = model[0].weight.data.double()", "has 0.weight as float64[8, 4], rank 0 has it a"),
        ("optimizer.state.clear()", "has no exp_avg of 0.weight, which rank 0 has, after step 4\n"),
        ("model[2].weight.data.add_(1e-7)", "differs from rank 0 in 2.weight, after step 4: "),
    ],
)
def test_other_differences_are_named_too(start: Start, tmp_path: Path, port: int, change: str, what: str) -> None:
    error, _ = ended_together(start_script(start, tmp_path, port, 2, change), 1)
    assert f"ReplicasDiffer: rank 1 {what}" in error or what in error.partition("ReplicasDiffer: rank 1 differs")[2]


@pytest.mark.parametrize(
    ("change", "options"),
    [
        ("model[2].weight.data.add_(1e-7)", ", tolerance=1e-4"),
        ("model[1].running_mean.add_(1)", ""),
        # All three are equal, though not in their bits.
        ("model[1].bias.data[:] = -0.0", ""),
    ],
)
def test_what_counts_as_equal_stops_nothing(start: Start, tmp_path: Path, port: int, change: str, options: str) -> None:
    everywhere = "nn.init.zeros_(model[1].bias).requires_grad_(False)"
    ranks = start_script(start, tmp_path, port, 2, change, changed_model=everywhere, options=options)
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    assert ["still agree" in rank.out for rank in ranks] == [True, True]


def test_a_tensor_that_one_rank_cannot_compare_is_refused_on_all(start: Start, tmp_path: Path, port: int) -> None:
    sparse = "model.register_buffer('graph', torch.eye(2).to_sparse() if rank else torch.eye(2))"
    error, _ = ended_together(start_script(start, tmp_path, port, 2, changed_model=sparse, wrapped="model"), 1)
    assert "BadOption: check_replicas cannot compare rank 1: graph is not dense but torch.sparse_coo\n" in error


def test_only_the_ranks_of_a_group_are_compared(start: Start, tmp_path: Path, port: int) -> None:
    """Two pairs of ranks, each of which trains a model of its own."""
    pairs = "pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]; torch.manual_seed(rank // 2)"
    wrapped = "DistributedDataParallel(model, process_group=pairs[rank // 2])"
    change = "model[0].weight.data[0, 0] += 1"
    ranks = start_script(start, tmp_path, port, 4, change, before=pairs, wrapped=wrapped)
    ranks[3].wait_for("ReplicasDiffer")
    assert "ReplicasDiffer: rank 3 differs from rank 2 in 0.weight, after step 4: 1 of 32 values" in ranks[3].err
    for rank in ranks[:2]:
        assert rank.wait() == 0
        assert "still agree" in rank.out
