"""Who belongs to a run: pure, with a clock that the test turns; and where it is told, with a real coordinator."""

from __future__ import annotations

import asyncio
import json
import secrets
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import msgspec
import pytest
from msgspec.structs import asdict, replace

from ddp_manual.agent.connection import Connection
from ddp_manual.agent.coordinator import Coordinator
from ddp_manual.agent.network_interface import own_address
from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    DeviceMissing,
    DeviceTaken,
    LoopbackMaster,
    RankMissing,
    RankTaken,
    VersionMismatch,
)
from ddp_manual.messages import (
    Claim,
    FromRank0,
    Greeting,
    Heartbeat,
    Hello,
    Look,
    News,
    Place,
    Placed,
    Question,
    RankInfo,
    Ready,
    Refused,
    RunEnds,
    RunInfo,
    Seen,
    Signed,
    Welcome,
    WorkerReady,
    read_from_rank_0,
)
from ddp_manual.protocol.compatibility import shared_gpu, unlike, unlike_when_ready
from ddp_manual.protocol.reachability import targets
from ddp_manual.protocol.roll_call import (
    MOST_REFUSALS,
    RollCall,
    advice_for,
    assign_places,
    missing_ranks_error,
    situation,
)
from ddp_manual.protocol.seal import Seal
from ddp_manual.protocol.seats import Seats
from ddp_manual.terminal import as_ranges, in_words
from ddp_manual.wire import LONGEST_ANSWER, as_json, decode, reader_of
from ddp_manual.wrapping import whole
from tests.runs import RUN, info, ready, run_info


def ready_with(*gpus: str, **other: Any) -> Ready:
    """Ready for NCCL, which wants a GPU for each rank."""
    nccl = {"device": ("cuda", "default"), "backend": ("nccl", "default")}
    return ready(**{"device": "cuda", "backend": "nccl", "gpus": list(gpus), "options": nccl, **other})


def test_rank_0_on_loopback_is_to_be_started_again_with_an_address_of_its_network() -> None:
    mine = own_address()
    runs = [run_info(address="127.0.0.1", command=command) for command in ("ddp-manual train", "WORLD_SIZE=2")]
    by_hand, script = (advice_for([[1, 1]], run, [str(mine)]) for run in runs)
    assert f"start rank 0 again with --master_addr {mine}" in by_hand[-1]
    assert f"start rank 0 again with master_addr={mine}" in script[-1]
    assert advice_for([[1, 1]], run_info(address="10.0.0.1"), ()) == [""]


def test_a_local_rank_that_was_given_is_kept() -> None:
    assert assign_places([info(0, "a", local_rank=3), info(1, "a")])[0].local_rank == 3


def test_many_missing_ranks_are_named_as_ranges() -> None:
    assert in_words(as_ranges([1])) == "rank 1"
    assert in_words(as_ranges([1, 2, 3, 7])) == "ranks 1-3, 7"
    assert len(in_words(as_ranges(range(1, 4096)))) < 20
    assert in_words(as_ranges(range(1, 4096, 2))).endswith(", 29, 31, ...")


def test_the_error_for_missing_ranks_has_a_command_for_each_and_leaves_other_braces_alone() -> None:
    news = News(here=1, named=["0 (a)"], missing=[(1, 2)])
    error = missing_ranks_error(news, RUN, 15.0, ())
    assert error.what == "2 of 3 ranks never joined within 15 s: ranks 1-2"
    assert error.next.splitlines()[:2] == ["  train --rank 1 --data '{x}'", "  train --rank 2 --data '{x}'"]
    assert "start the others again" in error.next


def test_ranks_that_are_here_and_do_not_load_torch_are_named_as_such() -> None:
    news = News(here=3, named=["0 (a)"], loading=[(1, 2)])
    error = missing_ranks_error(news, RUN, 15.0, ())
    assert "not all could load torch: ranks 1-2" in error.what
    assert "never joined" not in error.what


