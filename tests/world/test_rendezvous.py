"""Ranks started by hand, as real processes: how they meet, and what they are told when they do not."""

from __future__ import annotations

import json
import shlex
import signal
import socket
import sys
import threading
from pathlib import Path

import pytest

from tests.conftest import Start


def last_error(text: str) -> str:
    """From the last ``error[`` on."""
    return text[text.rindex("error[") :]


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_two_ranks_started_in_any_order_train_together(
    start_rank: Start, order: tuple[int, int], tmp_path: Path
) -> None:
    ranks = {}
    for rank in order:
        ranks[rank] = start_rank(rank, 2)
        if len(ranks) == 1:
            ranks[rank].wait_for("is rank 0 started?" if rank == 1 else "waiting for rank 1; 1 of 2 here")
    assert [ranks[rank].wait() for rank in (0, 1)] == [0, 0]
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert [entry["rank"] for entry in summary["roster"]] == [0, 1]
    assert [entry["pid"] for entry in summary["roster"]] == [ranks[rank].process.pid for rank in (0, 1)]


def test_every_waiting_rank_names_the_missing_one_and_its_command_works(start_rank: Start, start: Start) -> None:
    waiting = [start_rank(0, 3), start_rank(2, 3)]
    for rank in waiting:
        assert rank.wait_for("waiting for rank 1; 2 of 3 here: 0 (") < 10
        rank.wait_for("to start what is missing:")
    command = waiting[1].err.partition("to start what is missing:\n")[2].splitlines()[0]
    missing = start(*shlex.split(command))
    assert [rank.wait() for rank in (*waiting, missing)] == [0, 0, 0]


def test_at_the_join_timeout_all_who_waited_leave_with_the_command_for_the_missing_rank(
    start_rank: Start, tmp_path: Path, port: int
) -> None:
    waiting = {rank: start_rank(rank, 3, "--join_timeout", 6) for rank in (0, 2)}
    for rank, process in waiting.items():
        assert process.wait(30) == 10
        error = last_error(process.err)
        assert error.startswith("error[rank-missing]: 1 of 3 ranks never joined within 6 s: rank 1\n")
        assert "ranks 0 (" in error
        assert "nothing has tried to join as rank 1" in error
        command = error.partition("next: ")[2].splitlines()[0]
        assert f"run_multi_gpu_train.py --world_size 3 --rank 1 --master_addr 127.0.0.1 --master_port {port}" in command
        failure = json.loads((tmp_path / "run" / f"failure-rank{rank}.json").read_text())
        assert (failure["identifier"], failure["exit_code"], failure["rank"]) == ("rank-missing", 10, rank)


def test_a_second_rank_1_is_turned_away_and_the_others_wait_on(start_rank: Start, tmp_path: Path) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    second = start_rank(1, 3)
    assert second.wait() == 13
    assert last_error(second.err).startswith("error[rank-taken]: rank 1 is taken by ")
    assert f"(pid {ranks[1].process.pid})" in last_error(second.err)
    assert "--rank 2" in last_error(second.err)
    for rank in ranks:
        rank.wait_for("was refused: rank-taken")
    ranks.append(start_rank(2, 3))
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert list((tmp_path / "run").glob("failure-*")) == []


def test_a_rank_that_expects_another_world_size_is_turned_away(start_rank: Start) -> None:
    rank_0 = start_rank(0, 3)
    rank_0.wait_for("waiting for ranks 1-2")
    odd = start_rank(1, 2)
    assert odd.wait() == 12
    assert "error[world-size-mismatch]" in odd.err
    assert "expects 2 ranks, rank 0 expects 3" in odd.err
    rank_0.wait_for("was refused: world-size-mismatch")
    assert rank_0.process.poll() is None


def test_a_rank_with_other_options_is_told_which_and_where_they_came_from(start_rank: Start) -> None:
    rank_0 = start_rank(0, 2, "--lr", 0.25)
    other = start_rank(1, 2, "--momentum", 0.5)
    assert other.wait() == 12
    error = last_error(other.err)
    assert error.startswith("error[config-mismatch]")
    assert "lr: rank 0 has 0.25 (flag), rank 1 has 0.04 (default)" in error
    assert "momentum: rank 0 has 0.9 (default), rank 1 has 0.5 (flag)" in error
    assert "--lr 0.25" in error.partition("next: ")[2]
    rank_0.wait_for("was refused: config-mismatch")
    right = start_rank(1, 2, "--lr", 0.25)
    assert [rank_0.wait(), right.wait()] == [0, 0]


