"""Rank 0's side of the roll call: each process asks to be a rank and is admitted or refused; everybody sees who is
missing. The other side is ``answer.py``; every rank has that one, rank 0 too.

Requests go through one queue, so there is a first and a second claim to each rank without any lock in the store. When
all come at once a rank costs the store its request and one answer. Whoever waits longer is told of changes, which are
bundled: the more ranks wait, the longer a change is kept back.

Before two processes are told apart, and before the roll call is complete, all who have waited are mustered: a process
that was killed meanwhile is no rank.

torch's own ``wait_for_workers`` is not used: it counts connections, and a rank that was started twice fills two.
"""

from __future__ import annotations

import logging
import re
import secrets
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.errors import (
    DdpManualError,
    MasterLost,
    PeerLost,
    RankTaken,
)
from ddp_manual.rendezvous import refusals
from ddp_manual.rendezvous.bundling import LULL, Bundle
from ddp_manual.rendezvous.comparing import shared_gpu, unlike
from ddp_manual.rendezvous.entries import (
    Entry,
    Hello,
    Place,
    assign_places,
    missing_ranks_error,
    printable,
)
from ddp_manual.rendezvous.reachability import who_answers
from ddp_manual.rendezvous.roster import Roster, Seat
from ddp_manual.rendezvous.seal import Seal, Unsealed, claimed
from ddp_manual.rendezvous.stacks import OWN_THREADS
from ddp_manual.rendezvous.store import LARGEST_REQUEST, RunStore, decode
from ddp_manual.rendezvous.verdicts import Member

logger = logging.getLogger(__name__)

# Seconds in which a process that waits must show that it lives, when it is asked to. A refusal because another process
# holds the rank has to come within 2 s of the request.
PROVE_WITHIN = 1.2
POLL_EVERY = 0.005
START_AGAIN = "start all ranks again"


@dataclass
class Claim:
    """A process that asks for a rank which another one holds."""

    nonce: str
    entry: Entry
    warnings: list[str]


class Muster:
    """All who wait are asked to show that they live. The word they answer with is new each time, so that an answer
    cannot be played back."""

    def __init__(self, waiting: list[Seat]) -> None:
        self.word = secrets.token_hex(8)
        self.awaited = {seat.nonce for seat in waiting}
        # Each reads the question and puts in its answer.
        self.until = time.monotonic() + PROVE_WITHIN + 2 * LULL * len(waiting)

    def goes_on(self, *, queue_empty: bool) -> bool:
        """While somebody has not answered in time; answers that are in the queue already are in time."""
        now = time.monotonic()
        return bool(self.awaited) and (now < self.until or (not queue_empty and now < self.until + PROVE_WITHIN))