# -- what a process may say of itself ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "0"},
        {"rank": 4},
        {"rank": -1},
        {"rank": True},
        {"host": 5},
        {"options": []},
        {"options": {"lr": 5}},
        {"versions": {"torch": 2}},
        {"code": "all of it"},
        {"code": {"part": 5}},
        {"answer_port": 70_000},
        {"allow_mismatch": 1},
        {"since": "noon"},
        {"since": 1e300},
        {"local_rank": "0"},
        {"local_rank": -1},
        {"unknown": 1},
        {"address": "no.address"},
        {"host": "a\nb"},
        {"host_id": "a" * 300},
    ],
)
def test_a_hello_with_impossible_values_is_refused(wrong: dict[str, object]) -> None:
    read = reader_of(RankInfo)
    assert read(as_json(info(0, "a")).decode()) == info(0, "a")
    with pytest.raises(msgspec.MsgspecError):
        read(json.dumps({**asdict(info(0, "a")), **wrong}))


@pytest.mark.parametrize(
    "wrong",
    [
        {"pid": "1"},
        {"device": "cpu" * 100},
        {"backend": 1},
        {"gpus": [1]},
        {"gpus": "GPU-1"},
        {"gpus": ["GPU\n1"]},
        {"versions": {"cuda": 13}},
        {"options": {"device": "cpu"}},
        {"store": {}},
        {"unknown": 1},
    ],
)
def test_a_device_report_with_impossible_values_is_refused(wrong: dict[str, object]) -> None:
    read = reader_of(Ready)
    assert read(as_json(ready()).decode()) == ready()
    with pytest.raises(msgspec.MsgspecError):
        read(json.dumps({**asdict(ready()), **wrong}))


# -- who belongs together ---------------------------------------------------------------------------------------------


def refused(theirs: RankInfo, ours: RankInfo, run: RunInfo = RUN) -> DdpManualError | None:
    return unlike(theirs, ours, run, now=0.0)[0]


def refused_when_ready(theirs: Ready, ours: Ready) -> DdpManualError | None:
    return unlike_when_ready(info(1, "b"), theirs, info(0, "a"), ours, RUN)


def test_who_expects_another_number_of_ranks_is_told_the_command_of_a_rank_that_is_missing() -> None:
    roll_call = roll_call_of(info(0, "a"), info(1, "a"))
    for rank, world_size in ((1, 2), (2, 4), (3, 4)):
        error = roll_call.admit(info(rank, "b", world_size=world_size), 1.0, 1.0, 0.0)
        assert isinstance(error, DdpManualError)
        assert error.next == whole("train --rank 2 --data '{x}'")


def test_a_different_torch_is_reported_with_the_command_that_fixes_it_and_can_be_allowed() -> None:
    other = info(1, "b", versions={"torch": "2.11.0", "python": "3.11"})
    error = refused(other, info(0, "a"))
    assert isinstance(error, VersionMismatch)
    assert error.why == "torch: rank 0 (a) has 2.15.0+cu132, rank 1 has 2.11.0"
    assert "pip install torch==2.15.0\n" in error.next
    for pair in ((replace(other, allow_mismatch=True), info(0, "a")), (other, info(0, "a", allow_mismatch=True))):
        assert unlike(*pair, RUN, now=0.0) == (
            None,
            ["rank 1 (b, pid 1) has other versions than rank 0: torch (allowed)"],
        )


def test_cuda_and_nccl_versions_are_compared_only_with_nccl() -> None:
    other = {"torch": "2.15.0+cpu", "python": "3.11", "cuda": None, "nccl": None}
    assert refused(info(1, "b", versions={"torch": "2.15.0+cpu", "python": "3.11"}), info(0, "a")) is None
    assert refused_when_ready(ready(versions=other), ready()) is None
    error = refused_when_ready(ready_with("GPU-1", versions=other), ready_with("GPU-2"))
    assert isinstance(error, VersionMismatch)
    assert "nccl: rank 0 (a) has 2.30.7, rank 1 has none" in error.why
    allowed = info(1, "b", allow_mismatch=True)
    assert (
        unlike_when_ready(allowed, ready_with("GPU-1", versions=other), info(0, "a"), ready_with("GPU-2"), RUN) is None
    )


