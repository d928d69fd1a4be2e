"""A rank's side of the roll call: ask to be a rank, and wait for the others while saying who is missing."""

from __future__ import annotations

import logging
import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from ddp_manual.errors import (
    DdpManualError,
    MasterLost,
    MasterNotAStore,
    TokenMismatch,
    from_dict,
)
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.entries import Entry, Hello, Place, advice_for, missing_ranks_error, situation
from ddp_manual.rendezvous.group import first_line
from ddp_manual.rendezvous.lastwords import as_ours
from ddp_manual.rendezvous.seal import Seal, Unsealed
from ddp_manual.rendezvous.store import RunStore, StoreGone, interruptibly
from ddp_manual.rendezvous.waiting import Waiting

logger = logging.getLogger(__name__)

# Seconds that rank 0 has for its last answer to a process that leaves.
LAST_ANSWER = 2.0
# Seconds per rank for rank 0 to complete the roll call when all are here; 4,096 took a thirtieth of it.
COMPLETE_EACH = 0.02


@dataclass(frozen=True)
class Answered:
    """What a rank has when the roll call is complete."""

    hello: Hello
    place: Place


@dataclass(frozen=True)
class Answering:
    """How a rank answers the roll call.

    Args:
        met: told what run this is, as soon as it is known.
        hello_first: wait for rank 0 to open the roll call before asking, as where an agent hosts the store.
        hello_timeout: seconds rank 0 has to answer.
        nonce: 16 hexadecimal digits that tell this request from any other; None draws them.
        give_up: what rank 0 does when the time is up: close the roll call, which then ends this wait too.
        abandon: what rank 0 does when it leaves: tell those who wait.
    """

    seal: Seal
    met: Callable[[Hello], None]
    hello_first: bool
    hello_timeout: float
    nonce: str | None = None
    give_up: Callable[[float], None] | None = None
    abandon: Callable[[BaseException], None] | None = None


def answer(store: RunStore, entry: Entry, waiting: Waiting, how: Answering) -> Answered:
    """Ask to be a rank and block until all ranks are here, saying meanwhile who is missing.

    Args:
        store: a client for this alone, which a thread blocks. What the main thread has to say goes through another one,
            which is opened here, while rank 0 is known to answer.

    Raises:
        RankTaken, RanksDoNotBelongTogether, DeviceError: refused. RankMissing: not everybody came in time.
        StoreGone: before rank 0 answered it was the store of a run that was ending.
        MasterLost: rank 0 does not answer. MasterNotAStore: nobody has opened a roll call there.
    """
    speaking = store.clone()
    asking = Asking(store, entry, how)
    updates: queue.SimpleQueue[Any] = queue.SimpleQueue()
    thread = threading.Thread(target=asking.follow, args=(updates,), daemon=True)
    thread.start()
    try:
        return _await_the_others(asking, updates, waiting, speaking)
    except BaseException as error:
        if how.abandon is not None:
            how.abandon(error)
        elif thread.is_alive() or asking.placed:
            asking.withdraw(speaking, first_line(as_ours(entry.rank, error)))
        # Rank 0 answers a withdrawal. A thread inside torch when the interpreter ends would abort the process.
        thread.join(LAST_ANSWER)
        raise


def _await_the_others(
    asking: Asking, updates: queue.SimpleQueue[Any], waiting: Waiting, speaking: RunStore
) -> Answered:
    hello: Hello | None = None
    news: Mapping[str, Any] | None = None
    gave_up: float | None = None
    completed_by: float | None = None
    store, how = asking.store, asking.how
    while True:
        until = waiting.until_next_line
        if hello is None:
            until = min(until, how.hello_timeout - waiting.waited)
        if completed_by is not None:
            until = min(until, completed_by - waiting.waited)
        try:
            update = updates.get(timeout=max(0.05, until))
        except queue.Empty:
            update = None
        if isinstance(update, DdpManualError):
            raise update
        if isinstance(update, Hello):
            hello = update
            how.met(hello)
        elif isinstance(update, Place):
            assert hello is not None
            return Answered(hello, update)
        elif update is not None:
            news = update
            asking.say(update, waiting)
            completed_by = _completed_by(update, hello, waiting)
        elif hello is None and waiting.waited > how.hello_timeout:
            raise _no_answer(speaking, waiting)
        elif completed_by is not None and waiting.waited > completed_by:
            raise _no_answer(speaking, waiting, hello)
        elif news is None or hello is None:
            waiting.about(f"rank 0 has not answered yet at {at(store.address, store.port)}")
        else:
            asking.say(news, waiting)
            waiting.advise(advice_for(news["missing"], hello))
        if waiting.over and update is None:
            if how.give_up and gave_up is None:
                gave_up = waiting.waited
                how.give_up(gave_up)
            elif gave_up is None or waiting.waited > gave_up + LAST_ANSWER:
                if news and news["missing"] and hello and _answers(speaking):
                    raise missing_ranks_error(news, hello, waiting.waited)
                raise _no_answer(speaking, waiting)


def _completed_by(news: Mapping[str, Any], hello: Hello | None, waiting: Waiting) -> float | None:
    """When the roll call has to be complete, since all ranks are here: they show that they live, and that is all."""
    if news["missing"] or hello is None:
        return None
    return waiting.waited + hello.limits.silence + COMPLETE_EACH * hello.world_size


def _answers(store: RunStore) -> bool:
    try:
        return bool(interruptibly(store.hello_if_any, Waiting(LAST_ANSWER, logger), "asking rank 0 once more"))
    except TimeoutError:
        return False


