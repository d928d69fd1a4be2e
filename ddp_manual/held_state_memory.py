"""The state of a training after its last step, in memory that an agent owns and its worker writes to.

It stays when the worker has ended, however that has ended. Two slots take turns, and a slot counts once it is whole: a
worker that is killed while it writes a state leaves the state before. A state is a text, which describes it, and the
bytes of its tensors; ``training/held_state.py`` writes and reads both. Only the header is read without torch.
"""

from __future__ import annotations

import errno
import mmap
import os
import struct
import tempfile
from contextlib import suppress
from dataclasses import dataclass

from ddp_manual.memory_cgroup import memory_left
from ddp_manual.ranks_and_runs import Moment

# The steps that are done; then for each of the two slots: the number of its state, counted from 1, or 0 while it is not
# whole; the moment of its state, in three numbers; where the slot begins in the file, and its size; and the bytes of
# tensors and of text in it.
SLOT = struct.Struct("<8q")
NUMBER = struct.Struct("<q")
PAGE = 4096
# The share of the memory that is left which the held states of a host's ranks may take: the training takes some too.
SHARE = 0.8


@dataclass(frozen=True)
class Slot:
    """Where a state is in the memory: first the bytes of its tensors, then its text."""

    index: int
    number: int
    moment: Moment
    begin: int
    size: int
    tensors: int
    text: int


class HeldMemory:
    """The memory that holds the state of one rank.

    Args:
        descriptor: the descriptor of the file in memory, which this object closes.
    """

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor
        self._mapped: mmap.mmap | None = None

    @classmethod
    def create(cls) -> HeldMemory:
        """Make new memory, for an agent; it takes no room until a state is held."""
        if hasattr(os, "memfd_create"):
            descriptor = os.memfd_create("ddp_manual state")
        else:
            with tempfile.TemporaryFile() as file:
                descriptor = os.dup(file.fileno())
        os.ftruncate(descriptor, PAGE)
        return cls(descriptor)

    def close(self) -> None:
        self._mapped = None
        os.close(self.descriptor)

    def newest(self) -> Slot | None:
        """Return the slot of the newest state that is whole; None if no state is."""
        found = []
        for index in range(2):
            header = os.pread(self.descriptor, SLOT.size, self._place(index))
            number, generation, step, counts_calls, *rest = SLOT.unpack(header)
            if number:
                found.append(Slot(index, number, Moment(generation, step, bool(counts_calls)), *rest))
        return max(found, key=lambda slot: slot.number, default=None)

    @property
    def steps_done(self) -> int:
        """How many steps the worker has done; the held state may be from some steps before."""
        return int(NUMBER.unpack(os.pread(self.descriptor, NUMBER.size, 0))[0])

    @steps_done.setter
    def steps_done(self, step: int) -> None:
        NUMBER.pack_into(self.mapped, 0, step)

    @property
    def mapped(self) -> mmap.mmap:
        """The memory; ``begin`` maps it anew where it grows."""
        if self._mapped is None:
            self._mapped = mmap.mmap(self.descriptor, 0)
        return self._mapped

    def begin(self, tensors: int, text: int, ranks: int = 1) -> Slot:
        """Return the slot to write a state of so many bytes to, which does not count until ``finish``: not the newest.

        Args:
            ranks: how many ranks of this host are about to take as much.

        Raises:
            OSError: the machine does not have so much memory for all these ranks.
        """
        newest = self.newest()
        index, number = (1 - newest.index, newest.number + 1) if newest is not None else (0, 1)
        NUMBER.pack_into(self.mapped, self._place(index), 0)
        _, _, _, _, begin, size, _, _ = SLOT.unpack_from(self.mapped, self._place(index))
        if tensors + text > size:
            # The new place is at the end of the file; the memory that the slot had before is given back.
            with suppress(AttributeError, OSError):
                if size:
                    self.mapped.madvise(mmap.MADV_REMOVE, begin, size)
            begin, size = os.fstat(self.descriptor).st_size, (tensors + 4 * text) // PAGE * PAGE + PAGE
            # Both slots are made at the first state: what is left then, which other ranks look at, counts both.
            slots = [index] if newest is not None else [0, 1]
            whole = len(slots) * size
            if ranks * whole > SHARE * memory_left():  # in a cgroup nothing fails: the kernel ends a process
                raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))
            if hasattr(os, "posix_fallocate"):  # otherwise a machine without memory ends the worker with SIGBUS
                os.posix_fallocate(self.descriptor, begin, whole)
            os.truncate(self.descriptor, begin + whole)
            self._mapped = None
            for place, slot in enumerate(slots):
                SLOT.pack_into(self.mapped, self._place(slot), 0, 0, 0, 0, begin + place * size, size, 0, 0)
        return Slot(index, number, Moment(0, 0), begin, size, tensors, text)

    def finish(self, slot: Slot, moment: Moment) -> None:
        """Mark a slot as whole: the state that was written to it counts from now on."""
        place = self._place(slot.index)
        SLOT.pack_into(self.mapped, place, 0, *moment, slot.begin, slot.size, slot.tensors, slot.text)
        NUMBER.pack_into(self.mapped, place, slot.number)

    def forget(self) -> None:
        """Mark both slots as not whole: no newer state can be held, and theirs would be old."""
        for index in range(2):
            NUMBER.pack_into(self.mapped, self._place(index), 0)

    @staticmethod
    def _place(index: int) -> int:
        return NUMBER.size + index * SLOT.size
