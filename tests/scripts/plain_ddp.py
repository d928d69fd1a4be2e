"""DistributedDataParallel on the CPU, and nothing else."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    for _ in range(args.steps):
        inputs = torch.randn(16, 4, generator=generator)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    weights = " ".join(f"{weight:.6f}" for weight in model.module.weight.flatten())
    print(f"rank {rank} of {dist.get_world_size()}: loss {loss.item():.6f}, weights {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
