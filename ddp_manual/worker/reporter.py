"""Reporter: tells the agent what the worker is doing, and takes the agent's messages, in a thread of its own.

While a C call holds the GIL this thread stands still, but the agent does not.
"""

from __future__ import annotations

import collections
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import weakref
from contextlib import suppress
from typing import NoReturn, TypeVar

from ddp_manual import from_agent, from_worker, messages, orphans, terminal
from ddp_manual.deadline import done_within
from ddp_manual.ranks_and_runs import OPENING, Beat
from ddp_manual.wire import LONGEST_ANSWER, LineReader, Unreadable, encode_local
from ddp_manual.worker.private_torch import collectives_unfinished, open_groups
from ddp_manual.worker.steps_done import Stops
from ddp_manual.worker.whereabouts import whereabouts, writes_a_file

# Seconds between two looks at what is due.
LOOK_EVERY = 0.25
# The same while the agent waits for the end of a checkpoint.
LOOK_WHILE_SAVING = 0.02
# For the last messages, which wait where the agent does not run.
SENT_WITHIN = 5.0
# For a terminal or a pipe that nobody may read.
FLUSH_WITHIN = 0.3

M = TypeVar("M")

_reporters: weakref.WeakSet[Reporter] = weakref.WeakSet()


def _leave_to_parent() -> None:
    for reporter in list(_reporters):
        reporter.leave_to_parent()


os.register_at_fork(after_in_child=_leave_to_parent)


