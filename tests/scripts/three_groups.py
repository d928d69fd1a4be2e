"""Three process groups beside the default one: two of a DeviceMesh, and one for what is logged."""

import argparse

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=10)
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world_size // 2, 2), mesh_dim_names=("data", "tensor"))
    data, tensor = mesh.get_group("data"), mesh.get_group("tensor")
    logged = dist.new_group(group_desc="logged")

    # Each rank of a "tensor" group has half of the rows of the only layer; the ranks of a "data" group have the same.
    torch.manual_seed(0)
    rows = torch.randn(8, 4).chunk(2)[mesh.get_local_rank("tensor")]
    weight = nn.Parameter(rows.clone())
    optimizer = torch.optim.SGD([weight], lr=0.05)
    generator = torch.Generator().manual_seed(mesh.get_local_rank("data"))
    for _ in range(args.steps):
        inputs = torch.randn(16, 4, generator=generator)
        outputs = (inputs @ weight.T).sum(1)
        whole = outputs.detach().clone()
        dist.all_reduce(whole, group=tensor)
        error = whole - inputs.sum(1)
        optimizer.zero_grad()
        (outputs * 2 * error / len(error)).sum().backward()
        dist.all_reduce(weight.grad, group=data)
        weight.grad /= data.size()
        optimizer.step()
        loss = error.square().mean()
        dist.all_reduce(loss, group=logged)
    dist.barrier()
    print(f"rank {rank}: loss {loss.item() / world_size:.6f}, weight {weight.norm().item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
