"""stdout and stderr of a process that goes on while nobody reads its terminal: after Ctrl-S, in a pager, or where the
command at the other end of a pipe does not read.

A write to such a terminal returns only once somebody reads. So a thread of its own writes, and this process continues.
What cannot be written yet is kept as far as there is room; after that the newest lines are kept, and those left out are
counted.
"""

from __future__ import annotations

import collections
import io
import math
import os
import select
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from ddp_manual import signal_handlers

# Bytes that are kept for a reader who comes back.
ROOM = 1 << 20
# Bytes. A pipe takes so many in one piece.
PIECE = 4096
# Seconds. A terminal that is read takes a line within a millisecond; later lines of other processes then follow it.
WRITTEN_WITHIN = 0.1
# Seconds. A thread stops waiting for a reader that has taken nothing for so long.
UNREAD_AFTER = 0.5
# Seconds to write a process's last lines; and those of a command that a person typed, who may have stopped the output.
LAST_LINES_WITHIN = 1.0
A_PERSON_READS_WITHIN = 600.0


class _Writer:
    """The thread that writes to a descriptor, and what it still has to write."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor
        self._turn = threading.Condition()
        self._texts: collections.deque[bytes] = collections.deque()
        self._is_writing = self._is_started = False
        self._size = 0
        """The bytes in ``_texts``."""
        self._left_out = 0
        """The lines that were left out before the first of ``_texts``."""
        self._taken_at = self._unread_since = time.monotonic()
        """When the reader last took something; and when it had last done so before the first line was left out."""

    def add(self, lines: bytes) -> None:
        """Have these lines written."""
        with self._turn:
            if not self._is_started:
                threading.Thread(target=self._run, name="ddp_manual terminal", daemon=True).start()
                self._is_started = True
            if not self._is_busy:
                self._taken_at = time.monotonic()
            self._texts.append(lines)
            self._size += len(lines)
            while self._size > ROOM and len(self._texts) > 1:
                self._unread_since = self._unread_since if self._left_out else self._taken_at
                oldest = self._texts.popleft()
                self._size -= len(oldest)
                self._left_out += oldest.count(b"\n")
            self._turn.notify_all()

    def wait(self, patience: float, within: float = math.inf, room: int = 0) -> None:
        """Wait until all is written, ``within`` seconds at most, or until the reader takes nothing for ``patience``
        seconds.

        Args:
            room: bytes that may be unwritten.
        """
        deadline = time.monotonic() + within
        with self._turn:
            while (
                self._is_busy
                and self._size >= room
                and (left := min(deadline, self._taken_at + patience) - time.monotonic()) > 0
            ):
                self._turn.wait(left)

    def wait_for_the_last_lines(self) -> bool:
        """Wait until all is written, or until the reader takes nothing for 1 s; return whether all is written.

        That is counted in short steps: a process that was stopped meanwhile does not lose it.
        """
        steps = 10
        with self._turn:
            while self._is_busy and steps:
                steps -= not self._turn.wait(LAST_LINES_WITHIN / 10)
            return not self._is_busy

    @property
    def _is_busy(self) -> bool:
        return self._is_writing or bool(self._texts)

    def _run(self) -> None:
        while True:
            with self._turn:
                self._is_writing = False
                self._turn.notify_all()
                while not self._texts:
                    self._turn.wait()
                text, self._is_writing = self._next(), True
            self._write(text)

    def _next(self) -> bytes:
        text = self._texts.popleft()
        self._size -= len(text)
        if self._left_out:
            seconds = time.monotonic() - self._unread_since
            said = f"({self._left_out:,} lines left out: this terminal was not read for {seconds:.0f} s)\n"
            text, self._left_out = said.encode() + text, 0
        return text

    def _write(self, text: bytes) -> None:
        while text:
            try:
                text = text[os.write(self._descriptor, text[:PIECE]) :]
            except BlockingIOError:  # another process has made the terminal non-blocking
                select.select([], [self._descriptor], [])
            except OSError:  # the reader has gone
                return
            with self._turn:
                self._taken_at = time.monotonic()
                self._turn.notify_all()


_writers = {descriptor: _Writer(descriptor) for descriptor in (1, 2)}
# A fork has no thread, and writes nothing of what its parent has left; it repeats the beginning of an unfinished line.
os.register_at_fork(after_in_child=lambda: _writers.update({number: _Writer(number) for number in _writers}))


class _Below(io.RawIOBase):
    """The raw stream below stdout or stderr, which gives the lines to the thread."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def fileno(self) -> int:
        return self._descriptor

    def isatty(self) -> bool:
        return os.isatty(self._descriptor)

    def writable(self) -> bool:
        return True

    def write(self, lines: Any) -> int:
        _writers[self._descriptor].add(bytes(lines))
        return len(lines)


class Unblocked(io.TextIOWrapper):
    """Takes the place of stdout or stderr; no write waits for a reader, and ``flush`` only for a moment."""

    def __init__(self, stream: TextIO) -> None:
        below = io.BufferedWriter(_Below(stream.fileno()))
        super().__init__(below, stream.encoding, "backslashreplace", line_buffering=True)

    def flush(self) -> None:
        super().flush()
        _writers[self.fileno()].wait(WRITTEN_WITHIN, WRITTEN_WITHIN)

    def wait_for_reader(self) -> None:
        """Wait until there is room again, for as long as the reader goes on reading."""
        _writers[self.fileno()].wait(UNREAD_AFTER, room=ROOM // 2)


def _unblocked(stream: Any) -> Any:
    with suppress(AttributeError, OSError, ValueError):  # there is none, or it is no descriptor, as in a notebook
        if not isinstance(stream, Unblocked) and stream.fileno() in _writers:
            stream.flush()
            return Unblocked(stream)
    return stream


@contextmanager
def never_block(patience: float = LAST_LINES_WITHIN) -> Iterator[None]:
    """Have nothing that this process prints in the body wait for a reader.

    Args:
        patience: seconds after the body to write what is still unwritten. If that takes longer than a second, signals
            end the process again, which has nothing else to do any more.
    """
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = map(_unblocked, before)
    try:
        yield
    finally:
        for stream in (sys.stdout, sys.stderr):
            if isinstance(stream, Unblocked):
                stream.flush()
        sys.stdout, sys.stderr = before
        unread = [writer for writer in _writers.values() if not writer.wait_for_the_last_lines()]
        if unread and patience > LAST_LINES_WITHIN:
            signal_handlers.end_by_default()
            for writer in unread:
                writer.wait(patience, patience)


def write(text: str, sink: TextIO) -> None:
    """Write to stdout or stderr, in a thread that may wait for a reader; drop the text if the reader has gone."""
    with suppress(OSError, ValueError):
        sink.write(text)
        sink.flush()
        if isinstance(sink, Unblocked):
            sink.wait_for_reader()
