"""Simulate every rank of a world, each by one connection: the second process of benchmarks rollcall and watching.

It reads an ``Order`` as one line of JSON, prints ``ready``, and starts at the next line. It prints ``done`` when all
ranks have their place (the floor: when all keys are written), and keeps its connections until its input ends. With the
side "watching" the ranks then send heartbeats, at the rate and with the content of ranks that train.
"""

from __future__ import annotations

import gc
import json
import os
import random
import resource
import selectors
import socket
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from msgspec.structs import replace

from ddp_manual.agent.installed import code_digests, installed_versions
from ddp_manual.messages import (
    Claim,
    FromRank0,
    Greeting,
    Heartbeat,
    Hello,
    Placed,
    Probe,
    Probed,
    Refused,
    RunEnds,
    Welcome,
    WorkerReady,
    read_from_rank_0,
)
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.ranks_and_runs import Beat, RankInfo, Ready, RunInfo
from ddp_manual.training.options import TrainConfig
from ddp_manual.wire import encode, reader_of

LOOPBACK = "127.0.0.1"
# An address without a name in any hosts file: see ``ask_for_no_names``.
NAMELESS = "127.86.13.7"
RANKS_PER_HOST = 8
STEPS_A_SECOND = 20
CONNECTS_AT_ONCE = 64
CONNECT_TIMEOUT = timedelta(seconds=60)


@dataclass(frozen=True)
class Order:
    ranks: int
    port: int
    side: str
    """floor: connect to a TCPStore and write a key. roll call: join. watching: join, then send heartbeats."""
    token: str | None = None
    nonce: str = ""
    """Rank 0's nonce, by which the coordinator knows its own agent."""


def seal(token: str | None) -> Seal:
    return Seal(token.encode() if token else None)


def allow_many_connections() -> None:
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def run_info(world_size: int) -> RunInfo:
    """Return the description of a run as a training has it."""
    return RunInfo(
        run_id="benchmark",
        run_dir="runs/benchmark",
        world_size=world_size,
        host="host0",
        pid=os.getpid(),
        agent=os.getpid(),
        address="10.0.0.1",  # a coordinator on loopback refuses ranks of other hosts
        since=time.time(),
        command=f"python run_multi_gpu_train.py --world_size {world_size} --rank {{rank}} --master_addr 10.0.0.1",
        launched=None,
        peer_timeout=10.0,
        stall_timeout=300.0,
        resumes=True,
    )


def rank_infos(world_size: int) -> list[RankInfo]:
    """Return what training ranks say about themselves, with all options, versions and digests: 2 KB each."""
    options = dict(TrainConfig().shared_options())
    rank_0 = RankInfo(
        rank=0,
        world_size=world_size,
        world_size_source="flag",
        host="host0",
        host_id="",
        pid=os.getpid(),
        agent=os.getpid(),
        since=time.time(),
        address="10.0.0.1",
        answer_port=20000,
        local_rank=None,
        versions=installed_versions(),
        code=code_digests(),
        allow_mismatch=False,
        options={
            **options,
            "command": ("train", "command"),
            "address_family": ("IPv4", "eth0, on the way to 10.0.0.1"),
        },
    )
    infos = []
    for rank in range(world_size):
        node = rank // RANKS_PER_HOST
        host, address = f"host{node}", f"10.0.{node // 250}.{node % 250 + 1}"
        infos.append(replace(rank_0, rank=rank, host=host, host_id=f"{host} 4b2d", address=address))
    return infos


def ready_of(info: RankInfo) -> Ready:
    """Return what a rank knows once its worker has loaded torch."""
    return Ready(
        pid=info.pid,
        device="cpu",
        backend="gloo",
        gpus=[],
        versions={**info.versions, "cuda": None, "nccl": None},
        options={"device": ("cpu", "default"), "backend": ("gloo", "default")},
        store=("10.0.0.1", 41000) if info.rank == 0 else None,
    )