def test_a_host_without_a_gpu_is_named_whether_or_not_it_has_rank_0() -> None:
    cpu, cuda = ready(), ready_with("GPU-1")
    for rank_1, rank_0, without in ((cpu, cuda, "rank 1 (b, pid 1)"), (cuda, cpu, "rank 0 (a, pid 1)")):
        error = refused_when_ready(rank_1, replace(rank_0, versions=rank_1.versions))
        assert isinstance(error, DeviceMissing)
        assert error.what.startswith(f"{without} has no GPU")


def test_a_chosen_device_that_differs_is_a_different_option_and_not_a_missing_gpu() -> None:
    chosen = ready(options={"device": ("cpu", "flag"), "backend": ("gloo", "default")})
    error = refused_when_ready(chosen, ready_with("GPU-1"))
    assert isinstance(error, ConfigMismatch)
    assert "start every rank with the same --device and --backend" in error.next


def test_a_different_address_family_is_refused() -> None:
    families = [{"address_family": (family, "eth0, from GLOO_SOCKET_IFNAME")} for family in ("IPv4", "IPv6")]
    error = refused(info(1, "b", options=families[1]), info(0, "a", options=families[0]))
    assert isinstance(error, ConfigMismatch)
    assert "address_family: rank 0 has IPv4 (eth0, from GLOO_SOCKET_IFNAME), rank 1 has IPv6" in error.why


def test_a_rank_that_came_through_a_tunnel_to_loopback_is_refused() -> None:
    run = replace(RUN, address="127.0.0.1")
    assert refused(info(1, "a"), info(0, "a"), run) is None
    assert isinstance(refused(info(1, "b"), info(0, "a"), run), LoopbackMaster)


def test_a_clock_that_differs_by_much_gives_a_warning() -> None:
    assert unlike(info(1, "b", since=3600.0), info(0, "a"), RUN, now=0.0)[1] == [
        "the clock of b is 3600 s ahead of a's"
    ]


# -- GPUs: a second one cannot be had where the tests run, so what the processes say of theirs is made up -------------


@pytest.mark.parametrize(
    ("hosts", "gpus", "local_ranks", "error"),
    [
        ("aa", [["GPU-1", "GPU-2"]] * 2, [None, None], None),
        ("aa", [["GPU-1", "GPU-2"]] * 2, [0, 0], DeviceTaken),
        ("ab", [["GPU-1"]] * 2, [None, None], DeviceTaken),  # two containers that see the same GPU
        ("aa", [["GPU-1"]] * 2, [None, None], DeviceMissing),
    ],
)
def test_ranks_of_nccl_need_a_gpu_each(
    hosts: str, gpus: list[list[str]], local_ranks: list[int | None], error: type[DdpManualError] | None
) -> None:
    ranks = [info(rank, host, local_ranks[rank]) for rank, host in enumerate(hosts)]
    sees = [(rank, ready_with(*gpus[rank.rank])) for rank in ranks]
    found = shared_gpu(sees, assign_places(ranks))
    assert type(found) is (error or type(None))
    if found is not None and error is DeviceTaken:
        assert found.what == f"rank 0 (a, pid 1) and rank 1 ({hosts[1]}, pid 1) would share one GPU"
        assert "GPU-1" in found.why
    elif found is not None:
        assert found.what == "rank 1 (a, pid 1) wants cuda:1, which does not exist"


