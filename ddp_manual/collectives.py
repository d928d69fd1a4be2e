"""The records of the collectives that a rank has begun, in memory that the worker shares with its agent.

The worker writes a record before each collective; the agent reads, also after the worker's death. Each record has the
chain of its group: a checksum of what this and all collectives before it have in common on all ranks. Ranks whose
chains agree at a number have made the same calls up to there.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

from ddp_manual.wire import printable

# At 5,000 collectives per second a rank writes this many in 1.6 s, and its agent reads every 0.1 s.
SLOTS = 8192
_COUNT = struct.Struct("<Q")
_HEADER = 64
# How many were begun, number, group, chain; what was called and on which line.
_RECORD = struct.Struct("<QQII104s128s")
_KEY = struct.Struct("<QQII")
MEMORY_SIZE = _HEADER + SLOTS * _RECORD.size
LONGEST_CALL, LONGEST_LINE = 104, 128
# A reader leaves out the oldest records, which the writer may be about to overwrite.
_MARGIN = 64


class Key(NamedTuple):
    """Which collective a record is of."""

    begun: int
    """How many collectives the rank had begun in all groups, with this one."""
    number: int
    """How many of them in this group."""
    group: int
    """Numbered by the rank in the order of its first collective in each group."""
    chain: int


class Call(NamedTuple):
    """What a rank called."""

    call: str
    """Such as ``all_reduce float32[4]``."""
    detail: str
    """Such as ``sum`` or ``from rank 0``; "" if there is none."""
    line: str
    """Such as ``train.py:91``; "" if no Python called it."""


def write(memory: memoryview, key: tuple[int, int, int, int], call: bytes, line: bytes) -> None:
    """Write a record, then how many there are; ``call`` is a call and its detail, with a tab in between."""
    _RECORD.pack_into(memory, _HEADER + key[0] % SLOTS * _RECORD.size, *key, call, line)
    _COUNT.pack_into(memory, 0, key[0])


def read(memory: memoryview, after: int = 0) -> Iterator[Key]:
    """Yield the records that follow the one with index ``after``, as far as they are still there."""
    last = _COUNT.unpack_from(memory)[0]
    for index in range(max(after, last - SLOTS + _MARGIN) + 1, last + 1):
        key = Key(*_KEY.unpack_from(memory, _place(index)))
        if key.begun < index:  # a thread is still writing it
            break
        if key.begun == index:
            yield key


def read_call(memory: memoryview, index: int) -> Call | None:
    """Return what the record with this index says; None if it was overwritten."""
    found, *_, call, line = _RECORD.unpack_from(memory, _place(index))
    if found != index:
        return None
    text, _, detail = _text(call).partition("\t")
    return Call(printable(text), printable(detail), printable(_text(line)))


def _place(index: int) -> int:
    return _HEADER + index % SLOTS * int(_RECORD.size)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
