"""Comparing the collectives of ranks: memory that cannot be read, replies that say nothing, groups without end."""

from __future__ import annotations

import asyncio
import itertools
import os
import re
import socket
import subprocess
import sys
import zlib
from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from msgspec.structs import asdict, replace
from torch.testing._internal.distributed import fake_pg

from ddp_manual import collective_memory, from_worker, messages
from ddp_manual.agent.collective_records import Records
from ddp_manual.agent.worker_process import Worker, wait_until
from ddp_manual.protocol.collective_comparison import (
    LAST,
    LOOK_AGAIN_AFTER,
    LOOK_AGAIN_WITHIN,
    MOST_CHAINS,
    Comparison,
    Difference,
    Seen,
)
from ddp_manual.protocol.handshakes import Peers
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.search_for_mismatch import RECORDS_WITHIN
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import BY_RECORDS, Beat, LastWords, RankInfo, Verdict
from ddp_manual.wire import as_json, encode_local
from ddp_manual.worker import collective_recorder as recording
from ddp_manual.worker import private_torch
from ddp_manual.worker.private_torch import hide_from_dynamo
from tests.runs import run_info

WITHIN = 10.0
SPEC = WorldSpec(world_size=2)


def test_a_worker_whose_memory_cannot_be_read_is_not_compared_and_its_last_words_are_heard() -> None:
    heard: list[from_worker.FromWorker] = []
    last_words = from_worker.Failed(LastWords("training-failed", "the reason", "", "", 1))

    async def run() -> None:
        ours, theirs = socket.socketpair()
        faults, writing = os.pipe()
        with theirs, subprocess.Popen(["sleep", "60"], stdin=subprocess.DEVNULL) as process:
            worker = Worker(process.pid, ours, faults, process)
            await worker.attach(heard.append, lambda: None)
            opened = [from_worker.RecordsMemory(descriptor, True, True) for descriptor in (77, 0)]
            for said in (*opened, last_words):
                theirs.sendall(encode_local(said))
            await wait_until(lambda: last_words in heard, WITHIN)
            assert not worker.is_gone and worker.heartbeat().calls == {}
            process.kill()
            await wait_until(lambda: worker.ended, WITHIN)
            worker.close()
            os.close(writing)

    asyncio.run(run())
    why = [message.why for message in heard if isinstance(message, from_worker.NotCompared)]
    assert len(why) == 2 and "No such file or directory" in why[0]


OF_WORKER = {"ranks": [0, 1], "description": "default_pg", "device": ""}
LAST_CALL = messages.Begun("g", 1, 1, "barrier", "", "a.py:1")


def reply(*pairs: tuple[int, int], number: int = 1) -> messages.RecordsReply:
    """Of a rank that has made these calls in the default group: number and chain of each."""
    groups = {"g": messages.GroupRecords("the default group", pairs)}
    return messages.RecordsReply(number, groups, [LAST_CALL])


def test_a_rank_that_does_not_reply_is_known_by_its_heartbeats() -> None:
    comparison = Comparison()
    assert not comparison.hear(0, {"g": [1, 5]}, 0.0) and not comparison.hear(1, {"g": [1, 5]}, 0.0)
    seen = look(comparison, 2, lambda rank, _: None if rank else reply((1, 5)))
    assert seen.difference is None
    assert seen.last == {0: "the 1st of the default group, barrier at a.py:1", 1: "the 1st of the default group"}


def test_a_rank_that_begins_in_a_group_while_others_are_asked_about_it_is_on_no_side() -> None:
    def answer(rank: int, asked: messages.AskRecords) -> messages.RecordsReply:
        groups = {"g": [(1, rank)], **({"h": [(1, rank)]} if rank < 2 else {})}
        named = {group: messages.GroupRecords(f"group {group}", chains) for group, chains in groups.items()}
        calls = [messages.Begun(group, 1, 1, f"call {rank}", "", "a.py:1") for group in asked.calls]
        return messages.RecordsReply(1, named, calls)

    found = look(Comparison(), 3, answer).difference
    assert found is not None and found.error.what.endswith("rank 2 called call 2 at a.py:1, as the 1st of group g")


