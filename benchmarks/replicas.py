"""CPU milliseconds of a rank per ``check_replicas``, if two ranks agree, for the default ConvNet and models of 100 MB.
It is CPU time, because other processes of the machine change that less than elapsed time.

python -m benchmarks.replicas
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

import ddp_manual
from benchmarks.measuring import machine, ratio
from ddp_manual.training.models import ConvNet

CHECKS, STEPS = 10, 5
LAYERS = 24  # of 1024 x 1024: 101 MB


def convnet() -> tuple[nn.Module, torch.Tensor, Optimizer]:
    model = ConvNet().to(memory_format=torch.channels_last)
    return model, torch.randn(100, 1, 28, 28), SGD(model.parameters(), lr=0.01, momentum=0.9, nesterov=True)


def large(optimizer: Callable[..., Optimizer]) -> tuple[nn.Module, torch.Tensor, Optimizer]:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(LAYERS)))
    return model, torch.randn(32, 1024), optimizer(model.parameters(), lr=1e-3)


SIDES: dict[str, Callable[[], tuple[nn.Module, torch.Tensor, Optimizer]]] = {
    "ConvNet, SGD with momentum": convnet,
    "24 layers of 1024 x 1024, plain SGD": lambda: large(SGD),
    "the same, AdamW": lambda: large(AdamW),
}


def megabytes(model: nn.Module, optimizer: Optimizer) -> float:
    states = [tensor for state in optimizer.state.values() for tensor in state.values() if torch.is_tensor(tensor)]
    return sum(tensor.nbytes for tensor in (*model.parameters(), *states)) / 1e6


def timed(action: Callable[..., None], *arguments: object) -> float:
    """Return the CPU milliseconds of ``action`` in this process; all ranks begin it at the same moment."""
    dist.barrier()
    started = time.process_time()
    action(*arguments)
    return 1000 * (time.process_time() - started)


def step(model: nn.Module, samples: torch.Tensor, optimizer: Optimizer) -> None:
    optimizer.zero_grad()
    F.cross_entropy(model(samples), torch.zeros(len(samples), dtype=torch.int64)).backward()
    optimizer.step()


def measure(world: ddp_manual.World, repetitions: int) -> None:
    for name, build in SIDES.items():
        torch.manual_seed(0)
        network, samples, optimizer = build()
        model = nn.parallel.DistributedDataParallel(network)
        steps, checks = [], []
        for _ in range(repetitions):
            steps.append(statistics.median(timed(step, model, samples, optimizer) for _ in range(STEPS)))
            checks.append(statistics.median(timed(ddp_manual.check_replicas, model, optimizer) for _ in range(CHECKS)))
        if world.rank == 0:
            of_steps, of_checks = (
                f"{statistics.median(each):.2f} ({min(each):.2f} to {max(each):.2f})" for each in (steps, checks)
            )
            size = megabytes(model, optimizer)
            print(f"| {name} | {size:.1f} | {of_steps} | {of_checks} | {ratio(checks, steps)} |", flush=True)


@click.command()
@click.option("--repetitions", default=5, show_default=True)
def main(repetitions: int) -> None:
    click.echo(f"{machine()}\n")
    click.echo("| | MB compared | CPU ms per step | CPU ms per check | check / step |\n|---|---|---|---|---|")
    ddp_manual.spawn(measure, args=(repetitions,), nprocs=2)


if __name__ == "__main__":
    main()
