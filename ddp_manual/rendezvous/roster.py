"""Who is a rank, who was refused and who is gone, as rank 0 knows it and tells it."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_manual.rendezvous.comparing import named_gpu
from ddp_manual.rendezvous.entries import MOST_NAMED, Entry, Place, as_ranges, assign_places


@dataclass
class Seat:
    """An admitted rank."""

    nonce: str
    entry: Entry
    told: bool = False
    """Whether it was told to wait, and may have gone since."""


class Roster:
    """The seats by rank, and what became of the other processes that came."""

    def __init__(self, world_size: int, rank_0: Entry) -> None:
        self._world_size = world_size
        self._seats: dict[int, Seat] = {}
        self._by_nonce: dict[str, Seat] = {}
        # Rank 0 has its GPU before it asks to be a rank as all do.
        self._gpu_users = {named_gpu(rank_0): rank_0}
        self.refused: deque[str] = deque(maxlen=MOST_NAMED)
        self.gone: deque[str] = deque(maxlen=MOST_NAMED)
        self.warnings: deque[str] = deque(maxlen=MOST_NAMED)

    def __len__(self) -> int:
        return len(self._seats)

    @property
    def full(self) -> bool:
        return len(self._seats) == self._world_size

    @property
    def seats(self) -> list[Seat]:
        """In the order of their ranks."""
        return [seat for _, seat in sorted(self._seats.items())]

    @property
    def entries(self) -> list[Entry]:
        return [seat.entry for seat in self.seats]

    @property
    def missing(self) -> list[int]:
        return sorted(set(range(self._world_size)) - set(self._seats))

    @property
    def waiting(self) -> list[Seat]:
        """Those who may have gone since they came; rank 0 is this process."""
        return [seat for rank, seat in self._seats.items() if rank != 0 and seat.told]

    def of(self, rank: int) -> Seat | None:
        return self._seats.get(rank)

    def held_by(self, nonce: str) -> Seat | None:
        return self._by_nonce.get(nonce)

    def user_of_the_gpu_of(self, entry: Entry) -> Entry | None:
        """The rank that named the same GPU; looking through all of them took 1.2 s for 4,096."""
        gpu = named_gpu(entry)
        return self._gpu_users.get(gpu) if gpu else None

    def admit(self, nonce: str, entry: Entry) -> None:
        self._seats[entry.rank] = self._by_nonce[nonce] = Seat(nonce, entry)
        self._gpu_users[named_gpu(entry)] = entry

    def remove(self, seat: Seat) -> None:
        del self._seats[seat.entry.rank], self._by_nonce[seat.nonce]
        self._gpu_users.pop(named_gpu(seat.entry), None)

    def news(self) -> dict[str, Any]:
        """What those who wait are shown: short also where thousands are missing."""
        return {
            "here": len(self),
            "named": [f"{seat.entry.rank} ({seat.entry.host})" for seat in self.seats[:MOST_NAMED]],
            "missing": as_ranges(self.missing),
            "refused": list(self.refused),
            "gone": list(self.gone),
            "warnings": list(self.warnings),
        }

    def in_full(self) -> list[dict[str, Any]]:
        """What a third terminal is shown: all that is known of each rank."""
        places = assign_places(self.entries) if self.full else {}
        return [_line(entry, places[entry.rank].local_rank if places else entry.local_rank) for entry in self.entries]

    def host_leaders(self, places: Mapping[int, Place]) -> list[dict[str, Any]]:
        """By node: the rank that speaks for each host, and where it answers."""
        leaders = sorted({(place.node, place.host_leader) for place in places.values()})
        entries = [self._seats[leader].entry for _, leader in leaders]
        return [
            {"rank": entry.rank, "host": entry.host, "address": entry.address, "port": entry.probe_port}
            for entry in entries
        ]


def _line(entry: Entry, gpu: int | None) -> dict[str, Any]:
    known = gpu is not None and gpu < len(entry.gpus)
    telling = ("torch", "python", "cuda", "nccl") if entry.device == "cuda" else ("torch", "python")
    return {
        "rank": entry.rank,
        "host": entry.host,
        "pid": entry.pid,
        "device": f"cuda:{gpu}" if entry.device == "cuda" and gpu is not None else entry.device,
        **({"gpu": entry.gpus[gpu]} if known and gpu is not None else {}),
        "address": entry.address,
        "since": round(entry.since, 1),
        "versions": " ".join(f"{name} {entry.versions[name]}" for name in telling if entry.versions.get(name)),
    }
