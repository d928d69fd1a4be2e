"""DDP in a script of your own. Start each rank in a terminal of its own:

WORLD_SIZE=2 RANK=0 python examples/own_script.py
WORLD_SIZE=2 RANK=1 python examples/own_script.py
"""

import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_manual

with ddp_manual.join() as world:
    torch.manual_seed(world.rank)
    inputs = torch.randn(256, 8, device=world.device)
    targets = inputs.sum(dim=1, keepdim=True)
    model = DistributedDataParallel(torch.nn.Linear(8, 1).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(200):
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs), targets)
        loss.backward()
        optimizer.step()
    print(f"rank {world.rank} of {world.world_size}, {world.device}, {world.backend}: loss {loss.item():.6f}")
