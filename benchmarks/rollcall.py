"""Seconds that the roll call takes, compared with connecting to a TCPStore and writing one key per rank.

python -m benchmarks.rollcall

The coordinator is the real one, in a process without torch. In a second process one thread simulates all ranks, 8 per
host, which join at the same time. The floor is torch's TCPStore, also in two processes: the store in one, a client
per rank in the other.
"""

from __future__ import annotations

import os
import secrets
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from time import perf_counter

import click

from benchmarks.coordinator_process import hosted, simulated_ranks
from benchmarks.measuring import interleave, machine, ratio
from benchmarks.simulated_ranks import CONNECT_TIMEOUT, LOOPBACK, Order, allow_many_connections, ask_for_no_names

SIDES = ("floor", "roll call", "roll call, token")


@contextmanager
def store() -> Iterator[int]:
    """Host a TCPStore of torch in this process; yield its port."""
    from torch.distributed import TCPStore

    hosts = TCPStore(LOOPBACK, 0, None, True, CONNECT_TIMEOUT, wait_for_workers=False)
    yield int(hosts.port)


def measure(side: str, ranks: int) -> float:
    """Return the seconds until all ranks have their place (the floor: until all keys are written)."""
    token = secrets.token_hex(16) if side.endswith("token") else None
    nonce = secrets.token_hex(16)
    with store() if side == "floor" else hosted(ranks, nonce, token) as host:
        port = host if isinstance(host, int) else host[0]
        with simulated_ranks(Order(ranks, port, side.partition(",")[0], token, nonce)) as ranks_do:
            started = perf_counter()
            ranks_do("go")
            return perf_counter() - started


@click.command()
@click.option("--ranks", "sizes", multiple=True, type=int, default=(64, 256, 1024, 4096), show_default=True)
@click.option("--repetitions", default=5, show_default=True)
def main(sizes: tuple[int, ...], repetitions: int) -> None:
    os.environ["RES_OPTIONS"] = "attempts:0"
    os.environ["TORCH_CPP_LOG_LEVEL"] = "ERROR"
    allow_many_connections()
    ask_for_no_names()
    click.echo(machine())
    sides = {f"{side} {size}": partial(measure, side, size) for size in sizes for side in SIDES}
    results = interleave(sides, repetitions)
    click.echo("| ranks | floor, s | roll call, s | roll call / floor | with a token / floor |\n|---|---|---|---|---|")
    for size in sizes:
        floor, plain, sealed = (results[f"{side} {size}"] for side in SIDES)
        seconds = f"{statistics.median(floor):.3f} | {statistics.median(plain):.3f}"
        click.echo(f"| {size:,} | {seconds} | {ratio(plain, floor)} | {ratio(sealed, floor)} |")
    for smaller, larger in pairwise(sizes):
        growth = (f"{side} {ratio(results[f'{side} {larger}'], results[f'{side} {smaller}'])}" for side in SIDES)
        click.echo(f"{larger:,} ranks / {smaller:,} ranks: {', '.join(growth)}")


if __name__ == "__main__":
    main()