@pytest.mark.parametrize("from_launcher", [False, True])
def test_each_rank_of_a_host_that_sees_only_a_gpu_of_its_own_takes_index_0(from_launcher: bool) -> None:
    positions = [0, 1, 2] if from_launcher else [None] * 3
    roll_call = roll_call_of(*(info(rank, "a", position) for rank, position in enumerate(positions)))
    for rank in range(3):
        assert roll_call.get_ready(rank, ready_with(f"GPU-{rank}", may_use_cpu=True)) == []
    assert roll_call.leave_gpus() is None and roll_call.shared_gpu() is None
    assert [place.local_rank for place in roll_call.places().values()] == [0, 0, 0]
    assert [(line["device"], line["gpu"]) for line in roll_call.roster()] == [("cuda:0", f"GPU-{k}") for k in range(3)]


@pytest.mark.parametrize(
    ("hosts", "gpus", "local_ranks"),
    [
        ("abab", {}, [0, 0, 1, 1]),
        ("aa", {0: ["GPU-1"], 1: ["GPU-1"]}, [0, 1]),
        ("aa", {0: ["GPU-1", "GPU-2"], 1: ["GPU-1", "GPU-2"]}, [0, 1]),
        ("aa", {0: ["GPU-1"]}, [0, 1]),
        ("aabb", {0: ["GPU-1"], 1: ["GPU-2"], 2: ["GPU-3", "GPU-4"], 3: ["GPU-3", "GPU-4"]}, [0, 0, 0, 1]),
    ],
)
def test_a_rank_takes_the_index_of_its_position_on_its_host_unless_each_rank_there_sees_a_gpu_of_its_own(
    hosts: str, gpus: dict[int, list[str]], local_ranks: list[int]
) -> None:
    places = assign_places([info(rank, host) for rank, host in enumerate(hosts)], gpus)
    assert [place.local_rank for place in places.values()] == local_ranks


def test_more_ranks_than_gpus_on_a_host_train_on_the_cpu_where_nobody_has_chosen_a_device() -> None:
    roll_call = roll_call_of(*(info(rank, "b") for rank in range(2)))
    for rank in range(2):
        assert roll_call.get_ready(rank, ready_with("GPU-2", may_use_cpu=True)) == []
    why = roll_call.leave_gpus()
    assert why is not None and why.startswith("all ranks train on the CPU, with gloo: b has 2 ranks and 1 GPU;")
    assert roll_call.shared_gpu() is None
    assert [line["device"] for line in roll_call.roster()] == ["cpu"] * 2
    assert {member.ready and member.ready.backend for member in roll_call.members.values()} == {"gloo"}


def test_of_several_hosts_one_that_has_lost_a_gpu_does_not_send_the_others_to_the_cpu() -> None:
    roll_call = roll_call_of(*(info(rank, host) for rank, host in enumerate("abb")))
    for rank, gpu in enumerate(("GPU-1", "GPU-2", "GPU-2")):
        assert roll_call.get_ready(rank, ready_with(gpu, may_use_cpu=True)) == []
    assert roll_call.leave_gpus() is None
    assert isinstance(roll_call.shared_gpu(), DeviceMissing)


@pytest.mark.parametrize(
    ("gpus", "may_use_cpu", "local_ranks", "leave"),
    [
        (["GPU-1", "GPU-2"], [True, True], [None, None], False),
        (["GPU-1"], [True, False], [None, None], False),  # the device of one was chosen
        (["GPU-1"], [True, True], [0, 1], True),  # the local rank of a launcher chooses no GPU
    ],
)
def test_all_ranks_leave_their_gpus_only_if_nobody_has_chosen_a_device_and_a_rank_has_none(
    gpus: list[str], may_use_cpu: list[bool], local_ranks: list[int | None], leave: bool
) -> None:
    roll_call = roll_call_of(*(info(rank, "a", local_ranks[rank]) for rank in range(2)))
    for rank in range(2):
        assert roll_call.get_ready(rank, ready_with(*gpus, may_use_cpu=may_use_cpu[rank])) == []
    assert (roll_call.leave_gpus() is not None) is leave
    error = roll_call.shared_gpu()
    assert (error is not None and "or use --device cpu on every rank" in error.next) is not all(may_use_cpu)


