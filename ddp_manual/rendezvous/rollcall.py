"""Rank 0's side of the roll call: each process asks to be a rank and is admitted or refused; everybody sees who is
missing. The other side is ``answer.py``; every rank has that one, rank 0 too.

Requests go through one queue, so there is a first and a second claim to each rank without any lock in the store. A
rank costs the store a request, a verdict, a place, and one message for each change it is shown; changes are bundled
when many ranks come at once, so the whole roll call is O(world_size) operations.

torch's own ``wait_for_workers`` is not used: it counts connections, and a rank that was started twice fills two.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import Any

from ddp_manual.errors import ConfigMismatch, DdpManualError, MasterLost, RankTaken, WorldSizeMismatch
from ddp_manual.rendezvous.entries import (
    MOST_NAMED,
    Entry,
    Hello,
    Place,
    as_ranges,
    assign_places,
    missing_ranks_error,
)
from ddp_manual.rendezvous.store import RunStore, decode

logger = logging.getLogger(__name__)


class RollCall:
    """Rank 0's side. It goes on refusing late-comers after all ranks are here."""

    def __init__(self, store: RunStore, hello: Hello, rank_0: Entry) -> None:
        self._store = store
        self._hello = hello
        self._rank_0 = rank_0
        self._seats: dict[int, tuple[str, Entry]] = {}
        self._refused: list[str] = []
        self._gone: list[str] = []
        self._version = 0
        self._complete = False
        self._closed_by: DdpManualError | None = None
        self._lock = threading.Lock()
        self._judge_thread = threading.Thread(target=self._judge_all, args=(store.clone(),), daemon=True)

    def open(self) -> None:
        """Say hello and judge requests from now on.

        Raises:
            RankTaken: another rank 0 has opened this roll call (possible only where an agent hosts the store).
        """
        if not self._store.say_hello(asdict(self._hello)):
            first = Hello(**self._store.hello())
            raise RankTaken(
                "rank 0 is taken",
                why=f"{first.host} (pid {first.pid}) opened this roll call as rank 0",
                next="start this process as another rank, or end the other one first",
            )
        self._judge_thread.start()

    def give_up(self, waited: float) -> None:
        """End the wait of every rank: not all came within ``waited`` seconds."""
        with self._lock:
            if not self._complete and not self._closed_by:
                self._close(missing_ranks_error(self._news(), self._hello, waited))

    def abandon(self, error: DdpManualError) -> None:
        """End the wait of every rank: rank 0 itself is leaving."""
        with self._lock:
            if not self._complete and not self._closed_by:
                self._close(error)

    def stop(self) -> list[int]:
        """Judge no more; returns the ranks that were admitted.

        The thread is waited for: one that is still inside torch when the interpreter ends aborts the process.
        """
        self._store.arrive({"stop": True})
        self._judge_thread.join(timeout=5)
        return sorted(self._seats)

    def _judge_all(self, store: RunStore) -> None:
        try:
            while True:
                request = store.next_arrival(block=True)
                if len(self._seats) + 1 < self._hello.world_size:
                    # Bundle what comes in a rush: few messages per waiting rank and second, however many ranks.
                    time.sleep(min(1.0, len(self._seats) / 2000))
                with self._lock:
                    while request is not None:
                        if not self._judge(request):
                            return
                        request = store.next_arrival(block=False)
                    if not self._complete and not self._closed_by:
                        self._publish()
        except MasterLost as error:
            logger.debug("the roll call's store is gone: %s", error.what)
        except Exception as error:  # nobody would be judged any more, so nobody may go on waiting
            self.abandon(
                MasterLost(
                    "rank 0's roll call broke",
                    why=f"{type(error).__name__}: {error}",
                    next="start all ranks again; this is a mistake in ddp_manual and worth reporting",
                )
            )

    def _judge(self, message: bytes) -> bool:
        """Answer one request; False if it asks the judge to stop."""
        try:
            request = decode(message)
            if not isinstance(request, dict):
                raise TypeError("not an object")
            if "stop" in request:
                return False
            nonce = str(request.pop("nonce"))
            if "withdraw" in request:
                self._withdraw(nonce, str(request["withdraw"]))
                return True
            entry = Entry.from_request(request)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            logger.warning("a stranger put something unreadable into the roll call: %s", error)
            return True
        refusal = self._refusal(entry)
        if refusal is None:
            self._seats[entry.rank] = (nonce, entry)
            self._store.set_verdict(nonce, {"version": self._version})
        else:
            self._refused.append(f"{entry.who()} was refused: {refusal.identifier}")
            self._store.set_verdict(nonce, refusal.as_dict())
        return True

    def _withdraw(self, nonce: str, reason: str) -> None:
        for rank, (seat_nonce, entry) in list(self._seats.items()):
            if seat_nonce == nonce and not self._complete:
                del self._seats[rank]
                self._gone.append(f"{entry.who()} left again: {reason}")

    def _refusal(self, entry: Entry) -> DdpManualError | None:
        run = self._hello
        if self._closed_by:
            return self._closed_by
        if entry.world_size != run.world_size:
            return WorldSizeMismatch(
                f"{entry.who()} expects {entry.world_size} ranks, rank 0 expects {run.world_size}",
                why=f"rank 0 runs on {run.host} (pid {run.pid}) with world_size {run.world_size}",
                next=self._free_rank_command(entry.rank),
            )
        if entry.rank in self._seats:
            holder = self._seats[entry.rank][1]
            since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
            return RankTaken(
                f"rank {entry.rank} is taken by {holder.host} (pid {holder.pid})",
                why=f"that process has held it since {since}; this one is {entry.host} (pid {entry.pid})",
                next=self._free_rank_command(entry.rank),
            )
        return _options_refusal(entry, self._rank_0, run)

    def _free_rank_command(self, rank: int) -> str:
        free = sorted(set(range(self._hello.world_size)) - set(self._seats))
        if free:
            return self._hello.command_for(free[0])
        return f"all ranks are here; to replace rank {rank}, end that process and start all ranks again"

    def _close(self, error: DdpManualError) -> None:
        self._closed_by = error
        self._publish()

    def _publish(self) -> None:
        if len(self._seats) == self._hello.world_size and not self._closed_by:
            self._complete = True
            places = assign_places([entry for _, (_, entry) in sorted(self._seats.items())])
            self._store.set_places({rank: asdict(place) for rank, place in places.items()}, self._roster(places))
        self._version += 1
        error = self._closed_by.as_dict() if self._closed_by else None
        self._store.publish_news(self._version, {**self._news(), "complete": self._complete, "error": error})

    def _roster(self, places: Mapping[int, Place]) -> list[dict[str, Any]]:
        return [
            {
                "rank": rank,
                "host": entry.host,
                "pid": entry.pid,
                "device": f"cuda:{places[rank].local_rank}" if entry.device == "cuda" else entry.device,
            }
            for rank, (_, entry) in sorted(self._seats.items())
        ]

    def _news(self) -> dict[str, Any]:
        here = [f"{rank} ({entry.host})" for rank, (_, entry) in sorted(self._seats.items())]
        return {
            "here": len(here),
            "named": here[:MOST_NAMED],
            "missing": as_ranges(sorted(set(range(self._hello.world_size)) - set(self._seats))),
            "refused": self._refused[-MOST_NAMED:],
            "gone": self._gone[-MOST_NAMED:],
        }


def _options_refusal(entry: Entry, rank_0: Entry, run: Hello) -> ConfigMismatch | None:
    differing = [
        name
        for name in sorted({*rank_0.options, *entry.options})
        if list(rank_0.options.get(name, ()))[:1] != list(entry.options.get(name, ()))[:1]
    ]
    if not differing:
        return None
    lines = [
        f"{name}: rank 0 has {_shown(rank_0.options.get(name))}, "
        f"rank {entry.rank} has {_shown(entry.options.get(name))}"
        for name in differing
    ]
    next = run.command_for(entry.rank)
    if {"device", "backend"} & set(differing):
        # Left to themselves the two hosts chose differently, and would again.
        next = "start every rank with the same --device and --backend, such as: --device cpu --backend gloo"
    return ConfigMismatch(
        f"{entry.who()} was started with other options than rank 0: {', '.join(differing)}",
        why="\n".join(lines),
        next=next,
    )


def _shown(option: Sequence[Any] | None) -> str:
    return f"{option[0]} ({option[1]})" if option else "no such option"
