"""Each rank is watched over, and hears why the run ends, even while it is blocked inside a collective.

A thread in each rank keeps its lifeline to rank 0: heartbeats go up, verdicts come down. ``keeper.py`` is rank 0's.
After a verdict the main thread gets a moment to notice by itself (its collective breaks); then the thread prints the
cause and ends the process. ``os._exit`` is the only way out of a blocked gloo call: aborting the group does nothing
there, and ``sys.exit`` in a thread ends the thread alone.
"""

from __future__ import annotations

import logging
import os
import queue
import selectors
import socket
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from ddp_manual.errors import DdpManualError, MasterLost, PeerUnreachable
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.entries import Hello
from ddp_manual.rendezvous.group import collectives_begun
from ddp_manual.rendezvous.lifeline import Lifeline, LineClosed, kept_from_children
from ddp_manual.rendezvous.progress import Beat, Progress
from ddp_manual.rendezvous.seal import Seal, Unsealed
from ddp_manual.rendezvous.stacks import OWN_THREADS, stacks, whereabouts
from ddp_manual.rendezvous.verdicts import as_error, last_words

logger = logging.getLogger(__name__)

# Seconds. The main thread's own way out closes what the program has open, so it gets a moment; 2 s is the promise.
GRACE = 0.7
# Where nothing has closed, no collective breaks by itself, so there is nothing to notice.
GRACE_IN_SILENCE = 0.2
# NCCL ends the process by itself when a peer is gone, with a page that names nobody.
GRACE_WITH_NCCL = 0.0
# From the moment a collective breaks until the verdict has come that says why.
VERDICT_WITHIN = 1.5
CONNECT_TIMEOUT = 5.0
# To print and to write why this rank leaves.
REPORT_WITHIN = 1.0
# For the main thread to get out by itself when it is on its way; what it does there has bounds of its own.
WAY_OUT = 10.0
# For rank 0 to read that this rank has left in order.
BYE_WITHIN = 1.0
LOOK_EVERY = 0.25


@dataclass(frozen=True, kw_only=True)
class Watched:
    """What the watchdog of a rank needs to know.

    Args:
        backend: gloo or nccl.
        thread: the one that trains; heartbeats say where it is.
        report: told the error before the process ends.
        welcomed: told that the lifeline is open.
    """

    rank: int
    nonce: str
    hello: Hello
    seal: Seal
    backend: str
    progress: Progress
    thread: int
    report: Callable[[DdpManualError], None]
    welcomed: Callable[[], None]

    def purpose(self, kind: str, challenge: str) -> str:
        return f"{self.hello.run_id} {self.hello.challenge} {kind} {challenge}"

    def beat(self) -> Beat:
        inside, place = whereabouts(self.thread)
        return Beat.of(self.progress, collectives_begun(), inside=inside, place=place)


