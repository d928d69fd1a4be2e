"""Real strangers: an sshd on rank 0's port is named by its first bytes and its process, and whatever connects to a real
rank 0, or answers in its place, disturbs nobody and clears nobody's terminal."""

from __future__ import annotations

import json
import os
import random
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from datetime import datetime
from http.client import HTTPException
from pathlib import Path

import psutil
import pytest
from msgspec.structs import asdict, replace

from ddp_manual.messages import PROTOCOL, Greeting, Message, News, RunEnds, Seen, Welcome
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.ranks_and_runs import Verdict
from ddp_manual.wire import encode
from tests.conftest import RankProcess, Start, last_error
from tests.runs import run_info

RUN = (sys.executable, "-m", "ddp_manual", "run")
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


def test_an_sshd_on_rank_0s_port_is_named_by_its_first_bytes_and_by_its_process(
    ssh_server: RankProcess, start: Start, port: int
) -> None:
    errors = []
    for rank in (1, 0):
        process = start(*RUN, "--world_size", 2, "--rank", rank, "--master_port", port, "--no_python", "true")
        assert process.wait(20) == 11
        errors.append(last_error(process.err))
    of_rank_1, of_rank_0 = errors
    assert of_rank_1.startswith(f"error[master-not-a-store]: what listens at 127.0.0.1:{port} is not rank 0\n")
    assert "something else answers: SSH-2.0-OpenSSH_" in of_rank_1
    since = datetime.fromtimestamp(psutil.Process(ssh_server.process.pid).create_time()).strftime("%Y-%m-%d %H:%M:%S")
    assert of_rank_0.startswith(f"error[port-in-use]: rank 0 cannot listen at 127.0.0.1:{port}: the port is in use\n")
    assert f"it is held by pid {ssh_server.process.pid} (LISTEN), started {since}: sshd: " in of_rank_0
    assert ssh_server.process.poll() is None


def test_strangers_at_the_port_of_a_healthy_run_do_not_disturb_it(start: Start, port: int, tmp_path: Path) -> None:
    """Strangers come while the run waits and while it works, and some connections stay open until it has ended."""
    run = [*RUN, "--world_size", 2, "--master_port", port, "--peer_timeout", 3]
    works = ["--no_python", "sh", "-c", f"until [ -e {tmp_path / 'done'} ]; do sleep 0.1; done"]
    ranks = [start(*run, "--rank", 0, *works)]
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here")
    with ExitStack() as held:
        come_as_strangers(start, port, held)
        ranks.append(start(*run, "--rank", 1, *works))
        ranks[0].wait_for("starting sh as rank")
        come_as_strangers(start, port, held)
        time.sleep(3)  # the peer timeout
        assert [rank.process.poll() for rank in ranks] == [None, None]
        (tmp_path / "done").touch()
        codes = [rank.wait() for rank in ranks]
    texts = "".join(rank.err for rank in ranks)
    assert codes == [0, 0], texts
    assert "error[" not in texts and "refused" not in texts and "Traceback" not in texts


CLEAR = "\x1b[2J\r\x9b"
ESCAPED = "\\x1b[2J\\r\\x9b"


def test_control_characters_of_a_false_rank_0_are_escaped_and_its_folder_is_not_made(
    start: Start, rank_command: Callable[..., list[object]], tmp_path: Path
) -> None:
    """On the terminal, in commands to type, in the failure file and in status; newlines are kept."""
    folder = tmp_path / "named by rank 0"
    run = run_info(world_size=2, run_dir=str(folder), command=f"rm {CLEAR}", host=f"h{CLEAR}", address="127.0.0.1")
    words = "peer-lost", f"a{CLEAR}", f"two\nlines{CLEAR}", f"rm {CLEAR}", 14
    verdict = Verdict(*words, rank=0, host=f"h{CLEAR}", pid=1, judged=True)
    news = News(1, named=[f"0 ({CLEAR})"], missing=[(1, 1)], gone=[CLEAR], warnings=[CLEAR], waited=1.0, timeout=60.0)
    unsigned = Seal(None)
    with socket.create_server(("127.0.0.1", 0)) as false:
        false_port = false.getsockname()[1]
        rank = start(*rank_command(1, 2, "--master_port", false_port))
        with say_as_rank_0(false, unsigned.close(Welcome, "", run), news):
            rank.wait_for(f"1 of 2 here: 0 ({ESCAPED})")
            rank.wait_for(f"rm {ESCAPED}")
        assert rank.wait(20) == 14
        assert f"error[master-lost]: rank 0 (h{ESCAPED}, pid 1) is gone without a word\n" in rank.err
        own = start(*rank_command(1, 2, "--master_port", false_port, "--run_dir", folder.with_name("own")))
        welcome = unsigned.close(Welcome, "", replace(run, run_dir=str(folder.with_name("own"))))
        with say_as_rank_0(false, welcome, RunEnds(verdict)):
            assert own.wait(20) == 14
        assert f"error[peer-lost]: a{ESCAPED}\n  why:  two\n        lines{ESCAPED}\n  next: rm {ESCAPED}\n" in own.err
        looking = start(*RUN[:3], "status", "--master_port", false_port)
        seen = {**asdict(news), "run": asdict(run), "ranks": [], "progress": None, "failure": asdict(verdict)}
        with say_as_rank_0(false, unsigned.close(Seen, "", seen)):
            assert looking.wait(20) == 0
        assert f"run r: rank 0 on h{ESCAPED} (pid 1)" in looking.out and f"lines{ESCAPED}" in looking.out
    assert not any(letter in one.err + one.out for one in (rank, own, looking) for letter in "\x1b\r\x9b")
    written = json.loads((tmp_path / "own" / "failure-rank1.json").read_text())
    assert written["why"] == f"two\nlines{ESCAPED}"
    assert not folder.exists()


@contextmanager
def say_as_rank_0(listener: socket.socket, *messages: Message) -> Iterator[None]:
    """Greet the next process that connects, say this once it has spoken, and close the connection after the body."""
    with listener.accept()[0] as connection:
        connection.sendall(encode(Greeting(PROTOCOL, "-", CLEAR, 1, token=False)))
        connection.makefile().readline()
        connection.sendall(b"".join(map(encode, messages)))
        yield


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
            connection.sendall((HALF_A_REQUEST, b'{"type":"hello","content":{"rank": 1')[number % 2])
