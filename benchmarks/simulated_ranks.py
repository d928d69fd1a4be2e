"""The other process of benchmarks/rollcall.py: every rank but rank 0, each a store client that only answers.

Reads one line of JSON, ``Order``, says ``ready``, starts at the next line, says how many store operations it took, and
keeps its connections until its input ends.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import sys
import threading
import time
from dataclasses import dataclass, replace
from typing import Any

from ddp_manual.config import TrainConfig
from ddp_manual.rendezvous import store as stores
from ddp_manual.rendezvous.answer import Answering, Asking
from ddp_manual.rendezvous.entries import Entry, Place
from ddp_manual.rendezvous.introduction import OwnAddress, Program, introduce
from ddp_manual.rendezvous.seal import Seal
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.world_spec import WorldSpec

LOOPBACK = "127.0.0.1"
RANKS_PER_HOST = 8


@dataclass(frozen=True)
class Order:
    ranks: int
    port: int
    side: str
    """floor: connect and write a key. roll call: all at once. trickle: over ``seconds``."""
    token: str | None
    seconds: float


class CountingClient:
    """A TCPStore that counts what is asked of it; several keys in one call are as many operations."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self._client = _connect(*arguments, **options)

    def __getattr__(self, name: str) -> Any:
        call = getattr(self._client, name)

        def counted(*arguments: Any) -> Any:
            _counted.append(len(arguments[0]) if isinstance(arguments[0], list) else 1)
            return call(*arguments)

        return counted


_connect = stores._client
_counted: list[int] = []


def prepare() -> None:
    """Count store operations from now on, and allow as many connections as the system does."""
    stores._client = CountingClient  # type: ignore[assignment]
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def operations() -> int:
    return sum(_counted)


def seal(token: str | None) -> Seal:
    return Seal(token.encode() if token else None)


def entry_of_rank_0(world_size: int) -> Entry:
    """What a training process says of itself, with all options, versions and digests: 1.6 KB."""
    spec = WorldSpec(world_size=world_size)
    options = {**TrainConfig().shared_options(), "device": ("cpu", "default"), "backend": ("gloo", "default")}
    program = Program.of_this_process("cpu", script=False)
    return on_its_host(introduce(spec, "cpu", options, OwnAddress(LOOPBACK, "gloo"), 1, program), 0)


def on_its_host(entry: Entry, rank: int) -> Entry:
    host = f"host{rank // RANKS_PER_HOST}"
    return replace(entry, rank=rank, host=host, host_id=f"{host} {entry.host_id}")


def write_one_key_each(order: Order) -> None:
    clients = []
    for rank in range(1, order.ranks):
        clients.append(RunStore.connect(LOOPBACK, order.port))
        clients[-1].set_left(rank)
    assert clients[-1].have_left(range(1, order.ranks))


def answer_at_once(order: Order, entries: list[Entry]) -> None:
    """All ask before any reads an answer, so that one thread does what N processes would do at the same time."""
    asking = [ask(order, entry) for entry in entries]
    for one in asking:
        await_place(one)


def answer_one_by_one(order: Order, entries: list[Entry]) -> None:
    """A thread for each rank: this side's time does not count here, only what the store and rank 0 have to do."""
    started = time.monotonic()

    def answer(entry: Entry) -> None:
        time.sleep(max(0.0, started + order.seconds * entry.rank / order.ranks - time.monotonic()))
        await_place(ask(order, entry))

    threads = [threading.Thread(target=answer, args=(entry,)) for entry in entries]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def ask(order: Order, entry: Entry) -> Asking:
    how = Answering(seal=seal(order.token), met=lambda hello: None, hello_first=False, hello_timeout=60)
    asking = Asking(RunStore.connect(LOOPBACK, order.port), entry, how)
    asking.ask()
    return asking


def await_place(asking: Asking) -> None:
    *_, last = asking.updates()
    assert isinstance(last, Place)


def main() -> None:
    order = Order(**json.loads(sys.stdin.readline()))
    prepare()
    rank_0 = entry_of_rank_0(order.ranks)
    entries = [on_its_host(rank_0, rank) for rank in range(1, order.ranks)]
    RunStore.connect(LOOPBACK, order.port)  # imports what the first one imports
    before = operations()
    gc.disable()  # thousands of clients in one process give it work that no rank of them would have
    print("ready", flush=True)
    sys.stdin.readline()
    if order.side == "floor":
        write_one_key_each(order)
    elif order.side == "roll call":
        answer_at_once(order, entries)
    else:
        answer_one_by_one(order, entries)
    print(operations() - before, flush=True)
    sys.stdin.read()
    os._exit(0)  # taking thousands of clients down one by one takes longer than the measurement


if __name__ == "__main__":
    main()
