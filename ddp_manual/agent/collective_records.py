"""What an agent knows of the collectives of its own worker: it reads the records that the worker writes."""

from __future__ import annotations

import mmap
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from typing import Any

from ddp_manual import collective_memory
from ddp_manual.messages import AskRecords, Begun, GroupRecords, RecordsReply
from ddp_manual.protocol.collective_comparison import LAST, group_name
from ddp_manual.ranks_and_runs import BY_RECORDS
from ddp_manual.wire import printable

# A heartbeat has a group's chains (checksums, see ``collective_memory``) at its last LAST numbers, and at the last
# LAST_MULTIPLES multiples of each of MULTIPLES: heartbeats sent at different times then have numbers in common.
MULTIPLES = (64, 1024, 16384)
LAST_MULTIPLES = 4
# How many groups a heartbeat has at most: those in which the worker has begun a collective most recently.
MOST_GROUPS = 16
# How many groups of its worker an agent remembers: a script may open new groups in each epoch, and never close them.
MOST_GROUPS_READ = 512
# How many closed groups an agent remembers; torch closes the default group last.
MOST_CLOSED = 16


class _Group:
    """A process group that this agent's worker has opened, or one of its backends."""

    def __init__(self, key: str, ranks: Sequence[int], description: str, device: str) -> None:
        self.group, self.key = key, f"{key}{device and '/'}{device}"
        # Not a list of all its ranks: N ranks would send N numbers each, which is 64 KB from each of 16,384 ranks.
        self.name = printable(group_name(ranks, description, device))
        self.begun = 0
        """How many collectives the worker had begun in all groups, up to the last one of this group that was read."""
        self.is_closed, self._is_default = False, description == "default_pg"
        self._chains = [(1, deque[tuple[int, int]](maxlen=LAST))]
        self._chains += [(step, deque[tuple[int, int]](maxlen=LAST_MULTIPLES)) for step in MULTIPLES]

    @property
    def worth(self) -> tuple[bool, bool, int]:
        """A sort key; the group with the lowest is forgotten first: closed before open ones, the default group last."""
        return not self.is_closed, self._is_default, self.begun

    def take(self, key: collective_memory.Key) -> None:
        self.begun = key.begun
        for step, chains in self._chains:
            if key.number % step == 0:
                chains.append((key.number, key.chain))

    def for_beat(self) -> list[int]:
        """Return a flat list of number, chain, number, chain, ..., the highest number first."""
        latest = self._chains[0][1]
        found = dict(pair for _, chains in self._chains for pair in chains)
        return [part for number in sorted(found, reverse=True) for part in (number, found[number])] if latest else []


class Records:
    """What an agent reads of its worker's collectives; it can still read them after the worker's death."""

    def __init__(self) -> None:
        self._memory: memoryview | None = None
        self._groups: dict[int, _Group] = {}
        self._left_out = 0
        """The highest number of a forgotten group; the worker numbers its groups in the order of their opening."""
        self._read = 0
        self._closed: dict[str, int | None] = {}
        self.complete = False
        """Whether all collectives of the worker are recorded."""
        self._compared = False

    def open(self, pid: int, descriptor: int, complete: bool, compared: bool) -> None:
        """Open the memory to which the worker writes its records, by the worker's own ``descriptor`` of that memory.

        Raises:
            OSError, ValueError: the worker has ended already, or this system does not allow it.
        """
        with open(f"/proc/{pid}/fd/{descriptor}", "rb") as file:
            self._memory = memoryview(mmap.mmap(file.fileno(), collective_memory.MEMORY_SIZE, prot=mmap.PROT_READ))
        self._groups, self._left_out, self._read = {}, 0, 0
        self.complete, self._compared = complete, compared

    def add_group(self, group: Mapping[str, Any]) -> None:
        if len(self._groups) >= MOST_GROUPS_READ:
            identity = min(self._groups, key=lambda one: self._groups[one].worth)
            self._left_out = max(self._left_out, identity)
            del self._groups[identity]
        self._groups[group["identity"]] = _Group(group["key"], group["ranks"], group["description"], group["device"])

    def close_group(self, key: str, begun: int | None) -> None:
        """Note that the worker has closed a group in which it had begun ``begun`` collectives, as torch counts them."""
        self._closed[key] = begun
        for group in self._groups.values():
            group.is_closed |= group.group == key
        while len(self._closed) > MOST_CLOSED:
            del self._closed[next(iter(self._closed))]

    def count(self, by_torch: Mapping[str, int]) -> tuple[dict[str, int], dict[str, int]]:
        """Return how many collectives the worker has begun in each open process group, and in each recently closed one.
        If all are recorded, count the records, under keys with BY_RECORDS: torch may count one collective as two."""
        memory = self._memory
        if memory is None or not self.complete:
            of_open = {key: count for key, count in by_torch.items() if key not in self._closed}
            return of_open, {key: count for key, count in self._closed.items() if count is not None}
        of_open, of_closed = Counter[str](), Counter[str]()
        for identity, group in self._groups.items():
            if (number := collective_memory.read_number(memory, identity)) is not None:
                (of_closed if group.is_closed else of_open)[f"{group.group}{BY_RECORDS}"] += number
        last = {f"{key}{BY_RECORDS}" for key in self._closed}
        return of_open, {key: count for key, count in of_closed.items() if key in last}

    def read(self) -> None:
        """Read the records that were written since the last call."""
        for key in collective_memory.read(self._memory, self._read) if self._memory is not None else ():
            group = self._groups.get(key.group)
            if group is not None:
                group.take(key)
            elif key.group > self._left_out:  # the message GroupOpened of this group has not come yet
                break
            self._read = key.begun

    def for_beat(self) -> dict[str, list[int]]:
        """Return the key of each group -> number, chain, number, chain, ... of its last collectives."""
        self.read()
        latest = sorted(self._groups.values(), key=lambda group: -group.begun)[:MOST_GROUPS]
        return {group.key: group.for_beat() for group in latest if group.begun and self._compared}

    def answer(self, asked: AskRecords) -> RecordsReply:
        """Return the reply to rank 0: the calls it asks for, otherwise each group's last chains and the last call."""
        memory = self._memory
        if memory is None or not self._compared:
            return RecordsReply(asked.number)
        self.read()
        found = [key for key in collective_memory.read(memory) if key.group in self._groups]
        if asked.calls:
            wanted = [key for key in found if key.number in asked.calls.get(self._groups[key.group].key, ())]
            return RecordsReply(asked.number, calls=self._calls(memory, wanted))
        most = max(LAST, asked.chains // max(1, len({key.group for key in found})))
        chains: dict[int, list[tuple[int, int]]] = {}
        for key in reversed(found):
            of_group = chains.setdefault(key.group, [])
            if len(of_group) < most:
                of_group.append((key.number, key.chain))
        named = {group: self._groups[group] for group in chains}
        groups = {one.key: GroupRecords(one.name, chains[group]) for group, one in named.items()}
        return RecordsReply(asked.number, groups, self._calls(memory, found[-1:]))

    def _calls(self, memory: memoryview, keys: Sequence[collective_memory.Key]) -> list[Begun]:
        said = [(key, collective_memory.read_call(memory, key.begun)) for key in keys]
        return [
            Begun(self._groups[key.group].key, key.number, key.begun, *call) for key, call in said if call is not None
        ]