class Watchdog(ABC):
    """What rank 0's and the other ranks' have in common: a thread, a verdict, and the way out."""

    def __init__(self, watched: Watched) -> None:
        self.watched = watched
        self.seen: DdpManualError | None = None
        """Why the run ends, once it is known."""
        self.over = False
        """Whether rank 0 has finished and left, while this rank still works on its own."""
        self._verdict = threading.Event()
        self._main_thread_leaves = threading.Event()
        self._left = threading.Event()
        self._told = threading.Event()
        self._grace = GRACE
        self._requests: queue.SimpleQueue[Mapping[str, Any]] = queue.SimpleQueue()
        self._woken, self._waking = (kept_from_children(end) for end in socket.socketpair())
        self._woken.setblocking(False)
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}lifeline", daemon=True)

    # -- for the main thread ------------------------------------------------------------------------------------

    def start(self) -> None:
        self._thread.start()

    def main_thread_leaves(self) -> None:
        """The main thread is on its way out, with an error: the process is not ended from here unless it gets stuck."""
        self._main_thread_leaves.set()

    def await_verdict(self) -> DdpManualError | None:
        """Why the run ends, if that is known within a moment."""
        self._verdict.wait(VERDICT_WITHIN)
        return self.seen

    def tell(self, words: Mapping[str, Any]) -> None:
        """Tell the other ranks why this one leaves; waits a moment until they know."""
        self._ask({"failed": words})
        self._told.wait(VERDICT_WITHIN)

    def stand_down(self) -> DdpManualError | None:
        """This rank leaves; returns why the run ends, if it has been told by then.

        The thread is waited for: one that is still inside torch when the interpreter ends aborts the process.
        """
        self._main_thread_leaves.set()
        self._left.set()
        self._ask({"leave": True})
        self._thread.join(timeout=5)
        if not self._thread.is_alive():
            self._woken.close()
            self._waking.close()
        return self.seen

    # -- for the thread -----------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._watch()
        except Exception as error:  # nobody would watch over this rank, so the run cannot go on
            self._see(
                MasterLost(
                    f"the watchdog of rank {self.watched.rank} broke",
                    why=f"{type(error).__name__}: {error}",
                    next="start all ranks again; this is a mistake in ddp_manual and worth reporting",
                )
            )
            self._leave_at(time.monotonic())

    @abstractmethod
    def _watch(self) -> None:
        """Until the rank leaves or the run ends."""

    def _ask(self, request: Mapping[str, Any]) -> None:
        self._requests.put(request)
        try:
            self._waking.send(b"!")
        except OSError:  # the thread has ended, or is about to look anyway
            self._told.set()

    def _asked(self) -> list[Mapping[str, Any]]:
        try:
            while self._woken.recv(64):
                pass
        except BlockingIOError:
            pass
        found = []
        while not self._requests.empty():
            found.append(self._requests.get())
        return found

    def _see(self, error: DdpManualError, *, closed: bool = True) -> None:
        """The run has ended. ``closed``: by connections that have closed, so that collectives break."""
        if self.seen is None:
            self._grace = GRACE_WITH_NCCL if self.watched.backend == "nccl" else GRACE if closed else GRACE_IN_SILENCE
            self.seen = error
            self._verdict.set()

    def _leave_at(self, deadline: float) -> None:
        """End the process at ``deadline`` with the verdict, unless the main thread is leaving by then."""
        if self._main_thread_leaves.wait(max(0.0, deadline - time.monotonic())) and self._left.wait(WAY_OUT):
            return
        assert self.seen is not None
        leave_at_once(self.watched.report, self.seen)