def look(
    comparison: Comparison, ranks: int, answer: Callable[[int, messages.AskRecords], messages.RecordsReply | None]
) -> Seen:
    """Look at what all ranks have called."""
    looking: Any = comparison.look(range(ranks))
    replies = None
    while True:
        try:
            asked, wanted = looking.send(replies)
        except StopIteration as end:
            return end.value
        answers = {rank: answer(rank, messages.AskRecords(1, **wanted)) for rank in asked}
        replies = {rank: as_sent(one) for rank, one in answers.items() if one is not None}


def as_sent(message: messages.RecordsReply) -> messages.RecordsReply:
    return messages.read_from_rank(as_json(message).decode())  # type: ignore[return-value]


def watched(size: int = 2, **options: Any) -> tuple[Watch, list[Any]]:
    """A watch over two ranks, and what it has sent: the roll call and the connections are stand-ins."""
    sent: list[Any] = []
    infos = [RankInfo(rank=rank, world_size=size, host="h", pid=rank, agent=0) for rank in range(size)]
    run = replace(run_info(), world_size=size, **options)
    roll_call: Any = SimpleNamespace(run=run, info=infos.__getitem__, infos=lambda: infos, works=True)
    roll_call.hear, roll_call.stopped = (lambda rank, now: None), (lambda rank: "")
    peer: Any = SimpleNamespace(connection=SimpleNamespace(send=sent.append, write=sent.append), left=False)
    watch = Watch(roll_call, Peers.fromkeys(range(size), peer), 0.0)
    for rank in range(size):
        watch.hear(rank, Beat(calls={"g": [1, 5]}), 0.0)
    return watch, sent


def fail(watch: Watch, rank: int, broken_at: str | None, *, judged: bool) -> None:
    """Hear a rank's last words from within a collective."""
    verdict = Verdict("peer-lost", "what", f"reason {rank}", "next", 14, rank=rank, host="h", pid=rank, judged=judged)
    watch.take_failure(verdict, broken_at, 1.0, in_a_collective=True)


def test_all_ranks_that_crash_before_it_is_known_whether_their_calls_differ_are_lost() -> None:
    watch, sent = watched(on_loss="wait")
    for rank in range(2):
        fail(watch, rank, None, judged=True)
    assert not watch.take_lost() and watch.mismatch_search.waiting
    number = sent[-1].number
    for rank in range(2):
        watch.inquiries.take_reply(rank, number, reply((1, 5)), 1.1)
    lost = watch.take_lost()
    last = "ranks 0 and 1 began last the 1st of the default group, barrier at a.py:1"
    assert {rank: loss.verdict.why for rank, loss in lost.items()} == {
        rank: f"reason {rank}\n{last}" for rank in range(2)
    }
    assert not watch.mismatch_search.waiting and not watch.take_lost()


def test_a_collective_that_breaks_on_all_ranks_is_one_loss_and_is_judged_once() -> None:
    watch, sent = watched(on_loss="wait")
    for rank in range(2):
        fail(watch, rank, "a.py:1", judged=False)
    for rank in range(2):
        watch.hear(rank, None, 2.5)
    watch.check(2.5)
    watch.check(2.6)
    assert [type(message) for message in sent] == [messages.AskRecords] * 2
    watch.check(2.6 + RECORDS_WITHIN)
    assert [*watch.take_lost()] == [0]
    watch.check(4.0)
    assert not watch.take_lost()


def test_a_collective_that_breaks_is_blamed_on_the_rank_that_has_finished_before_any_of_those_where_it_broke() -> None:
    watch, _ = watched(3)
    # What rank 0 has begun is not known. Rank 1 has closed its group as its collective broke.
    for rank, (begun, closed) in enumerate((({}, {}), ({}, {"0": 3}), ({"0": 2}, {}))):
        watch.hear(rank, Beat(collectives=begun, closed=closed), 1.0)
    watch.health.finish(2)
    for rank in (0, 1):
        fail(watch, rank, f"a.py:{rank}", judged=False)
        watch.hear(rank, None, 2.5 - rank)  # of a busy host
    watch.hear(2, None, 2.5)
    watch.check(2.5)
    watch.check(2.6 + RECORDS_WITHIN)
    failure = watch.end_of_work.failure
    assert failure and failure.what == "rank 2 had finished while rank 1 was still in a collective"


