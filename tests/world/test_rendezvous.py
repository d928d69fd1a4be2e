"""How real ranks meet: what is typed after a message, what of torch is loaded when, and limits of the kernel."""

from __future__ import annotations

import resource
import shlex
import socket
import sys
from pathlib import Path

import pytest

from tests.conftest import HOST, RankProcess, Start, last_error

RUN = (sys.executable, "-m", "ddp_manual", "run")


def test_every_waiting_rank_prints_a_command_that_starts_the_missing_one(start: Start, port: int) -> None:
    """Quoted for a shell."""
    run, program = [*RUN, "--world_size", 3, "--master_port", port], ["--no_python", "sh", "-c", 'echo "I am $RANK"']
    waiting = [start(*run, "--rank", rank, *program) for rank in (0, 2)]
    commands = set()
    for rank in waiting:
        assert rank.wait_for("waiting for rank 1; 2 of 3 here: 0 (") < 10
        rank.wait_for("--rank 1 ")  # rank 2 may have been told before how to start rank 0
        commands.add(rank.err.rpartition("to start what is missing:\n")[2].splitlines()[0])
    (command,) = commands
    ranks = [waiting[0], start(*shlex.split(command)), waiting[1]]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert [rank.out for rank in ranks] == ["I am 0\n", "I am 1\n", "I am 2\n"]


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


def test_a_port_forward_that_closes_connections_until_rank_0_is_up_is_waited_for_and_named(
    start: Start, port: int
) -> None:
    process = start(sys.executable, "-c", PROXY, port)
    process.wait_for("port ")
    proxy = process.err.split()[1]

    def start_rank(rank: int, *options: object) -> RankProcess:
        return start(*RUN, "--world_size", 2, "--rank", rank, *options, "--no_python", "true")

    waiting = start_rank(1, "--master_port", proxy)
    waiting.wait_for(f"127.0.0.1:{proxy}, which is {HOST} itself accepts connections and closes them: a proxy or ")
    lost = start_rank(1, "--master_port", proxy, "--join_timeout", 2)
    assert lost.wait(30) == 11
    assert last_error(lost.err).startswith("error[master-refused]: what listens at rank 0's address ")
    assert "a proxy or a port forward whose other side is not up" in last_error(lost.err)
    assert [start_rank(0, "--master_port", port).wait(), waiting.wait()] == [0, 0], waiting.err


def test_a_rank_whose_torch_sees_no_gpu_leaves_before_it_joins(start_rank: Start) -> None:
    rank = start_rank(1, 2, "--device", "cuda")
    assert rank.wait(30) == 17
    assert last_error(rank.err).startswith(f"error[device-missing]: rank 1 on {HOST} has no GPU\n")
    assert "device cuda (flag), but " in last_error(rank.err)


def test_a_download_that_never_ends_is_named_by_those_who_wait_for_it(start: Start, port: int, tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as mute_proxy:
        proxy = f"http://127.0.0.1:{mute_proxy.getsockname()[1]}"
        options = ["--nproc", 2, "--master_port", port, "--join_timeout", 5, "--stall_timeout", 5]
        options += ["--run_dir", tmp_path / "run", "--", "--dataset", "mnist", "--data_dir", tmp_path / "data"]
        launcher = start(*RUN[:3], "launch", *options, http_proxy=proxy, https_proxy=proxy)
        launcher.wait_for(f"[rank 1] waiting for rank 0 on {HOST} to download mnist (")
        assert launcher.wait(20) == 16, launcher.err
        mute_proxy.setblocking(False)
        connection, _ = mute_proxy.accept()
        with connection:
            assert connection.recv(64).startswith(b"CONNECT ")
        with pytest.raises(BlockingIOError):  # one rank of a host asks, and once
            mute_proxy.accept()
    error = f"error[data-missing]: rank 0 on {HOST} did not download mnist within 5 s\n"
    assert f"[rank 1] {error}" in launcher.err, launcher.err


def test_rank_0_raises_its_limit_of_open_files_and_is_told_where_that_is_not_enough(start: Start, port: int) -> None:
    rank_0 = ["--rank", 0, "--master_port", port, "--no_python", "true"]
    few = start("prlimit", "--nofile=200:200", *RUN, "--world_size", 100, *rank_0)
    assert few.wait(10) == 2
    assert last_error(few.err).startswith(
        f"error[bad-option]: rank 0 on {HOST} may open 200 files, and a run of 100 ranks needs 300\n"
        "  why:  each rank keeps up to 2 connections to rank 0; the hard limit is 200\n"
    )
    raised = start("prlimit", "--nofile=256:1200", *RUN, "--world_size", 500, *rank_0)
    raised.wait_for("waiting for ranks 1-499")
    assert resource.prlimit(raised.process.pid, resource.RLIMIT_NOFILE) == (1200, 1200)
