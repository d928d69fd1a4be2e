"""FAULTS.md's rows about how ranks meet, each provoked for real: what is told, to whom, how soon, with what exit codes.

Seconds count from the start of the rank that is told, where no other moment is named.
"""

from __future__ import annotations

import os
import re
import resource
import signal
import socket
import sys
import time
from collections.abc import Callable
from datetime import datetime
from pathlib import Path

import psutil
import pytest

from tests.catalogue import record
from tests.clock import left, said
from tests.conftest import RankProcess, Start
from tests.world.test_rendezvous import last_error

HOST = os.uname().nodename


def complete(*ranks: RankProcess) -> list[int]:
    """Assert that ranks train to the end without an error; return their exit codes."""
    codes = [rank.wait() for rank in ranks]
    texts = "\n".join(rank.err for rank in ranks)
    assert codes == [0] * len(ranks) and "error[" not in texts, texts
    return codes


def moments_of(text: str, ranks: list[RankProcess]) -> list[list[float]]:
    """Return the times of each rank's lines with ``text``; wait until all ranks have ended."""
    moments: list[list[float]] = [[] for _ in ranks]
    while any(rank.process.poll() is None for rank in ranks):
        for rank, seen in zip(ranks, moments, strict=True):
            seen += [time.monotonic()] * (rank.err.count(text) - len(seen))
        time.sleep(0.02)
    return moments


def test_a_missing_rank_is_named_every_10_seconds_by_all_who_wait_and_at_the_timeout_with_its_command(
    start_rank: Start, tmp_path: Path, port: int
) -> None:
    ranks = [start_rank(rank, 3, "--join_timeout", 14) for rank in (0, 2)]
    listening = said(ranks[0], "listening at")
    known = ranks[1].started
    named = moments_of("waiting for rank 1; 2 of 3 here: 0 (", ranks)
    ended = time.monotonic()
    codes = [rank.wait() for rank in ranks]
    silences = [after - before for seen in named for before, after in zip([known, *seen], seen, strict=False)]
    assert [len(seen) >= 2 for seen in named] == [True, True]
    # A line comes 10 s after the last one; another second is allowed for reading it.
    record(
        "rank 1 of 3 is not started",
        "a line on ranks 0 and 2",
        "rank 1, who is here",
        seconds=max(silences),
        within=11,
        codes=codes,
        row=1,
    )
    for number, rank in zip((0, 2), ranks, strict=True):
        error = last_error(rank.err)
        assert error.startswith("error[rank-missing]: 1 of 3 ranks never joined within 14 s: rank 1\n")
        assert f"ranks 0 ({HOST}), 2 ({HOST}) are here; nothing has tried to join as rank 1" in error
        command = error.partition("next: ")[2].splitlines()[0]
        assert f"run_multi_gpu_train.py --world_size 3 --rank 1 --master_port {port}" in command
        assert command in rank.err.partition("to start what is missing:\n")[2].splitlines()[0]
        failure = (tmp_path / "run" / f"failure-rank{number}.json").read_text()
        assert '"rank-missing"' in failure and '"exit_code": 10' in failure
    assert codes == [10, 10]
    record(
        "rank 1 of 3 never comes",
        "rank-missing",
        "rank 1, its command",
        seconds=ended - listening - 14,
        within=2,
        codes=codes,
        row=1,
    )


def test_without_rank_0_the_others_ask_for_it_and_give_up_at_the_timeout(start_rank: Start, port: int) -> None:
    # A name rather than an address, for the line that is printed before rank 0's port is first tried.
    alone = start_rank(1, 2, "--master_addr", "localhost", "--join_timeout", 4)
    known = said(alone, "rank 0's address localhost is 127.0.0.1")
    asked = said(alone, f"nothing listens at localhost:{port} (localhost is 127.0.0.1), which is {HOST} itself: is ")
    assert "is rank 0 started? (" in alone.err
    ended = left(alone, 11)
    where = f"localhost:{port} (localhost is 127.0.0.1), which is {HOST} itself"
    assert last_error(alone.err).startswith(
        f"error[master-refused]: nothing has listened for 4 s at rank 0's address {where}\n"
        f"  why:  rank 1 on {HOST} tried 127.0.0.1:{port}: nothing listens\n"
    )
    assert f"--rank 0 --master_addr localhost --master_port {port}" in last_error(alone.err)
    address = "rank 0's address and port"
    record("rank 0 is not started", "a line", address, seconds=asked - known, within=2, codes=[11], row=2)
    over = ended - known - 4
    record(
        "rank 0 is never started",
        "master-refused",
        f"{address}, its command",
        seconds=over,
        within=2,
        codes=[11],
        row=2,
    )


