"""The roll call: each process asks to be a rank, rank 0 admits or refuses it, and everybody sees who is missing.

Rank 0 runs one RollCall, in a thread; every rank, rank 0 too, answers it with ``answer``. Requests go through one
queue, so there is a first and a second claim to each rank without any lock in the store. A rank costs the store a
request, a verdict, a place, and one message for each change it is shown; changes are bundled when many ranks come at
once, so the whole roll call is O(world_size) operations.

torch's own ``wait_for_workers`` is not used: it counts connections, and a rank that was started twice fills two.
"""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    MasterLost,
    MasterNotAStore,
    RankMissing,
    RankTaken,
    Stopped,
    WorldSizeMismatch,
    from_dict,
)
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.store import RunStore, decode
from ddp_manual.rendezvous.waiting import Waiting

logger = logging.getLogger(__name__)

MOST_NAMED = 16
MOST_COMMANDS = 8


@dataclass(frozen=True, kw_only=True)
class Entry:
    """What a process says of itself when it asks to be a rank."""

    rank: int
    world_size: int
    host: str
    host_id: str
    """Differs between hosts, also where their names do not: see ``world.host_id``."""
    pid: int
    since: float
    """Seconds since the epoch, by the process's own clock."""
    device: str
    local_rank: int | None
    options: Mapping[str, Sequence[Any]]
    """Option -> [value, source], for all that the ranks must agree on."""

    @classmethod
    def from_request(cls, request: Mapping[str, Any]) -> Entry:
        """An entry from the network.

        Raises:
            TypeError: fields are missing, unknown or of the wrong type.
        """
        entry = cls(**request)
        numbers = (entry.rank, entry.world_size, entry.pid)
        names = (entry.host, entry.host_id, entry.device)
        if not all(type(number) is int for number in numbers) or not all(type(name) is str for name in names):
            raise TypeError("an entry with a field of the wrong type")
        if not 0 <= entry.rank < entry.world_size or not isinstance(entry.options, dict):
            raise TypeError("an entry that cannot be a rank's")
        return entry

    def who(self) -> str:
        return f"rank {self.rank} ({self.host}, pid {self.pid})"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where an admitted rank stands among the others."""

    local_rank: int
    """Index of its GPU on the host."""
    local_world_size: int
    node: int
    nodes: int
    host_leader: int
    """The first rank of its host, the one that downloads for the others."""


@dataclass(frozen=True, kw_only=True)
class Hello:
    """What run this is, as rank 0 opens the roll call."""

    run_id: str
    run_dir: str | None
    world_size: int
    host: str
    pid: int
    command: str
    """The command that starts a rank of this run, with ``{rank}`` in the place of its number."""

    def command_for(self, rank: int) -> str:
        return self.command.replace("{rank}", str(rank))


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
            if not self._complete:
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

    def _judge(self, message: bytes) -> bool:
        """Answer one request; False if it asks the judge to stop."""
        try:
            request = decode(message)
            if "stop" in request:
                return False
            nonce = str(request.pop("nonce"))
            if "withdraw" in request:
                self._withdraw(nonce, str(request["withdraw"]))
                return True
            entry = Entry.from_request(request)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
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
                next=run.command_for(min(entry.rank, run.world_size - 1)),
            )
        if entry.rank in self._seats:
            holder = self._seats[entry.rank][1]
            since = time.strftime("%H:%M:%S", time.localtime(holder.since))
            return RankTaken(
                f"rank {entry.rank} is taken by {holder.host} (pid {holder.pid})",
                why=f"that process has held it since {since}; this one is {entry.host} (pid {entry.pid})",
                next=self._advice_for_a_second_claim(entry.rank),
            )
        return _options_refusal(entry, self._rank_0, run)

    def _advice_for_a_second_claim(self, rank: int) -> str:
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
    return ConfigMismatch(
        f"{entry.who()} was started with other options than rank 0: {', '.join(differing)}",
        why="\n".join(lines),
        next=run.command_for(entry.rank),
    )


def _shown(option: Sequence[Any] | None) -> str:
    return f"{option[0]} ({option[1]})" if option else "no such option"


def assign_places(entries: Sequence[Entry]) -> dict[int, Place]:
    """local_rank is the position among the ranks of the same host, unless the rank was told another one."""
    hosts: dict[str, list[int]] = {}
    for entry in entries:
        hosts.setdefault(entry.host_id, []).append(entry.rank)
    nodes = {host: node for node, host in enumerate(hosts)}
    return {
        entry.rank: Place(
            local_rank=hosts[entry.host_id].index(entry.rank) if entry.local_rank is None else entry.local_rank,
            local_world_size=len(hosts[entry.host_id]),
            node=nodes[entry.host_id],
            nodes=len(nodes),
            host_leader=hosts[entry.host_id][0],
        )
        for entry in entries
    }


def as_ranges(ranks: Sequence[int]) -> list[list[int]]:
    """[1, 2, 3, 7] -> [[1, 3], [7, 7]]: short also for thousands of missing ranks."""
    ranges: list[list[int]] = []
    for rank in ranks:
        if ranges and ranges[-1][1] == rank - 1:
            ranges[-1][1] = rank
        else:
            ranges.append([rank, rank])
    return ranges


def in_words(ranges: Sequence[Sequence[int]]) -> str:
    """[[1, 3], [7, 7]] -> ``ranks 1-3, 7``"""
    alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges]
    return ("rank " if alone else "ranks ") + ", ".join(shown)


def situation(news: Mapping[str, Any], world_size: int) -> str:
    """One line for everybody who waits: who is here, who is missing, who was refused or left."""
    ranges = news["missing"]
    parts = [f"waiting for {in_words(ranges)}" if ranges else "all ranks are here"]
    named = ", ".join(news["named"]) + (", ..." if news["here"] > len(news["named"]) else "")
    parts.append(f"{news['here']} of {world_size} here: {named}")
    parts += news["gone"][-1:] + news["refused"][-1:]
    return "; ".join(parts)


def commands_for(ranges: Sequence[Sequence[int]], run: Hello) -> list[str]:
    """A command for each missing rank, up to as many as a person would type."""
    missing = [rank for first, last in ranges for rank in range(first, last + 1)]
    return [run.command_for(rank) for rank in missing[:MOST_COMMANDS]]


def missing_ranks_error(news: Mapping[str, Any], run: Hello, waited: float) -> RankMissing:
    ranges = news["missing"]
    missing = sum(last - first + 1 for first, last in ranges)
    tried = [*news["refused"], *news["gone"]]
    here = "rank" if news["here"] == 1 else "ranks"
    return RankMissing(
        f"{missing} of {run.world_size} ranks never joined within {waited:.0f} s: {in_words(ranges)}",
        why="\n".join(
            [f"{here} {', '.join(news['named'])} {'is' if news['here'] == 1 else 'are'} here", *tried]
            if tried
            else [
                f"{here} {', '.join(news['named'])} {'is' if news['here'] == 1 else 'are'} here; "
                f"nothing has tried to join as {in_words(ranges)}"
            ]
        ),
        next="\n".join([*commands_for(ranges, run), "and start the others again: they have left too"]),
    )


@dataclass(frozen=True)
class Answered:
    """What a rank has when the roll call is complete."""

    hello: Hello
    place: Place


def answer(
    store: RunStore,
    entry: Entry,
    waiting: Waiting,
    *,
    met: Callable[[Hello], None],
    hello_timeout: float,
    give_up: Callable[[float], None] | None = None,
) -> Answered:
    """Ask to be a rank and block until all ranks are here, saying meanwhile who is missing.

    Args:
        met: told what run this is, as soon as it is known.
        hello_timeout: seconds rank 0 has to open the roll call.
        give_up: what rank 0 does when the time is up: close the roll call, which then ends this wait too.

    Raises:
        RankTaken, WorldSizeMismatch, ConfigMismatch: refused. RankMissing: not everybody came in time.
        MasterLost: the store is gone. MasterNotAStore: nobody has opened a roll call there.
    """
    nonce = secrets.token_hex(8)
    updates: queue.SimpleQueue[Any] = queue.SimpleQueue()
    request = {**asdict(entry), "nonce": nonce}
    threading.Thread(target=_follow, args=(store, request, updates), daemon=True).start()
    hello: Hello | None = None
    news: Mapping[str, Any] | None = None
    while True:
        try:
            update = updates.get(timeout=max(0.05, waiting.until_next_line))
        except queue.Empty:
            if hello is None and waiting.waited > hello_timeout:
                raise _no_roll_call(store, waiting) from None
            if news and hello:
                waiting.about(situation(news, entry.world_size))
                waiting.advise(commands_for(news["missing"], hello))
            else:
                waiting.about(f"rank 0 has not answered yet at {at(store.address, store.port)}")
            if waiting.over and give_up:
                give_up(waiting.waited)
            elif waiting.over:
                _withdraw(store, nonce, "its --join_timeout was over")
                if news is None or hello is None:
                    raise _no_roll_call(store, waiting) from None
                raise missing_ranks_error(news, hello, waiting.waited) from None
            continue
        except Stopped as stop:
            _withdraw(store, nonce, stop.what)
            raise
        except KeyboardInterrupt:
            _withdraw(store, nonce, "stopped by Ctrl-C")
            raise
        if isinstance(update, DdpManualError):
            raise update
        if isinstance(update, Hello):
            hello = update
            met(hello)
        elif isinstance(update, Place):
            assert hello is not None
            return Answered(hello, update)
        else:
            news = update
            waiting.about(situation(update, entry.world_size))


def _withdraw(store: RunStore, nonce: str, reason: str) -> None:
    """Give the rank back, so that the others see it missing again. The client is a new one: ``store``'s is blocked."""
    with suppress(MasterLost):
        store.clone().arrive({"nonce": nonce, "withdraw": reason})


