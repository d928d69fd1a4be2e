"""The serial MNIST script with its five changes for DDP: one rank per GPU of this machine, or two ranks on the CPU.

python examples/spawned_ranks.py

It trains on MNIST if the folder data has it, otherwise on digits drawn in code. Nothing is downloaded.
"""

from pathlib import Path

import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

import ddp_manual
from ddp_manual.training.datasets import source_of


def train(world, epochs):  # the process group is opened before this function (1) and closed after it (5)
    dataset = "mnist" if any(Path("data", "MNIST", "raw").glob("*")) else "synthetic"
    digits = source_of(ddp_manual.TrainConfig(dataset=dataset, data_dir="data"))
    world.once_per_host("draw digits", digits.prepare, timeout=600)
    split = digits.load("train")
    data = TensorDataset(split.images / 255, split.labels)
    sampler = DistributedSampler(data)  # (2)
    torch.manual_seed(0)
    network = nn.Sequential(nn.Flatten(), nn.Linear(784, 128), nn.ReLU(), nn.Linear(128, 10)).to(world.device)
    model = DistributedDataParallel(network)  # (3)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for images, labels in DataLoader(data, batch_size=100, sampler=sampler):
            optimizer.zero_grad()
            loss = cross_entropy(model(images.to(world.device)), labels.to(world.device))
            loss.backward()
            optimizer.step()
    if world.rank == 0:  # (4)
        torch.save(network.state_dict(), "spawned.pt")
        print(f"{world.world_size} ranks, epoch {epochs}: loss {loss.item():.4f}, saved in spawned.pt")


if __name__ == "__main__":
    ddp_manual.spawn(train, nprocs=torch.cuda.device_count() or 2, args=(1,))
