"""Ranks whose parameters or optimizer states differ, in real torch: in our training, and in a script."""

from __future__ import annotations

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path

import torch

from tests.conftest import REPOSITORY, Start

# Four ranks, of which the last one changes something and changes it back, again and again; then all train, and the last
# one's network changes a weight of its own.
SCRIPT = """
    import torch, torch.distributed as dist
    from torch import nn
    from torch.nn.parallel import DistributedDataParallel
    import ddp_manual

    def train(rank, change="", wrap=DistributedDataParallel, seed=0, **options):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))
        nn.init.zeros_(model[1].bias).requires_grad_(False)
        wrapped = wrap(model)
        optimizer = torch.optim.AdamW(wrapped.parameters())
        for step in range(1, 4):
            torch.manual_seed(100 * rank + step)
            wrapped(torch.randn(6, 4)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            ddp_manual.check_replicas(wrapped, optimizer, step=step)
        if rank == 3:
            exec(change)
        ddp_manual.check_replicas(wrapped, optimizer, step=4, **options)

    def tried(name, compare, *arguments, **options):
        try:
            compare(*arguments, **options)
            said = "equal"
        except ddp_manual.DdpManualError as error:
            said = f"{type(error).__name__}: {error.what}"
        found = [None] * dist.get_world_size()
        dist.all_gather_object(found, said)
        if dist.get_rank() == 0:
            print(name, *sorted(set(found)), sep=" | ", flush=True)

    def odd(model):
        ddp_manual.check_replicas(model, torch.optim.SGD(model.parameters()))

    def sparse():
        model = nn.Linear(2, 2)
        model.register_buffer("graph", torch.eye(2).to_sparse() if rank == 1 else torch.eye(2))
        odd(model)

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    tried("state", train, rank, "optimizer.state[model[2].bias]['exp_avg'][1] += 0.5")
    tried("lr", train, rank, "optimizer.param_groups[0]['lr'] = 0.5")
    tried("nan", train, rank, "model[0].bias.data[3] = float('nan')")
    tried("dtype", train, rank, "model[0].weight.data = model[0].weight.data.double()")
    tried("cleared", train, rank, "optimizer.state.clear()")
    tried("little", train, rank, "model[2].weight.data.add_(1e-7)")
    tried("tolerated", train, rank, "model[2].weight.data.add_(1e-7)", tolerance=torch.tensor(1e-4))
    own_buffers = lambda model: DistributedDataParallel(model, broadcast_buffers=False)
    tried("statistics", train, rank, "model[1].running_mean.add_(1)", own_buffers)
    tried("minus zero", train, rank, "model[1].bias.data[:] = -0.0")
    tried("missing", lambda: odd(nn.Linear(8, 2, bias=rank < 2)))
    tried("sparse", sparse)
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    of_a_pair = lambda model: DistributedDataParallel(model, process_group=pairs[rank // 2])
    tried("pairs", train, rank, "model[0].weight.data[0, 0] += 1", of_a_pair, rank // 2)
    dist.destroy_process_group()

    class Network(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer1 = nn.Linear(256, 8)
            self.layer2 = nn.Linear(8, 2)
            self.calls = 0

        def forward(self, images):
            self.calls += self.training  # also a few before the first step
            if self.calls == 8 and self.training and rank == 3:
                with torch.no_grad():
                    self.layer1.weight[2, 7] += 64
            return self.layer2(self.layer1(images.flatten(1)))

    own = {"model": "script:Network", "dataset": "my_shapes:shapes", "batch_size": 8, "epochs": 3}
    config = ddp_manual.TrainConfig(**own, check_replicas=1, checkpoint_steps=1, keep=1000)
    with ddp_manual.join() as world:
        ddp_manual.train(world, config)
"""
SAID = {
    "state": "ReplicasDiffer: rank 3 differs from ranks 0-2 in exp_avg of 2.bias, after step 4: 1 of 2 values, largest",
    "lr": "ReplicasDiffer: rank 3 differs from ranks 0-2 in lr of parameter group 0, after step 4",
    "nan": "ReplicasDiffer: rank 3 differs from ranks 0-2 in 0.bias, after step 4: 1 of 8 values, some not finite on",
    "dtype": "ReplicasDiffer: rank 3 has 0.weight as float64[8, 4], ranks 0-2 have it as float32[8, 4]",
    "cleared": "ReplicasDiffer: rank 3 has no exp_avg of 0.weight, which ranks 0-2 have, after step 4",
    "little": "ReplicasDiffer: rank 3 differs from ranks 0-2 in 2.weight, after step 4: ",
    "tolerated": "equal",
    "statistics": "equal",
    "minus zero": "equal",
    "missing": "ReplicasDiffer: ranks 2-3 have no bias, which ranks 0-1 have",
    "sparse": "BadOption: check_replicas cannot compare rank 1: graph is not dense but torch.sparse_coo",
    "pairs": "ReplicasDiffer: rank 3 differs from rank 2 in 0.weight, after step 4: 1 of 32 values",
}


def test_what_differs_is_the_same_error_on_all_ranks_also_in_our_training_which_saves_no_step_after_that(
    start: Start, tmp_path: Path
) -> None:
    """And what counts as equal is none."""
    shutil.copy(REPOSITORY / "examples" / "my_shapes.py", tmp_path)
    script, run = tmp_path / "script.py", tmp_path / "run"
    script.write_text(textwrap.dedent(SCRIPT))
    launcher = start(sys.executable, "-m", "ddp_manual", "launch", "--nproc", 4, "--run_dir", run, script)
    assert launcher.wait() == 14, launcher.err
    found = dict(line.removeprefix("[rank 0] ").split(" | ", 1) for line in launcher.out.splitlines() if " | " in line)
    assert found.keys() == SAID.keys(), launcher.out
    for name, said in SAID.items():
        ours = found[name].removesuffix(" | equal") if name == "pairs" else found[name]
        assert ours.startswith(said) and " | " not in ours, found[name]

    error = launcher.err[launcher.err.index("error[replicas-differ]: ") :]
    differs = re.match(r".*: rank 3 differs from ranks 0-2 in layer1.weight, after step (\d+): ", error)
    assert differs, error
    assert ": 1 of 2048 values, largest difference 64\n" in error
    assert "rank 3: 1 of 2048 values, the first at [2, 7]: " in error
    assert "layer1.weight is float32[8, 256], compared bit for bit" in error
    for rank in range(4):
        failure = json.loads((run / f"failure-rank{rank}.json").read_text())
        assert (failure["identifier"], failure["exit_code"]) == ("replicas-differ", 14)
    saved = sorted((run / "checkpoints").glob("*.pt"))
    assert len(saved) == int(differs[1]) - 1 > 0
    for file in saved:
        assert float(torch.load(file, weights_only=True)["model"]["layer1.weight"].max()) < 32