def test_a_second_rank_0_is_told_of_the_first_and_of_the_run_and_who_is_in_it(start_rank: Start, port: int) -> None:
    first = start_rank(0, 2, "--run_id", "first", fresh=True)
    first.wait_for("waiting for rank 1; 1 of 2 here")
    second = start_rank(0, 2, "--run_id", "second")
    known = second.started
    told = left(second, 11)
    error = last_error(second.err)
    pid = first.process.pid
    since = datetime.fromtimestamp(psutil.Process(pid).create_time()).strftime("%Y-%m-%d %H:%M:%S")
    command = " ".join(first.arguments)
    assert error.startswith(f"error[port-in-use]: another rank 0 is already running at 127.0.0.1:{port}\n")
    assert f"held by pid {pid} (LISTEN), started {since}: {command}\n" in error
    assert f"it is run first, waiting for rank 1; 1 of 2 here: 0 ({HOST}); " in error
    assert "say which: --rank 1\n" in error
    codes = complete(first, start_rank(1, 2))
    named = "pid, command, start time, run_id, who is here"
    seconds = told - known
    record("a second rank 0", "port-in-use", named, seconds=seconds, within=5, codes=[*codes, 11], row=6)


def test_a_second_rank_1_is_turned_away_and_the_others_wait_on(start_rank: Start, port: int, tmp_path: Path) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    second = start_rank(1, 3)
    known = second.started
    told = left(second, 13)
    error = last_error(second.err)
    assert error.startswith(f"error[rank-taken]: rank 1 is taken by {HOST} (pid {ranks[1].worker})\n")
    assert re.search(r"that process has held it since \d\d:\d\d:\d\d; this one is ", error)
    assert f"(pid {second.worker})" in error
    assert "--rank 2" in error
    for rank in ranks:
        rank.wait_for(
            f"waiting for rank 2; 2 of 3 here: 0 ({HOST}), 1 ({HOST}); "
            f"rank 1 ({HOST}, pid {second.worker}) was refused: rank-taken"
        )
    codes = complete(*ranks, start_rank(2, 3))
    assert list((tmp_path / "run").glob("failure-*")) == []
    named = "host, pid, since; the late-comer on the others"
    seconds = told - known
    record("a second rank 1", "rank-taken", named, seconds=seconds, within=2, codes=[*codes, 13], row=10)


@pytest.mark.parametrize("killed", ["agent", "worker"])
def test_a_rank_that_is_killed_while_it_waits_and_started_again_has_its_place_back(
    start_rank: Start, killed: str
) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    first = ranks[1]
    os.kill(first.process.pid if killed == "agent" else first.worker, signal.SIGKILL)
    known = time.monotonic()
    how = "its process has ended" if killed == "agent" else "SIGKILL"
    gone = f"waiting for ranks 1-2; 1 of 3 here: 0 ({HOST}); rank 1 ({HOST}, pid {first.worker}) is gone: {how} ("
    told = said(ranks[0], gone)
    code = {-signal.SIGKILL: 137}.get(first.wait(5), first.process.returncode)
    assert code == 137
    ranks[1] = start_rank(1, 3)
    back = max(said(rank, "waiting for rank 2; 2 of 3 here") for rank in ranks) - ranks[1].started
    assert back < 2
    codes = complete(*ranks, start_rank(2, 3))
    record(
        f"the {killed} of rank 1 is killed while it waits, and rank 1 started again",
        "a line on rank 0",
        "the rank and pid that is gone, and how",
        seconds=told - known,
        within=2,
        codes=[*codes, code],
        row=11,
    )


def test_a_second_rank_1_is_told_that_the_first_is_frozen_which_then_goes_on(start_rank: Start) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[0].wait_for("waiting for rank 2; 2 of 3 here")
    frozen = ranks[1]
    os.killpg(frozen.process.pid, signal.SIGSTOP)
    time.sleep(1.5)  # it says something twice a second
    second = start_rank(1, 3)
    told = left(second, 13)
    error = last_error(second.err)
    assert error.startswith(f"error[rank-taken]: rank 1 is taken by {HOST} (pid {frozen.worker})\n")
    assert "the process that holds it is frozen: its connection is open, and it does not answer" in error
    assert f"on {HOST}: kill -9 {frozen.worker}" in error
    ranks[0].wait_for(f"rank 1 ({HOST}, pid {second.worker}) was refused: rank-taken")
    os.killpg(frozen.process.pid, signal.SIGCONT)
    codes = complete(*ranks, start_rank(2, 3))
    record(
        "a second rank 1 while the first is frozen",
        "rank-taken",
        "host, pid, since, that it is frozen",
        seconds=told - second.started,
        within=2,
        codes=[*codes, 13],
        row=11,
    )


