"""Simulate all ranks except rank 0 through the stages of a run, and count what they send: for benchmarks.limits.

It reads an ``Order`` as one line of JSON, prints ``ready``, and then reads a stage per line: see ``Crowd``. After each
stage it prints one line of JSON: seconds, and message -> [how many, bytes], sent and received.
"""

from __future__ import annotations

import gc
import heapq
import json
import mmap
import os
import random
import selectors
import socket
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable

from msgspec.structs import replace

from benchmarks.simulated_ranks import (
    CONNECTS_AT_ONCE,
    LOOPBACK,
    STEPS_A_SECOND,
    Order,
    SimulatedRank,
    allow_many_connections,
    rank_infos,
    run_info,
)
from ddp_manual import collective_memory
from ddp_manual.agent.collective_records import Records
from ddp_manual.messages import (
    AskRecords,
    Failed,
    Finished,
    Goodbye,
    Heartbeat,
    Look,
    Probed,
    Question,
    RecordsReply,
    StacksReply,
    read_from_rank_0,
)
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.ranks_and_runs import LONGEST_TEXT, Beat, LastWords, RankInfo
from ddp_manual.wire import encode

WITHIN = 150.0
# Seconds between two looks at all ranks: with thousands of ranks a look takes a while.
LOOK_EVERY = 0.05
# Collectives of DDP with two buckets.
COLLECTIVES_A_STEP = 2


class Program:
    """A program whose collectives are recorded in memory, as a worker's are.

    Args:
        ranks: the number of ranks in its process group.
        call: the collective that it calls; a program with another call has other chains of checksums.
    """

    def __init__(self, ranks: int, call: str) -> None:
        self._call = call
        self._begun = self._chain = 0
        self.records = Records()
        descriptor = os.memfd_create("collectives")
        os.ftruncate(descriptor, collective_memory.MEMORY_SIZE)
        self._memory = memoryview(mmap.mmap(descriptor, collective_memory.MEMORY_SIZE))
        self.records.open(os.getpid(), descriptor, complete=True, compared=True)
        group = {"key": "0/1c291ca3/0", "ranks": list(range(ranks)), "description": "default_pg", "device": ""}
        self.records.add_group({"identity": 1, **group})
        self._answers: dict[bytes, RecordsReply] = {}

    @property
    def step(self) -> int:
        return self._begun // COLLECTIVES_A_STEP

    def go_on(self, step: int) -> None:
        while self.step < step:
            self._begun += 1
            self._chain = zlib.crc32(self._call.encode(), self._chain)
            words = f"{self._call}\tsum".encode(), b"loop.py:104"
            collective_memory.write(self._memory, (self._begun, self._begun, 1, self._chain), *words)
            self._answers.clear()

    def answer(self, asked: AskRecords) -> RecordsReply:
        """Return what an agent replies; worked out once, because real agents do that on machines of their own."""
        key = encode(asked)
        if key not in self._answers:
            self._answers[key] = self.records.answer(asked)
        return self._answers[key]