class Follower(Watchdog):
    """The watchdog of every rank but rank 0."""

    def __init__(self, watched: Watched) -> None:
        super().__init__(watched)
        self._line: Lifeline | None = None
        self._limits = watched.hello.limits
        self._welcome = False
        self._heard = time.monotonic()

    def _watch(self) -> None:
        try:
            self._line = self._connect()
            self._follow(self._line)
        except (LineClosed, Unsealed, KeyError, TypeError, ValueError) as error:
            if self.seen is None:
                self._see(self._rank_0_lost("is gone, without last words", f"its lifeline to this rank broke: {error}"))
        except PeerUnreachable as error:
            self._see(error)
        finally:
            if self._line is not None:
                self._line.close()
        self._told.set()
        if self.seen is not None:
            self._leave_at(time.monotonic() + self._grace)

    def _connect(self) -> Lifeline:
        address, port = self.watched.hello.lifeline
        try:
            return Lifeline(socket.create_connection((address, port), CONNECT_TIMEOUT))
        except OSError as error:
            if isinstance(error, ConnectionError):  # nothing listens there any more
                raise LineClosed(error.strerror or str(error)) from None
            raise PeerUnreachable(
                f"rank {self.watched.rank} cannot open its lifeline to rank 0",
                why=f"connecting to {at(address, port)} gave: {error}",
                next=f"open all TCP ports to {address} for the hosts of the run",
            ) from None

    def _follow(self, line: Lifeline) -> None:
        # Not select(), which refuses a file descriptor above 1,023.
        with selectors.DefaultSelector() as selector:
            selector.register(line.connection, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            self._exchange(line, selector)

    def _exchange(self, line: Lifeline, selector: selectors.BaseSelector) -> None:
        next_beat = self._heard = time.monotonic()
        said_hello = late = False
        while self.seen is None and not self.over:
            waited_since = time.monotonic()
            ready = [key.fileobj for key, _ in selector.select(max(0.0, min(LOOK_EVERY, next_beat - waited_since)))]
            line.flush()
            if line.connection in ready:
                self._heard = time.monotonic()
                for message in line.receive():
                    if "challenge" in message and not said_hello:
                        said_hello = True
                        self._say_hello(line, str(message["challenge"]))
                    else:
                        self._take(line, message)
            for request in self._asked():
                if "leave" in request:
                    line.send({"bye": True})
                    line.finish(BYE_WITHIN)
                    return
                line.send(request)
            now = time.monotonic()
            if self._welcome and now >= next_beat:
                next_beat = now + self._limits.beat_every
                line.send({"beat": vars(self.watched.beat())})
            took = now - waited_since
            if took > self._limits.peer_timeout:  # this process was stopped, perhaps with all its host
                self._heard = now
            # After a round that took long what has come meanwhile is read first.
            late = not late and took > 2 * LOOK_EVERY
            if not late:
                self._judge_rank_0(line, now)

    def _say_hello(self, line: Lifeline, challenge: str) -> None:
        watched = self.watched
        hello = {"rank": watched.rank, "nonce": watched.nonce}
        line.send({"hello": watched.seal.close(watched.purpose("lifeline", challenge), hello)})

    def _take(self, line: Lifeline, message: Mapping[str, Any]) -> None:
        if "welcome" in message:
            purpose = self.watched.purpose("welcome", self.watched.nonce)
            self.watched.seal.open(purpose, message["welcome"])
            self._welcome = True
            self.watched.welcomed()
        elif not self._welcome:
            raise LineClosed("something else answers there")
        elif "verdict" in message:
            verdict = message["verdict"]
            error = as_error(verdict)
            if verdict.get("judged") and verdict["rank"] == self.watched.rank:
                error.why = f"that is this process; the others have not waited for it\n{error.why}"
            self._see(error, closed=bool(verdict.get("closed", True)))
        elif "stacks" in message:
            line.send({"stacks": stacks(), "for": message["stacks"]})
        elif "over" in message:
            self.over = True
            logger.info("rank 0 has finished and left; this rank goes on alone, and nobody watches over it")

    def _judge_rank_0(self, line: Lifeline, now: float) -> None:
        silence = now - self._heard
        if silence > self._limits.silence:
            lost = self._rank_0_lost(
                f"has been silent for {silence:.0f} s",
                "its process is stopped or frozen, its host is down, or the network between the hosts is cut",
            )
            self._see(lost, closed=False)
            # What rank 0 reads if it is only stopped, and goes on.
            line.send({"failed": last_words(self.watched.rank, lost)})

    def _rank_0_lost(self, what: str, why: str) -> MasterLost:
        hello = self.watched.hello
        own = self.watched.progress
        return MasterLost(
            f"rank 0 ({hello.host}, pid {hello.pid}) {what}",
            why=f"{why}\nthis rank was {Beat.of(own, {}, inside=False, place='').at_step()}",
            next=f"look at rank 0's last lines and at {hello.host}, then {hello.start_again}",
        )


def leave_at_once(report: Callable[[DdpManualError], None], error: DdpManualError) -> None:
    """Say why and end the process, whatever the disk and the terminal do meanwhile."""
    try:
        attempt(lambda: report(error), REPORT_WITHIN)
    finally:
        exit_now(error.exit_code, flush_within=REPORT_WITHIN / 2)


def exit_now(status: int, *, flush_within: float | None = None) -> None:
    """End the process from any thread, without the interpreter's teardown.

    After a failure the teardown may block (a process group with a broken peer) or abort (a thread inside torch).

    Args:
        flush_within: seconds for what is still unwritten; None: as long as its reader takes.
    """
    try:
        if flush_within is None:
            _flush()
        else:
            attempt(_flush, flush_within)
    finally:
        os._exit(status)


def _flush() -> None:
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()


def attempt(action: Callable[[], None], seconds: float) -> None:
    """Do what may block (a disk that hangs, a terminal that nobody reads), and go on without it after ``seconds``."""
    thread = threading.Thread(target=action, name=f"{OWN_THREADS}attempt", daemon=True)
    thread.start()
    thread.join(seconds)
