"""How a message goes over a connection: one JSON object on a line of bounded size; nothing is unpickled."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Generic, TypeAlias, TypeVar

import msgspec

from ddp_manual.errors import escaped

# Bytes. A rank's longest lines are an error with its traceback, and the stacks of a process.
LONGEST_LINE = 1 << 18
# Bytes of the longest line that an observer reads: a run of thousands of ranks, with their stacks.
LONGEST_ANSWER = 1 << 26
# Characters of a name, a version or a digest.
LONGEST_NAME = 255

T = TypeVar("T")
Read: TypeAlias = Callable[[str], T]
"""Reads a message from a line; raises ``msgspec.MsgspecError``, ValueError or RecursionError if it is none."""

_encoder = msgspec.json.Encoder()
_local_encoder = json.JSONEncoder(separators=(",", ":"))


class Unreadable(Exception):
    """The bytes received are not a message, or are longer than any message."""


def encode(message: msgspec.Struct) -> bytes:
    return as_json(message) + b"\n"


def encode_local(message: Mapping[str, Any] | msgspec.Struct) -> bytes:
    """Return the line for a message to a process of this rank, or of this user, with texts and numbers as they are."""
    return _local_encoder.encode(msgspec.to_builtins(message, enc_hook=_plain)).encode() + b"\n"


def _plain(value: Any) -> Any:
    """Return the plain value of a text or a number of another class, such as ``torch.__version__``."""
    return json.loads(json.dumps(value))


def as_json(content: Any) -> bytes:
    """Return the JSON of a content that goes over the network."""
    try:
        return _encoder.encode(content)
    except UnicodeEncodeError:  # a text that is not Unicode, such as a stray byte in the name of a file
        return _encoder.encode(all_escaped(msgspec.to_builtins(content)))


def reader_of(type: Any) -> Read[Any]:
    """Return a function that reads JSON of this type from the network, and makes every text in it safe to show: see
    ``escaped``. It leaves a signed message as it is, until ``Seal.open`` reads its content."""
    decoder = msgspec.json.Decoder(type)

    def read(text: str) -> Any:
        found = decoder.decode(text)
        # As nearly all messages, it has no character that JSON escapes, and none beyond ASCII.
        if (text.isascii() and text.isprintable() and "\\" not in text) or hasattr(found, "signature"):
            return found
        return msgspec.convert(all_escaped(msgspec.json.decode(text)), type)

    return read


decode = reader_of(Any)
"""Reads any JSON from the network, and makes its texts safe to show."""


def local_reader_of(type: Any) -> Read[Any]:
    """Return a function that reads such JSON from ``encode_local``: also texts that are not Unicode, and NaN."""
    decoder = msgspec.json.Decoder(type)

    def read(text: str) -> Any:
        try:
            return decoder.decode(text)
        except msgspec.DecodeError:  # not JSON for msgspec, such as NaN; or no such message
            return msgspec.convert(json.loads(text), type)

    return read


class LineReader(Generic[T]):
    """Splits the bytes of a connection into messages, of at most ``longest`` bytes each."""

    def __init__(self, read: Read[T], longest: int = LONGEST_LINE) -> None:
        self.read, self.longest = read, longest
        self._received = bytearray()

    def feed(self, data: bytes) -> Iterator[T]:
        """Yield the messages that ``data`` completes; each is read when it is asked for, so that the first bad message
        costs no more than itself.

        Raises:
            Unreadable: a line is too long, or is no message.
        """
        for number, piece in enumerate(data.split(b"\n")):
            if number:
                line, self._received = self._received, bytearray()
                yield self._read(line)
            self._received += piece
            if len(self._received) > self.longest:
                raise Unreadable(f"a message of more than {self.longest} bytes")

    def _read(self, line: bytearray) -> T:
        try:
            return self.read(line.decode())
        except (msgspec.MsgspecError, ValueError, RecursionError) as error:
            raise Unreadable(f"not a message: {printable(str(error))}") from None


def all_escaped(value: Any) -> Any:
    """Return a value that was read from JSON, with every text in it made safe to show."""
    if isinstance(value, str):
        return escaped(value)
    if isinstance(value, (list, tuple)):
        return [all_escaped(one) for one in value]
    if isinstance(value, dict):
        return {escaped(name): all_escaped(one) for name, one in value.items()}
    return value


def printable(text: str, longest: int = LONGEST_NAME) -> str:
    """Return the end of a text, escaped so that it is one line."""
    return escaped(text[-longest:], keep="")[-longest:]
