"""How a message goes over a connection: one JSON object on a line of bounded size; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from ddp_manual.errors import escaped

# Bytes. A rank's longest lines are an error with its traceback, and the stacks of a process.
LONGEST_LINE = 1 << 18
# Bytes of the longest line that an observer reads: a run of thousands of ranks, with their stacks.
LONGEST_ANSWER = 1 << 26
# Characters of a name, a version or a digest.
LONGEST_NAME = 255


class Unreadable(Exception):
    """The bytes received are not a message, or are longer than any message."""


def encode(message: Mapping[str, Any]) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode() + b"\n"


class LineReader:
    """Splits the bytes of a connection into messages, of at most ``longest`` bytes each.

    Args:
        local: whether a process of this rank sends them, whose texts, such as file names, are kept as they are.
    """

    def __init__(self, longest: int = LONGEST_LINE, *, local: bool = False) -> None:
        self.longest = longest
        self._decode = json.loads if local else decode
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[dict[str, Any]]:
        """Yield the messages that ``data`` completes; each is read when it is asked for, so that the first bad message
        costs no more than itself.

        Raises:
            Unreadable: a line is too long, or is not a JSON object.
        """
        for number, piece in enumerate(data.split(b"\n")):
            if number:
                line, self._received = self._received, bytearray()
                yield self._read(line)
            self._received += piece
            if len(self._received) > self.longest:
                raise Unreadable(f"a message of more than {self.longest} bytes")

    def _read(self, line: bytearray) -> dict[str, Any]:
        try:
            message = self._decode(line.decode())
        except (ValueError, RecursionError) as error:
            raise Unreadable(f"not a message: {error}") from None
        if not isinstance(message, dict):
            raise Unreadable("not a message")
        return message


def decode(text: str) -> Any:
    """Read JSON that the network brought, with every text in it made safe to show: see ``escaped``."""
    value = json.loads(text)
    # Nearly all messages: they have no character that JSON escapes, and none beyond ASCII.
    return value if text.isascii() and text.isprintable() and "\\" not in text else all_escaped(value)


def all_escaped(value: Any) -> Any:
    """Return what JSON has given with every text in it made safe to show."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, list):
        return [all_escaped(one) for one in value]
    if isinstance(value, dict):
        return {escaped(name): all_escaped(one) for name, one in value.items()}
    return value


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """Return the end of a text, escaped so that it is one line."""
    return escaped(text[-longest:], keep="")[-longest:]