class CountedRank(SimulatedRank):
    """A rank whose messages are counted."""

    def __init__(self, info: RankInfo, order: Order, crowd: Crowd) -> None:
        super().__init__(info, order)
        self.crowd = crowd
        self.program = crowd.program
        self.here = b""
        """The last message of the kind ``news``, which says who is here."""
        self.welcomed = self.judged = self.may_close = False

    def send(self, line: bytes) -> None:
        self.crowd.count("sent", line)
        while line:
            try:
                line = line[self.connection.send(line) :]
            except BlockingIOError:
                time.sleep(0.001)

    def read(self) -> None:
        data = self.connection.recv(1 << 18)
        if not data:
            raise ConnectionError(f"the coordinator has closed the connection of rank {self.rank}")
        *lines, self._received = (self._received + data).split(b"\n")
        for line in lines:
            self.take_line(line + b"\n")

    def take_line(self, line: bytes) -> None:
        kind = self.crowd.count("received", line)
        if kind == "news":
            self.here = line
        elif kind == "greeting":
            assert self._hello_line is not None
            self.send(self._hello_line)
        elif kind == "welcome":
            self.welcomed = True
            self.send(self._ready_line)
            period = self.crowd.period
            heapq.heappush(self.crowd.beats, (time.monotonic() + period * random.random(), self.rank, self))
        elif kind == "probe":
            self.send(encode(Probed(json.loads(line)["key"], ())))
        elif kind == "placed":
            self.placed = True
        elif kind == "ask_records":
            asked = read_from_rank_0(line.decode())
            assert isinstance(asked, AskRecords)
            self.send(encode(replace(self.program.answer(replace(asked, number=0)), number=asked.number)))
        elif kind == "ask_stacks":
            self.send(encode(StacksReply("".join(f"  File train.py, line {n}, in step\n" for n in range(60)))))
        elif kind == "run_ends":
            self.judged = True
        elif kind == "close":
            self.may_close = True
        elif kind not in ("alive", "line", "rank0_leaves"):
            raise AssertionError(line)

    def send_beat(self) -> None:
        if not self.crowd.working:
            self.send(encode(Heartbeat()))
            return
        step = self.program.step
        beat = Beat(
            phase="training",
            epoch=step // 600 + 1,
            step=step % 600,
            samples_per_second=round(2000 + 50 * random.random(), 1),
            step_seconds=round((1 + 0.05 * random.random()) / STEPS_A_SECOND, 6),
            collectives={"0": step * COLLECTIVES_A_STEP},
            inside=random.random() < 0.5,
            place=f"loop.py:{random.randrange(100, 120)} in train_one_epoch",
            calls=self.program.records.for_beat(),
        )
        self.send(encode(Heartbeat(beat)))


class Observer:
    """Asks the coordinator about the run, as ``status`` does."""

    def __init__(self, crowd: Crowd, port: int, *, stacks: bool) -> None:
        self.crowd = crowd
        self.answer = b""
        self.pieces: list[bytes] = []
        self.connection = socket.create_connection((LOOPBACK, port))
        # Sent at once: the coordinator waits 5 s for it, and the late heartbeats of 4,096 ranks would take longer.
        self.connection.recv(1 << 18)
        self.connection.send(encode(Seal(None).close(Look, "", Question("1", stacks=stacks))))

    def read(self) -> None:
        data = self.connection.recv(1 << 18)
        assert data, "the observer is turned away"
        self.pieces.append(data)
        if data.endswith(b"\n"):
            self.answer = b"".join(self.pieces)
            self.crowd.count("received", self.answer)


