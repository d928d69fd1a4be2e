"""What a process prints while nobody reads its terminal: a real pipe that is full."""

from __future__ import annotations

import os
import re
import select
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TextIO

import pytest

from ddp_manual import errors, terminal, unread
from ddp_manual.rank_output import RankOutput

LINES = 40_000
WORDS = "a line that is about as long as others are, "


class Reader:
    """The other end of a pipe, which does not read until it is told to. Of a terminal: tests/world/test_terminal.py."""

    def __init__(self, reading: int) -> None:
        self.reading = reading
        self.stream: TextIO
        """What this process writes to."""
        self.text = ""

    def read_until(self, wanted: str) -> str:
        deadline = time.monotonic() + 20
        while wanted not in self.text:
            assert select.select([self.reading], [], [], deadline - time.monotonic())[0], self.text[-1000:]
            self.text += os.read(self.reading, 65536).decode()
        return self.text


@pytest.fixture
def reader(monkeypatch: pytest.MonkeyPatch) -> Iterator[Reader]:
    """The reader of this process's stderr, which has stopped to read."""
    reading, writing = os.pipe()
    found = Reader(reading)
    os.set_blocking(writing, False)
    with suppress(BlockingIOError):
        while True:
            os.write(writing, b"." * 4096)
    os.set_blocking(writing, True)
    monkeypatch.setitem(unread._writers, writing, unread._Writer(writing))
    with os.fdopen(writing, "w") as found.stream:
        yield found
    os.close(reading)


def test_lines_for_a_terminal_that_is_not_read_wait_for_no_reader_and_the_newest_are_kept(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", reader.stream)
    with unread.never_block():
        started = time.monotonic()
        for number in range(LINES):
            terminal.say(f"{WORDS}{number}")
        assert time.monotonic() - started < 10
        text = reader.read_until(f", {LINES - 1}\n")
    (left_out,) = re.findall(r"^\((\S+) lines left out: this terminal was not read for \d+ s\)$", text, re.MULTILINE)
    shown = [int(number) for number in re.findall(f"{WORDS}(\\d+)\n", text)]
    assert len(shown) + int(left_out.replace(",", "")) == LINES
    assert shown[-1000:] == [*range(LINES - 1000, LINES)]
    assert len(text) < 2 * unread.ROOM


def test_an_error_for_a_terminal_that_is_not_read_does_not_hang_the_exit(
    reader: Reader, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stderr", reader.stream)
    started = time.monotonic()
    terminal.print_error(errors.BadOption("--epochs 0 is below 1", why="it is", next="raise it"))
    assert time.monotonic() - started < 5
    assert "--epochs 0 is below 1\n" in reader.read_until("raise it\n")


def test_no_line_is_lost_of_a_terminal_that_is_read_slowly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    monkeypatch.setitem(unread._writers, writing, unread._Writer(writing))
    received = bytearray()

    def read_slowly() -> None:
        while piece := os.read(reading, 1 << 16):
            received.extend(piece)
            time.sleep(0.002)

    slow = threading.Thread(target=read_slowly)
    slow.start()
    with (
        (tmp_path / "log").open("ab", buffering=0) as log,
        os.fdopen(writing, "w") as stream,
        ThreadPoolExecutor(1) as writer,
    ):
        monkeypatch.setattr(sys, "stderr", stream)
        with unread.never_block():
            for number in range(100):
                RankOutput(log, 1, writer).write(f"{WORDS}{number}\n".encode() * 1000)
            writer.shutdown()
    slow.join(20)
    os.close(reading)
    assert received.count(b"\n") == 100_000
    assert b"left out" not in received
