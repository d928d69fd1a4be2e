"""With a token, no stranger becomes a rank and no rank takes a stranger for rank 0; the token itself is never seen."""

from __future__ import annotations

import json
import os
import re
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from ddp_manual.rendezvous.seal import Seal
from tests.catalogue import record
from tests.clock import connected, left
from tests.conftest import LONGER, SHORT, RankProcess, Start
from tests.world.test_rendezvous import last_error

HOST = os.uname().nodename
TOKEN = "correct-horse-battery-staple"
SEALED = re.compile(rb'\{"sealed": "(?:[^"\\]|\\.)*", "signature": "[0-9a-f]{64}"\}')


def client(port: int) -> TCPStore:
    """A stranger's: it may read and write all that is in the store."""
    return TCPStore("127.0.0.1", port, None, False, timedelta(seconds=20), wait_for_workers=False)


def contents(store: TCPStore) -> dict[str, bytes]:
    return {key: store.get(key) for key in store.list_keys() if store.check([key])}


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


def test_a_process_without_the_token_or_with_another_one_never_becomes_a_rank(
    start_rank: Start, port: int, token_file: Path
) -> None:
    ranks = [start_rank(0, 3, DDP_MANUAL_TOKEN=TOKEN), start_rank(2, 3, "--token_file", token_file)]
    for rank in ranks:
        rank.wait_for("waiting for rank 1; 2 of 3 here")
    for token in ("", "another"):
        stranger = start_rank(1, 3, DDP_MANUAL_TOKEN=token)
        known = connected(stranger, port)
        seconds = left(stranger, 12) - known
        assert last_error(stranger.err).startswith("error[token-mismatch]")
        for rank in ranks:
            rank.wait_for(f"a process that says it is rank 1 on '{HOST}' was refused: token-mismatch")
        if not token:
            assert f"rank 0 on {HOST} (pid {ranks[0].process.pid}) says of its request: it is not " in stranger.err
    codes = [rank.wait() for rank in (ranks[0], start_rank(1, 3, DDP_MANUAL_TOKEN=TOKEN), ranks[1])]
    assert codes == [0, 0, 0]
    named = "who it says it is, on the others too"
    record("no token, or another one", "token-mismatch", named, seconds=seconds, within=2, codes=[*codes, 12], row=29)


def test_a_recorded_request_takes_no_rank_in_its_own_run_nor_in_the_next(
    start_rank: Start, port: int, eavesdropper: Eavesdropper, tmp_path: Path
) -> None:
    rank_0 = start_rank(0, 3, DDP_MANUAL_TOKEN=TOKEN)
    rank_0.wait_for("waiting for ranks 1-2; 1 of 3 here")
    overheard = start_rank(1, 3, "--master_port", eavesdropper.port, DDP_MANUAL_TOKEN=TOKEN)
    rank_0.wait_for("waiting for rank 2; 2 of 3 here")
    overheard.process.terminate()
    assert overheard.wait(10) == 143
    rank_0.wait_for(
        "waiting for ranks 1-2; 1 of 3 here: 0 (" + f"{HOST}); rank 1 ({HOST}, pid {overheard.process.pid})"
    )
    request, withdrawal = SEALED.findall(bytes(eavesdropper.to_rank_0))
    assert b'\\"probe_port\\"' in request and b"withdraw" in withdrawal

    store = client(port)
    for message in (request, request):
        store.queue_push("ddp_manual/0/arrivals", message)
    rank_0.wait_for("a request came twice to the roll call: it was recorded, and is ignored")
    store.queue_push("ddp_manual/0/arrivals", request.replace(b'\\"rank\\": 1', b'\\"rank\\": 2'))
    rank_0.wait_for("a message that was recorded or altered came to the roll call")
    true = start_rank(1, 3, DDP_MANUAL_TOKEN=TOKEN)
    true.wait_for("waiting for rank 2; 2 of 3 here")
    for message in (withdrawal, request):
        store.queue_push("ddp_manual/0/arrivals", message)
    del store
    for rank in (rank_0, true):
        rank.process.terminate()
        assert rank.wait(10) in (14, 143)
        assert "token-mismatch" not in rank.err and f"pid {true.process.pid}) left" not in rank_0.err

    again = ["--run_dir", tmp_path / "next"]
    ranks = [start_rank(0, 2, *again, DDP_MANUAL_TOKEN=TOKEN)]
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here")
    store = client(port)
    # With which rank 0 tells itself that it leaves; nobody else's may end its roll call.
    stop = json.dumps(Seal(TOKEN.encode()).close("stop", {"stop": True}))
    for message in (stop, request, withdrawal):
        store.queue_push("ddp_manual/0/arrivals", message)
    del store
    ranks[0].wait_for("waiting for rank 1; 1 of 2 here: 0 (" + f"{HOST}); a process that says it is rank 1 on '{HOST}'")
    ranks.append(start_rank(1, 2, *again, DDP_MANUAL_TOKEN=TOKEN))
    assert [rank.wait() for rank in ranks] == [0, 0]
    roster = json.loads((tmp_path / "next" / "summary.json").read_text())["roster"]
    assert [entry["pid"] for entry in roster] == [rank.process.pid for rank in ranks]