class SimulatedRank:
    """Sends at once what an agent sends only after its worker has loaded torch."""

    def __init__(self, info: RankInfo, order: Order) -> None:
        self.rank = info.rank
        self.placed = False
        self.next_beat = 0.0
        self._seal = seal(order.token)
        self._nonce = order.nonce if info.rank == 0 else f"{info.rank:032x}"
        self._claim = Claim(info, self._nonce)
        # Prepared here, because real ranks do this work on machines of their own.
        self._hello_line = None if self._seal else encode(self._seal.close(Hello, "", self._claim))
        self._ready_line = encode(WorkerReady(ready_of(info))) + encode(Heartbeat())
        self._received = b""
        self._step = 0
        self.connection = socket.socket()

    def connect(self, port: int) -> None:
        self.connection.connect((LOOPBACK, port))
        self.connection.setblocking(False)

    def read(self) -> None:
        data = self.connection.recv(1 << 18)
        assert data, f"the coordinator has closed the connection of rank {self.rank}"
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            # Not parsed, because real ranks do that on machines of their own.
            if not line.startswith((b'{"type":"alive"', b'{"type":"news"')):
                self._take(read_from_rank_0(line.decode()))

    def _take(self, message: FromRank0) -> None:
        match message:
            case Greeting():
                line = self._hello_line or encode(self._seal.close(Hello, message.challenge, self._claim))
                self.connection.send(line)
            case Welcome():
                self._seal.open(message, self._nonce, reader_of(RunInfo))
                self.connection.send(self._ready_line)
            case Probe():
                self.connection.send(encode(Probed(message.key, ())))
            case Placed():
                self.placed = True
            case Refused() | RunEnds():
                raise AssertionError(message)

    def beat(self, beat_every: float) -> None:
        """Send a heartbeat with everything that changes in training: step, collectives, the line of the program."""
        self._step += max(1, round(STEPS_A_SECOND * beat_every))
        beat = Beat(
            phase="training",
            epoch=self._step // 600 + 1,
            step=self._step % 600,
            samples_per_second=round(2000 + 50 * random.random(), 1),
            step_seconds=round((1 + 0.05 * random.random()) / STEPS_A_SECOND, 6),
            collectives={"0": self._step + 7},
            inside=random.random() < 0.5,
            place=f"loop.py:{random.randrange(100, 120)} in train_one_epoch",
        )
        self.connection.send(encode(Heartbeat(beat)))


def join(order: Order, ranks: list[SimulatedRank], selector: selectors.BaseSelector) -> None:
    for number, rank in enumerate(ranks):
        rank.connect(order.port)
        selector.register(rank.connection, selectors.EVENT_READ, rank)
        if number % CONNECTS_AT_ONCE == 0:
            read_all(selector.select(0))
    while not all(rank.placed for rank in ranks):
        read_all(selector.select())


def read_all(ready: Iterable[tuple[selectors.SelectorKey, int]]) -> None:
    for key, _ in ready:
        key.data.read()


def beat_until_the_input_ends(ranks: list[SimulatedRank], selector: selectors.BaseSelector) -> None:
    beat_every = run_info(len(ranks)).heartbeat_period
    selector.register(sys.stdin, selectors.EVENT_READ)
    started = time.monotonic()
    for rank in ranks:
        rank.next_beat = started + beat_every * random.random()
    ranks = sorted(ranks, key=lambda rank: rank.next_beat)
    turn = 0
    while True:
        for key, _ in selector.select(max(0.0, ranks[turn].next_beat - time.monotonic())):
            if key.data is None:
                return
            key.data.read()
        now = time.monotonic()
        while (rank := ranks[turn]).next_beat <= now:
            rank.beat(beat_every)
            rank.next_beat += beat_every
            turn = (turn + 1) % len(ranks)


def ask_for_no_names() -> None:
    """Keep torch from looking up the name of every peer of a store.

    After one look-up has failed, torch makes no more of them in this process. With RES_OPTIONS=attempts:0 it fails at
    once.
    """
    from torch.distributed import TCPStore

    TCPStore(NAMELESS, 0, None, True, timedelta(seconds=2), wait_for_workers=False)


def write_one_key_each(order: Order) -> None:
    from torch.distributed import TCPStore

    clients = []
    for rank in range(1, order.ranks):
        clients.append(TCPStore(LOOPBACK, order.port, None, False, CONNECT_TIMEOUT, wait_for_workers=False))
        clients[-1].set(f"left/{rank}", "true")
    assert clients[-1].check([f"left/{rank}" for rank in range(1, order.ranks)])
    kept.extend(clients)


kept: list[Any] = []


def main() -> None:
    order = Order(**json.loads(sys.stdin.readline()))
    allow_many_connections()
    selector = selectors.DefaultSelector()
    ranks: list[SimulatedRank] = []
    if order.side == "floor":
        ask_for_no_names()
    else:
        ranks = [SimulatedRank(info, order) for info in rank_infos(order.ranks)]
    gc.disable()  # its work grows with the ranks in a process, and a real process has one rank
    print("ready", flush=True)
    sys.stdin.readline()
    if order.side == "floor":
        write_one_key_each(order)
    else:
        join(order, ranks, selector)
    print("done", flush=True)
    if order.side == "watching":
        gc.freeze()
        gc.enable()
        beat_until_the_input_ends(ranks, selector)
    else:
        sys.stdin.read()
    os._exit(0)  # destroying thousands of clients one by one takes longer than the measurement


if __name__ == "__main__":
    main()