def test_gloo_ranks_may_share_a_gpu() -> None:
    ranks = [info(rank, "a", local_rank=0) for rank in range(2)]
    has = ready(device="cuda", gpus=["GPU-1"])
    assert shared_gpu([(rank, has) for rank in ranks], assign_places(ranks)) is None


# -- the roll call ----------------------------------------------------------------------------------------------------


def roll_call_of(*infos: RankInfo, run: RunInfo = RUN) -> RollCall:
    """All of these are here since second 0."""
    roll_call = RollCall(run, infos[0], 0.0, WITHIN)
    for one in infos:
        assert roll_call.admit(one, 0.0, 0.0, 0.0) is True
    return roll_call


def test_ranks_that_wait_to_return_get_no_say_in_the_device_of_the_others() -> None:
    roll_call = roll_call_of(info(0, "a"), info(1, "a"))
    for rank in range(2):
        roll_call.get_ready(rank, ready_with("GPU-0", may_use_cpu=True))
    roll_call.leave_out()
    assert roll_call.admit(info(2, "a"), 4.0, 4.0, 0.0) is True  # it loads torch when the others begin
    assert roll_call.leave_gpus() is not None


def test_the_news_are_as_short_where_every_second_of_many_ranks_is_missing() -> None:
    run = replace(RUN, world_size=4096)
    roll_call = roll_call_of(*(info(rank, "a", world_size=4096) for rank in range(0, 4096, 2)), run=run)
    news = roll_call.news()
    assert len(as_json(news)) < 1000
    assert "2048 of 4096 ranks never joined" in missing_ranks_error(news, run, 15.0, ()).what
    assert situation(news, 4096).startswith("waiting for ranks 1, 3, 5,")


@pytest.mark.parametrize("later", [0, 1])
def test_the_later_of_two_ranks_that_are_told_to_take_one_gpu_is_refused_alone(later: int) -> None:
    has = ready_with("GPU-1", "GPU-2")
    roll_call = roll_call_of(info(0, "a", 1), info(1, "a", 0), info(2, "a", later))
    assert roll_call.get_ready(1, has) == roll_call.get_ready(0, has) == []
    refused = [(rank, type(error)) for rank, error in roll_call.get_ready(2, has)]
    assert refused == [(2, DeviceTaken)]
    roll_call.leave(2, "has left: it was refused")
    assert roll_call.admit(info(2, "b", later), 1.0, 1.0, 0.0) is True
    assert roll_call.get_ready(2, ready_with("GPU-3", "GPU-4")) == []
    assert roll_call.shared_gpu() is None


def test_a_rank_that_was_told_its_gpu_and_one_that_was_not_share_it_only_once_all_are_here() -> None:
    roll_call = roll_call_of(info(0, "a"), info(1, "a", 0), info(2, "b"))
    for rank, gpus in enumerate([("GPU-1", "GPU-2"), ("GPU-1", "GPU-2"), ("GPU-3",)]):
        assert roll_call.get_ready(rank, ready_with(*gpus)) == []
    assert isinstance(roll_call.shared_gpu(), DeviceTaken)


@pytest.mark.parametrize("replaced", [False, True])
def test_a_rank_that_is_ready_before_rank_0_or_replaces_another_is_compared_too(replaced: bool) -> None:
    roll_call = roll_call_of(info(0, "a"), info(1, "b"))
    other = ready(options={"device": ("cpu", "default"), "backend": ("nccl", "flag")})
    assert roll_call.get_ready(1, ready() if replaced else other) == []
    refused = roll_call.get_ready(0, ready())
    if replaced:
        roll_call.leave(1, "is gone: its process has ended")
        assert refused == [] and roll_call.admit(info(1, "b"), 1.0, 1.0, 0.0) is True
        refused = roll_call.get_ready(1, other)
    assert [(rank, type(error)) for rank, error in refused] == [(1, ConfigMismatch)]