class Reporter:
    """Speaks for one rank. When the agent is gone, it kills this process, since nothing else would explain or end it.

    Args:
        channel: the worker's end of a socket pair.
        first: the first message.
    """

    def __init__(self, channel: socket.socket, first: from_worker.FromWorker) -> None:
        self.progress = from_worker.Progress()
        self.save_is_asked = False
        """Whether a signal has asked for a checkpoint."""
        self.thread = threading.get_ident()
        """The id of the thread that trains."""
        self.unwinding = False
        """Whether the training thread has failed and is closing what is open."""
        self.over = False
        """Whether this rank has left the run, so that the agent may end."""
        self.stops = Stops(self.send, lambda: self.wait(messages.StopAfter))
        self._channel = channel
        self._reader = LineReader(from_agent.read, LONGEST_ANSWER)
        self._turn = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._stopped, self._stop = socket.socketpair()
        self._sockets = (channel, self._stopped, self._stop)
        self._said: dict[type[object], from_agent.FromAgent] = {}
        self._agent_spoke = threading.Event()
        self._ending = False
        self._sent_beat: Beat | None = None
        self._next_beat = 0.0
        self.send(first)
        self._thread = threading.Thread(target=self._run, name="ddp_manual reporter", daemon=True)
        _reporters.add(self)
        self._thread.start()

    def send(self, message: from_worker.FromWorker) -> None:
        """Send a message from any thread or signal handler; a thread that is sending already sends this one too."""
        self._unsent.append(encode_local(message))
        while self._unsent and self._turn.acquire(blocking=False):
            self._send_and_release()

    def flush(self) -> None:
        """Wait until all messages are sent, since this process may end at once: a message of another thread's may be
        on its way, and this thread's behind it."""
        if self._turn.acquire(timeout=SENT_WITHIN):
            self._send_and_release()

    def _send_and_release(self) -> None:
        try:
            while self._unsent:
                self._channel.sendall(self._unsent.popleft())
        except OSError:  # the agent is gone, as the reporter's thread also sees
            self._unsent.clear()
        finally:
            self._turn.release()

    def send_beat(self) -> None:
        """Send a heartbeat to the agent; it says what this rank is doing if that has changed since the last one."""
        groups, where = open_groups(), whereabouts(self.thread)
        # Not while the rank begins operations: then some are always unfinished, and torch's recorder is in use.
        unfinished = (
            collectives_unfinished() if self._sent_beat and groups.operations == self._sent_beat.operations else None
        )
        beat = self.progress.beat(
            collectives=groups.begun,
            operations=groups.operations,
            timeouts=groups.timeouts if where.timeout is None else {**groups.timeouts, OPENING: where.timeout},
            unfinished=unfinished or 0,
            return_at_once=groups.return_at_once,
            # With gloo, a method like ``item`` waits for this rank's own GPU at most, not for other ranks.
            inside=where.inside or (where.syncs and groups.return_at_once if unfinished is None else unfinished > 0),
            opening=where.opening,
            place=where.place,
            debugging=where.debugging,
        )
        # With NCCL a rank may be inside a collective while its program runs Python, such as a handler of SIGTERM.
        self.send(from_worker.Doing(beat if beat != self._sent_beat else None, where.inside))
        self._sent_beat = beat

    @property
    def verdict(self) -> from_agent.RunEnds | None:
        """Why the run ends, once the agent has said so, which it does only in a person's own script."""
        said = self._said.get(from_agent.RunEnds)
        return said if isinstance(said, from_agent.RunEnds) else None

    def wait(self, kind: type[M], timeout: float = math.inf) -> M:
        """Wait for a message of a type that comes once, such as ``Start``.

        Raises:
            TimeoutError: it has not come within ``timeout`` seconds. DdpManualError: the run has ended.
        """
        deadline = time.monotonic() + timeout
        while True:
            if self.verdict is not None and kind is not from_agent.RunEnds:
                raise self.verdict.words.error()
            if isinstance(said := self._said.get(kind), kind):
                return said
            if time.monotonic() >= deadline or not self._thread.is_alive():
                raise TimeoutError(f"the agent did not say {kind.__name__}")
            self._agent_spoke.wait(0.2)  # short, since Python handles no signal while it waits
            self._agent_spoke.clear()

    def stop(self) -> None:
        """End the thread before Python ends: what the frames of a daemon thread refer to is never collected, among it
        files of the program that are to be written to their end. Descriptors are closed with the process: without the
        channel the agent would take it for gone, and the program may have its own files under their numbers."""
        if self._thread.is_alive():  # not in a fork
            with suppress(OSError):  # the program has closed descriptors that are not its own
                self._stop.send(b".")
            self._thread.join(timeout=SENT_WITHIN)
        for one in self._sockets:
            one.detach()

    def leave_to_parent(self) -> None:
        """Close, in a fork such as a DataLoader's, what would keep the channel open after the parent's death; the
        parent's thread, whose turn it may be to send, is not in the fork."""
        for one in self._sockets:
            one.close()
        self._turn = threading.Lock()

    def close(self) -> None:
        self.over = True
        self.flush()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=SENT_WITHIN)
        for one in self._sockets:
            one.close()

    def _run(self) -> None:
        spoken_to = select.poll()  # which has no descriptor that the program could close
        spoken_to.register(self._channel, select.POLLIN)
        spoken_to.register(self._stopped, select.POLLIN)
        while True:
            data: bytes | None = None
            if speaks := dict(spoken_to.poll(1000 * (LOOK_WHILE_SAVING if self._ending else LOOK_EVERY))):
                if self._stopped.fileno() in speaks:
                    return
                try:
                    data = self._channel.recv(1 << 16)
                except ConnectionError:
                    data = b""
                except OSError:  # the program has closed descriptors that are not its own
                    return
            if data == b"":
                break
            try:
                for message in self._reader.feed(data or b""):
                    with suppress(Exception):  # go on: this thread must see it if the agent is gone
                        self._take(message)
            except Unreadable:
                break
            with suppress(Exception):
                self._look()
        if not self.over:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look(self) -> None:
        """Send what is due: MayEnd, once no checkpoint is being written, and the heartbeat."""
        if self._ending and not (self.progress.saving or self.unwinding or writes_a_file()):
            self._ending = False
            self.send(from_worker.MayEnd())
        if (now := time.monotonic()) >= self._next_beat:
            self._next_beat = now + LOOK_EVERY
            self.send_beat()

    def _take(self, message: from_agent.FromAgent) -> None:
        self._said[type(message)] = message
        self._agent_spoke.set()
        match message:
            case messages.AskStep():
                self.stops.ask()
            case from_agent.Save():
                self.save_is_asked = True
            case from_agent.BeQuiet():  # the agent prints the last lines
                terminal.LOGGER.disabled = True
                self.send(from_worker.IsQuiet())
            case from_agent.BeforeTheEnd():
                self._ending = True
                self.send(from_worker.IsSaving())  # until ``_look`` finds that nothing is being written
            case from_agent.Exit() if self.verdict is not None:
                end_process(self.verdict.words.exit_code)


def end_process(status: int) -> NoReturn:
    """End the process from any thread, without the interpreter's teardown: the main thread may be blocked for good.

    What is still in buffers is written, but a reader that is gone is not waited for.
    """

    def flush() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    with suppress(BaseException):
        done_within(FLUSH_WITHIN, flush, "flush")
    orphans.end_daemons()
    os._exit(status)
