"""Milliseconds per training step of the ConvNet on one rank, with and without each change that was tried.

python -m benchmarks.step
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import click
import torch
import torch.nn.functional as F
from torch import nn

from benchmarks.measuring import interleave, machine, ratio
from ddp_manual.training.models import ConvNet

WARMUP, STEPS, BATCH_SIZE = 10, 60, 100


def textbook_order(network: ConvNet) -> ConvNet:
    """Put ReLU before pooling, as networks are usually written."""
    for block in (network.layer1, network.layer2):
        block[2], block[3] = block[3], block[2]
    return network


def milliseconds(network: nn.Module, *, channels_last: bool = True, fused: bool = False, clip: bool = True) -> float:
    if channels_last:
        network = network.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01, momentum=0.9, nesterov=True, fused=fused)
    images, labels = torch.randn(BATCH_SIZE, 1, 28, 28), torch.randint(0, 10, (BATCH_SIZE,))
    durations = []
    for _ in range(WARMUP + STEPS):
        started = time.perf_counter()
        optimizer.zero_grad()
        F.cross_entropy(network(images), labels).backward()
        if clip:
            nn.utils.clip_grad_norm_(network.parameters(), 1.0)
        optimizer.step()
        durations.append(time.perf_counter() - started)
    return 1000 * statistics.median(durations[WARMUP:])


@click.command()
@click.option("--repetitions", default=5, show_default=True)
@click.option("--threads", default=1, show_default=True)
def main(repetitions: int, threads: int) -> None:
    torch.set_num_threads(threads)
    sides: dict[str, Callable[[], float]] = {
        "as it is": lambda: milliseconds(ConvNet()),
        "images in NCHW layout": lambda: milliseconds(ConvNet(), channels_last=False),
        "ReLU before pooling": lambda: milliseconds(textbook_order(ConvNet())),
        "fused SGD": lambda: milliseconds(ConvNet(), fused=True),
        "no clipping": lambda: milliseconds(ConvNet(), clip=False),
    }
    results = interleave(sides, repetitions)
    click.echo(f"{machine()}, {threads} thread(s)\n| | ms per step | this / as it is |\n|---|---|---|")
    for name, durations in results.items():
        click.echo(f"| {name} | {statistics.median(durations):.1f} | {ratio(durations, results['as it is'])} |")


if __name__ == "__main__":
    main()
