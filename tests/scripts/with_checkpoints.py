"""DistributedSampler, and a checkpoint after each epoch that rank 0 writes and every rank resumes from."""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
from line_data import Line
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    def __init__(self, args: argparse.Namespace) -> None:
        self.rank = int(os.environ["RANK"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self.checkpoint = Path(args.checkpoint)
        self.sampler = DistributedSampler(Line(256, broken=args.broken), shuffle=not args.in_order)
        self.data = DataLoader(self.sampler.dataset, batch_size=16, sampler=self.sampler)
        self.model = DistributedDataParallel(nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)
        self.epochs_done = 0
        if self.checkpoint.exists():
            self.load()

    def load(self) -> None:
        saved = torch.load(self.checkpoint, map_location="cpu", weights_only=True)
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.epochs_done = saved["epochs_done"]
        print(f"rank {self.rank}: resumes after epoch {self.epochs_done}", flush=True)

    def save(self) -> None:
        saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
        torch.save({**saved, "epochs_done": self.epochs_done}, self.checkpoint)

    def train(self, epochs: int) -> None:
        for epoch in range(self.epochs_done, epochs):
            self.sampler.set_epoch(epoch)
            for inputs, targets in self.data:
                loss = nn.functional.mse_loss(self.model(inputs), targets)
                self.optimizer.zero_grad()
                loss.backward()
                self.optimizer.step()
            self.epochs_done = epoch + 1
            if self.rank == 0:
                self.save()
            dist.barrier()
            mean = loss.detach()
            dist.all_reduce(mean, op=dist.ReduceOp.AVG if dist.get_backend() == "nccl" else dist.ReduceOp.SUM)
            print(f"rank {self.rank}: epoch {epoch + 1}, {len(self.data)} steps, loss {mean.item():.6f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("epochs", type=int)
    parser.add_argument("--checkpoint", default="checkpoint.pt")
    parser.add_argument("--in_order", action="store_true", help="do not shuffle")
    parser.add_argument("--broken", type=int, help="a sample that cannot be read")
    args = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    Trainer(args).train(args.epochs)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