def _no_answer(store: RunStore, waiting: Waiting, known: Hello | None = None) -> DdpManualError:
    where = at(store.address, store.port)
    try:
        hello = vars(known) if known else interruptibly(store.hello_if_any, Waiting(LAST_ANSWER, logger), "once more")
    except TimeoutError:
        hello = {"host": where, "pid": "unknown"}
    if hello is None:
        return MasterNotAStore(
            f"the store at {where} has no roll call",
            why=f"a TCPStore answers there, but no rank 0 of this program used it within {waiting.waited:.0f} s",
            next="start rank 0 with this program, or choose another --master_port",
        )
    return MasterLost(
        f"rank 0 ({hello.get('host')}, pid {hello.get('pid')}) does not answer",
        why=f"it opened a roll call at {where}, but did not complete or close it within {waiting.waited:.0f} s",
        next="look whether rank 0 is stopped or frozen, then start all ranks again",
    )


class Asking:
    """One request to be a rank, and all that follows from it. Both block; ``follow`` is for a thread of its own."""

    def __init__(self, store: RunStore, entry: Entry, how: Answering) -> None:
        self.store = store
        self.entry = entry
        self.how = how
        self._nonce = how.nonce or secrets.token_hex(8)
        self._run: str | None = None
        self._asked = False
        self._withdrawn = False
        self.placed = False
        self._warned: set[str] = set()
        self._told: set[str] = set()

    def say(self, news: Mapping[str, Any], waiting: Waiting) -> None:
        """Who is missing and, once, who left or was refused."""
        untold = [words for words in (*news["gone"], *news["refused"]) if words not in self._told]
        if waiting.about(situation(news, self.entry.world_size), untold):
            self._told.update(untold)

    def withdraw(self, speaking: RunStore, reason: str) -> None:
        """Give the rank back, so that the others see it missing again.

        Args:
            speaking: another client: ours is blocked.
        """
        self._withdrawn = True
        if self._asked:
            with suppress(MasterLost):
                self._send(speaking, {"withdraw": reason})

    def follow(self, updates: queue.SimpleQueue[Any]) -> None:
        """Put all there is to know into a queue: a Hello, news, at the end a Place or an error."""
        where = at(self.store.address, self.store.port)
        try:
            self.ask()
            for update in self.updates():
                updates.put(update)
        except DdpManualError as error:
            updates.put(error)
        except Unsealed as reason:
            updates.put(self._not_believed(where, reason))
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            updates.put(
                MasterNotAStore(
                    f"the store at {where} holds something else than our roll call",
                    why=f"reading it gave {type(error).__name__}: {error}",
                    next="start all ranks with the same version of this program, or choose another --master_port",
                )
            )

    def ask(self) -> None:
        if self.how.seal or self.how.hello_first:
            opened = Hello(**self.store.hello())
            if self.how.seal and opened.challenge is None:
                raise Unsealed(f"rank 0 ({opened.host}, pid {opened.pid}) has no token at all")
            self._run = f"{opened.run_id} {opened.challenge}"
        self._send(self.store, {**vars(self.entry), "since": time.time()})
        self._asked = True

    def updates(self) -> Iterator[Hello | Mapping[str, Any] | Place]:
        """What rank 0 answers: its Hello, news as often as there is any, at the end the Place."""
        store, seal = self.store, self.how.seal
        verdict = seal.open(f"verdict {self._nonce}", store.verdict(self._nonce))
        if verdict.get("over"):
            raise StoreGone(store.address, store.port, "it was that of another run, which has just ended")
        if verdict["error"]:
            raise from_dict(verdict["error"])
        hello = Hello(**verdict["hello"])
        self._run = f"{hello.run_id} {hello.challenge}"
        yield hello
        news, version, place = verdict["news"], int(verdict["version"]), verdict["place"]
        self._warn(news)
        while not place:
            yield news
            if news["prove"]:
                self._send(store, {"alive": news["prove"]})
            version += 1
            news = seal.open(f"{self._run} news {version}", store.news(version))
            if self._withdrawn:
                return  # this news says so; the next one may come while the interpreter ends
            if news["error"]:
                raise from_dict(news["error"])
            self._warn(news)
            if news["complete"] or self._nonce in news["struck"]:
                stands = seal.open(f"place {self._nonce}", store.place(self._nonce))
                if stands["error"]:
                    raise from_dict(stands["error"])
                place = stands["place"]
        self.placed = True
        yield Place(**place)

    def _warn(self, news: Mapping[str, Any]) -> None:
        """Each warning once; rank 0 has said it where it judged."""
        for warning in news["warnings"]:
            if self.entry.rank != 0 and warning not in self._warned:
                logger.warning("%s", warning)
        self._warned.update(news["warnings"])

    def _not_believed(self, where: str, reason: Unsealed) -> TokenMismatch:
        if self.entry.rank == 0:
            return TokenMismatch(
                f"a stranger writes into the store of this run, at {where}",
                why=f"what only rank 0 may say there was replaced: {reason}",
                next="let nobody but the run's hosts connect to that port: docs/rendezvous.md, Security",
            )
        return TokenMismatch(
            f"rank 0 at {where} does not have this rank's token",
            why=f"of its answer to {self.entry.who()}: {reason}",
            next="give every rank the same DDP_MANUAL_TOKEN or --token_file; "
            "if they have, something else poses as rank 0",
        )

    def _send(self, store: RunStore, content: Mapping[str, Any]) -> None:
        message = {**content, "nonce": self._nonce}
        store.arrive(self.how.seal.close(f"{self._run} request", message))
