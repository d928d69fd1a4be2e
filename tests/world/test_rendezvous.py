"""Ranks started by hand, as real processes: how they meet, and what they are told when they do not."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest

from tests.conftest import LONGER, Start
from tests.faulty import faulty
from tests.strangers import Stranger

HOST = os.uname().nodename


def last_error(text: str) -> str:
    """Return the text from the last ``error[`` on."""
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
    assert [entry["pid"] for entry in summary["roster"]] == [ranks[rank].worker for rank in (0, 1)]


def test_every_waiting_rank_names_the_missing_one_and_its_command_works(start_rank: Start, start: Start) -> None:
    waiting = [start_rank(0, 3), start_rank(2, 3)]
    for rank in waiting:
        assert rank.wait_for("waiting for rank 1; 2 of 3 here: 0 (") < 3
        rank.wait_for("to start what is missing:")
    command = waiting[1].err.partition("to start what is missing:\n")[2].splitlines()[0]
    missing = start(*shlex.split(command))
    assert [rank.wait() for rank in (*waiting, missing)] == [0, 0, 0]


def test_the_command_for_rank_0_has_the_folder_that_another_rank_was_given(start_rank: Start, start: Start) -> None:
    rank_1 = start_rank(1, 2, "--resume", "auto")
    rank_1.wait_for("to start what is missing:")
    command = rank_1.err.partition("to start what is missing:\n")[2].splitlines()[0]
    rank_0 = start(*shlex.split(command))
    assert [rank_0.wait(), rank_1.wait()] == [0, 0], rank_0.err


# A port forward: it accepts each connection, and closes it where nothing listens beyond it yet.
PROXY = """
import asyncio, sys

async def forward(reader, writer):
    async def copy(source, sink):
        while piece := await source.read(65536):
            sink.write(piece)
        sink.close()

    try:
        beyond = await asyncio.open_connection("127.0.0.1", int(sys.argv[1]))
    except OSError:
        writer.close()
    else:
        await asyncio.gather(copy(reader, beyond[1]), copy(beyond[0], writer))

async def main():
    server = await asyncio.start_server(forward, "127.0.0.1", 0)
    print("port", server.sockets[0].getsockname()[1], file=sys.stderr, flush=True)
    await asyncio.sleep(100)

asyncio.run(main())
"""


@pytest.fixture
def proxy(start: Start, port: int) -> int:
    """The port of a port forward to ``port``."""
    process = start(sys.executable, "-c", PROXY, port)
    process.wait_for("port ")
    return int(process.err.split()[1])


def test_a_proxy_that_closes_connections_until_rank_0_is_up_is_waited_for(
    start_rank: Start, port: int, proxy: int
) -> None:
    rank_1 = start_rank(1, 2, "--master_port", proxy)
    line = f"127.0.0.1:{proxy}, which is {HOST} itself accepts connections and closes them: a proxy or a port forward"
    assert rank_1.wait_for(line) < 2
    rank_0 = start_rank(0, 2)
    assert [rank_0.wait(), rank_1.wait()] == [0, 0], rank_1.err


def test_a_proxy_behind_which_no_rank_0_comes_up_is_named(start_rank: Start, proxy: int) -> None:
    rank_1 = start_rank(1, 2, "--master_port", proxy, "--join_timeout", 2)
    assert rank_1.wait(30) == 11
    error = last_error(rank_1.err)
    assert error.startswith("error[master-refused]: what listens at rank 0's address ")
    assert "has closed every connection for 2 s" in error
    assert "a proxy or a port forward whose other side is not up" in error


def test_a_name_that_does_not_resolve_ends_rank_0_at_once(start_rank: Start) -> None:
    lost = start_rank(0, 2, "--master_addr", "no.such.host.invalid")
    assert lost.wait(30) == 11
    assert last_error(lost.err).startswith("error[master-unresolvable]")


def test_all_ranks_count_the_seconds_of_rank_0s_limit(start_rank: Start) -> None:
    rank_0 = start_rank(0, 3, "--join_timeout", 6)
    rank_0.wait_for("waiting for ranks 1-2; 1 of 3 here")
    rank_2 = start_rank(2, 3)  # its own limit is 1800 s
    assert [rank.wait(20) for rank in (rank_0, rank_2)] == [10, 10]
    shown = re.findall(r"here: .*\((\d+) s of (\d+) s\)", rank_0.err + rank_2.err)
    assert {limit for _, limit in shown} == {"6"}, rank_2.err
    assert all(int(waited) <= 6 for waited, _ in shown)


def test_a_rank_with_a_shorter_limit_than_rank_0_leaves_before(start_rank: Start) -> None:
    rank_0 = start_rank(0, 3)
    rank_0.wait_for("waiting for ranks 1-2; 1 of 3 here")
    rank_2 = start_rank(2, 3, "--join_timeout", 3)
    assert rank_2.wait(20) == 10
    assert last_error(rank_2.err).startswith("error[rank-missing]: 1 of 3 ranks never joined within ")
    rank_0.wait_for("left again: 1 of 3 ranks never joined within ")


def test_a_store_without_a_roll_call_ends_the_wait_at_once(start_rank: Start, start: Start, port: int) -> None:
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


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
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


def test_when_rank_0_is_stopped_while_all_load_their_data_the_others_are_told_why(
    start: Start, rank_command: Callable[..., list[object]]
) -> None:
    ranks = [start(*faulty(rank_command(rank, 2), "sleep:60@loading")) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("faulty: sleep in loading")
    ranks[0].process.send_signal(signal.SIGTERM)
    assert [rank.wait(10) for rank in ranks] == [143, 14]
    assert re.search(r"^error\[peer-failed\]: rank 0 \(.*\) left with error\[stopped\]$", ranks[1].err, re.MULTILINE)
    assert "goes on alone" not in ranks[1].err


def test_a_rank_that_was_frozen_during_the_roll_call_is_told_so_and_rank_0_is_not_blamed(
    start_rank: Start,
) -> None:
    ranks = [start_rank(rank, 3, "--peer_timeout", 2) for rank in (0, 1)]
    ranks[1].wait_for("waiting for rank 2;")
    ranks[1].process.send_signal(signal.SIGSTOP)
    ranks[0].wait_for("has been silent for")
    ranks[1].process.send_signal(signal.SIGCONT)
    assert ranks[1].wait(10) == 14
    error = last_error(ranks[1].err)
    assert error.startswith("error[peer-lost]: rank 1 (") and "has lost its place" in error


def test_garbage_in_the_roll_call_does_not_disturb_the_run(start_rank: Start, port: int) -> None:
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    for line in (
        *(b"", b"no json", b"[]", b'"stop"', b"{}", b"\xff\xfe", b"[" * 100_000, b'{"type":"hello"}'),
        *(b'{"type":"hello","content":null}', b'{"type":"hello","content":1}', b'{"type":"look","content":{}}'),
        *(b'{"type":"later"}', b'{"type":"goodbye"}', b'{"type":"run_ends","verdict":{}}', b'{"hello":1}'),
        *(b'{"type":"look","content":{"nonce":null}}', b'{"type":"look","content":"a\\u001b"}'),
    ):
        with Stranger(port) as stranger:
            stranger.connection.sendall(line + b"\n")
            assert b"welcome" not in stranger.rest()
    with Stranger(port) as stranger:
        stranger.say({"type": "hello", "content": {"nonce": 1, "info": {"rank": "x"}}})
        assert stranger.hears("refused")["identifier"] == "version-mismatch"
    rank_0.wait_for("was refused: version-mismatch")
    codes = [start_rank(1, 2).wait(), rank_0.wait()]
    assert codes == [0, 0]
    assert "Traceback" not in rank_0.err


def test_a_rank_that_was_killed_while_it_waited_is_missed_before_the_roll_call_is_complete(start_rank: Start) -> None:
    ranks = {rank: start_rank(rank, 3) for rank in (0, 1)}
    ranks[0].wait_for("waiting for rank 2;")
    ranks[1].kill()
    ranks[2] = start_rank(2, 3)
    for rank in (0, 2):
        ranks[rank].wait_for("waiting for rank 1; 2 of 3 here")
        # Its agent's, where that has not told yet that there is a worker.
        gone = re.search(r"rank 1 \(\S+, pid (\d+)\) is gone: its process has ended", ranks[rank].err)
        assert gone and int(gone[1]) in (ranks[1].process.pid, ranks[1].worker)
    ranks[1] = start_rank(1, 3)
    assert [rank.wait() for rank in ranks.values()] == [0, 0, 0]


def test_a_rank_that_is_started_again_while_its_run_is_stopping_waits_for_the_next_run(start_rank: Start) -> None:
    ranks = [start_rank(rank, 2, *LONGER, 1000) for rank in range(2)]
    ranks[0].wait_for("step 100/")
    os.kill(ranks[0].worker, signal.SIGSTOP)  # so that the ranks cannot agree on a step yet
    ranks[1].process.send_signal(signal.SIGTERM)
    ranks[1].wait_for("stopping after the next step")
    again = start_rank(1, 2)
    again.wait_for("is ending; waiting for the next run")
    os.kill(ranks[0].worker, signal.SIGCONT)
    assert [rank.wait(30) for rank in ranks] == [143, 143]
    again.wait_for("is rank 0 started?")


def test_a_rank_can_be_stopped_while_rank_0_is_frozen(start_rank: Start) -> None:
    ranks = [start_rank(rank, 3) for rank in (0, 1)]
    ranks[1].wait_for("waiting for rank 2;")
    ranks[0].process.send_signal(signal.SIGSTOP)
    ranks[1].process.send_signal(signal.SIGINT)
    assert ranks[1].wait(10) == 130
    late = start_rank(2, 3)
    assert late.wait(30) == 11
    assert "something accepts connections there but says nothing" in late.err
    assert "a rank 0 that was stopped" in late.err


def test_the_agent_of_a_rank_never_loads_torch_and_is_there_within_a_second(start_rank: Start) -> None:
    rank_0 = start_rank(0, 2, fresh=True)
    assert rank_0.wait_for("waiting for rank 1; 1 of 2 here") < 2.5
    agent, worker = psutil.Process(rank_0.process.pid), psutil.Process(rank_0.worker)
    deadline = time.monotonic() + 60
    while not any("libtorch" in one.path for one in worker.memory_maps()):
        assert time.monotonic() < deadline
        time.sleep(0.1)
    assert not any("torch" in one.path for one in agent.memory_maps())
    assert agent.memory_info().rss < 60 << 20
    assert "rank=0" in worker.cmdline() and "of=2" in worker.cmdline()


@pytest.mark.parametrize("killed", ["agent", "worker"])
def test_when_the_agent_is_killed_the_worker_is_gone_within_2_s_and_the_other_way_round(
    start_rank: Start, killed: str
) -> None:
    """Both belong to a rank that waits for another rank."""
    rank_0 = start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1; 1 of 2 here")
    worker = psutil.Process(rank_0.worker)
    os.kill(rank_0.worker if killed == "worker" else rank_0.process.pid, signal.SIGKILL)
    assert rank_0.wait(2) == (128 + signal.SIGKILL if killed == "worker" else -signal.SIGKILL)
    with suppress(psutil.NoSuchProcess):
        worker.wait(2)
    if killed == "worker":
        error = last_error(rank_0.err)
        assert error.startswith(f"error[master-lost]: rank 0 ({HOST}, pid {worker.pid}) is gone: SIGKILL\n")
        assert "memory ran out" not in error


def test_rank_0s_port_is_free_as_soon_as_its_agent_is_killed(start_rank: Start, tmp_path: Path) -> None:
    """The worker, which may outlive its agent for a moment, does not inherit the listening socket."""
    ranks = [start_rank(rank, 2, "--epochs", 500) for rank in (0, 1)]
    ranks[0].wait_for("] step 100/")
    os.kill(ranks[0].process.pid, signal.SIGKILL)
    again = start_rank(0, 2, "--run_dir", tmp_path / "again")
    assert again.wait_for("listening at ") < 3
    assert ranks[1].wait() == 14
    assert last_error(ranks[1].err).startswith("error[master-lost]")
    assert start_rank(1, 2).wait() == again.wait() == 0, again.err
