"""With a token, on real sockets: what was recorded takes no rank, no rank takes a false rank 0 for the true one. The
token itself is never seen, neither on the wire nor in torch's store nor in a file."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddp_manual.messages import Look, Question
from ddp_manual.protocol.token_proof import Seal
from tests.conftest import HOST, RankProcess, Start, last_error
from tests.real_scripts import FOLDER
from tests.strangers import Stranger
from tests.world.test_check_and_status import look

TOKEN = "correct-horse-battery-staple"
RUN = (sys.executable, "-m", "ddp_manual", "run")
WORKS = ("--no_python", "sleep", 1)


class Eavesdropper:
    """Passes on what goes between a rank and rank 0, and keeps it."""

    def __init__(self, port: int) -> None:
        self._to = port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self.to_rank_0, self.from_rank_0 = bytearray(), bytearray()
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self) -> None:
        for one in (self._listener, *self._connections):
            with suppress(OSError):
                one.shutdown(socket.SHUT_RDWR)
            one.close()

    def line_to_rank_0(self, kind: str) -> bytes:
        return line_of(bytes(self.to_rank_0), kind)

    def line_from_rank_0(self, kind: str) -> bytes:
        return line_of(bytes(self.from_rank_0), kind)

    def _accept(self) -> None:
        while True:
            try:
                rank, _ = self._listener.accept()
            except OSError:
                return
            rank_0 = socket.create_connection(("127.0.0.1", self._to))
            self._connections += [rank, rank_0]
            for pair in ((rank, rank_0, self.to_rank_0), (rank_0, rank, self.from_rank_0)):
                threading.Thread(target=self._pass_on, args=pair, daemon=True).start()

    def _pass_on(self, source: socket.socket, to: socket.socket, kept: bytearray) -> None:
        with suppress(OSError):
            while piece := source.recv(65536):
                kept += piece
                to.sendall(piece)
        with suppress(OSError):
            to.shutdown(socket.SHUT_WR)


def line_of(text: bytes, kind: str) -> bytes:
    """The first message of a kind, as it was sent."""
    return next(line + b"\n" for line in text.splitlines() if json.loads(line)["type"] == kind)


@pytest.fixture
def eavesdropper(port: int) -> Iterator[Eavesdropper]:
    between = Eavesdropper(port)
    yield between
    between.close()


@pytest.fixture
def token_file(tmp_path: Path) -> Path:
    file = tmp_path / "token"
    file.write_text(f"{TOKEN}\n")
    return file


@pytest.fixture
def start_program(start: Start, port: int) -> Start:
    """Start a rank of a program without torch that has the token."""

    def start_program(rank: int, world_size: int, *options: object, token: str = TOKEN) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, *options]
        return start(*RUN, *meeting, *WORKS, DDP_MANUAL_TOKEN=token)

    return start_program  # type: ignore[return-value]


def test_a_recorded_hello_takes_no_rank_in_its_own_run_nor_in_the_next(
    start_program: Start, port: int, eavesdropper: Eavesdropper
) -> None:
    rank_0 = start_program(0, 3)
    rank_0.wait_for("waiting for ranks 1-2; 1 of 3 here")
    overheard = start_program(1, 3, "--master_port", eavesdropper.port)
    overheard.wait_for("waiting for rank 2; 2 of 3 here")  # that it has been answered: otherwise it only closes
    overheard.process.terminate()
    assert overheard.wait(10) == 143
    rank_0.wait_for(
        "waiting for ranks 1-2; 1 of 3 here: 0 (" + f"{HOST}); rank 1 ({HOST}, pid {overheard.worker}) left"
    )
    hello, everything = eavesdropper.line_to_rank_0("hello"), bytes(eavesdropper.to_rank_0)
    assert b"signature" in hello and b"answer_port" in hello and b'"leaves"' in everything

    refused = f"a process that says it is rank 1 on '{HOST}' was refused: token-mismatch"
    for recorded in (hello, everything, hello.replace(b'"rank":1', b'"rank":2')):
        turned_away(port, recorded)
    rank_0.wait_for(refused)
    rank_0.wait_for(refused.replace("rank 1", "rank 2"))
    true = start_program(1, 3)
    true.wait_for("waiting for rank 2; 2 of 3 here")
    turned_away(port, everything)
    assert f"pid {true.worker}) " not in rank_0.err
    for rank in (true, rank_0):
        rank.process.terminate()
        assert rank.wait(10) == 143
        assert "error[token-mismatch]" not in rank.err

    ranks = [start_program(0, 2)]
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here")
    turned_away(port, everything)
    ranks[0].wait_for(f"waiting for rank 1; 1 of 2 here: 0 ({HOST}); {refused}")
    ranks.append(start_program(1, 2))
    assert [rank.wait() for rank in ranks] == [0, 0]


def turned_away(port: int, recorded: bytes) -> None:
    """Send recorded bytes to rank 0, which must refuse them."""
    with Stranger(port) as stranger:
        stranger.connection.sendall(recorded)
        answer = stranger.rest(timeout=0.5)
        assert b"welcome" not in answer and b"news" not in answer
        assert b"refused" in answer and b"signature" in answer


def test_a_rank_refuses_a_false_rank_0_that_plays_back_what_a_true_one_said(
    start_program: Start, eavesdropper: Eavesdropper
) -> None:
    true = start_program(0, 3)
    true.wait_for("waiting for ranks 1-2; 1 of 3 here")
    overheard = start_program(1, 3, "--master_port", eavesdropper.port)
    overheard.wait_for("waiting for rank 2; 2 of 3 here")
    greeting, welcome = (eavesdropper.line_from_rank_0(kind) for kind in ("greeting", "welcome"))
    overheard.kill()
    true.kill()
    with socket.create_server(("127.0.0.1", 0)) as false:
        false_port = false.getsockname()[1]
        rank = start_program(1, 3, "--master_port", false_port)
        connection, _ = false.accept()
        with connection:
            connection.sendall(greeting)
            assert b"hello" in connection.recv(65536)
            connection.sendall(welcome)
            assert rank.wait(10) == 12
    error = last_error(rank.err)
    assert error.startswith(
        f"error[token-mismatch]: rank 0 at 127.0.0.1:{false_port} does not have this rank's token\n"
    )
    assert "or was recorded elsewhere" in error


def test_a_rank_and_status_need_the_token(start: Start, start_program: Start, port: int, token_file: Path) -> None:
    rank_0 = start_program(0, 2)
    rank_0.wait_for("waiting for rank 1; 1 of 2 here")
    for token in ("", "another"):
        denied = look(start, port, DDP_MANUAL_TOKEN=token)
        assert denied.wait(10) == 12, denied.err
        assert denied.err.startswith("error[token-mismatch]") and denied.out == ""
        stranger = start_program(1, 2, token=token)
        assert stranger.wait(10) == 12 and last_error(stranger.err).startswith("error[token-mismatch]")
    with Stranger(port) as stranger:
        stranger.say(Seal(None).close(Look, "", Question("x")))
        assert b"seen" not in stranger.rest(timeout=0.5)
    allowed = look(start, port, "--token_file", token_file)
    assert allowed.wait(10) == 0 and "1 of 2 ranks are here" in allowed.out
    assert TOKEN not in rank_0.err and TOKEN not in allowed.out


def everything_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "token":
            yield file, file.read_bytes()


def test_two_ranks_with_the_same_token_work_and_nothing_reveals_the_token(
    start: Start, port: int, eavesdropper: Eavesdropper, tmp_path: Path, token_file: Path
) -> None:
    """The token is neither on the wire, nor in torch's store, nor in a file, nor in a command that is printed."""
    words = [*RUN, "--world_size", 2, "--token_file", token_file, "--run_dir", tmp_path / "run"]
    ranks = [start(*words, "--rank", 0, "--master_port", port, FOLDER / "adding.py")]
    ranks[0].wait_for("to start what is missing:\n")
    ranks.append(start(*words, "--rank", 1, "--master_port", eavesdropper.port, FOLDER / "adding.py"))
    for number, rank in enumerate(ranks):
        rank.wait_for(f"rank {number} of 2 adds")
    address, store_port = json.loads(eavesdropper.line_from_rank_0("placed"))["store"]
    store = TCPStore(address, store_port, None, False, timedelta(seconds=20), wait_for_workers=False)
    keys = {key: store.get(key) for key in store.list_keys() if store.check([key])}
    del store
    assert any("default_pg/" in key for key in keys)
    os.kill(ranks[1].worker, signal.SIGKILL)
    assert [rank.wait() for rank in ranks] == [14, 137]
    wire = {"to rank 0": bytes(eavesdropper.to_rank_0), "from rank 0": bytes(eavesdropper.from_rank_0)}
    assert all(b"signature" in text for text in wire.values())
    places = {**keys, **wire, **dict(everything_in(tmp_path))}
    assert {tmp_path / "run" / "failure-rank0.json", tmp_path / "run" / "failure-rank1.json"} <= {*places}
    assert [place for place, text in places.items() if TOKEN.encode() in text or TOKEN in str(place)] == []


def test_launch_passes_the_token_on_and_leaves_it_in_no_file(start: Start, tmp_path: Path, token_file: Path) -> None:
    options = ["--nproc", 2, "--run_dir", tmp_path / "run", "--token_file", token_file, "--no_python", "env"]
    launcher = start(*RUN[:3], "launch", *options)
    assert launcher.wait() == 0, launcher.err
    places = dict(everything_in(tmp_path))
    assert {tmp_path / "run" / name for name in ("log-rank0.txt", "log-rank1.txt")} <= {*places}
    assert [place for place, text in places.items() if TOKEN.encode() in text] == []
