"""Real strangers: an sshd on rank 0's port is named by its first bytes and its process, and whatever connects to a real
rank 0, or answers in its place, disturbs nobody and clears nobody's terminal."""

from __future__ import annotations

import asyncio
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

from ddp_manual.agent.probe import look_at, probe
from ddp_manual.messages import (
    PROTOCOL,
    Claim,
    Greeting,
    Hello,
    Message,
    News,
    RankInfo,
    RunEnds,
    Seen,
    Verdict,
    Welcome,
)
from ddp_manual.protocol.roll_call import MOST_REFUSALS, REFUSALS_WITHIN
from ddp_manual.protocol.seal import Seal
from ddp_manual.wire import encode
from tests.conftest import LONGER, RankProcess, Start, last_error
from tests.runs import run_info
from tests.strangers import Stranger

# As many as come in an hour at one each second, in a minute.
STRANGERS = int(os.environ.get("DDP_MANUAL_SOAK_STRANGERS", "480"))
STRANGERS_A_SECOND = 60
RUN = (sys.executable, "-m", "ddp_manual", "run")
WORKS = ("--no_python", "sleep", 15)
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


def test_strangers_at_the_port_of_a_healthy_run_do_not_disturb_it(start: Start, port: int) -> None:
    """Strangers come while the run waits and while it works, and some connections stay open until it has ended."""
    run = [*RUN, "--world_size", 2, "--master_port", port, "--peer_timeout", 3]
    ranks = [start(*run, "--rank", 0, *WORKS)]
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here")
    with ExitStack() as held:
        come_as_strangers(start, port, held)
        ranks.append(start(*run, "--rank", 1, *WORKS))
        ranks[0].wait_for("starting sleep as rank")
        come_as_strangers(start, port, held)
        assert [rank.process.poll() for rank in ranks] == [None, None]
        codes = [rank.wait() for rank in ranks]
    texts = "".join(rank.err for rank in ranks)
    assert codes == [0, 0], texts
    assert "error[" not in texts and "refused" not in texts and "Traceback" not in texts


CLEAR = "\x1b[2J\r\x9b"
ESCAPED = "\\x1b[2J\\r\\x9b"


def test_control_characters_of_a_stranger_are_escaped_in_the_terminals_of_all_ranks_and_in_status(
    start: Start, port: int
) -> None:
    run = [*RUN, "--world_size", 3, "--master_port", port]
    ranks = [start(*run, "--rank", rank, *WORKS) for rank in (0, 1)]
    ranks[1].wait_for("waiting for rank 2; 2 of 3 here")
    with Stranger(port) as stranger:
        stranger.say(Seal(None).close(Hello, "", {"nonce": "", "info": {"rank": 2, "host": f"a\n{CLEAR}"}}))
        assert stranger.hears("refused")["identifier"] == "version-mismatch"
    with Stranger(port) as stranger:
        hello = RankInfo(rank=2, world_size=7, host=f"b{CLEAR}", pid=1, address="127.0.0.1")
        stranger.say(Seal(None).close(Hello, "", Claim(hello, "")))
        assert stranger.hears("refused")["identifier"] == "world-size-mismatch"
    for rank in ranks:
        rank.wait_for(f"rank 2 (b{ESCAPED}, pid 1) was refused: world-size-mismatch")
        rank.wait_for("a process that says it is rank 2 on 'a")
    seen = [start(*RUN[:3], "status", "--master_port", port, *as_json) for as_json in ([], ["--json"])]
    assert [status.wait() for status in seen] == [0, 0]
    assert f"rank 2 (b{ESCAPED}, pid 1) was refused: world-size-mismatch" in seen[0].out
    assert not any(letter in process.out + process.err for process in (*ranks, *seen) for letter in "\x1b\r\x9b")


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


@pytest.mark.soak(only=True)
@pytest.mark.alone
@pytest.mark.timeout(600)
@pytest.mark.parametrize("token", ["", "of the soak"])
def test_an_hours_worth_of_strangers_in_a_minute_changes_neither_heartbeats_nor_memory(
    start: Start, rank_command: Callable[..., list[object]], port: int, token: str
) -> None:
    """They send without pause, for as long as they are let: random bytes, a line without an end, only newlines, empty
    messages, hellos, damaged hellos, looks. Without a token they come once all ranks are here, since one of their
    hellos would make a rank. With a token, rank 1 comes while they do."""
    command = [rank_command(rank, 2, *LONGER, 1000, "--join_timeout", 300) for rank in range(2)]
    env = {"DDP_MANUAL_TOKEN": token}
    ranks = [start(*command[0], **env)]
    listener = socket.create_server(("127.0.0.1", 0))
    hello = hello_of(start(*command[1], "--master_port", listener.getsockname()[1], **env), listener, token)
    if not token:
        ranks.append(start(*command[1], **env))
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here" if token else "step 100/")
    agent = psutil.Process(ranks[0].process.pid)
    before = agent.memory_full_info().uss
    seconds = STRANGERS / STRANGERS_A_SECOND
    strangers = start(sys.executable, "-m", "tests.strangers", port, STRANGERS, seconds, random.randrange(10**6), hello)
    if token:
        ranks.append(start(*command[1], **env))
    looks = asyncio.run(look_while(strangers, port, token))
    grown = agent.memory_full_info().uss - before
    ranks[0].wait_for("step 200/")
    assert [rank.process.poll() for rank in ranks] == [None, None], ranks[0].err
    for rank in ranks:
        rank.process.terminate()
    assert [rank.wait() for rank in ranks] == [143, 143]
    slowest, silent = max(took for took, _ in looks), max(silent for _, silent in looks)
    print(
        f"{strangers.out.strip()}: the slowest of {len(looks)} looks took {slowest:.2f} s, a rank was silent for "
        f"{silent} s at most, rank 0's agent has grown by {grown / 1e6:.1f} MB"
    )
    assert slowest < 2 and silent < 2 and grown < 10e6
    said = "".join(rank.err for rank in ranks)
    assert "silent" not in said and "Traceback" not in said and "is gone" not in said
    assert said.count(" was refused: ") <= 2 * MOST_REFUSALS * (1 + seconds // REFUSALS_WITHIN)


def hello_of(rank: RankProcess, listener: socket.socket, token: str) -> str:
    """The hello of a rank whose rank 0 is this listener, and which then ends."""
    with listener, listener.accept()[0] as connection:
        connection.sendall(encode(Greeting(PROTOCOL, "-", "-", 1, token=bool(token))))
        hello = connection.makefile().readline()
    rank.kill()
    return hello.strip()


async def look_while(strangers: RankProcess, port: int, token: str) -> list[tuple[float, float]]:
    """Look at the run until the strangers have come; return how long each look took, and for how long a rank had been
    silent then, in seconds."""
    there, found = await probe("127.0.0.1", port), []
    assert there.connection is not None
    while strangers.process.poll() is None:
        began = time.monotonic()
        seen = await look_at(there, "rank 0", token.encode() or None)
        silent = max((rank["silent_seconds"] for rank in seen["progress"] or ()), default=0.0)
        found.append((time.monotonic() - began, silent))
        await asyncio.sleep(0.1)
    there.connection.close()
    return found


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