class RollCall:
    """Rank 0's side. It goes on refusing late-comers after all ranks are here."""

    def __init__(self, store: RunStore, hello: Hello, rank_0: Entry, seal: Seal) -> None:
        # Another client than the one that the main thread may block.
        self._store = store.clone()
        self._hello = hello
        self._rank_0 = rank_0
        self._seal = seal
        self._roster = Roster(hello.world_size, rank_0)
        self._untold = Bundle()
        self._claims: list[Claim] = []
        self._muster: Muster | None = None
        self._nonces: set[str] = set()
        self._struck: list[str] = []
        self._gave_up: float | None = None
        self._version = 0
        self._complete = False
        self._over = False
        self._closed_by: DdpManualError | None = None
        self._lock = threading.Lock()
        self._stopping = threading.Event()
        self._judge_thread = threading.Thread(
            target=self._judge_all, args=(store.clone(),), name=f"{OWN_THREADS}roll call", daemon=True
        )

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
        self._set_summary()
        self._judge_thread.start()

    def give_up(self, waited: float) -> None:
        """End the wait of every rank: not all came within ``waited`` seconds."""
        with self._lock:
            self._gave_up = waited
            if self._muster is None:  # else it is decided when that is over
                self._close_for_missing_ranks()

    def abandon(self, error: DdpManualError) -> None:
        """End the wait of every rank: rank 0 itself is leaving."""
        with self._lock:
            if not self._complete and not self._closed_by:
                self._close(error)

    @property
    def members(self) -> list[Member]:
        """The ranks that were admitted, in order."""
        with self._lock:
            seats = self._roster.seats
        return [
            Member(
                rank=seat.entry.rank,
                host=seat.entry.host,
                pid=seat.entry.pid,
                nonce=seat.nonce,
                address=seat.entry.address,
                probe_port=seat.entry.probe_port,
            )
            for seat in seats
        ]

    def end(self) -> dict[int, str]:
        """From now on tell whoever comes that this run is over; returns the ranks that were admitted, each with the
        nonce of its process."""
        with self._lock:
            self._over = True
            return {seat.entry.rank: seat.nonce for seat in self._roster.seats}

    def stop(self) -> None:
        """Judge no more.

        The thread is waited for: one that is still inside torch when the interpreter ends aborts the process.
        """
        self._stopping.set()
        self._store.arrive({"stop": True})
        self._judge_thread.join(timeout=5)

    # -- judging ------------------------------------------------------------------------------------------------

    def _judge_all(self, store: RunStore) -> None:
        try:
            while True:
                message = store.next_arrival(block=self._next_due() is None)
                with self._lock:
                    if message is not None and not self._judge(message):
                        return
                    self._go_on(queue_empty=message is None)
                if message is None:
                    time.sleep(POLL_EVERY)
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

    def _next_due(self) -> float | None:
        """When there is something to do even if nobody comes."""
        return min((due for due in (self._untold.due, self._muster and self._muster.until) if due), default=None)

    def _go_on(self, *, queue_empty: bool) -> None:
        """Do what is due: end a muster or begin one, complete the roll call, tell of changes."""
        if self._complete or self._closed_by:
            if self._untold.is_due:
                self._publish()
            return
        mustered = self._muster is not None
        if self._muster is not None:
            if self._muster.goes_on(queue_empty=queue_empty):
                return
            self._end_muster(self._muster)
            self._muster = None
        if self._gave_up is not None and not self._roster.full:
            self._close_for_missing_ranks()
        elif self._claims or (self._roster.full and not mustered and self._roster.waiting):
            self._muster = Muster(self._roster.waiting)
            self._publish()
        elif self._roster.full:
            self._complete_roll_call()
        elif self._untold.is_due:
            if self._untold.is_for_all(len(self._roster)):
                self._publish()
            else:
                self._tell_newcomers(self._news(), {})
                self._untold.told_newcomers()

    def _judge(self, message: bytes) -> bool:
        """Answer one message; False if it asks the judge to stop."""
        try:
            if len(message) > LARGEST_REQUEST:
                raise ValueError(f"a message of {len(message)} bytes")
            envelope = decode(message)
            says = claimed(envelope)
            if "stop" in says:
                # It only wakes this thread: anybody may put one into the queue.
                return not self._stopping.is_set()
            nonce = str(says["nonce"])
            if not re.fullmatch("[0-9a-f]{16}", nonce):
                raise ValueError("a nonce that is none")
            try:
                request = dict(self._seal.open(f"{self._run()} request", envelope))
            except Unsealed as reason:
                self._turn_stranger_away(nonce, says, reason, sealed="sealed" in envelope)
                return True
            del request["nonce"]
            if "withdraw" in request:
                self._withdraw(nonce, printable(str(request["withdraw"])))
            elif "alive" in request:
                if self._muster is not None and request["alive"] == self._muster.word:
                    self._muster.awaited.discard(nonce)
            else:
                self._judge_request(nonce, request)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError, Unsealed) as error:
            logger.warning("a stranger put something unreadable into the roll call: %s", error)
        return True

    def _run(self) -> str:
        return f"{self._hello.run_id} {self._hello.challenge}"

    def _turn_stranger_away(self, nonce: str, says: Mapping[str, Any], reason: Unsealed, *, sealed: bool) -> None:
        if nonce in self._nonces:
            logger.warning("a message that was recorded or altered came to the roll call: %s", reason)
            return
        who = f"a process that says it is rank {says.get('rank')!r:.20} on {says.get('host')!r:.60}"
        self._refuse(
            nonce,
            who,
            refusals.other_token(who, self._hello, reason),
            # Whoever has no token reads it as it is; whoever has another one sees that it is signed with another.
            sealed=sealed,
        )

    def _judge_request(self, nonce: str, request: dict[str, Any]) -> None:
        if nonce in self._nonces:
            logger.warning("a request came twice to the roll call: it was recorded, and is ignored")
            return
        # Nearly all say the same; thousands of copies would be a quarter of the time, for the garbage collector.
        common = {name: getattr(self._rank_0, name) for name in ("versions", "code", "options")}
        request |= {name: known for name, known in common.items() if request.get(name) == known}
        try:
            entry = Entry.from_request(request)
        except (TypeError, ValueError) as error:
            who = f"a process on {request.get('host')!r:.60}"
            self._refuse(nonce, who, refusals.other_version(who, self._hello, error))
            return
        holder = self._roster.of(entry.rank)
        if self._over or (self._complete and holder and self._store.have_left([holder.nonce])):
            # It comes too early for the next run, and asks again.
            self._set_verdicts({nonce: {"over": True}})
            return
        refusal, warnings = unlike(entry, self._rank_0, self._hello, time.time())
        refusal = self._closed_by or refusal
        if refusal is None and holder is not None:
            if self._complete or entry.rank == 0:
                refusal = refusals.taken(entry, holder.entry, self._hello, self._roster.missing)
            else:
                self._claims.append(Claim(nonce, entry, warnings))
                self._nonces.add(nonce)
                return
        self._seat_or_refuse(nonce, entry, refusal, warnings)

    def _seat_or_refuse(self, nonce: str, entry: Entry, refusal: DdpManualError | None, warnings: list[str]) -> None:
        if refusal is None:
            user = self._roster.user_of_the_gpu_of(entry)
            refusal = shared_gpu([user, entry] if user and user.rank != entry.rank else [entry])
        if refusal is not None:
            self._refuse(nonce, entry.who(), refusal)
            return
        self._nonces.add(nonce)
        self._roster.admit(nonce, entry)
        self._untold.add(len(self._roster), noteworthy=False)
        for warning in warnings:
            logger.warning("%s", warning)
        self._roster.warnings += warnings

    def _refuse(self, nonce: str, who: str, error: DdpManualError, *, sealed: bool = True) -> None:
        self._nonces.add(nonce)
        self._roster.refused.append(f"{who} was refused: {error.identifier}: {error.what}")
        verdict = {"error": error.as_dict()}
        self._set_verdicts({nonce: verdict}) if sealed else self._store.set_verdicts({nonce: verdict})
        self._untold.add(len(self._roster), noteworthy=True)

    def _withdraw(self, nonce: str, reason: str) -> None:
        if self._muster is not None:
            self._muster.awaited.discard(nonce)
        self._nonces.add(nonce)  # a request that was held back on its way must not be a rank now
        left = RankTaken("this process has left the roll call", why=reason, next=START_AGAIN)
        self._claims = [claim for claim in self._claims if claim.nonce != nonce]
        if seat := self._roster.held_by(nonce):
            if self._complete:
                # The others count on it: what they wait for next would not come.
                words = PeerLost(
                    f"{seat.entry.who()} left as the roll call was completed", why=reason, next=START_AGAIN
                )
                about = {"rank": seat.entry.rank, "host": seat.entry.host, "pid": seat.entry.pid, "judged": True}
                self._store.publish_failure({**words.as_dict(), **about})
            else:
                self._remove(seat)
                self._roster.gone.append(f"{seat.entry.who()} left again: {reason}")
        # Its own thread may still wait for an answer.
        self._set_verdicts({nonce: {"error": left.as_dict()}})

    def _remove(self, seat: Seat) -> None:
        self._roster.remove(seat)
        self._untold.add(len(self._roster), noteworthy=True)

    # -- who still lives ------------------------------------------------------------------------------------------

    def _end_muster(self, muster: Muster) -> None:
        """Remove those who have neither answered through the store nor accept connections; judge the claims."""
        silent = [seat for seat in map(self._roster.held_by, muster.awaited) if seat is not None]
        claims, self._claims = self._claims, []
        asked: list[Seat | Claim] = [*silent, *claims]
        answered = who_answers([(one.entry.address, one.entry.probe_port) for one in asked])
        reached = {one.nonce for one, answers in zip(asked, answered, strict=True) if answers}
        dead = [seat for seat in silent if seat.nonce not in reached]
        frozen = {seat.nonce for seat in silent if seat.nonce in reached}
        for seat in dead:
            self._remove(seat)
        self._struck = [seat.nonce for seat in dead]
        self._set_places(
            {seat.nonce: {"error": refusals.not_heard(seat.entry, PROVE_WITHIN).as_dict()} for seat in dead}
        )
        for claim in claims:
            holder = self._roster.of(claim.entry.rank)
            refusal: DdpManualError | None = None
            if holder is not None:
                refusal = refusals.taken(
                    claim.entry, holder.entry, self._hello, self._roster.missing, frozen=holder.nonce in frozen
                )
            elif claim.nonce not in reached:
                refusal = refusals.out_of_reach(claim.entry, self._hello)
            self._seat_or_refuse(claim.nonce, claim.entry, refusal, claim.warnings)
        for seat in dead:
            heir = self._roster.of(seat.entry.rank)
            what = f"; pid {heir.entry.pid} has taken its place" if heir else ": its process has ended"
            self._roster.gone.append(f"{seat.entry.who()} is gone{what}")

    # -- telling ------------------------------------------------------------------------------------------------

    def _close(self, error: DdpManualError) -> None:
        self._closed_by = error
        claims, self._claims = self._claims, []
        for claim in claims:
            self._refuse(claim.nonce, claim.entry.who(), error)
        self._publish()

    def _close_for_missing_ranks(self) -> None:
        if not self._complete and not self._closed_by and self._gave_up is not None:
            self._close(missing_ranks_error(self._roster.news(), self._hello, self._gave_up))

    def _complete_roll_call(self) -> None:
        places = assign_places(self._roster.entries)
        self._closed_by = shared_gpu(self._roster.entries, places)
        if self._closed_by is None:
            self._complete = True
            self._store.set_hosts(self._roster.host_leaders(places))
        self._publish(places if self._complete else None)

    def _publish(self, places: Mapping[int, Place] | None = None) -> None:
        """Tell everybody who waits how it stands; when all are here, where each of them stands."""
        self._untold.told_all(len(self._roster))
        # Before anybody is let go, so that whoever is can read it.
        self._set_summary()
        if self._complete and places is None:
            return  # only those who look on care who was refused since
        self._version += 1
        news = self._news()
        waiting = self._tell_newcomers(news, places or {})
        if places:
            self._set_places({seat.nonce: {"place": vars(places[seat.entry.rank]), "error": None} for seat in waiting})
        self._store.publish_news(self._version, self._seal.close(f"{self._run()} news {self._version}", news))

    def _tell_newcomers(self, news: Mapping[str, Any], places: Mapping[int, Place]) -> list[Seat]:
        """Answer those who have had no answer, and give each its place if there is one; returns the others."""
        waiting = [seat for seat in self._roster.seats if seat.told]
        news_for_all = {"hello": asdict(self._hello), "version": self._version, "news": news, "error": news["error"]}
        verdicts = {}
        for seat in self._roster.seats:
            if not seat.told:
                seat.told = True
                place = places.get(seat.entry.rank)
                verdicts[seat.nonce] = {**news_for_all, "place": vars(place) if place else None}
        self._set_verdicts(verdicts)
        return waiting

    def _set_summary(self) -> None:
        self._store.set_summary({**self._roster.news(), **self._state(), "ranks": self._roster.in_full()})

    def _set_verdicts(self, verdicts: Mapping[str, Mapping[str, Any]]) -> None:
        self._store.set_verdicts({nonce: self._seal.close(f"verdict {nonce}", one) for nonce, one in verdicts.items()})

    def _set_places(self, places: Mapping[str, Mapping[str, Any]]) -> None:
        self._store.set_places({nonce: self._seal.close(f"place {nonce}", one) for nonce, one in places.items()})

    def _news(self) -> dict[str, Any]:
        """What those who wait are told: how it stands, who is asked to show that it lives, who was not heard."""
        prove = self._muster.word if self._muster else None
        return {**self._roster.news(), **self._state(), "prove": prove, "struck": self._struck}

    def _state(self) -> dict[str, Any]:
        return {"complete": self._complete, "error": self._closed_by.as_dict() if self._closed_by else None}
