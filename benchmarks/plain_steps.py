"""A plain DDP script for benchmarks/any_script.py: prints "first step", and then the steps per second of each block.

Two runs of it take turns, block by block, if both have the same --turns: a machine that slows down slows both down.
"""

import argparse
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

# The first steps fill caches, and DDP rebuilds its buckets after the first.
WARM_UP = 20
LOOK_EVERY = 0.002


def wait_for_turn(turns: Path, me: int) -> None:
    """Wait until the number of blocks that are done is even (``me`` 0) or odd (1)."""
    while len(turns.read_bytes()) % 2 != me:
        time.sleep(LOOK_EVERY)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--width", type=int, default=64)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--batch_size", type=int, default=32)
    parser.add_argument("--steps", type=int, default=1_000_000, help="of a block")
    parser.add_argument("--blocks", type=int, default=1)
    parser.add_argument("--turns", type=Path, help="a file that gets a byte for each block that is done")
    parser.add_argument("--me", type=int, choices=[0, 1], default=0, help="which of the two runs this is")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    torch.manual_seed(0)
    layers = [layer for _ in range(args.layers) for layer in (nn.Linear(args.width, args.width), nn.ReLU())]
    model = DistributedDataParallel(nn.Sequential(*layers, nn.Linear(args.width, 10)))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)

    def step() -> None:
        inputs, labels = torch.randn(args.batch_size, args.width), torch.randint(10, (args.batch_size,))
        loss = nn.functional.cross_entropy(model(inputs), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    if rank == 0:
        print("first step", flush=True)
    for _ in range(WARM_UP):
        step()
    for _ in range(args.blocks):
        if rank == 0 and args.turns:
            wait_for_turn(args.turns, args.me)
        dist.barrier()
        started = time.perf_counter()
        for _ in range(args.steps):
            step()
        dist.barrier()
        if rank == 0:
            print(f"steps per second: {args.steps / (time.perf_counter() - started):.3f}", flush=True)
            if args.turns:
                with args.turns.open("ab") as file:
                    file.write(b".")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
