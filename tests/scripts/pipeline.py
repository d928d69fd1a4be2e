"""A stage of a pipeline on each rank: activations and gradients go from rank to rank."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

MICROBATCHES = 4


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=8)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    layer = nn.Sequential(nn.Linear(4, 4), nn.Tanh()) if rank < world_size - 1 else nn.Linear(4, 1)
    stage = PipelineStage(layer, rank, world_size, torch.device("cpu"))
    schedule = ScheduleGPipe(stage, MICROBATCHES, loss_fn=nn.functional.mse_loss)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(0)
    for _ in range(args.steps):
        inputs = torch.randn(16, 4, generator=generator)
        losses: list[torch.Tensor] = []
        if rank == 0:
            schedule.step(inputs)
        elif rank == world_size - 1:
            schedule.step(target=inputs.sum(1, keepdim=True), losses=losses)
        else:
            schedule.step()
        optimizer.step()
        optimizer.zero_grad()
    norm = sum(parameter.square().sum() for parameter in layer.parameters()).sqrt().item()
    loss = f", loss {torch.stack(losses).mean().item():.6f}" if losses else ""
    print(f"rank {rank}: stage {rank} of {world_size}, norm {norm:.6f}{loss}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
