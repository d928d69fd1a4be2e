"""What a rank of ``launch`` writes: line by line to the terminal, with the rank in front, and to its log."""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from collections.abc import Sequence
from concurrent.futures import Executor, Future
from contextlib import suppress
from typing import BinaryIO, TextIO

from ddp_manual import unread
from ddp_manual.environment import user_variables
from ddp_manual.errors import DdpManualError, escaped
from ddp_manual.terminal import in_colour, tag, width_of
from ddp_manual.text_wrapping import LEAST, wrapped
from ddp_manual.wire import LONGEST_LINE

COLOURS = (36, 33, 32, 35, 34, 31)
# nanobind's report, at Python's end, of what a forked worker leaves frozen: see ``worker/script.py``.
FROZEN = re.compile(
    rb"nanobind: leaked \d+ [\w ]+!| - leaked (instance 0x\S+ of type|type|function) \".*\"| - \.\.\. skipped remainder"
    rb"|nanobind: this is likely caused by a reference .*|See https://nanobind\S+/refleaks\.html"
)
# Seconds between two states of a progress bar.
STATE_EVERY = 1.0


class RankOutput:
    """Writes the output of one rank to the terminal, with the rank in front, and unchanged to its log.

    Args:
        log: opened without a buffer, so that closing it writes nothing, which could fail.
        writer: the thread that writes. It waits for a slow reader of the terminal, as the event loop, which sends
            heartbeats, must not; it does not wait for a reader who has stopped, since the log goes on.
    """

    def __init__(self, log: BinaryIO, rank: int, writer: Executor) -> None:
        self._log = log
        self._writer = writer
        self._tag = tag(rank)
        self._colour = COLOURS[rank % len(COLOURS)]
        self._is_incomplete = False
        if log.tell():
            with suppress(OSError):  # of which the next line tells
                log.write(f"--- started again at {time.strftime('%Y-%m-%d %H:%M:%S')} ---\n".encode())

    def write(self, text: bytes, sink: TextIO | None = None) -> Future[None]:
        """Write to terminal and log, in turn with all other output; the rank continues even if one of them fails."""
        return self._writer.submit(self._write, text, sink)

    def print(self, line: str, sink: TextIO | None = None, *, shown: bool = True) -> None:
        """Write a line of this package to the log and, if it is to be ``shown``, to stderr or ``sink``."""
        own = wrapped(line.removeprefix(f"{self._tag} "), self._room(sink or sys.stderr))
        self._writer.submit(self._write, f"{wrapped(line, None)}\n".encode(), sink, f"{own}\n" if shown else "")

    def print_error(self, error: DdpManualError, *, shown: bool) -> None:
        """Write the error that ends the rank to the log and, if ``shown``, to stderr."""
        text = f"{error.render(self._room(sys.stderr))}\n" if shown else ""
        self._writer.submit(self._write, f"{error.render()}\n".encode(), None, text)

    def _room(self, sink: TextIO) -> int | None:
        width = width_of(sink)
        return width and max(LEAST, width - len(self._tag) - 1)

    def _write(self, text: bytes, sink: TextIO | None, shown: str | None = None) -> None:
        """Write to the log and to the terminal.

        Args:
            shown: what the terminal shows instead.
        """
        sink = sys.stderr if sink is None else sink
        lacks = self._write_log(text)
        if shown is None:
            room = self._room(sink)
            shown = "".join(self._at_width(line, room) for line in _lines(text))
        shown += lacks
        colour = sink.isatty() and user_variables.colour_allowed()
        tag = f"\x1b[{self._colour}m{self._tag}\x1b[0m" if colour else self._tag
        lines = _lines(shown.encode(errors="replace"))
        unread.write("".join(f"{tag} {in_colour(line, sink)}" for line in lines), sink)

    def _write_log(self, text: bytes) -> str:
        """Write to the log, which goes on after a failure; return a line that says so after the first one, else ""."""
        try:
            while text:  # on a disk that is almost full a part of it is written
                text = text[self._log.write(text) :]
        except OSError as error:
            if not self._is_incomplete:
                self._is_incomplete = True
                return f"{escaped(self._log.name)} is incomplete from here on: {error.strerror}\n"
        return ""

    def _at_width(self, line: str, room: int | None) -> str:
        """Wrap a line of this package, which has the tag in front; those of programs are left alone."""
        own = line.removeprefix(f"{self._tag} ")
        return line if own == line else wrapped(own, room)


def _lines(text: bytes) -> list[str]:
    """Return the lines with their ends, as a terminal has them: ``str.splitlines`` also splits at U+2028, or a FF."""
    return [line.decode(errors="replace") for line in text.splitlines(keepends=True)]


def copies(pipes: Sequence[int], output: RankOutput) -> list[asyncio.Future[None]]:
    """Copy stdout and stderr of a worker; each future is done when everything is read that the worker has written."""
    sinks = zip(pipes, (sys.stdout, sys.stderr), strict=True)
    return [asyncio.ensure_future(copy(pipe, output, sink)) for pipe, sink in sinks]


async def copy(descriptor: int, output: RankOutput, sink: TextIO) -> None:
    """Copy what the worker writes to this pipe, line by line, until its end; of a progress bar, which rewrites its line
    with a carriage return, the last state of each second."""
    reader = asyncio.StreamReader(limit=1 << 20)
    loop = asyncio.get_running_loop()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(descriptor, "rb"))
    rest, shown, shown_at = b"", b"", -STATE_EVERY
    while True:
        is_new = b"\r" in rest and _last_state(rest) != shown
        piece: bytes | None = None
        with suppress(asyncio.TimeoutError):
            within = shown_at + STATE_EVERY - loop.time() if is_new else None
            piece = await asyncio.wait_for(reader.read(1 << 16), within)
        if piece is None:
            shown, shown_at = _last_state(rest), loop.time()
            lines = [shown]
        else:
            *lines, rest = (rest + piece).replace(b"\r\n", b"\n").split(b"\n")
            if not piece or len(rest) > LONGEST_LINE:
                lines, rest = [*lines, rest] if rest else lines, b""
            lines = [_last_state(line) for line in lines if sink is not sys.stderr or not FROZEN.fullmatch(line)]
            if lines and shown:  # a state that was shown has become a line
                lines, shown = lines[lines[0] == shown :], b""
            if b"\r" in rest:  # a state that another one has replaced is not kept
                rest = b"\r" + _last_state(rest) + b"\r" * rest.endswith(b"\r")
        if lines:
            await asyncio.wrap_future(output.write(b"\n".join(lines) + b"\n", sink))
        if piece == b"":
            return


def _last_state(line: bytes) -> bytes:
    """Return what a terminal shows of a line that was rewritten with carriage returns."""
    return next((state for state in reversed(line.split(b"\r")) if state.strip()), b"")