@pytest.mark.parametrize("token", ["", "another"])
def test_a_rank_with_a_token_refuses_a_rank_0_without_it(start_rank: Start, port: int, token: str) -> None:
    false = start_rank(0, 2, DDP_MANUAL_TOKEN=token)
    false.wait_for("waiting for rank 1; 1 of 2 here")
    rank = start_rank(1, 2, DDP_MANUAL_TOKEN=TOKEN)
    known = connected(rank, port)
    seconds = left(rank, 12) - known
    why = "it is signed with another token, or was recorded elsewhere" if token else "has no token at all"
    error = last_error(rank.err)
    assert error.startswith(
        f"error[token-mismatch]: rank 0 at 127.0.0.1:{port} does not have this rank's token\n"
        f"  why:  of its answer to rank 1 ({HOST}, pid {rank.process.pid}): "
    )
    assert why in error
    fault = f"a rank 0 with {'another' if token else 'no'} token"
    named = "where it is, what is wrong with its answer"
    record(fault, "token-mismatch", named, seconds=seconds, within=2, codes=[12], row=29)


@pytest.mark.parametrize("forged", [False, True])
def test_a_rank_refuses_a_store_that_plays_back_what_a_true_rank_0_told(
    start_rank: Start, port: int, forged: bool
) -> None:
    true = start_rank(0, 3, DDP_MANUAL_TOKEN=TOKEN)
    true.wait_for("waiting for ranks 1-2; 1 of 3 here")
    recorded = contents(client(port))
    verdict = next(value for key, value in recorded.items() if key.startswith("ddp_manual/0/verdict/"))
    true.kill()
    if forged:
        verdict = json.loads(verdict)["sealed"].encode()
    false = TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=60), wait_for_workers=False)
    for key, value in recorded.items():
        false.set(key, value)
    rank = start_rank(1, 3, "--master_port", false.port, DDP_MANUAL_TOKEN=TOKEN)
    request = json.loads(json.loads(false.queue_pop("ddp_manual/0/arrivals"))["sealed"])
    false.set(f"ddp_manual/0/verdict/{request['nonce']}", verdict)
    assert rank.wait(10) == 12
    error = last_error(rank.err)
    assert error.startswith(
        f"error[token-mismatch]: rank 0 at 127.0.0.1:{false.port} does not have this rank's token\n"
    )
    assert ("it is not signed with a token" if forged else "or was recorded elsewhere") in error