def test_a_rank_that_has_closed_its_group_because_of_an_exception_is_named_with_it_and_may_begin_anew() -> None:
    for options in ({}, {"on_loss": "wait", "on_loss_of_own_code": True}):
        watch, _ = watched(2, **options)
        watch.hear(0, Beat(collectives={"0": 3}), 1.0)
        watch.hear(1, Beat(closed={"0": 2}, raised="ValueError: bad sample"), 1.0)
        fail(watch, 0, "a.py:1", judged=False)
        for rank in range(2):
            watch.hear(rank, None, 2.5)
        watch.check(2.5)
        failure = watch.end_of_work.failure or watch.take_lost()[1].verdict
        assert (failure.rank, failure.identifier) == (1, "training-failed")
        assert failure.what == "rank 1 on h: ValueError: bad sample"
        assert bool(watch.end_of_work.failure) is not bool(options)


@pytest.mark.parametrize("error", ["training-failed", "peer-lost"])  # the victim may hide what torch has raised
def test_a_victim_that_closes_its_group_is_no_culprit_and_one_that_fails_first_is_explained(error: str) -> None:
    watch, _ = watched(3)
    for rank, (count, raised) in enumerate((("4", ""), ("4", "RuntimeError: reset"), ("3", "ValueError: bad sample"))):
        groups = {"closed" if raised else "collectives": {"0": int(count)}}
        watch.hear(rank, Beat(**groups, raised=raised, broken=rank == 1), 1.0)
    verdict = Verdict(error, "what", "why", "next", 1, rank=0, host="h", pid=0, judged=False)
    watch.take_failure(verdict, "a.py:1" if error == "peer-lost" else None, 1.0, in_a_collective=False)
    for rank in range(3):
        watch.hear(rank, None, 2.5)
    watch.check(2.5)
    failure = watch.end_of_work.failure
    assert failure and (failure.rank, failure.what) == (2, "rank 2 on h: ValueError: bad sample")
    assert (failure.why.splitlines()[-1] == "what") is (error == "training-failed")


def test_a_rank_that_has_handled_its_exception_and_finished_ends_the_run_as_any_that_finishes_early() -> None:
    watch, _ = watched(2)
    watch.hear(0, Beat(collectives={"0": 3}, inside=True), 1.0)
    watch.hear(1, Beat(closed={"0": 2}, raised="ValueError: bad sample"), 1.0)
    watch.health.finish(1)
    fail(watch, 0, "a.py:1", judged=False)
    watch.hear(0, None, 2.5)
    watch.check(2.5)
    watch.check(2.6 + RECORDS_WITHIN)
    failure = watch.end_of_work.failure
    assert failure and failure.what == "rank 1 had finished while rank 0 was still in a collective"
    assert failure.why.splitlines()[2] == "rank 1: ValueError: bad sample"


@pytest.mark.parametrize("broken", [(0, 1), (0,)])  # while rank 1 saves what it has
def test_of_a_silent_rank_the_ranks_are_the_victims_whose_collectives_break_and_who_close_their_groups(
    broken: Sequence[int],
) -> None:
    watch, _ = watched(3, on_loss="wait")
    for rank, (begun, closed) in enumerate((({"0": 31}, {}), ({}, {"0": 30}), ({"0": 29}, {}))):
        watch.hear(rank, Beat(collectives=begun, closed=closed), 1.0)
    watch.hear(1, None, 8.0)
    for rank in broken:
        fail(watch, rank, f"a.py:{rank}", judged=False)
        watch.hear(rank, None, 8.0)
    watch.check(8.0)
    assert [*watch.take_lost()] == [2] and watch.end_of_work.failure is None


def test_of_ranks_far_behind_one_is_looked_at_with_the_rank_ahead_and_less_and_less_often() -> None:
    comparison = Comparison()
    for rank in range(1024):
        comparison.hear(rank, {"g": [1000 if rank == 7 else 1, 5]}, 0.0)
    assert comparison.lagging(0.5) is None
    ticks = [0.1 * tick for tick in range(10, 6000)]
    looks = [(now, pair) for now in ticks if (pair := comparison.lagging(now)) is not None]
    assert {pair for _, pair in looks} == {(0, 7)}
    waits = [round(after[0] - before[0]) for before, after in itertools.pairwise(looks)]
    assert waits[:5] == [5, 10, 20, 40, 60] and set(waits[4:]) == {LOOK_AGAIN_WITHIN}
    for rank in set(range(1024)) - {7}:
        comparison.hear(rank, {"g": [900, 5]}, 600.0)
    assert comparison.lagging(620.0) == (0, 7) and comparison.lagging(620.0 + LOOK_AGAIN_AFTER) == (0, 7)