def _no_roll_call(store: RunStore, waiting: Waiting) -> MasterNotAStore:
    return MasterNotAStore(
        f"the store at {at(store.address, store.port)} has no roll call",
        why=f"a TCPStore answers there, but no rank 0 of this program used it within {waiting.waited:.0f} s",
        next="start rank 0 with this program, or choose another --master_port",
    )


def _follow(store: RunStore, request: dict[str, Any], updates: queue.SimpleQueue[Any]) -> None:
    try:
        for update in _updates(store, request):
            updates.put(update)
    except DdpManualError as error:
        updates.put(error)
    except (ValueError, TypeError, KeyError) as error:
        updates.put(
            MasterNotAStore(
                f"the store at {at(store.address, store.port)} holds something else than our roll call",
                why=f"reading it gave {type(error).__name__}: {error}",
                next="start all ranks with the same version of this program, or choose another --master_port",
            )
        )


def _updates(store: RunStore, request: dict[str, Any]) -> Iterator[Any]:
    hello = Hello(**store.hello())
    yield hello
    store.arrive(request)
    verdict = store.verdict(request["nonce"])
    if "identifier" in verdict:
        raise from_dict(verdict)
    version = int(verdict["version"])
    while True:
        version += 1
        news = store.news(version)
        if news["error"]:
            raise from_dict(news["error"])
        if news["complete"]:
            yield Place(**store.place(request["rank"]))
            return
        yield news