def test_a_rank_that_expects_another_world_size_is_told_both_sizes_and_where_its_own_came_from(
    start_rank: Start, start: Start, port: int
) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1; 1 of 2 here")
    meeting = ["--rank", 1, "--master_port", port]
    seconds = {}
    for size, source, flag, variable in ((3, "flag", ["--world_size", 3], ""), (8, "from WORLD_SIZE", [], "8")):
        odd = start(sys.executable, "run_multi_gpu_train.py", *meeting, *flag, WORLD_SIZE=variable)
        known = odd.started
        seconds[source] = left(odd, 12) - known
        if variable:
            assert odd.err.splitlines()[0] == "[rank 1] world_size 8 (from WORLD_SIZE)"
        error = last_error(odd.err)
        who = f"rank 1 ({HOST}, pid {odd.worker})"
        assert error.startswith(f"error[world-size-mismatch]: {who} expects {size} ranks, rank 0 expects 2\n")
        assert f"rank 0 runs on {HOST} (pid {rank_0.worker}) with world_size 2; " in error
        assert f"rank 1 has world_size {size} ({source})" in error
        assert "--world_size 2 --rank 1" in error.partition("next: ")[2]
        rank_0.wait_for(f"{who} was refused: world-size-mismatch")
    codes = [*complete(rank_0, start_rank(1, 2)), 12]
    named = "both sizes and their sources; the odd one on the others"
    told = {"identifier": "world-size-mismatch", "named": named, "within": 2, "codes": codes}
    record("world_size 3 instead of 2", seconds=seconds["flag"], row=12, **told)
    record("an inherited WORLD_SIZE=8", seconds=seconds["from WORLD_SIZE"], row=28, **told)


def test_a_rank_with_other_options_is_told_which_and_where_they_came_from(
    start_rank: Start, port: int, tmp_path: Path
) -> None:
    options = tmp_path / "options.json"
    options.write_text('{"momentum": 0.5}')
    rank_0 = start_rank(0, 2, "--lr", 0.25)
    rank_0.wait_for("waiting for rank 1")
    other = start_rank(1, 2, "--config", options, "--batch_size", 50)
    known = other.started
    told = left(other, 12)
    error = last_error(other.err)
    assert error.startswith("error[config-mismatch]")
    assert "was started with other options than rank 0: batch_size, lr, momentum\n" in error
    assert "batch_size: rank 0 has 100 (flag), rank 1 has 50 (flag)" in error
    assert "lr: rank 0 has 0.25 (flag), rank 1 has 0.04 (default)" in error
    assert f"momentum: rank 0 has 0.9 (default), rank 1 has 0.5 (from {options})" in error
    command = error.partition("next: ")[2].splitlines()[0]
    assert "--rank 1" in command and "--lr 0.25" in command and "--momentum" not in command
    rank_0.wait_for(f"rank 1 ({HOST}, pid {other.worker}) was refused: config-mismatch")
    codes = complete(rank_0, start_rank(1, 2, "--lr", 0.25))
    named = "option: rank 0's value / mine, the source of each"
    seconds = told - known
    record("other options", "config-mismatch", named, seconds=seconds, within=2, codes=[*codes, 12], row=13)


def test_a_rank_without_the_gpu_it_was_to_use_leaves_before_it_joins(start_rank: Start) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    no_gpu = start_rank(1, 2, "--device", "cuda", CUDA_VISIBLE_DEVICES="-1")
    seconds = left(no_gpu, 17) - no_gpu.started
    error = last_error(no_gpu.err)
    assert error.startswith(f"error[device-missing]: rank 1 on {HOST} has no GPU\n")
    assert "device cuda (flag), but torch " in error
    no_nccl = start_rank(1, 2, "--backend", "nccl", "--device", "cpu")
    seconds_nccl = left(no_nccl, 17) - no_nccl.started
    error = last_error(no_nccl.err)
    assert error.startswith(f"error[backend-unavailable]: rank 1 on {HOST} cannot use nccl without a GPU\n")
    assert "backend nccl (flag), device cpu" in error
    assert "refused" not in rank_0.err
    codes = [*complete(rank_0, start_rank(1, 2)), 17]
    rest = {"within": 15, "codes": codes, "row": 15}
    record("--device cuda without a GPU", "device-missing", "rank, host, source", seconds=seconds, **rest)
    named = "rank, host, both sources"
    record("--backend nccl without a GPU", "backend-unavailable", named, seconds=seconds_nccl, **rest)


