"""``check`` meets the other ranks and measures; ``status`` looks at a run from outside."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONGER, RankProcess, Start
from tests.world.deaths import wait_until

COMMAND = (sys.executable, "-m", "ddp_manual")


def start_check(start: Start, port: int, rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
    identity = ["--world_size", world_size, "--rank", rank, "--master_port", port]
    return start(*COMMAND, "check", *identity, *options, **env)


def look(start: Start, port: int, *options: object, **env: str) -> RankProcess:
    return start(*COMMAND, "status", "--master_port", port, *options, **env)


def looked(start: Start, port: int) -> dict[str, Any]:
    process = look(start, port, "--json")
    assert process.wait(30) == 0, process.err
    seen: dict[str, Any] = json.loads(process.out)
    return seen


def test_check_shows_every_step_on_rank_0_and_a_line_on_the_others(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 3) for rank in range(3)]
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0]
    text = ranks[0].out
    assert text.startswith("rank 0 on ")
    assert ": all is well, in " in text
    for step in ("names", "open files", "device", "shared memory", "listen", "roll call", "reachability", "all-reduce"):
        assert f"\N{CHECK MARK}  {step} " in text
    assert re.search(rf"^  master_port +{port} +\(flag\)$", text, re.MULTILINE)
    assert re.search(r"^  device +auto +\(default\)$", text, re.MULTILINE)
    assert "RES_OPTIONS" not in text  # ours, and not the user's
    assert "round trips in us:" in text
    for number, rank in enumerate(ranks):
        assert f"  {number}     " in text
        assert f"  {rank.worker}  " in text
        if number:
            assert rank.out.startswith(f"rank {number} on ")
            assert rank.out.count("\n") == 1


def test_check_measures_with_the_bus_bandwidth_of_nccl_tests(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 2, "--json") for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    report = json.loads(ranks[0].out)
    assert report["findings"] == []
    measured = report["measured"]
    assert [one["bytes"] for one in measured["all_reduce"]] == [1 << 10, 1 << 20, 64 << 20]
    for one in measured["all_reduce"]:
        # Two ranks: 2 (n - 1) / n is 1.
        assert one["bus_bandwidth"] == pytest.approx(one["bytes"] / one["seconds"])
    assert [(pair["rank"], pair["other"]) for pair in measured["round_trips"]] == [(0, 1)]
    assert 0 < measured["barrier_seconds"] < 1
    assert [line["pid"] for line in report["roster"]] == [rank.worker for rank in ranks]
    assert json.loads(ranks[1].out)["steps"][-1]["outcome"] == "ok"


def test_check_of_a_rank_alone_shows_what_this_host_can_find_out_and_exits_with_3(start: Start, port: int) -> None:
    alone = start_check(start, port, 1, 2, "--join_timeout", 3, NCCL_DEBUG="WARN")
    assert alone.wait(30) == 3
    first, *rest = alone.out.splitlines()
    assert first.startswith("error[master-refused]: nothing has listened for 3 s at rank 0's address 127.0.0.1:")
    assert any(line.strip().startswith("\N{CHECK MARK}  device") for line in rest)
    assert any(line.strip().startswith("\N{BALLOT X}  rank 0 ") for line in rest)
    assert "NCCL_DEBUG" in alone.out


def test_check_names_the_rank_that_never_joined(start: Start, port: int) -> None:
    ranks = [start_check(start, port, rank, 3, "--join_timeout", 4) for rank in (0, 2)]
    assert [rank.wait(30) for rank in ranks] == [3, 3]
    for rank in ranks:
        assert rank.out.startswith("error[rank-missing]: 1 of 3 ranks never joined within 4 s: rank 1\n")
        assert "check --world_size 3 --rank 1" in rank.out


def test_a_rank_that_checks_is_refused_by_a_rank_that_trains(start: Start, start_rank: Start, port: int) -> None:
    training = start_rank(0, 2)
    training.wait_for("waiting for rank 1")
    checking = start_check(start, port, 1, 2)
    assert checking.wait(30) == 3
    assert checking.out.startswith("error[config-mismatch]")
    assert "why:  command: rank 0 has train (command), rank 1 has check (command)\n  next" in checking.out
    assert [start_rank(1, 2).wait(), training.wait()] == [0, 0]


def test_status_shows_who_waits_who_is_missing_and_who_was_refused(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 2)]
    ranks[0].wait_for("waiting for rank 1; 2 of 3 here")
    assert start_rank(2, 3).wait(30) == 13
    seen = looked(start, port)
    assert [line["rank"] for line in seen["ranks"]] == [0, 2]
    assert [line["pid"] for line in seen["ranks"]] == [rank.worker for rank in ranks]
    assert seen["missing"] == [[1, 1]]
    assert "was refused: rank-taken" in seen["refused"][0]
    assert not seen["complete"]
    text = look(start, port)
    assert text.wait(30) == 0
    assert "2 of 3 ranks are here" in text.out
    assert f"--rank 1 --master_addr 127.0.0.1 --master_port {port}" in text.out
    assert "was refused: rank-taken" in text.out
    ranks.append(start_rank(1, 3))
    assert [rank.wait() for rank in ranks] == [0, 0, 0]


def test_status_follows_the_training_until_the_run_ends(start: Start, start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 3, "--log_every", 20) for rank in range(2)]
    ranks[0].wait_for("step ")
    watching = look(start, port, "--watch", "--json")
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert watching.wait(30) == 0, watching.err
    seen = [json.loads(line) for line in watching.out.splitlines()]
    progress = [look["progress"] for look in seen if look["progress"]]
    assert len(progress) >= 2
    assert {line["phase"] for lines in progress for line in lines} <= {
        "joining",
        "running",
        "loading",
        "training",
        "evaluating",
        "saving",
        "leaving",
    }
    for rank in range(2):
        steps = [lines[rank]["step"] for lines in progress]
        assert steps == sorted(steps)
        assert steps[-1] > steps[0]
        assert all(lines[rank]["silent_seconds"] < 5 for lines in progress)
        assert progress[-1][rank]["samples_per_second"] > 0


@pytest.mark.parametrize("token", [{}, {"DDP_MANUAL_TOKEN": "a secret"}], ids=["without a token", "with a token"])
def test_status_watch_ends_with_the_failure_that_ended_the_run(
    start: Start, start_rank: Start, port: int, token: dict[str, str]
) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000, **token) for rank in range(2)]
    ranks[0].wait_for("training ")
    watching = look(start, port, "--watch", "--json", **token)
    wait_until(lambda: watching.out.count("\n") > 0)
    os.kill(ranks[1].worker, signal.SIGKILL)
    assert [rank.wait(30) for rank in ranks] == [14, 137]
    assert watching.wait(30) == 14, watching.err
    *seen, last = [json.loads(line) for line in watching.out.splitlines()]
    assert last["error"]["identifier"] == "peer-lost" and "rank 1 " in last["error"]["what"]
    assert watching.err.startswith(f"error[peer-lost]: {last['error']['what']}\n")
    assert all("error" not in answer for answer in seen)


def test_status_watch_does_not_take_a_frozen_rank_0_for_the_end_of_the_run(
    start: Start, start_rank: Start, port: int
) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    watching = look(start, port, "--watch", "--json")
    wait_until(lambda: watching.out.count("\n") > 1)
    rank_0.process.send_signal(signal.SIGSTOP)
    assert watching.wait(30) == 14
    assert "does not answer" in watching.err and "has ended" not in watching.err


def test_status_where_nobody_listens_says_so_at_once(start: Start, port: int) -> None:
    started = time.monotonic()
    nobody = look(start, port)
    assert nobody.wait(30) == 11
    assert time.monotonic() - started < 10
    assert nobody.err.startswith(f"error[master-refused]: nothing listens at rank 0's address 127.0.0.1:{port}")


def test_status_of_a_store_that_is_no_run_says_so(start: Start, port: int, tmp_path: Path) -> None:
    store = start(
        sys.executable,
        "-c",
        "import sys, time, torch.distributed as dist\n"
        f"store = dist.TCPStore('127.0.0.1', {port}, None, True, wait_for_workers=False)\n"
        "print('up', file=sys.stderr, flush=True); time.sleep(60)",
    )
    store.wait_for("up")
    process = look(start, port)
    assert process.wait(30) == 11
    assert "has no roll call" in process.err