def test_once_all_ranks_are_here_a_newcomer_reads_that_no_rank_is_missing() -> None:
    roll_call = roll_call_of(*(info(rank, "a") for rank in range(3)))
    error = roll_call.admit(info(0, "b", pid=9), 1.0, 1.0, 0.0, false_rank_0=True)
    assert isinstance(error, RankTaken)
    assert error.next.startswith("all ranks are here; to replace rank 0, end that process")


def test_beyond_32_hosts_every_host_is_still_tried_in_both_directions() -> None:
    assert targets(1, 3) == [0, 2]
    for nodes in (33, 64, 100):
        tried = {(node, other) for node in range(nodes) for other in targets(node, nodes)}
        assert len(tried) < nodes * 8
        assert {start for start, _ in tried} == {end for _, end in tried} == set(range(nodes))
        assert all(start != end for start, end in tried)


# -- told over real connections ---------------------------------------------------------------------------------------

WITHIN = 20.0
Connect = Callable[[], Awaitable[tuple[Connection[FromRank0], Greeting]]]
M = TypeVar("M")


def with_a_coordinator(
    test: Callable[[Coordinator, Connect], Awaitable[None]], world_size: int = 3, own_nonce: str = "rank 0's"
) -> None:
    """Run ``test`` with a coordinator on loopback, and what makes a connection to it that was greeted."""

    async def run() -> None:
        rank_0 = info(0, "a", world_size=world_size)
        coordinator = Coordinator(
            replace(RUN, world_size=world_size), rank_0, Seal(None), own_nonce, WITHIN, Seats(0, "")
        )
        listener = socket.create_server(("127.0.0.1", 0), backlog=4096)
        await coordinator.serve(listener)
        connections: list[Connection[FromRank0]] = []

        async def connect() -> tuple[Connection[FromRank0], Greeting]:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(
                lambda: Connection(read_from_rank_0, longest=LONGEST_ANSWER), *listener.getsockname()
            )
            connections.append(connection)
            return connection, await until(connection, Greeting)

        try:
            await asyncio.wait_for(test(coordinator, connect), 3 * WITHIN)
        finally:
            coordinator.close()
            for connection in connections:
                connection.close()

    asyncio.run(run())


async def until(connection: Connection[FromRank0], kind: type[M]) -> M:
    """The next message of a kind; others, such as heartbeats and news, are skipped."""
    while True:
        message = await asyncio.wait_for(connection.receive(), WITHIN)
        assert message is not None, connection.ended
        if isinstance(message, kind):
            return message


def content(message: Signed) -> Any:
    return decode(bytes(message.content).decode())


async def say_hello(connect: Connect, who: RankInfo, nonce: str = "") -> Connection[FromRank0]:
    connection, _ = await connect()
    connection.send(Seal(None).close(Hello, "", Claim(who, nonce or secrets.token_hex(8))))
    return connection


def test_a_process_that_waits_for_a_taken_rank_is_refused_when_rank_0_leaves() -> None:
    async def test(coordinator: Coordinator, connect: Connect) -> None:
        holder = await say_hello(connect, info(1, "b", pid=7))
        await until(holder, Welcome)
        second = await say_hello(connect, info(1, "b", pid=8))
        await until(await say_hello(connect, info(2, "b")), Welcome)  # so the claim has come too
        coordinator.end(RankMissing("rank 0 left", why="-", next="-"))
        for connection in (holder, second):
            refused = content(await until(connection, Refused))
            assert refused["what"] == "rank 0 (a, pid 1) left before all ranks had joined"

    with_a_coordinator(test)


def test_only_rank_0s_own_agent_can_be_rank_0() -> None:
    async def test(coordinator: Coordinator, connect: Connect) -> None:
        stranger = await say_hello(connect, info(0, "b"))
        assert content(await until(stranger, Refused))["identifier"] == "rank-taken"
        await until(await say_hello(connect, info(0, "a"), "rank 0's"), Welcome)

    with_a_coordinator(test)


