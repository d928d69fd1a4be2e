"""A training loop of your own that can be stopped, killed and resumed at any rank. Start each rank in its own terminal:

ddp-manual run --world_size 2 --rank 0 --on_loss wait --run_dir runs/own examples/own_training.py
ddp-manual run --world_size 2 --rank 1 --on_loss wait --run_dir runs/own examples/own_training.py

Ctrl-C at one rank stops all ranks after the same step, with a checkpoint: the same commands go on from it. If a rank is
killed, type its command again: all ranks go on after the last step that is held.
"""

import sys
from pathlib import Path

import torch
from torch.nn.parallel import DistributedDataParallel

import ddp_manual

steps = int(sys.argv[1]) if sys.argv[1:] else 1000

with ddp_manual.join() as world:
    folder = world.run_dir or Path()
    data, checkpoint = folder / "data.pt", folder / "checkpoint.pt"

    def make_data() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        inputs = torch.randn(4096, 32, generator=torch.Generator().manual_seed(0))
        torch.save((inputs, inputs.sum(dim=1, keepdim=True)), data)

    world.once_per_host("make the data", make_data, timeout=600)
    inputs, targets = (tensor.to(world.device) for tensor in torch.load(data, weights_only=True))
    torch.manual_seed(0)
    model = DistributedDataParallel(torch.nn.Linear(32, 1).to(world.device))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)

    def save() -> None:
        if world.rank == 0:
            with world.saving():
                state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
                torch.save(state, checkpoint.with_suffix(".new"))
                checkpoint.with_suffix(".new").replace(checkpoint)

    torch.manual_seed(world.rank)  # for dropout, for example; ``held`` gives each rank its own stream back
    step = ddp_manual.held(model, optimizer, per_rank=torch.set_rng_state)  # None unless a rank was lost
    if step is None and checkpoint.exists():
        saved = torch.load(checkpoint, map_location=world.device, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    step = step or 0
    while step < steps:
        drawn = torch.Generator().manual_seed(step * world.world_size + world.rank)
        samples = torch.randint(len(inputs), (64,), generator=drawn).to(world.device)
        optimizer.zero_grad()
        loss = torch.nn.functional.mse_loss(model(inputs[samples]), targets[samples])
        loss.backward()
        optimizer.step()
        step += 1
        said = loss.item() if step % 50 == 0 else None  # reading it waits for a GPU
        world.progress(step=step, steps=steps, loss=said)
        ddp_manual.hold(model, optimizer, step, per_rank=torch.get_rng_state())
        stops = world.stop_after_this_step()
        if stops or step == steps or step % 200 == 0:
            ddp_manual.check_replicas(model, optimizer, step=step)
            save()
        if stops:
            break
    losses = world.gather(loss.item() if step else None)
    if world.rank == 0:
        print(f"after step {step} of {steps} the losses are {losses}")
    if step < steps:
        print(f"rank {world.rank} was stopped after step {step} of {steps}: to go on, type the same command again")
