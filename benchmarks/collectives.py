"""What it costs to record collectives: steps of DDP of about 1 ms, in turn with and without, in the same two processes.

python -m benchmarks.collectives --repetitions 20

CPU seconds of the thread that trains: on gloo a step mostly waits for the other rank, whose noise would hide the cost.
On a busy machine the fastest of the pairs counts, since other processes only slow both sides down.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.multiprocessing.spawn import spawn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.measuring import free_port, interleave, machine
from ddp_manual.rank_options import WorldSpec
from ddp_manual.worker.collective_recorder import Recorder

# Per step: DDP's all-reduce in the backward pass, and an all-reduce of the loss.
COLLECTIVES = 2


def measure(rank: int, port: int, repetitions: int, steps: int) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    model = DistributedDataParallel(nn.Sequential(nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    images, labels = torch.randn(64, 512), torch.randint(0, 10, (64,))

    def train() -> float:
        """Return the microseconds of CPU per step."""
        dist.barrier()
        began = time.thread_time()
        for _ in range(steps):
            optimizer.zero_grad()
            loss = nn.functional.cross_entropy(model(images), labels)
            loss.backward()
            optimizer.step()
            dist.all_reduce(loss.detach())
        return 1e6 * (time.thread_time() - began) / steps

    def recorded() -> float:
        stop = Recorder(WorldSpec(world_size=2), lambda message: None).start()
        try:
            return train()
        finally:
            stop()

    train()
    found = interleave({"off": train, "check": recorded}, repetitions)
    if rank == 0:
        print(f"\n{machine()}: {repetitions} pairs of {steps} steps, {COLLECTIVES} collectives each\n")
        print("| of the pairs | CPU per step, off | check | per collective |\n|---|---|---|---|")
        for name, choose in (("fastest", min), ("median", statistics.median)):
            off, check = (choose(found[side]) for side in ("off", "check"))
            print(f"| {name} | {off / 1e3:.3f} ms | {check / 1e3:.3f} ms | {(check - off) / COLLECTIVES:.1f} us |")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repetitions", type=int, default=20)
    parser.add_argument("--steps", type=int, default=200)
    options = parser.parse_args()
    arguments = (free_port(), options.repetitions, options.steps)
    spawn(measure, arguments, nprocs=2)