def test_without_rank_0_the_others_ask_for_it_and_give_up_at_the_timeout(start_rank: Start) -> None:
    alone = start_rank(1, 2, "--join_timeout", 4)
    alone.wait_for("is rank 0 started?")
    assert alone.wait(30) == 11
    assert last_error(alone.err).startswith(
        "error[master-refused]: nothing has listened for 4 s at rank 0's address 127.0.0.1:"
    )


def test_a_name_that_does_not_resolve_ends_the_rank_at_once(start_rank: Start) -> None:
    lost = start_rank(1, 2, "--master_addr", "no.such.host.invalid")
    assert lost.wait(30) == 11
    assert last_error(lost.err).startswith("error[master-unresolvable]")


def test_something_else_on_the_port_is_named(start_rank: Start, port: int) -> None:
    with socket.create_server(("127.0.0.1", port)) as listener:

        def greet() -> None:
            connection, _ = listener.accept()
            with connection:
                connection.sendall(b"220 mail.example ESMTP\r\n")

        thread = threading.Thread(target=greet)
        thread.start()
        lost = start_rank(1, 2)
        assert lost.wait(30) == 11
        thread.join()
        assert last_error(lost.err).startswith("error[master-not-a-store]")
        assert "220 mail.example ESMTP" in lost.err
        second_rank_0 = start_rank(0, 2)
        assert second_rank_0.wait(30) == 11
        assert last_error(second_rank_0.err).startswith("error[port-in-use]: rank 0 cannot listen at 127.0.0.1:")


def test_a_second_rank_0_is_told_that_there_is_one(start_rank: Start) -> None:
    first = start_rank(0, 2)
    first.wait_for("waiting for rank 1")
    second = start_rank(0, 2, "--run_id", "second")
    assert second.wait(30) == 11
    error = last_error(second.err)
    assert error.startswith("error[port-in-use]: another rank 0 is already running at 127.0.0.1:")
    assert f"pid {first.process.pid} (LISTEN)" in error
    assert "--rank 1" in error
    assert [start_rank(1, 2).wait(), first.wait()] == [0, 0]


def test_a_store_without_our_roll_call_is_not_waited_for(start_rank: Start, start: Start, port: int) -> None:
    store = start(
        sys.executable,
        "-c",
        "import time, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)\n"
        "print('up', flush=True); time.sleep(60)",
    )
    lost = start_rank(1, 2)
    assert lost.wait(40) == 11
    assert last_error(lost.err).startswith("error[master-not-a-store]")
    assert "has no roll call" in lost.err
    assert store.process.poll() is None


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_waiting_rank_can_be_stopped_and_the_others_see_it_missing_again(start_rank: Start, number: int) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2;")
    ranks[1].process.send_signal(number)
    assert ranks[1].wait(5) == 128 + number
    ranks[0].wait_for("waiting for ranks 1-2; 1 of 3 here")
    again = [start_rank(rank, 3) for rank in (1, 2)]
    assert [rank.wait() for rank in (ranks[0], *again)] == [0, 0, 0]


def test_when_rank_0_is_stopped_while_it_waits_the_others_leave_and_say_so(start_rank: Start) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[1].wait_for("waiting for rank 2;")
    ranks[0].process.send_signal(signal.SIGTERM)
    assert ranks[0].wait(5) == 143
    assert ranks[1].wait(5) == 14
    assert last_error(ranks[1].err).startswith("error[master-lost]: rank 0 (")
    assert "stopped by SIGTERM" in last_error(ranks[1].err)


def test_nccl_without_a_gpu_is_refused_before_joining(start_rank: Start) -> None:
    rank = start_rank(0, 2, "--backend", "nccl", "--device", "cpu")
    assert rank.wait() == 17
    assert last_error(rank.err).startswith("error[backend-unavailable]")


def test_cuda_that_is_not_there_is_refused_before_joining(start_rank: Start) -> None:
    rank = start_rank(0, 2, "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    assert rank.wait() == 17
    assert last_error(rank.err).startswith("error[device-missing]")


def test_garbage_in_the_roll_call_does_not_disturb_the_run(start_rank: Start, start: Start, port: int) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    stranger = start(
        sys.executable,
        "-c",
        "import torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, None, False, wait_for_workers=False)\n"
        "for text in ('', 'no json', '[]', '\"stop\"', '[' * 100000, '{}', '{\"nonce\": 1, \"rank\": \"x\"}'):\n"
        "    store.queue_push('ddp_manual/0/arrivals', text)",
    )
    assert stranger.wait() == 0
    rank_0.wait_for("a stranger put something unreadable into the roll call")
    assert [start_rank(1, 2).wait(), rank_0.wait()] == [0, 0]