def test_groups_share_the_numbers_that_an_agent_replies_with() -> None:
    read, memory = Records(), memoryview(bytearray(collective_memory.MEMORY_SIZE))
    descriptor = os.memfd_create("test")
    os.ftruncate(descriptor, collective_memory.MEMORY_SIZE)
    read.open(os.getpid(), descriptor, True, True)
    for identity in range(1, 5):
        read.add_group({"identity": identity, "key": f"g{identity}", **OF_WORKER})
    for begun in range(1, 401):
        collective_memory.write(memory, (begun, (begun + 3) // 4, begun % 4 + 1, 5), b"barrier", b"a.py:1")
        os.pwrite(descriptor, memory, 0)
    for asked, each in ((256, 64), (4, LAST)):
        answer = read.answer(messages.AskRecords(1, asked)).groups
        assert [len(group.chains) for group in answer.values()] == [each] * 4
    for identity in range(5, 2_000):  # of a script that opens others for each epoch, and closes none
        read.add_group({"identity": identity, "key": f"g{identity}", **OF_WORKER})
    begun, _ = read.count({f"g{identity}": 0 for identity in range(1, 2_000)})
    assert len(begun) == 512 and begun[f"g1{BY_RECORDS}"] == 100
    for number in range(101, 9_000):  # more than there is room for, before the agent reads again
        collective_memory.write(memory, (300 + number, number, 2, 5), b"barrier", b"a.py:1")
    os.pwrite(descriptor, memory, 0)
    read.read()
    begun, _ = read.count({})
    assert [begun[f"g{identity}{BY_RECORDS}"] for identity in (1, 2)] == [100, 8_999]
    for group, number in ((8_193, 5), (1, 101)):  # they share a place, which the later one keeps
        collective_memory.write_number(memory, group, number)
    assert [collective_memory.read_number(memory, group) for group in (1, 8_193)] == [None, 5]
    os.close(descriptor)


Calls = Callable[[Callable[..., None]], Any]
"""Calls collectives; it is given what records those of the group."""


def records_of(*calls: Calls, backend: str = "fake") -> Records:
    """What an agent reads of a worker that makes these calls as rank 0 of 2, by default with torch's stand-in for a
    backend."""
    told: list[Any] = []
    dist.init_process_group(backend, store=fake_pg.FakeStore(), rank=0, world_size=2)
    recorder = recording.Recorder(SPEC, told.append)
    stop = recorder.start()
    try:
        record = recorder._groups[dist.group.WORLD]
        for call in calls:
            call(record)
        read = Records()
        read.open(os.getpid(), told[0].descriptor, told[0].complete, told[0].compared)
        for one in told[1:]:
            read.add_group(asdict(one))
        return read
    finally:
        stop()
        dist.destroy_process_group()


with_hooks = pytest.mark.skipif(
    not recording.operations_of_hooks({"BARRIER": None}), reason="before torch 2.14 what C++ begins is not recorded"
)


@pytest.mark.parametrize("hooks", [pytest.param(True, marks=with_hooks), False])
def test_an_agent_counts_what_is_recorded_of_groups_that_are_open_or_closed_otherwise_what_torch_says(
    monkeypatch: pytest.MonkeyPatch, *, hooks: bool
) -> None:
    if not hooks:
        monkeypatch.setattr(recording, "operations_of_hooks", lambda wanted: {})
    found: list[tuple[dict[str, int], dict[str, int]]] = []

    def count(told: list[Any]) -> None:
        read = Records()
        for one in told:
            match one:
                case from_worker.RecordsMemory():
                    read.open(os.getpid(), one.descriptor, one.complete, one.compared)
                case from_worker.GroupOpened():
                    read.add_group(asdict(one))
                case from_worker.GroupClosed():
                    read.close_group(one.key, one.begun)
        read.read()
        found.append(read.count({} if hooks else private_torch.open_groups().begun))  # {}: since the last message

    told: list[Any] = []
    stop = recording.Recorder(SPEC, told.append).start()
    for _ in range(2):
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
        dist.new_group([0, 1])
        dist.all_reduce(torch.ones(1))
        dist.send(torch.ones(1), 1)
        count(told)
        dist.destroy_process_group()
        count(told)
    stop()
    # torch's stand-in for a backend counts nothing; where one rank has sent, what it says does not count.
    ranks = f"{zlib.crc32(b'[0, 1]'):08x}"
    began, end = ({"0": 1, "1": 0}, BY_RECORDS) if hooks else ({"1": 0}, "")
    first, second = ({f"{name}/{ranks}/{time}/0{end}": count for name, count in began.items()} for time in (1, 2))
    assert found == [(first, {}), ({}, first), (second, first), ({}, {**first, **second})]


@pytest.mark.parametrize(
    ("error", "told"),
    [
        (ValueError("bad sample"), ("ValueError: bad sample", False)),
        (StopIteration(), ("StopIteration", False)),
        (OSError("/data/" + 300 * "x"), ("OSError: /data/" + 240 * "x", False)),
        (KeyboardInterrupt(), ("", False)),
        (dist.DistNetworkError("Connection closed by peer"), ("DistNetworkError: Connection closed by peer", True)),
    ],
)
def test_of_a_default_group_that_is_closed_because_of_an_exception_it_is_said_which_and_whether_a_collective_broke(
    error: BaseException, told: tuple[str, bool]
) -> None:
    heard: list[Any] = []
    stop = recording.Recorder(SPEC, heard.append).start()
    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    dist.new_group([0, 1])
    try:
        raise error
    except BaseException:
        dist.destroy_process_group()
    stop()
    closed = [(one.raised, one.broken) for one in heard if isinstance(one, from_worker.GroupClosed)]
    assert closed == [("", False), told]  # the default group last


def test_an_exception_that_was_handled_before_a_group_was_opened_is_no_reason_to_close_it() -> None:
    heard: list[Any] = []
    stop = recording.Recorder(SPEC, heard.append).start()
    try:
        raise FileNotFoundError("config.json")
    except OSError:
        dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
        dist.destroy_process_group()
    stop()
    assert [one.raised for one in heard if isinstance(one, from_worker.GroupClosed)] == [""]


@with_hooks
def test_a_signal_handler_in_the_middle_of_a_record_may_raise_or_begin_a_collective(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    write = collective_memory.write

    def handled_by(handler: Callable[[], None]) -> Calls:
        def call(record: Callable[..., None]) -> None:
            def interrupted(*record: Any) -> None:
                monkeypatch.undo()
                handler()
                write(*record)

            monkeypatch.setattr(collective_memory, "write", interrupted)
            alike(record)

        return call

    def raises() -> None:
        raise TimeoutError("of the program")

    def catches(record: Callable[..., None]) -> None:
        with pytest.raises(TimeoutError):
            handled_by(raises)(record)

    records = records_of(alike, catches, handled_by(lambda: alike(lambda: None)), alike)
    ((_, chains),) = records.for_beat().items()
    assert sorted(chains[::2]) == [1, 2, 3, 4] and [*records.count({})[0].values()] == [4]


def recorded(*calls: Calls, backend: str = "fake") -> dict[str, Sequence[tuple[int, int]]]:
    """Group -> number and chain of these calls."""
    groups = records_of(*calls, backend=backend).answer(messages.AskRecords(1, MOST_CHAINS)).groups
    return {key: group.chains for key, group in groups.items()}


def compared(*ranks: Records) -> tuple[bool, Difference | None]:
    """Whether the heartbeats of these ranks show that they called different collectives, and what rank 0 finds."""
    comparison = Comparison()
    differ = [comparison.hear(rank, records.for_beat(), 0.0) for rank, records in enumerate(ranks)]
    return differ[-1], look(comparison, len(ranks), lambda rank, asked: ranks[rank].answer(asked)).difference


def alike(record: Callable[..., None]) -> None:
    dist.all_reduce(torch.ones(4))


def greatest(record: Callable[..., None]) -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX)


def least(record: Callable[..., None]) -> None:
    dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MIN)


def compiled(record: Callable[..., None]) -> None:
    """What torch.compile makes of ``greatest``: C++, to which the operation is a string."""
    operations = torch.ops._c10d_functional
    operations.wait_tensor(operations.all_reduce_(torch.ones(4), "max", dist.group.WORLD.group_name))


@with_hooks
def test_a_compiled_collective_goes_together_with_that_of_a_rank_whatever_its_reduce_operation() -> None:
    fell_back, compiles = records_of(alike, greatest, alike), records_of(alike, compiled, alike)
    assert compared(compiles, fell_back, compiles) == (False, None)


@with_hooks
def test_ranks_that_differ_are_named_although_the_reduce_operation_of_one_is_not_known() -> None:
    differ, found = compared(*(records_of(alike, alike, third, alike) for third in (compiled, greatest, least)))
    assert differ and found is not None
    called = r"rank {} called all_reduce float32\[4\] \({}\) at .*"
    expected = f"{called.format(1, 'max')}, {called.format(2, 'min')}, as the 3rd of the default group"
    assert re.fullmatch(expected, found.error.what), found.error.what


def test_what_only_the_joined_rank_calls_from_python_is_not_recorded_without_hooks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Within DDP's join() with find_unused_parameters=True: the ranks that still train call it from C++."""
    monkeypatch.setattr(recording, "operations_of_hooks", lambda wanted: {})

    def joined(record: Callable[..., None]) -> None:
        model = SimpleNamespace(process_group=dist.group.WORLD)
        model.reducer = SimpleNamespace(_get_local_used_map=lambda: torch.zeros(4, dtype=torch.int32))
        torch.nn.parallel.DistributedDataParallel._match_unused_params_allreduce(model)

    assert recorded(alike, joined, greatest) == recorded(alike, greatest) != {}


def test_dynamo_compiles_nothing_of_what_records_a_collective(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where compiled code calls the collective, with a hook and with the methods of an older torch."""
    import torch._dynamo as dynamo

    @torch.compile(backend="eager")
    def program(tensor: torch.Tensor) -> torch.Tensor:
        work = dist.all_reduce(2 * tensor, async_op=True)
        work.wait()
        return tensor + 1

    def frames() -> int:
        dynamo.reset()
        dynamo.utils.counters.clear()
        program(torch.ones(4))
        return int(dynamo.utils.counters["frames"]["total"])

    dist.init_process_group("fake", store=fake_pg.FakeStore(), rank=0, world_size=2)
    not_recorded = frames()
    dist.destroy_process_group()
    found: list[int] = []
    for operations in (recording.operations_of_hooks, lambda wanted: {}):
        monkeypatch.setattr(recording, "operations_of_hooks", operations)
        assert recorded(lambda record: found.append(frames()))
    assert found == [not_recorded] * 2


def test_nothing_is_imported_to_hide_a_function_from_dynamo(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch._dynamo takes 1.5 to 4.4 s to be imported."""
    monkeypatch.setitem(sys.modules, "torch._dynamo", None)
    hide_from_dynamo(lambda: None)


def test_the_backends_of_a_group_have_orders_of_their_own() -> None:
    """As with cpu:gloo,cuda:nccl, when a thread saves a checkpoint and the main thread trains. Without a GPU, torch's
    own stand-in is both backends; torch calls no hook for its device "meta", so the test does."""
    dist.Backend.register_backend("other", fake_pg._create_fake_pg, extended_api=True, devices=["meta"])

    def on_cpu(record: Callable[..., None]) -> None:
        dist.all_reduce(torch.ones(1))

    def elsewhere(record: Callable[..., None]) -> None:
        record(recording._OPERATIONS["ALLREDUCE"], [torch.ones(4, device="meta")], [], -1, None)

    def barrier(record: Callable[..., None]) -> None:
        dist.barrier()

    recorded_of_both = partial(recorded, backend="cpu:fake,meta:other")
    one = recorded_of_both(on_cpu, elsewhere, barrier, on_cpu, elsewhere)
    other = recorded_of_both(elsewhere, on_cpu, elsewhere, barrier, on_cpu)
    assert one == other
    assert {key.split("/")[4]: len(chains) for key, chains in one.items()} == {"cpu": 3, "meta": 2}
    assert recorded_of_both(on_cpu, barrier) != recorded_of_both(barrier, on_cpu)
