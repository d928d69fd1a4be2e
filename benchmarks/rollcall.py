"""Seconds and store operations of the roll call, against merely connecting to the store and writing a key each.

python -m benchmarks.rollcall

Rank 0 is the real one, in this process; the others are clients of its store in a second process, where one thread
connects and asks for all of them and then reads all answers. The floor has the same two processes and clients.
RES_OPTIONS=attempts:0 is set for both: the store looks every peer up by name, and where no name server answers one
would measure that.
"""

from __future__ import annotations

import json
import logging
import os
import secrets
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from threading import Thread

import click

from benchmarks.measuring import REPOSITORY, interleave, machine, ratio
from benchmarks.simulated_ranks import LOOPBACK, Order, entry_of_rank_0, operations, prepare, seal
from ddp_manual import environment
from ddp_manual.rendezvous.answer import Answering, answer
from ddp_manual.rendezvous.entries import Hello
from ddp_manual.rendezvous.rollcall import RollCall
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.waiting import Waiting

TIMEOUT = 120.0

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Measured:
    seconds: float
    operations: int
    """Of all ranks, on the store."""
    cpu_seconds: float
    """Of rank 0's process, the store's server with it."""


def measure(side: str, ranks: int, token: str | None = None, seconds: float = 0.0) -> Measured:
    """From the word go, when rank 0 listens, until all ranks have their place (the floor: until all keys are there).

    Args:
        side, seconds: see ``Order``.
    """
    listener = socket.create_server((LOOPBACK, 0), backlog=4096)
    store = RunStore.host(listener)
    roll_call, waiting_for_all = None, None
    if side != "floor":
        roll_call, waiting_for_all = _open_roll_call(store, ranks, token)
    with _simulated_ranks(Order(ranks, store.port, side, token, seconds)) as others:
        before, started, cpu_started = operations(), time.perf_counter(), time.process_time()
        theirs = int(others("go"))
        if waiting_for_all:
            waiting_for_all.join()
        measured = Measured(
            seconds=time.perf_counter() - started,
            operations=operations() - before + theirs,
            cpu_seconds=time.process_time() - cpu_started,
        )
    if roll_call:
        roll_call.stop()
    store.close()
    return measured


def _open_roll_call(store: RunStore, ranks: int, token: str | None) -> tuple[RollCall, Thread]:
    """Rank 0's part; the thread ends when rank 0 has its place."""
    entry = entry_of_rank_0(ranks)
    hello = Hello(
        run_id="benchmark",
        run_dir="runs/benchmark",
        world_size=ranks,
        host=entry.host,
        pid=entry.pid,
        address="10.0.0.1",  # on loopback it would refuse ranks that say they are on other hosts
        since=entry.since,
        challenge=secrets.token_hex(16) if token else None,
        command=f"python run_multi_gpu_train.py --world_size {ranks} --rank {{rank}} --master_addr 10.0.0.1",
        lifeline=("10.0.0.1", 20000),
        peer_timeout=10.0,
        stall_timeout=300.0,
        script=False,
    )
    roll_call = RollCall(store, hello, entry, seal(token))
    roll_call.open()
    how = Answering(seal=seal(token), met=lambda hello: None, hello_first=False, hello_timeout=TIMEOUT)
    thread = Thread(target=answer, args=(store.clone(), entry, Waiting(TIMEOUT, logger), how))
    thread.start()
    return roll_call, thread


@contextmanager
def _simulated_ranks(order: Order) -> Iterator[Callable[[str], str]]:
    command = [sys.executable, "-m", "benchmarks.simulated_ranks"]
    process = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    to, of = process.stdin, process.stdout
    assert to is not None and of is not None

    def tell(line: str) -> str:
        to.write(f"{line}\n")
        to.flush()
        answered = of.readline()
        if not answered:
            raise click.ClickException("the simulated ranks ended early")
        return answered

    with process:
        tell(json.dumps(asdict(order)))
        yield tell


@click.command()
@click.option("--ranks", "sizes", multiple=True, type=int, default=(64, 256, 1024, 4096), show_default=True)
@click.option("--repetitions", default=5, show_default=True)
@click.option("--trickle", default=1024, show_default=True, help="Ranks that come over 5 s, once; 0 for none.")
def main(sizes: tuple[int, ...], repetitions: int, trickle: int) -> None:
    os.environ["RES_OPTIONS"] = "attempts:0"
    environment.quiet_torch_warnings()
    prepare()
    click.echo(machine())
    token = secrets.token_hex(16)
    most: dict[str, float] = {}

    def side(name: str, size: int, **how: str) -> float:
        measured = measure(name.partition(",")[0], size, **how)
        most[f"{name} {size}"] = max(most.get(f"{name} {size}", 0.0), measured.operations / size)
        return measured.seconds

    results = interleave(
        {
            f"{name} {size}": partial(side, name, size, **how)
            for size in sizes
            for name, how in (("floor", {}), ("roll call", {}), ("roll call, token", {"token": token}))
        },
        repetitions,
    )
    click.echo(
        "| ranks | floor, s | roll call, s | roll call / floor | with a token / floor "
        "| operations per rank, at most | with a token |\n|---|---|---|---|---|---|---|"
    )
    for size in sizes:
        floor, plain, sealed = (results[f"{name} {size}"] for name in ("floor", "roll call", "roll call, token"))
        seconds = f"{statistics.median(floor):.3f} | {statistics.median(plain):.3f}"
        ratios = f"{ratio(plain, floor)} | {ratio(sealed, floor)}"
        operations = f"{most[f'roll call {size}']:.1f} | {most[f'roll call, token {size}']:.1f}"
        click.echo(f"| {size:,} | {seconds} | {ratios} | {operations} |")
    for smaller, larger in pairwise(sizes):
        growth = ", ".join(
            f"{name} {ratio(results[f'{name} {larger}'], results[f'{name} {smaller}'])}"
            for name in ("floor", "roll call", "roll call, token")
        )
        click.echo(f"{larger:,} ranks / {smaller:,} ranks: {growth}")
    if trickle:
        found = measure("trickle", trickle, seconds=5.0)
        click.echo(
            f"{trickle:,} ranks over 5 s: {found.operations / trickle:.1f} operations per rank, "
            f"{found.cpu_seconds:.2f} CPU seconds of rank 0, complete after {found.seconds:.2f} s"
        )


if __name__ == "__main__":
    main()
