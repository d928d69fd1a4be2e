"""Whatever else listens on rank 0's port is named within 5 s, and whatever else connects to it disturbs nobody."""

from __future__ import annotations

import os
import random
import re
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from contextlib import ExitStack, suppress
from datetime import datetime
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest

from tests.catalogue import record
from tests.clock import left
from tests.conftest import LONGER, RankProcess, Start
from tests.world.test_rendezvous import last_error

RANDOM_BYTES = random.Random(0).randbytes(10_000_000)
# What a client of torch's store sends first, and the head of a request to set a key, which then never comes.
VALIDATE = bytes.fromhex("00cef7853c")
HALF_A_REQUEST = VALIDATE + b"\x01" + (9).to_bytes(8, "little") + b"ddp"


@pytest.fixture
def ssh_server(start: Start, port: int, tmp_path: Path) -> RankProcess:
    """A real sshd on rank 0's port, with a key and a configuration of its own."""
    program = shutil.which("sshd", path=f"{os.environ['PATH']}:/usr/sbin")
    if program is None:
        pytest.skip("sshd not found (on Debian and Ubuntu: apt-get install openssh-server)")
    if os.geteuid() != 0:
        pytest.skip("only root can run sshd (run the tests as root)")
    Path("/run/sshd").mkdir(exist_ok=True)  # where Debian's sshd is built to lock its children in
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "key"], check=True)
    (tmp_path / "sshd.conf").write_text(f"ListenAddress 127.0.0.1:{port}\nPidFile none\n")
    server = start(program, "-D", "-e", "-f", tmp_path / "sshd.conf", "-h", tmp_path / "key")
    server.wait_for(f"Server listening on 127.0.0.1 port {port}")
    return server


@pytest.fixture
def http_server(start: Start, port: int) -> RankProcess:
    server = start(sys.executable, "-u", "-m", "http.server", "--bind", "127.0.0.1", port)
    wait_until_it_listens(server, port)
    return server


@pytest.fixture
def mute_listener(start: Start, port: int) -> RankProcess:
    """Accepts connections and never says a word."""
    return listener(start, port, "pass")


@pytest.fixture
def random_bytes_listener(start: Start, port: int) -> RankProcess:
    """Sends 10 MB of random bytes to whoever connects."""
    return listener(start, port, "threading.Thread(target=held[-1].sendall, args=(os.urandom(10_000_000),)).start()")


def listener(start: Start, port: int, then: str) -> RankProcess:
    server = start(
        sys.executable,
        "-c",
        "import os, socket, threading\n"
        f"listener, held = socket.create_server(('127.0.0.1', {port})), []\n"
        "while True:\n"
        "    held.append(listener.accept()[0])\n"
        f"    {then}\n",
    )
    wait_until_it_listens(server, port)
    return server


def wait_until_it_listens(server: RankProcess, port: int) -> None:
    """Wait until a server listens, without connecting to it."""
    deadline = server.started + 20
    while not any(
        one.laddr.port == port and one.status == psutil.CONN_LISTEN
        for one in psutil.Process(server.process.pid).net_connections("tcp")
    ):
        assert server.process.poll() is None, server.err
        assert time.monotonic() < deadline


@pytest.mark.parametrize(
    ("stranger", "answer"),
    [
        ("ssh_server", r"something else answers: SSH-2\.0-OpenSSH_"),
        ("http_server", r"something else answers: HTTP/1\.0 400 Bad request"),
        ("mute_listener", r"something accepts connections there but says nothing\n"),
        ("random_bytes_listener", r"something else answers: [^\n]*\\x[^\n]*\n"),
    ],
)
def test_another_server_on_rank_0s_port_is_named_to_rank_1_by_its_first_bytes_and_to_rank_0_by_its_process(
    request: pytest.FixtureRequest, start_rank: Start, port: int, stranger: str, answer: str
) -> None:
    server: RankProcess = request.getfixturevalue(stranger)
    told, errors = [], []
    for rank in (1, 0):
        process = start_rank(rank, 2)
        told.append(left(process, 11) - process.started)
        errors.append(last_error(process.err))
    of_rank_1, of_rank_0 = errors
    assert of_rank_1.startswith(f"error[master-not-a-store]: what listens at 127.0.0.1:{port} is not rank 0\n")
    assert re.search(answer, of_rank_1)
    owner = psutil.Process(server.process.pid)
    since = datetime.fromtimestamp(owner.create_time()).strftime("%Y-%m-%d %H:%M:%S")
    assert of_rank_0.startswith(f"error[port-in-use]: rank 0 cannot listen at 127.0.0.1:{port}: the port is in use\n")
    command = " ".join(" ".join(owner.cmdline()).split())
    assert f"it is held by pid {owner.pid} (LISTEN), started {since}: {command}\n" in of_rank_0
    assert server.process.poll() is None
    who = stranger.replace("_", " ")
    named = "first bytes" if "answers" in answer else "that it says nothing"
    record(f"{who} on rank 0's port", "master-not-a-store", named, seconds=told[0], within=5, codes=[11], row=5)
    named = "pid, command, start time"
    record(f"{who} where rank 0 is to listen", "port-in-use", named, seconds=told[1], within=5, codes=[11], row=6)


def test_strangers_at_the_port_of_a_healthy_run_do_not_disturb_it(start_rank: Start, start: Start, port: int) -> None:
    """Strangers come while the run waits and while it trains, and some connections stay open until it has ended."""
    ranks = [start_rank(0, 2, *LONGER, 5)]
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here")
    with ExitStack() as held:
        come_as_strangers(start, port, held)
        ranks.append(start_rank(1, 2, *LONGER, 5))
        ranks[0].wait_for("step 100/")
        come_as_strangers(start, port, held)
        assert [rank.process.poll() for rank in ranks] == [None, None]
        assert "epoch 5/5 loss" not in ranks[0].err
        codes = [rank.wait() for rank in ranks]
    texts = "".join(rank.err for rank in ranks)
    assert codes == [0, 0], texts
    assert "error[" not in texts and "refused" not in texts and "Traceback" not in texts
    record("strangers on a healthy run's port", "none", "nothing", seconds=None, within=None, codes=codes, row=29)


def come_as_strangers(start: Start, port: int, held: ExitStack) -> None:
    """Connect once as each kind of stranger; silent and half-finished connections stay open until ``held`` is left."""
    address = ("127.0.0.1", port)
    for first in (b"", VALIDATE):
        with socket.create_connection(address, 5) as connection, suppress(ConnectionError):
            connection.sendall(first + RANDOM_BYTES)
    with pytest.raises((OSError, HTTPException)):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1)
    if shutil.which("ssh"):
        assert start("ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=1", "-p", port, "127.0.0.1").wait(20) == 255
    held.enter_context(socket.create_connection(address, 5))
    for number in range(200):
        connection = held.enter_context(socket.create_connection(address, 5))
        with suppress(ConnectionError):  # some have to make room for others
            connection.sendall((HALF_A_REQUEST, b'{"hello": {"rank": 1')[number % 2])
