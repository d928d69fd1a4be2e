"""Rank 0's watchdog: it keeps the lifelines of all ranks, judges them, and tells everybody why the run ends."""

from __future__ import annotations

import logging
import secrets
import selectors
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from ddp_manual.errors import DdpManualError
from ddp_manual.rendezvous import verdicts
from ddp_manual.rendezvous.address import family
from ddp_manual.rendezvous.entries import printable
from ddp_manual.rendezvous.judging import Judge, Stall
from ddp_manual.rendezvous.lifeline import Lifeline, LineClosed, kept_from_children
from ddp_manual.rendezvous.noticeboard import NoticeBoard
from ddp_manual.rendezvous.progress import SAVING, Beat
from ddp_manual.rendezvous.reachability import who_is_gone
from ddp_manual.rendezvous.seal import Unsealed
from ddp_manual.rendezvous.stacks import OWN_THREADS, stacks
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.verdicts import Member, as_error
from ddp_manual.rendezvous.watchdog import LOOK_EVERY, Watchdog, Watched

logger = logging.getLogger(__name__)

# Seconds a connection has to say which rank it is; and for all ranks to give their stacks.
HELLO_WITHIN = 5.0
STACKS_WITHIN = 2.0
# Connections that are no rank's (yet).
MOST_STRANGERS = 64
# A rank without a lifeline may have died before it could open one; those that live answer at their port.
LOOK_FOR_ABSENT = 0.5
# For rank 0 to finish the checkpoint it is writing when the run ends; the others have been told by then.
SAVE_WITHIN = 30.0


def open_lifelines(address: str) -> socket.socket:
    """The socket that the ranks open their lifelines to: any free port at rank 0's address."""
    listener = kept_from_children(socket.socket(family(address), socket.SOCK_STREAM))
    listener.bind((address, 0))
    listener.listen(4096)
    listener.setblocking(False)
    return listener


@dataclass
class _Caller:
    """A connection. ``rank`` is None until it has said which it is."""

    line: Lifeline
    challenge: str
    since: float
    rank: int | None = None


@dataclass
class _Asking:
    """Stacks that are being gathered."""

    until: float
    awaited: set[int]
    done: Callable[[Mapping[int, str]], None]
    found: dict[int, str] = field(default_factory=dict)


