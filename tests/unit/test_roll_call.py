"""Who belongs to a run, and who is told: pure, with a clock that the test turns."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
from msgspec.structs import replace

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    DeviceMissing,
    DeviceTaken,
    RankMissing,
    RankTaken,
    VersionMismatch,
)
from ddp_manual.messages import Claim, Heartbeat, Hello, Look, News, Question, Refused, Welcome
from ddp_manual.protocol.compatibility import mismatch, mismatch_when_ready
from ddp_manual.protocol.coordinator import CoordinatorProtocol
from ddp_manual.protocol.handshakes import Peer
from ddp_manual.protocol.missing_ranks import missing_ranks_error
from ddp_manual.protocol.reachability import targets
from ddp_manual.protocol.roll_call import MOST_REFUSALS, RollCall
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.ranks_and_runs import RankInfo, Ready
from ddp_manual.wire import Unreadable, decode
from ddp_manual.wording import as_ranges, in_words
from tests.runs import RUN, info, ready

WITHIN = 20.0


def ready_with(*gpus: str, **other: Any) -> Ready:
    """Ready for NCCL, which wants a GPU for each rank."""
    nccl = {"device": ("cuda", "default"), "backend": ("nccl", "default")}
    return ready(**{"device": "cuda", "backend": "nccl", "gpus": list(gpus), "options": nccl, **other})


def test_many_missing_ranks_are_named_as_ranges() -> None:
    assert in_words(as_ranges([1])) == "rank 1"
    assert in_words(as_ranges([1, 2, 3, 7])) == "ranks 1-3, 7"
    assert len(in_words(as_ranges(range(1, 4096)))) < 20
    assert in_words(as_ranges(range(1, 4096, 2))).endswith(", 29, 31, ...")


def test_ranks_that_are_here_and_do_not_load_torch_are_named_as_such() -> None:
    news = News(here=3, named=["0 (a)"], loading=[(1, 2)])
    error = missing_ranks_error(news, RUN, 15.0, ())
    assert "not all could load torch: ranks 1-2" in error.what
    assert "never joined" not in error.what


# -- who belongs together ---------------------------------------------------------------------------------------------


def test_a_different_torch_is_reported_with_the_command_that_fixes_it_and_can_be_allowed() -> None:
    other = info(1, "b", versions={"torch": "2.11.0", "python": "3.11"})
    error, _ = mismatch(other, info(0, "a"), RUN, now=0.0)
    assert isinstance(error, VersionMismatch)
    assert error.why == "torch: rank 0 (a) has 2.15.0+cu132, rank 1 has 2.11.0"
    assert "pip install torch==2.15.0\n" in error.next
    for pair in ((replace(other, allow_mismatch=True), info(0, "a")), (other, info(0, "a", allow_mismatch=True))):
        allowed = "rank 1 (b, pid 1) has other versions than rank 0: torch (allowed)"
        assert mismatch(*pair, RUN, now=0.0) == (None, [allowed])


WITHOUT_CUDA = {"torch": "2.15.0+cpu", "python": "3.11", "cuda": None, "nccl": None}
CHOSEN = {"device": ("cpu", "flag"), "backend": ("gloo", "default")}


@pytest.mark.parametrize(
    ("rank_1", "rank_0", "error", "words"),
    [
        (ready(versions=WITHOUT_CUDA), ready(), None, ""),
        (
            ready_with("GPU-1", versions=WITHOUT_CUDA),
            ready_with("GPU-2"),
            *(VersionMismatch, "nccl: rank 0 (a) has 2.30.7, rank 1 has none"),
        ),
        (ready(), ready_with("GPU-1"), DeviceMissing, "rank 1 (b, pid 1) has no GPU"),
        (ready_with("GPU-1"), ready(), DeviceMissing, "rank 0 (a, pid 1) has no GPU"),
        (ready(options=CHOSEN), ready_with("GPU-1"), ConfigMismatch, "with the same --device and --backend"),
    ],
)
def test_ranks_that_have_loaded_torch_are_compared_in_what_matters_to_their_backend(
    rank_1: Ready, rank_0: Ready, error: type[DdpManualError] | None, words: str
) -> None:
    found = mismatch_when_ready(info(1, "b"), rank_1, info(0, "a"), rank_0, RUN)
    assert type(found) is (error or type(None)) and (found is None or words in found.render())


# -- GPUs: a second one cannot be had where the tests run, so what the processes say of theirs is made up -------------


UNTOLD = [None] * 3


@pytest.mark.parametrize(
    ("hosts", "gpus", "told", "may_use_cpu", "found"),
    [
        ("aba", ["1 2", "3 4", "1 2"], UNTOLD, [False] * 3, "cuda:0 cuda:0 cuda:1"),
        ("abb", ["1", "3 4", "3 4"], UNTOLD, [False] * 3, "cuda:0 cuda:0 cuda:1"),
        # Where each rank of a host sees only a GPU of its own, its index is 0.
        ("aaa", ["1", "2", "3"], [0, 1, 2], [False] * 3, "cuda:0 cuda:0 cuda:0"),
        ("aa", ["1 2", "1 2"], [0, 0], [False] * 2, "rank 0 (a, pid 1) and rank 1 (a, pid 1) would share one GPU"),
        # One was told its GPU, and the other takes it by its position.
        ("aa", ["1 2", "1 2"], [1, None], [False] * 2, "rank 0 (a, pid 1) and rank 1 (a, pid 1) would share one GPU"),
        # Two containers that see the same GPU.
        ("ab", ["1", "1"], UNTOLD, [False] * 2, "rank 0 (a, pid 1) and rank 1 (b, pid 1) would share one GPU"),
        ("aa", ["1", "1"], UNTOLD, [False] * 2, "rank 1 (a, pid 1) wants cuda:1, which does not exist"),
        ("aa", ["1", "1"], UNTOLD, [True] * 2, "all ranks train on the CPU, with gloo: a has 2 ranks and 1 GPU;"),
        ("aa", ["1", "1"], [0, 1], [True] * 2, "all ranks train on the CPU, with gloo: a has 2 ranks and 1 GPU;"),
        # The device of one was chosen.
        ("aa", ["1", "1"], UNTOLD, [True, False], "rank 1 (a, pid 1) wants cuda:1, which does not exist"),
        # One host has lost a GPU, which does not send the others to the CPU.
        ("abb", ["1", "2", "2"], UNTOLD, [True] * 3, "rank 2 (b, pid 1) wants cuda:1, which does not exist"),
    ],
)
def test_each_rank_of_nccl_takes_a_gpu_of_its_own_or_all_leave_theirs_where_nobody_has_chosen_a_device(
    hosts: str, gpus: list[str], told: list[int | None], may_use_cpu: list[bool], found: str
) -> None:
    roll_call = roll_call_of(*(info(rank, host, told[rank]) for rank, host in enumerate(hosts)))
    refused: list[tuple[int, DdpManualError]] = []
    for rank, seen in enumerate(gpus):
        refused += roll_call.get_ready(rank, ready_with(*seen.split(), may_use_cpu=may_use_cpu[rank]))
    leave = roll_call.leave_gpus()
    error = refused[0][1] if refused else roll_call.shared_gpu()
    devices = [line["device"] for line in roll_call.roster()]
    assert (error.what if error else leave or " ".join(devices)).startswith(found)
    assert ({*devices} == {"cpu"}) is (leave is not None)


# -- the roll call ----------------------------------------------------------------------------------------------------


def roll_call_of(*infos: RankInfo) -> RollCall:
    """All of these are here since second 0."""
    roll_call = RollCall(RUN, infos[0], 0.0, WITHIN)
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


# -- told by the coordinator ------------------------------------------------------------------------------------------


def test_of_many_processes_that_are_refused_only_the_first_are_named_each_minute() -> None:
    calling = RollCall(RUN, info(0, "a"), 0.0, WITHIN)
    for number in range(1000):
        calling.admit(info(1, "b", pid=number, world_size=7), number / 1000, 0.0, 0.0)
    assert len(calling.refused) == MOST_REFUSALS
    assert "pid 15) was refused: world-size-mismatch" in calling.refused[-1]
    assert calling.refused[-1].endswith("more that are refused within 60 s are not named")
    calling.admit(info(1, "b", pid=7777, world_size=7), 100.0, 0.0, 0.0)
    assert "pid 7777) was refused" in calling.refused[-1]
    calling.complete(101.0)
    assert not calling.refused, "once all ranks have gone on"


class Rank0:
    """The coordinator's decisions, with stand-ins for connections."""

    def __init__(self) -> None:
        outside: Any = mock.MagicMock()
        self.stopped = outside.stopped
        self.decides = CoordinatorProtocol(
            *(RUN, info(0, "a"), Seal(None), "rank 0's", WITHIN, WaitOrShrink(0, ""), 0.0),
            own_addresses=[],
            folder_of=outside.folder_of,
            show=outside.show,
            stopped=outside.stopped,
        )

    def hears(self, message: Any, peer: Peer | None = None) -> Peer:
        """Take a message over this connection, by default over a new one."""
        peer = peer or self.decides.handshakes.greet(mock.MagicMock(unsent=0), "", 0.0, 0.0)
        assert peer is not None
        self.decides.take(peer, message, 0.0)
        return peer

    def hello(self, who: RankInfo, nonce: str = "a nonce") -> Peer:
        return self.hears(Seal(None).close(Hello, "", Claim(who, nonce)))


