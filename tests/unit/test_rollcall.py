from __future__ import annotations

import logging
import socket
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from typing import Any

import pytest

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    DeviceMissing,
    DeviceTaken,
    LoopbackMaster,
    RankMissing,
    VersionMismatch,
)
from ddp_manual.rendezvous.answer import Answered, Answering, answer
from ddp_manual.rendezvous.comparing import shared_gpu, unlike
from ddp_manual.rendezvous.entries import Entry, Hello, as_ranges, assign_places, in_words, missing_ranks_error
from ddp_manual.rendezvous.reachability import Answerer, targets
from ddp_manual.rendezvous.rollcall import RollCall
from ddp_manual.rendezvous.seal import Seal
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.waiting import Waiting

RUN = Hello(
    run_id="r",
    run_dir="d",
    world_size=3,
    host="a",
    pid=1,
    address="10.0.0.1",
    since=0.0,
    challenge=None,
    command="train --rank {rank} --data '{x}'",
    lifeline=("10.0.0.1", 20000),
    peer_timeout=10.0,
    stall_timeout=300.0,
    script=False,
)


def entry(rank: int, host_id: str, local_rank: int | None = None, **other: Any) -> Entry:
    fields: dict[str, Any] = {
        "rank": rank,
        "world_size": 3,
        "world_size_source": "flag",
        "host": host_id,
        "host_id": host_id,
        "pid": 1,
        "since": 0.0,
        "address": "10.0.0.1",
        "probe_port": 1,
        "device": "cpu",
        "local_rank": local_rank,
        "gpus": [],
        "versions": {"torch": "2.15.0+cu132", "python": "3.11", "cuda": "13.2", "nccl": "2.30.7"},
        "code": {"ddp_manual/training": "aa"},
        "allow_mismatch": False,
        "options": {"backend": ["gloo", "default"]},
    }
    return Entry(**{**fields, **other})


def test_local_rank_is_the_position_among_the_ranks_of_the_same_host() -> None:
    places = assign_places([entry(rank, host) for rank, host in enumerate("abab")])
    assert [place.local_rank for place in places.values()] == [0, 0, 1, 1]
    assert [place.node for place in places.values()] == [0, 1, 0, 1]
    assert [place.host_leader for place in places.values()] == [0, 1, 0, 1]
    assert {place.local_world_size for place in places.values()} == {2}


def test_a_local_rank_that_was_given_is_kept() -> None:
    assert assign_places([entry(0, "a", local_rank=3), entry(1, "a")])[0].local_rank == 3


def test_many_missing_ranks_are_named_as_ranges() -> None:
    assert in_words(as_ranges([1])) == "rank 1"
    assert in_words(as_ranges([1, 2, 3, 7])) == "ranks 1-3, 7"
    assert len(in_words(as_ranges(range(1, 4096)))) < 20


def test_the_error_for_missing_ranks_has_a_command_for_each_and_leaves_other_braces_alone() -> None:
    news = {"here": 1, "named": ["0 (a)"], "missing": [[1, 2]], "refused": [], "gone": []}
    error = missing_ranks_error(news, RUN, 15.0)
    assert error.what == "2 of 3 ranks never joined within 15 s: ranks 1-2"
    assert error.next.splitlines()[:2] == ["train --rank 1 --data '{x}'", "train --rank 2 --data '{x}'"]
    assert "start the others again" in error.next


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
        {"gpus": [1]},
        {"versions": {"torch": 2}},
        {"code": "all of it"},
        {"probe_port": 70_000},
        {"allow_mismatch": 1},
        {"since": "noon"},
        {"since": 1e300},
        {"local_rank": "0"},
        {"unknown": 1},
        {"address": "no.address"},
        {"host": "a\x1b[2J"},
        {"device": "cpu" * 100},
    ],
)
def test_an_entry_that_cannot_be_a_ranks_is_not_believed(wrong: dict[str, object]) -> None:
    request = {**vars(entry(0, "a")), **wrong}
    with pytest.raises((TypeError, ValueError)):
        Entry.from_request(request)


NCCL = {"options": {"backend": ["nccl", "default"]}, "device": "cuda"}


def refused(theirs: Entry, ours: Entry, run: Hello = RUN) -> DdpManualError | None:
    return unlike(theirs, ours, run, now=0.0)[0]


def test_a_rank_like_rank_0_belongs_with_it() -> None:
    assert unlike(entry(1, "b"), entry(0, "a"), RUN, now=0.0) == (None, [])


def test_another_torch_is_named_with_the_command_that_mends_it_and_may_be_allowed() -> None:
    other = entry(1, "b", versions={"torch": "2.11.0", "python": "3.11", "cuda": "12.8", "nccl": None})
    error = refused(other, entry(0, "a"))
    assert isinstance(error, VersionMismatch)
    assert error.why == "torch: rank 0 (a) has 2.15.0+cu132, rank 1 has 2.11.0"
    assert "pip install torch==2.15.0\n" in error.next
    for pair in ((replace(other, allow_mismatch=True), entry(0, "a")), (other, entry(0, "a", allow_mismatch=True))):
        assert unlike(*pair, RUN, now=0.0) == (
            None,
            ["rank 1 (b, pid 1) has other versions than rank 0: torch (allowed)"],
        )


