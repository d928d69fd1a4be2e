"""A plain DDP script in which one rank goes wrong, as its arguments say: for benchmarks/faults.py."""

import argparse
import os
import signal
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

STEPS = 100
FAULT_AT = 20


def go_wrong(fault: str, loss: torch.Tensor) -> None:
    if fault == "raise":
        raise ValueError("the labels of batch 20 are missing")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    while fault == "loop":
        pass
    dist.broadcast(loss, src=0)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--fault", choices=["raise", "kill", "loop", "mismatch"])
    parser.add_argument("--on", type=int, help="the rank that goes wrong")
    parser.add_argument("--moment", type=Path, help="where that rank writes when it went wrong")
    parser.add_argument("--timeout", type=float, help="seconds for a collective; by default 1800")
    args = parser.parse_args()

    dist.init_process_group("gloo", timeout=timedelta(seconds=args.timeout) if args.timeout else None)
    rank = dist.get_rank()
    torch.manual_seed(0)
    model = DistributedDataParallel(nn.Linear(4, 1))
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr)
    for step in range(STEPS):
        inputs = torch.randn(16, 4)
        loss = nn.functional.mse_loss(model(inputs), inputs.sum(1, keepdim=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        if args.fault and step == FAULT_AT and rank == args.on:
            args.moment.write_text(str(time.monotonic()))
            go_wrong(args.fault, mean)
        else:
            dist.all_reduce(mean)
    if rank == 0:
        print(f"trained {STEPS} steps", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