class Crowd:
    """The ranks of a run, without rank 0. Each method is a stage."""

    def __init__(self, order: Order) -> None:
        self.order = order
        self.program = Program(order.ranks, "all_reduce float32[13]")
        self.period = run_info(order.ranks).heartbeat_period
        self.ranks = [CountedRank(info, order, self) for info in rank_infos(order.ranks)[1:]]
        self.beats: list[tuple[float, int, CountedRank]] = []
        self.working = False
        self.began = time.monotonic()
        self.counts: dict[str, dict[str, Counter[str]]] = {}
        self.forget_counts()
        self._selector = selectors.DefaultSelector()
        self._drawn = random.Random(0)

    # -- what is counted ----------------------------------------------------------------------------------------------

    def forget_counts(self) -> None:
        self.counts = {way: {"messages": Counter(), "bytes": Counter()} for way in ("sent", "received")}

    def count(self, way: str, line: bytes) -> str:
        begin = len(b'{"type":"')
        kind = line[begin : line.index(b'"', begin)].decode()
        self.counts[way]["messages"][kind] += line.count(b"\n")
        self.counts[way]["bytes"][kind] += len(line)
        return kind

    def run(self, done: Callable[[], bool], within: float = WITHIN) -> None:
        """Read and send heartbeats until ``done``.

        Raises:
            TimeoutError: that takes too long.
        """
        until = time.monotonic() + within
        while not done():
            if time.monotonic() > until:
                raise TimeoutError("a stage takes too long")
            look_again = time.monotonic() + LOOK_EVERY
            while time.monotonic() < look_again:
                self._take_turn(LOOK_EVERY)

    def _take_turn(self, pause: float) -> None:
        """Send the heartbeats that are due, then read what comes within ``pause`` seconds."""
        now = time.monotonic()
        if self.working:
            self.program.go_on(int((now - self.began) * STEPS_A_SECOND))
        while self.beats and self.beats[0][0] <= now:
            due, number, rank = heapq.heappop(self.beats)
            rank.send_beat()
            heapq.heappush(self.beats, (due + self.period, number, rank))
        pause = min(pause, self.beats[0][0] - now) if self.beats else pause
        for key, _ in self._selector.select(max(0.0, pause)):
            key.data.read()

    # -- the stages ---------------------------------------------------------------------------------------------------

    def half(self) -> None:
        """Every second rank joins, and all that have joined hear who is missing."""
        self._join([rank for rank in self.ranks if rank.rank % 2 == 0])

    def rest(self) -> None:
        """All others join except the last one, in any order."""
        others = [rank for rank in self.ranks if rank.rank % 2 and rank is not self.ranks[-1]]
        self._drawn.shuffle(others)
        self._join(others)

    def wait(self) -> None:
        """Nothing happens for two heartbeats, at least a second."""
        until = time.monotonic() + max(1.0, 2 * self.period)
        self.run(lambda: time.monotonic() > until)

    def begin(self) -> None:
        """The last rank joins, and all ranks get their places."""
        self._connect(self.ranks[-1:])
        self.run(lambda: all(rank.placed for rank in self.ranks))

    def work(self) -> None:
        """All ranks train for three heartbeats, at least two seconds."""
        if not self.working:
            self.working, self.began = True, time.monotonic()
        until = time.monotonic() + max(2.0, 3 * self.period)
        self.run(lambda: time.monotonic() > until)

    def look(self) -> None:
        self._look(stacks=False)

    def stacks(self) -> None:
        self._look(stacks=True)

    def differ(self) -> None:
        """One rank calls another collective from now on, and all ranks learn which."""
        odd = self.ranks[-1]
        odd.program = Program(self.order.ranks, "broadcast float32[13]")
        odd.program.go_on(self.program.step)
        odd.send_beat()
        self.run(lambda: all(rank.judged for rank in self.ranks))

    def fail(self) -> None:
        """One rank fails with a long traceback, and all ranks learn why."""
        words = LastWords("training-failed", "RuntimeError", "x" * LONGEST_TEXT, "", 1)
        self.ranks[-1].send(encode(Failed(words)))
        self.run(lambda: all(rank.judged for rank in self.ranks))

    def finish(self) -> None:
        """All ranks finish, may close their process groups, and leave."""
        for rank in self.ranks:
            rank.send(encode(Finished()))
        self.run(lambda: all(rank.may_close for rank in self.ranks))
        for rank in self.ranks:
            rank.send(encode(Goodbye()))
            self._selector.unregister(rank.connection)
            rank.connection.shutdown(socket.SHUT_WR)
        self.beats.clear()

    def _connect(self, ranks: list[CountedRank]) -> None:
        for number, rank in enumerate(ranks):
            rank.connect(self.order.port)
            self._selector.register(rank.connection, selectors.EVENT_READ, rank)
            if number % CONNECTS_AT_ONCE == 0:
                self._take_turn(0.0)

    def _join(self, ranks: list[CountedRank]) -> None:
        self._connect(ranks)
        joined = [rank for rank in self.ranks if rank in set(ranks) or rank.welcomed]
        here = b'"here":%d,' % (len(joined) + 1)
        self.run(lambda: all(here in rank.here and b'"loading":[]' in rank.here for rank in joined))

    def _look(self, *, stacks: bool) -> None:
        observer = Observer(self, self.order.port, stacks=stacks)
        self._selector.register(observer.connection, selectors.EVENT_READ, observer)
        self.run(lambda: bool(observer.answer))
        self._selector.unregister(observer.connection)
        observer.connection.close()


def main() -> None:
    order = Order(**json.loads(sys.stdin.readline()))
    allow_many_connections()
    crowd = Crowd(order)
    gc.disable()  # its work grows with the ranks in a process, and a real process has one rank
    print("ready", flush=True)
    for line in sys.stdin:
        crowd.forget_counts()
        began = time.monotonic()
        getattr(crowd, line.strip())()
        print(json.dumps({"seconds": time.monotonic() - began, **crowd.counts}), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main()