def test_cuda_and_nccl_versions_count_where_nccl_is_used() -> None:
    other = {"torch": "2.15.0+cpu", "python": "3.11", "cuda": None, "nccl": None}
    assert refused(entry(1, "b", versions=other), entry(0, "a")) is None
    error = refused(entry(1, "b", versions=other, **NCCL), entry(0, "a", **NCCL))
    assert isinstance(error, VersionMismatch)
    assert "nccl: rank 0 (a) has 2.30.7, rank 1 has none" in error.why


def test_other_code_is_named_by_the_part_that_differs() -> None:
    error = refused(entry(1, "b", code={"ddp_manual/training": "bb"}), entry(0, "a"))
    assert isinstance(error, ConfigMismatch)
    assert error.what == "rank 1 (b, pid 1) runs other code than rank 0: ddp_manual/training"


def test_a_host_without_a_gpu_is_named_whichever_rank_it_has() -> None:
    for without, having in ((1, 0), (0, 1)):
        kinds = {having: "cuda", without: "cpu"}
        entries = [
            entry(rank, "ab"[rank], device=kinds[rank], options={"device": [kinds[rank], "default"]}) for rank in (0, 1)
        ]
        error = refused(entries[1], entries[0])
        assert isinstance(error, DeviceMissing)
        assert error.what.startswith(f"rank {without} ({'ab'[without]}, pid 1) has no GPU")


def test_another_address_family_is_refused() -> None:
    families = [{"address_family": [family, "eth0, from GLOO_SOCKET_IFNAME"]} for family in ("IPv4", "IPv6")]
    error = refused(entry(1, "b", options=families[1]), entry(0, "a", options=families[0]))
    assert isinstance(error, ConfigMismatch)
    assert "address_family: rank 0 has IPv4 (eth0, from GLOO_SOCKET_IFNAME), rank 1 has IPv6" in error.why


def test_a_rank_that_came_through_a_tunnel_to_loopback_is_refused() -> None:
    run = replace(RUN, address="127.0.0.1")
    assert refused(entry(1, "a"), entry(0, "a"), run) is None
    assert isinstance(refused(entry(1, "b"), entry(0, "a"), run), LoopbackMaster)


def test_a_clock_that_is_far_off_is_warned_about() -> None:
    assert unlike(entry(1, "b", since=3600.0), entry(0, "a"), RUN, now=0.0)[1] == [
        "the clock of b is 3600 s ahead of a's"
    ]


# A second GPU cannot be had where the tests run, so what the processes say of their GPUs is made up here.
def test_two_ranks_on_one_gpu_are_named_with_its_uuid() -> None:
    ranks = [entry(0, "a", gpus=["GPU-1", "GPU-2"], **NCCL), entry(1, "a", gpus=["GPU-1", "GPU-2"], **NCCL)]
    assert shared_gpu(ranks, assign_places(ranks)) is None
    ranks[1] = replace(ranks[1], local_rank=0)
    assert shared_gpu(ranks) is None  # rank 0 has not been given its GPU yet
    error = shared_gpu(ranks, assign_places(ranks))
    assert isinstance(error, DeviceTaken)
    assert error.what == "rank 0 (a, pid 1) and rank 1 (a, pid 1) would share one GPU"
    assert "GPU-1" in error.why
    ranks[0] = replace(ranks[0], local_rank=0)
    assert isinstance(shared_gpu(ranks), DeviceTaken)


@pytest.mark.parametrize("second", [0, 1])
def test_ranks_that_were_told_their_gpus_are_compared_with_one_another_but_not_with_themselves(second: int) -> None:
    gpus = ["GPU-1", "GPU-2"]
    ranks = [entry(rank, "a", local, gpus=gpus, world_size=2, **NCCL) for rank, local in ((0, 0), (1, second))]
    store = RunStore.host(socket.create_server(("127.0.0.1", 0)))
    roll_call = RollCall(store, replace(RUN, world_size=2), ranks[0], Seal(None))
    roll_call.open()
    how = Answering(seal=Seal(None), met=lambda hello: None, hello_first=False, hello_timeout=30)

    def ask(rank: Entry) -> Answered | DdpManualError:
        try:
            return answer(store.clone(), rank, Waiting(30, logging.getLogger(__name__)), how)
        except DdpManualError as error:
            return error

    with ThreadPoolExecutor() as pool:
        rank_1 = pool.submit(ask, ranks[1])
        if second == 0:
            assert isinstance(rank_1.result(), DeviceTaken)
            rank_1 = pool.submit(ask, replace(ranks[1], local_rank=1))
        rank_0 = pool.submit(ask, ranks[0])
        answered = [rank_0.result(), rank_1.result()]
    assert [one.place.local_rank if isinstance(one, Answered) else one for one in answered] == [0, 1]
    assert list(roll_call.end()) == [0, 1]
    roll_call.stop()


@pytest.fixture
def store() -> RunStore:
    return RunStore.host(socket.create_server(("127.0.0.1", 0)))


