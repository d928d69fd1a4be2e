"""DistributedDataParallel on the CPU; its state is held after each step, so that a lost rank costs no step."""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import ddp_manual


def main() -> None:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    state = ddp_manual.held(model, optimizer, per_rank=torch.set_rng_state) or {"step": 0}
    print(f"rank {rank} begins at step {state['step']}", flush=True)
    for step in range(state["step"], 40):
        inputs = torch.randn(16, 4, generator=torch.Generator().manual_seed(1000 * step + rank))
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        drawn = torch.rand(1).item()
        ddp_manual.hold(model, optimizer, {"step": step + 1}, per_rank=torch.get_rng_state())
    print(f"rank {rank} drew {drawn} in the last step", flush=True)
    weights = " ".join(weight.hex() for weight in model.module.weight.double().flatten().tolist())
    print(f"rank {rank} of {dist.get_world_size()}: weights {weights}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