def told(peer: Peer) -> tuple[type, dict[str, Any]]:
    """The last message to this connection, and what is in it."""
    message: Any = peer.connection.send.call_args.args[0]  # type: ignore[attr-defined]
    return type(message), decode(bytes(message.content).decode())


def test_a_process_that_waits_for_a_taken_rank_is_refused_when_rank_0_leaves() -> None:
    rank_0 = Rank0()
    holder, second = (rank_0.hello(info(1, "b", pid=pid)) for pid in (7, 8))
    assert told(holder)[0] is Welcome
    rank_0.decides.end(RankMissing("rank 0 left", why="-", next="-"), 1.0)
    for kind, words in map(told, (holder, second)):
        assert (kind, words["what"]) == (Refused, "rank 0 (a, pid 1) left before all ranks had joined")


def test_only_rank_0s_own_agent_can_be_rank_0() -> None:
    rank_0 = Rank0()
    assert told(rank_0.hello(info(0, "b")))[1]["identifier"] == "rank-taken"
    assert told(rank_0.hello(info(0, "a"), "rank 0's"))[0] is Welcome


def test_status_says_of_a_silent_rank_beside_rank_0_that_a_signal_has_stopped_it() -> None:
    rank_0 = Rank0()
    rank_0.stopped.side_effect = "SIGTSTP has stopped the agent of {}".format
    for silent in (info(1, "b", agent=7), info(2, "a", agent=8)):
        rank_0.hello(silent)
    rank_0.decides._silence.look({0: 12.0, 1: 0.0, 2: 0.0}, replace(RUN, peer_timeout=60.0), 12.0)
    assert rank_0.decides.describe(12.0)["stopped"] == ["rank 2 is silent: SIGTSTP has stopped the agent of 8"]


def test_an_observer_that_asks_again_before_it_is_answered_ends_its_connection() -> None:
    rank_0, look = Rank0(), Seal(None).close(Look, "", Question(""))
    hasty = rank_0.hears(look)
    with pytest.raises(Unreadable, match="before it is answered"):
        rank_0.hears(look, hasty)


def test_a_mistake_of_the_coordinator_ends_the_run_blaming_nobody_or_the_connection_of_a_stranger_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rank_0 = Rank0()
    rank = rank_0.hello(info(1, "b"))
    for method in ("admit", "hear"):
        monkeypatch.setattr(RollCall, method, mock.Mock(side_effect=KeyError("a mistake")))
    with pytest.raises(Unreadable, match="a mistake"):
        rank_0.hello(info(2, "b"))
    assert rank_0.decides.failure is None
    rank_0.hears(Heartbeat(), rank)
    failure = rank_0.decides.failure
    assert failure is not None and (failure.rank, failure.what) == (0, "rank 0's coordinator broke")
    assert "KeyError: 'a mistake'" in failure.why
