"""How many collectives a rank has begun in each group, and their records, in memory that the worker shares with its
agent.

The worker writes a record before each collective; the agent reads it, also after the worker's death. A record has the
chain of its group: a checksum of what this and all collectives before it have in common on all ranks. Ranks whose
chains agree at a number have made the same calls up to there.

The reduce operation of some collectives is not known, such as of compiled ones and those of C++. So reduce operations
have their own checksums in a chain, which are compared only between ranks that know them of the same collectives.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator
from typing import NamedTuple

from ddp_manual.wire import printable

# At 5,000 collectives per second a rank writes this many in 1.6 s, and its agent reads every 0.25 s.
SLOTS = 8192
_COUNT = struct.Struct("<Q")
_HEADER = 64
# A record is a ``Key`` (begun, number, group, chain), then the call with its detail, and its line.
_RECORD = struct.Struct("<QQI12s96s128s")
_KEY = struct.Struct("<QQI12s")
# Groups that have a number each; a group that is opened after this many others takes the place of one of them. A group
# and its number are one word of the machine, which is written and read as a whole.
_GROUPS = 8192
_NUMBER = struct.Struct("@Q")
_BITS_OF_NUMBER = 40
_RECORDS = _HEADER + _GROUPS * _NUMBER.size
MEMORY_SIZE = _RECORDS + SLOTS * _RECORD.size
LONGEST_CALL, LONGEST_LINE = 96, 128
# A reader leaves out this many of the oldest records, which the writer may be about to overwrite.
_MARGIN = 64
_32_BITS = 0xFFFFFFFF


class Key(NamedTuple):
    """Which collective a record is of."""

    begun: int
    """How many collectives the rank had begun in all groups, with this one."""
    number: int
    """How many collectives the rank had begun in this group, with this one."""
    group: int
    """The number of the group: the rank numbers its groups in the order in which it opens them."""
    chain: int
    """See ``chain_with``."""


def chain_with(chain: int, number: int, call: bytes, reduce: bytes) -> int:
    """Return a group's chain with one more collective. It has three checksums, of 32 bits each from the lowest on: of
    the calls, of the numbers of the collectives whose reduce operation is known, and of these operations.

    Args:
        call: what the collective must have in common with the same collective of all other ranks.
        reduce: the reduce operation of the collective; b"" if it has none, or if that is not known.
    """
    calls = zlib.crc32(call, chain & _32_BITS)
    if not reduce:
        return chain & ~_32_BITS | calls
    known = zlib.crc32(b"%d " % number, chain >> 32 & _32_BITS)
    return zlib.crc32(reduce, chain >> 64) << 64 | known << 32 | calls


def comparable(chain: int) -> dict[int, int]:
    """Return key -> value, to compare with what other ranks have at the same number: two ranks with different values
    for the same key have made different calls."""
    known = chain >> 32 & _32_BITS
    return {0: chain & _32_BITS, known: chain >> 64} if known else {0: chain & _32_BITS}


def write_number(memory: memoryview, group: int, number: int) -> None:
    """Write how many collectives the rank has begun in a group, unless a later group has its place."""
    place = _place_of_number(group)
    if _NUMBER.unpack_from(memory, place)[0] >> _BITS_OF_NUMBER <= group:
        _NUMBER.pack_into(memory, place, group << _BITS_OF_NUMBER | number)


def read_number(memory: memoryview, group: int) -> int | None:
    """Return how many collectives the rank has begun in a group; None if a later group has its place."""
    found, number = divmod(_NUMBER.unpack_from(memory, _place_of_number(group))[0], 1 << _BITS_OF_NUMBER)
    return number if found == group else None if found > group else 0


def write(memory: memoryview, key: tuple[int, int, int, int], call: bytes, line: bytes) -> None:
    """Write a record, then how many there are; ``call`` is a call and its detail, with a tab in between."""
    index, number, group, chain = key
    _RECORD.pack_into(memory, _place(index), index, number, group, chain.to_bytes(12, "little"), call, line)
    _COUNT.pack_into(memory, 0, index)
    write_number(memory, group, number)


def read(memory: memoryview, after: int = 0) -> Iterator[Key]:
    """Yield the records that follow the one with index ``after``, as far as they are still there."""
    last = _COUNT.unpack_from(memory)[0]
    for index in range(max(after, last - SLOTS + _MARGIN) + 1, last + 1):
        begun, number, group, chain = _KEY.unpack_from(memory, _place(index))
        key = Key(begun, number, group, int.from_bytes(chain, "little"))
        if key.begun < index:  # a thread is still writing it
            break
        if key.begun == index:
            yield key


def read_call(memory: memoryview, index: int) -> tuple[str, str, str] | None:
    """Return the call, its detail and its line as the record with this index has them; None if it was overwritten."""
    found, *_, call, line = _RECORD.unpack_from(memory, _place(index))
    if found != index:
        return None
    text, _, detail = _text(call).partition("\t")
    return printable(text), printable(detail), printable(_text(line))


def _place(index: int) -> int:
    return _RECORDS + index % SLOTS * int(_RECORD.size)


def _place_of_number(group: int) -> int:
    return _HEADER + group % _GROUPS * int(_NUMBER.size)


def _text(padded: bytes) -> str:
    return padded.rstrip(b"\0").decode(errors="replace")