def ask_as(store: RunStore, nonce: str, who: Entry) -> None:
    """A request by hand; whoever put it in answers no muster."""
    store.arrive({**vars(who), "nonce": nonce * 16})


def test_a_rank_that_comes_as_the_time_is_up_is_not_missing_while_the_others_are_mustered(store: RunStore) -> None:
    """Rank 1 is frozen: it does not answer, but its port is open, so it keeps its rank."""
    with closing(Answerer("127.0.0.1")) as answerer:
        here = {"address": "127.0.0.1", "probe_port": answerer.port}
        roll_call = RollCall(store, RUN, entry(0, "a"), Seal(None))
        roll_call.open()
        ask_as(store, "1", entry(1, "a", **here))
        assert store.verdict("1" * 16)["news"]["missing"] == [[0, 0], [2, 2]]
        ask_as(store, "0", entry(0, "a"))
        ask_as(store, "2", entry(2, "a", **here))
        assert store.news(2)["prove"]
        roll_call.give_up(5.0)
        assert store.news(3)["complete"]
        roll_call.stop()


def test_a_process_that_is_taken_for_dead_is_told_at_once(store: RunStore) -> None:
    roll_call = RollCall(store, RUN, entry(0, "a"), Seal(None))
    roll_call.open()
    ask_as(store, "1", entry(1, "a", address="127.0.0.1", probe_port=1))
    assert store.verdict("1" * 16)["error"] is None
    with closing(Answerer("127.0.0.1")) as answerer:
        ask_as(store, "2", entry(1, "a", address="127.0.0.1", probe_port=answerer.port))
        assert store.verdict("2" * 16)["error"] is None
    last = store.news(3)
    assert last["struck"] == ["1" * 16]
    assert last["gone"] == ["rank 1 (a, pid 1) is gone; pid 1 has taken its place"]
    assert "was not heard in time" in store.place("1" * 16)["error"]["what"]
    roll_call.stop()


def test_who_takes_a_dead_ranks_place_is_held_to_the_same_as_all(store: RunStore) -> None:
    """It may not name rank 0's GPU, nor be where rank 0 cannot connect to it."""
    gpus = {"gpus": ["GPU-1", "GPU-2"], **NCCL}
    roll_call = RollCall(store, RUN, entry(0, "a", 0, **gpus), Seal(None))
    roll_call.open()
    ask_as(store, "1", entry(1, "a", 1, address="127.0.0.1", probe_port=1, **gpus))
    assert store.verdict("1" * 16)["error"] is None
    ask_as(store, "2", entry(1, "a", 1, address="127.0.0.1", probe_port=1, **gpus))
    with closing(Answerer("127.0.0.1")) as answerer:
        ask_as(store, "3", entry(1, "a", 0, address="127.0.0.1", probe_port=answerer.port, **gpus))
        refused = [store.verdict(nonce * 16)["error"]["identifier"] for nonce in "23"]
    assert refused == ["peer-unreachable", "device-taken"]
    roll_call.stop()


def test_a_claim_is_answered_when_the_roll_call_is_given_up(store: RunStore) -> None:
    roll_call = RollCall(store, RUN, entry(0, "a"), Seal(None))
    roll_call.open()
    with closing(Answerer("127.0.0.1")) as answerer:
        here = {"address": "127.0.0.1", "probe_port": answerer.port}
        ask_as(store, "1", entry(1, "a", **here))
        assert store.verdict("1" * 16)["error"] is None
        ask_as(store, "2", entry(1, "a", **here))
        assert store.news(2)["prove"]  # which is asked because of the claim
        roll_call.abandon(RankMissing("rank 0 left", why="-", next="-"))
        assert store.verdict("2" * 16)["error"]["what"] == "rank 0 left"
    roll_call.stop()


def test_two_containers_that_see_the_same_gpu_share_it() -> None:
    ranks = [entry(rank, host, gpus=["GPU-1"], **NCCL) for rank, host in enumerate("ab")]
    assert isinstance(shared_gpu(ranks, assign_places(ranks)), DeviceTaken)


def test_more_ranks_on_a_host_than_gpus_is_a_missing_device() -> None:
    ranks = [entry(rank, "a", gpus=["GPU-1"], **NCCL) for rank in range(2)]
    error = shared_gpu(ranks, assign_places(ranks))
    assert isinstance(error, DeviceMissing)
    assert error.what == "rank 1 (a, pid 1) wants cuda:1, which does not exist"


def test_gloo_ranks_may_share_a_gpu() -> None:
    ranks = [replace(entry(rank, "a", gpus=["GPU-1"]), device="cuda", local_rank=0) for rank in range(2)]
    assert shared_gpu(ranks, assign_places(ranks)) is None


def test_beyond_32_hosts_every_host_is_still_tried_in_both_directions() -> None:
    assert targets(1, 3) == [0, 2]
    for nodes in (33, 64, 100):
        tried = {(node, other) for node in range(nodes) for other in targets(node, nodes)}
        assert len(tried) < nodes * 8
        assert {start for start, _ in tried} == {end for _, end in tried} == set(range(nodes))
        assert all(start != end for start, end in tried)
