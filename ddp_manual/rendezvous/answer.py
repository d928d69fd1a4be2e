"""A rank's side of the roll call: ask to be a rank, and wait for the others while saying who is missing."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.errors import DdpManualError, MasterLost, MasterNotAStore, Stopped, from_dict
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.entries import Entry, Hello, Place, commands_for, missing_ranks_error, situation
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.waiting import Waiting

logger = logging.getLogger(__name__)


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
    try:
        return _await_the_others(store, entry, nonce, updates, waiting, met, hello_timeout, give_up)
    except (Stopped, KeyboardInterrupt) as stop:
        _withdraw(store, nonce, stop.what if isinstance(stop, Stopped) else "stopped by Ctrl-C")
        raise


def _await_the_others(
    store: RunStore,
    entry: Entry,
    nonce: str,
    updates: queue.SimpleQueue[Any],
    waiting: Waiting,
    met: Callable[[Hello], None],
    hello_timeout: float,
    give_up: Callable[[float], None] | None,
) -> Answered:
    hello: Hello | None = None
    news: Mapping[str, Any] | None = None
    while True:
        try:
            update = updates.get(timeout=max(0.05, waiting.until_next_line))
        except queue.Empty:
            update = None
        if isinstance(update, DdpManualError):
            raise update
        if isinstance(update, Hello):
            hello = update
            met(hello)
        elif isinstance(update, Place):
            assert hello is not None
            return Answered(hello, update)
        elif update is not None:
            news = update
            waiting.about(situation(update, entry.world_size))
        elif hello is None and waiting.waited > hello_timeout:
            raise _no_roll_call(store, waiting)
        elif news is None or hello is None:
            waiting.about(f"rank 0 has not answered yet at {at(store.address, store.port)}")
        else:
            waiting.about(situation(news, entry.world_size))
            waiting.advise(commands_for(news["missing"], hello))
        if waiting.over and update is None:
            if give_up:
                give_up(waiting.waited)
                continue
            _withdraw(store, nonce, "its --join_timeout was over")
            if news is None or hello is None:
                raise _no_roll_call(store, waiting)
            raise missing_ranks_error(news, hello, waiting.waited)


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