def test_news_that_a_stranger_writes_are_not_believed(start_rank: Start, port: int) -> None:
    ranks = [start_rank(rank, 3, DDP_MANUAL_TOKEN=TOKEN) for rank in (0, 1)]
    for rank in ranks:
        rank.wait_for("waiting for rank 2; 2 of 3 here")
    store = client(port)
    said = contents(store)
    version = max(int(key.rpartition("/")[2]) for key in said if key.startswith("ddp_manual/0/news/"))
    news = json.loads(json.loads(said[f"ddp_manual/0/news/{version}"])["sealed"])
    forged = {**news, "here": 3, "missing": [], "complete": True}
    for nonce in {key.rpartition("/")[2] for key in said if key.startswith("ddp_manual/0/verdict/")}:
        place = {"local_rank": 0, "local_world_size": 3, "node": 0, "nodes": 1, "host_leader": 0}
        store.set(f"ddp_manual/0/place/{nonce}", json.dumps({"place": place, "error": None}))
    store.set(f"ddp_manual/0/news/{version + 1}", json.dumps(forged))
    # Rank 0 leaves because of it, and rank 1 for the same reason or because rank 0 does.
    codes = [rank.wait(10) for rank in ranks]
    assert codes[0] == 12 and codes[1] in (12, 14), ranks[1].err
    assert last_error(ranks[0].err).startswith("error[token-mismatch]")
    assert "it is not signed with a token" in ranks[0].err
    assert "process group ready" not in ranks[0].err + ranks[1].err


def everything_in(folder: Path) -> Iterator[tuple[Path, bytes]]:
    for file in folder.rglob("*"):
        if file.is_file() and file.name != "token":
            yield file, file.read_bytes()


def test_two_ranks_with_the_same_token_train_and_it_is_nowhere_to_be_seen(
    start: Start, small_data: Path, tmp_path: Path, token_file: Path
) -> None:
    options = [*SHORT, *LONGER, 3, "--data_dir", small_data, "--token_file", token_file]
    run_dir = tmp_path / "run"
    program = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, "--run_dir", run_dir, "--", *options]
    launcher = start(*program)
    launcher.wait_for("[rank 1] step 100/")
    found = re.search(r"listening at 127\.0\.0\.1:(\d+)", launcher.err)
    assert found
    keys = contents(client(int(found.group(1))))
    assert any("hello" in key for key in keys) and any("process_group/" in key for key in keys)
    assert launcher.wait() == 0
    places = {**keys, **dict(everything_in(tmp_path))}
    assert {run_dir / name for name in ("config.json", "summary.json", "log-rank0.txt", "log-rank1.txt")} <= {*places}
    seen = [place for place, text in places.items() if TOKEN.encode() in text or TOKEN in str(place)]
    assert seen == []


def test_the_token_is_not_in_the_command_for_a_missing_rank_nor_in_a_failure_file(
    start_rank: Start, tmp_path: Path
) -> None:
    waiting = start_rank(0, 2, "--join_timeout", 3, DDP_MANUAL_TOKEN=TOKEN)
    assert waiting.wait(30) == 10
    assert "to start what is missing:\n" in waiting.err
    places = dict(everything_in(tmp_path))
    assert tmp_path / "run" / "failure-rank0.json" in places
    assert [place for place, text in places.items() if TOKEN.encode() in text] == []


def test_a_token_that_is_none_is_refused_before_anything_listens(
    start: Start, start_rank: Start, rank_command: Callable[..., list[object]], tmp_path: Path
) -> None:
    (tmp_path / "empty").write_text("\n")
    (tmp_path / "large").write_bytes(b"x" * 1_000_000)
    expected: dict[RankProcess, tuple[str, str]] = {
        start("env", "DDP_MANUAL_TOKEN=", *rank_command(0, 2)): ("DDP_MANUAL_TOKEN holds no token", "it is empty"),
        start_rank(0, 2, DDP_MANUAL_TOKEN=" "): ("DDP_MANUAL_TOKEN holds no token", "it is empty"),
    }
    for name, what, why in (
        ("empty", "holds no token", "it is empty"),
        ("large", "holds no token", "it is longer than 4096 bytes"),
        ("missing", "cannot be read", "No such file or directory"),
        (".", "cannot be read", "Is a directory"),
    ):
        file = tmp_path / name
        expected[start_rank(0, 2, "--token_file", file)] = (f"--token_file {file} {what}", why)
    for rank, (what, why) in expected.items():
        assert rank.wait() == 2
        assert last_error(rank.err).startswith(f"error[bad-option]: {what}\n  why:  {why}")
        assert "listening at" not in rank.err