def test_an_observer_may_look_again_once_it_has_read_the_answer_and_not_before() -> None:
    async def test(coordinator: Coordinator, connect: Connect) -> None:
        patient, _ = await connect()
        for _ in range(400):  # more bytes than a stranger may send in all
            patient.send(Seal(None).close(Look, "", Question("n" * 250)))
            assert content(await until(patient, Seen))["missing"] == [[0, 2]]
        hasty, _ = await connect()
        for _ in range(10):
            hasty.send(Seal(None).close(Look, "", Question("")))
        answers = []
        while (answer := await asyncio.wait_for(hasty.receive(), WITHIN)) is not None:
            answers.append(answer)
        assert len(answers) <= 1

    with_a_coordinator(test)


def test_a_mistake_of_the_coordinator_ends_the_run_and_blames_nobody_whose_message_came(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def test(coordinator: Coordinator, connect: Connect) -> None:
        rank = await say_hello(connect, info(1, "b"))
        await until(rank, Welcome)
        monkeypatch.setattr(RollCall, "hear", lambda *_: {}["a mistake"])
        rank.send(Heartbeat())
        verdict = (await until(rank, RunEnds)).verdict
        assert (verdict.rank, verdict.what) == (0, "rank 0's coordinator broke")
        assert "KeyError: 'a mistake'" in verdict.why and not rank.closed
        monkeypatch.undo()

    with_a_coordinator(test)


def test_a_mistake_about_a_stranger_ends_its_connection_and_nothing_else(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test(coordinator: Coordinator, connect: Connect) -> None:
        rank = await say_hello(connect, info(1, "b"))
        await until(rank, Welcome)
        monkeypatch.setattr(RollCall, "admit", lambda *_, **__: {}["a mistake"])
        stranger = await say_hello(connect, info(2, "b"))
        assert await asyncio.wait_for(stranger.receive(), WITHIN) is None
        monkeypatch.undo()
        await until(await say_hello(connect, info(2, "b")), Welcome)

    with_a_coordinator(test)


def test_of_many_processes_that_are_refused_only_the_first_are_named_each_minute() -> None:
    calling = RollCall(RUN, info(0, "a"), 0.0, WITHIN)
    for number in range(1000):
        calling.admit(info(1, "b", pid=number, world_size=7), number / 1000, 0.0, 0.0)
    assert len(calling.refused) == MOST_REFUSALS
    assert "pid 15) was refused: world-size-mismatch" in calling.refused[-1]
    assert calling.refused[-1].endswith("more that are refused within 60 s are not named")
    calling.admit(info(1, "b", pid=7777, world_size=7), 100.0, 0.0, 0.0)
    assert "pid 7777) was refused" in calling.refused[-1]


def test_rank_0_of_a_large_world_reads_the_roster_of_all_ranks() -> None:
    """The roster of 4,096 ranks is longer than any other message, and than what a slow reader may leave unread."""
    ranks = 4096
    place = Place(rank=0, world_size=ranks, local_rank=0, local_world_size=ranks, node=0, nodes=1, host_leader=0)

    async def test(coordinator: Coordinator, connect: Connect) -> None:
        rank_0 = await say_hello(connect, info(0, "a", world_size=ranks), "rank 0's")
        await until(rank_0, Welcome)
        for rank in range(1, ranks):
            who = info(rank, "a", world_size=ranks, host="a" * 150)
            assert coordinator.protocol.roll_call.admit(who, time.monotonic(), 0.0, 0.0) is True
            coordinator.protocol.roll_call.get_ready(rank, ready())
        rank_0.send(WorkerReady(ready(store=("10.0.0.1", 41000))))
        message = await until(rank_0, Placed)
        assert message.place == place
        assert len(message.roster) == ranks
        assert len(as_json(message)) > 1 << 20

    with_a_coordinator(test, ranks)