class Keeper(Watchdog):
    """Watches over all ranks; told by the store what a third terminal asks and what failed before the lifelines were.

    Args:
        listener: from ``open_lifelines``.
        members: every rank, as admitted by the roll call, in rank order.
        store: a client for the notice board's thread alone.
    """

    def __init__(self, watched: Watched, listener: socket.socket, members: list[Member], store: RunStore) -> None:
        super().__init__(watched)
        self._listener = listener
        self._members = members
        self._limits = watched.hello.limits
        self._judge = Judge(len(members), self._limits, time.monotonic(), async_collectives=watched.backend == "nccl")
        self._selector = selectors.DefaultSelector()
        self._strangers: list[_Caller] = []
        self._lines: dict[int, _Caller] = {}
        self._parted: set[int] = set()
        self._looking: threading.Thread | None = None
        self._look_at = time.monotonic() + LOOK_FOR_ABSENT
        self._asking: dict[str, _Asking] = {}
        self._stalled: Stall | None = None
        self._failure: Mapping[str, Any] | None = None
        self._ends_at: float | None = None
        self._board = NoticeBoard(store, self._ask)

    def start(self) -> None:
        super().start()
        self._board.start()

    def stand_down(self) -> DdpManualError | None:
        seen = super().stand_down()
        self._board.stop()
        return seen

    # -- the thread ---------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        self.watched.welcomed()
        self._selector.register(self._listener, selectors.EVENT_READ, None)
        self._selector.register(self._woken, selectors.EVENT_READ, None)
        next_beat = 0.0
        late = False
        try:
            while True:
                waited_since = time.monotonic()
                for key, _ in self._selector.select(max(0.0, min(LOOK_EVERY, next_beat - waited_since))):
                    if key.fileobj is self._listener:
                        self._accept()
                    elif key.data is not None:
                        self._read(key.data)
                leaving = self._take_requests()
                now = time.monotonic()
                if now - waited_since > self._limits.peer_timeout:
                    self._judge.restart(now)
                beats = now >= next_beat
                if beats:
                    next_beat = now + self._limits.beat_every
                    self._judge.hear(0, self.watched.beat(), now)
                    self._send_all({"ping": True})
                    self._board.post(self._judge.progress(now))
                self._finish_asking(now)
                if self._failure is None:
                    # After a round that took long what has come meanwhile is read first.
                    late = not late and now - waited_since > 2 * LOOK_EVERY
                    if not late:
                        self._end_silence(now)
                    self._look_for_the_absent(now)
                    if beats:
                        self._name_the_slow_and_stalled(now)
                    if leaving:
                        self._send_all({"over": True})
                        return
                elif self._all_know(now):
                    break
        finally:
            self._close()
        self._let_it_save()
        self._leave_at(self._ends_at or now)

    def _let_it_save(self) -> None:
        """A checkpoint that is being written when another rank dies is not lost."""
        deadline = time.monotonic() + SAVE_WITHIN
        while self.watched.progress.phase == SAVING and time.monotonic() < deadline:
            if self._main_thread_leaves.wait(0.02):
                return

    def _all_know(self, now: float) -> bool:
        """Whether all ranks have read the verdict and closed their lifelines, or the time for it is over."""
        assert self._ends_at is not None
        return now >= self._ends_at or (not self._lines and self._main_thread_leaves.is_set())

    def _close(self) -> None:
        self._told.set()
        for caller in [*self._lines.values(), *self._strangers]:
            with suppress(LineClosed):
                caller.line.flush()
            caller.line.close()
        self._listener.close()
        self._selector.close()

    def _take_requests(self) -> bool:
        """Do what the other threads ask for; whether the main thread leaves."""
        leaving = False
        for request in self._asked():
            if "leave" in request:
                leaving = True
            elif "stacks" in request:
                key = str(request["stacks"])
                self._gather_stacks(key, list(range(len(self._members))), partial(self._board.answer, key))
            elif "gone" in request:
                self._bury(request["gone"])
            else:
                self._end_the_run(request.get("failed") or request["failure"])
                self._told.set()
        return leaving

    # -- lines --------------------------------------------------------------------------------------------------

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except ConnectionAbortedError:
                continue
            except OSError as error:  # too many open files, perhaps; some may be closed soon
                logger.warning("a lifeline could not be opened: %s", error.strerror)
                time.sleep(LOOK_EVERY)
                return
            caller = _Caller(Lifeline(connection), secrets.token_hex(16), time.monotonic())
            if len(self._strangers) >= len(self._members) + MOST_STRANGERS:
                caller.line.close()
                continue
            self._strangers.append(caller)
            self._selector.register(connection, selectors.EVENT_READ, caller)
            self._send(caller, {"challenge": caller.challenge})

    def _read(self, caller: _Caller) -> None:
        try:
            for message in caller.line.receive():
                if caller.rank is None:
                    self._greet(caller, message)
                else:
                    self._take(caller.rank, message)
        except (LineClosed, Unsealed, KeyError, TypeError, ValueError, AttributeError) as reason:
            self._hang_up(caller, str(reason))

    def _greet(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        watched = self.watched
        hello = watched.seal.open(watched.purpose("lifeline", caller.challenge), message["hello"])
        rank = hello["rank"]
        if type(rank) is not int or not 0 < rank < len(self._members) or rank in self._lines or rank in self._parted:
            raise LineClosed("it is no rank that is awaited")
        if hello["nonce"] != self._members[rank].nonce:
            raise LineClosed("it is another process than the one that was admitted")
        caller.rank = rank
        self._strangers.remove(caller)
        self._lines[rank] = caller
        self._judge.hear(rank, self._judge.beat(rank), time.monotonic())
        welcome = watched.seal.close(watched.purpose("welcome", self._members[rank].nonce), {})
        self._send(caller, {"welcome": welcome})
        if self._failure is not None:
            self._send(caller, {"verdict": self._failure})

    def _take(self, rank: int, message: Mapping[str, Any]) -> None:
        if "beat" in message:
            self._judge.hear(rank, Beat.from_message(message["beat"]), time.monotonic())
        elif "failed" in message:
            self._end_the_run(verdicts.words_of(self._members[rank], message["failed"]))
        elif "stacks" in message:
            asking = self._asking.get(str(message["for"]))
            if asking is not None:
                asking.found[rank] = str(message["stacks"])
                asking.awaited.discard(rank)
        elif "bye" in message:
            self._parted.add(rank)
            self._judge.part_with(rank)

    def _hang_up(self, caller: _Caller, reason: str) -> None:
        """The connection is gone. If that was a rank which had not said goodbye, so is the rank."""
        self._selector.unregister(caller.line.connection)
        caller.line.close()
        if caller.rank is None:
            self._strangers.remove(caller)
            logger.debug("a connection that was no rank's lifeline is closed: %s", reason)
            return
        del self._lines[caller.rank]
        if caller.rank not in self._parted:
            beat = self._judge.beat(caller.rank)
            self._end_the_run(verdicts.gone(self._members[caller.rank], beat, printable(reason), self._again))

    def _send(self, caller: _Caller, message: Mapping[str, Any]) -> None:
        """A line that cannot be written to is noticed, and judged, when it is read from."""
        with suppress(LineClosed):
            caller.line.send(message)

    def _send_all(self, message: Mapping[str, Any]) -> None:
        for caller in self._lines.values():
            self._send(caller, message)

    # -- judging ------------------------------------------------------------------------------------------------

    def _end_silence(self, now: float) -> None:
        """Of strangers, and of ranks."""
        for caller in [stranger for stranger in self._strangers if now - stranger.since > HELLO_WITHIN]:
            self._hang_up(caller, "it did not say which rank it is")
        silent = self._judge.silent(now)
        if silent:
            self._end_the_run(
                verdicts.silent(
                    [(self._members[rank], self._judge.beat(rank), self._judge.silence(rank, now)) for rank in silent],
                    len(self._members),
                    self._again,
                )
            )

    def _look_for_the_absent(self, now: float) -> None:
        """Try the ports of the ranks that have not opened a lifeline yet, in a thread, since that may take a while."""
        if now < self._look_at or (self._looking is not None and self._looking.is_alive()):
            return
        absent = [member for member in self._members[1:] if not self._has_been_here(member.rank)]
        if not absent:
            self._look_at = float("inf")
            return
        self._look_at = now + LOOK_FOR_ABSENT

        def look() -> None:
            gone = who_is_gone([(member.address, member.probe_port) for member in absent])
            self._ask({"gone": [member.rank for member, is_gone in zip(absent, gone, strict=True) if is_gone]})

        self._looking = threading.Thread(target=look, name=f"{OWN_THREADS}looking", daemon=True)
        self._looking.start()

    def _bury(self, ranks: list[int]) -> None:
        """Unless they have opened their lifelines meanwhile, which is when they close their ports."""
        for rank in ranks:
            if not self._has_been_here(rank):
                reason = "it had not opened its lifeline yet, and its port is closed"
                self._end_the_run(verdicts.gone(self._members[rank], self._judge.beat(rank), reason, self._again))

    def _has_been_here(self, rank: int) -> bool:
        return rank in self._lines or rank in self._parted

    def _name_the_slow_and_stalled(self, now: float) -> None:
        for rank, seconds, median in self._judge.newly_slow(now):
            logger.warning("%s", verdicts.slow(self._members[rank], seconds, median))
        stall = None if self._stalled else self._judge.stall(now)
        if stall is not None:
            self._stalled = stall
            beats = {rank: self._judge.beat(rank) for rank in stall.waiting}
            self._gather_stacks("", stall.behind or verdicts.one_per_place(stall, beats), self._name_the_stalled)

    def _name_the_stalled(self, found: Mapping[int, str]) -> None:
        """With their stacks. Unless they have gone on meanwhile, at the last moment."""
        now = time.monotonic()
        stall, self._stalled = self._judge.stall(now), None
        if stall is None or self._failure is not None:
            return
        beats = {rank: self._judge.beat(rank) for rank in (*stall.waiting, *stall.behind)}
        self._end_the_run(verdicts.stalled(self._members, stall, beats, found, self._again))

    def _end_the_run(self, failure: Mapping[str, Any]) -> None:
        if self._failure is not None:
            return
        self._failure = failure
        self._send_all({"verdict": failure})
        self._board.fail(failure)
        self._see(as_error(failure), closed=bool(failure.get("closed", True)))
        self._ends_at = time.monotonic() + self._grace

    @property
    def _again(self) -> str:
        return self.watched.hello.start_again

    # -- stacks -------------------------------------------------------------------------------------------------

    def _gather_stacks(self, key: str, ranks: list[int], done: Callable[[Mapping[int, str]], None]) -> None:
        asking = _Asking(time.monotonic() + STACKS_WITHIN, {rank for rank in ranks if rank in self._lines}, done)
        if 0 in ranks:
            asking.found[0] = stacks()
        self._asking[key] = asking
        for rank in asking.awaited:
            self._send(self._lines[rank], {"stacks": key})

    def _finish_asking(self, now: float) -> None:
        for key, asking in list(self._asking.items()):
            if now >= asking.until or not asking.awaited:
                del self._asking[key]
                asking.done(asking.found)
