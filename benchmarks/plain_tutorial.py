"""The training loop of a typical tutorial: the other side of benchmarks/throughput.py. Start it like any DDP script:

WORLD_SIZE=1 RANK=0 MASTER_ADDR=127.0.0.1 MASTER_PORT=29500 python benchmarks/plain_tutorial.py data
"""

from __future__ import annotations

import json
import os
import sys
import time

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from torchvision import datasets, transforms

EPOCHS = 1
BATCH_SIZE = 100
WARMUP_EPOCHS = 0.8
BASE_LR = 0.04


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 16, kernel_size=5, padding=2),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, kernel_size=5, padding=2),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(7 * 7 * 32, 10),
    )


def main() -> None:
    local_rank = int(os.environ.get("LOCAL_RANK", "0"))
    device = torch.device("cuda", local_rank) if torch.cuda.is_available() else torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // world_size))
    torch.manual_seed(0)
    train = datasets.MNIST(sys.argv[1], train=True, transform=transforms.ToTensor())
    sampler: DistributedSampler[object] = DistributedSampler(train)
    loader = DataLoader(train, batch_size=BATCH_SIZE, sampler=sampler, num_workers=0)
    model = DistributedDataParallel(conv_net().to(device))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9, weight_decay=5e-4, nesterov=True)
    warmup, steps = WARMUP_EPOCHS * len(loader), EPOCHS * len(loader)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: BASE_LR * world_size * min((step + 1) / warmup, max(0.0, (steps - step) / (steps - warmup))),
    )
    started = time.perf_counter()
    running_loss = 0.0
    correct = 0
    for epoch in range(EPOCHS):
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(device), labels.to(device)
            optimizer.zero_grad()
            scores = model(images)
            loss = F.cross_entropy(scores, labels)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            if rank == 0 and epoch == 0 and running_loss == 0.0:
                print("first step", flush=True)  # for benchmarks/startup.py
            running_loss += loss.item()
            correct += (scores.argmax(dim=1) == labels).sum().item()
    seconds = time.perf_counter() - started
    if rank == 0:
        samples = EPOCHS * len(sampler) * world_size
        print(json.dumps({"samples_per_second": samples / seconds, "loss": running_loss / (EPOCHS * len(loader))}))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