def test_a_download_that_never_ends_is_named_by_those_who_wait_for_it(start_rank: Start, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute_proxy:
        proxy = f"http://127.0.0.1:{mute_proxy.getsockname()[1]}"
        options = ["--dataset", "mnist", "--data_dir", tmp_path / "data", "--join_timeout", 5, "--stall_timeout", 5]
        ranks = [start_rank(rank, 2, *options, http_proxy=proxy, https_proxy=proxy) for rank in range(2)]
        known = said(ranks[1], "process group ready after")
        ranks[1].wait_for(f"waiting for rank 0 on {HOST} to download mnist (")
        told = left(ranks[1], 16)
        codes = [ranks[0].wait(5), 16]
        mute_proxy.setblocking(False)
        connection, _ = mute_proxy.accept()
        with connection:
            assert connection.recv(64).startswith(b"CONNECT ")
        with pytest.raises(BlockingIOError):
            mute_proxy.accept()
    error = last_error(ranks[1].err)
    assert error.startswith(f"error[data-missing]: rank 0 on {HOST} did not download mnist within 5 s\n")
    assert f"error[peer-failed]: rank 1 ({HOST}, pid {ranks[1].worker}) left with error[data-missing]\n" in ranks[0].err
    assert codes == [14, 16]
    seconds = told - known - 5
    record(
        "a download never ends", "data-missing", "who downloads, what", seconds=seconds, within=2, codes=codes, row=23
    )


def test_rank_0_is_told_when_it_may_not_open_enough_files_for_all_ranks(
    start: Start, rank_command: Callable[..., list[object]]
) -> None:
    rank_0 = start("prlimit", "--nofile=200:200", *rank_command(0, 100))
    seconds = left(rank_0, 2) - rank_0.started
    error = last_error(rank_0.err)
    assert error.startswith(
        f"error[bad-option]: rank 0 on {HOST} may open 200 files, and a run of 100 ranks needs 300\n"
        "  why:  each rank keeps up to 2 connections to rank 0; the hard limit is 200\n"
    )
    assert "ulimit -n 300" in error
    named = "host, limit, what is needed"
    record("too few files may be open", "bad-option", named, seconds=seconds, within=2, codes=[2], row=26)


def test_a_rank_raises_its_own_limit_of_open_files(start: Start, rank_command: Callable[..., list[object]]) -> None:
    rank_0 = start("prlimit", "--nofile=256:1200", *rank_command(0, 500))
    rank_0.wait_for("waiting for ranks 1-499")
    assert resource.prlimit(rank_0.process.pid, resource.RLIMIT_NOFILE) == (1200, 1200)


def test_rank_0_is_told_at_once_of_variables_that_another_launcher_has_left(start: Start, port: int) -> None:
    inherited = {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port), "WORLD_SIZE": "2", "RANK": "0"}
    rank_0 = start(sys.executable, "run_multi_gpu_train.py", TORCHELASTIC_USE_AGENT_STORE="True", **inherited)
    known = said(rank_0, "rank 0's address localhost is 127.0.0.1")
    told = left(rank_0, 2)
    sources = [f"{name.lower()} {value} (from {name})" for name, value in inherited.items()]
    assert set(rank_0.err.splitlines()[0].removeprefix("[rank 0] ").split(", ")) == set(sources)
    error = last_error(rank_0.err)
    assert error.startswith(
        "error[bad-option]: variables of another launcher say that its agent hosts the store at "
        f"localhost:{port}, but nothing listens there\n"
        f"  why:  TORCHELASTIC_USE_AGENT_STORE=True, MASTER_ADDR=localhost, MASTER_PORT={port}; "
        "world_size 2 (from WORLD_SIZE); rank 0 (from RANK)\n"
        "  next: unset TORCHELASTIC_USE_AGENT_STORE RANK WORLD_SIZE "
    )
    record(
        "variables of torchrun, without its agent",
        "bad-option",
        "each variable, the source of each value",
        seconds=told - known,
        within=2,
        codes=[2],
        row=28,
    )
