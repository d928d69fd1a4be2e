"""The thread through which a worker speaks with its agent: what it does now goes out, what it is asked for comes in.

While a C call keeps the interpreter's lock this thread stands still; the agent does not.
"""

from __future__ import annotations

import collections
import math
import os
import selectors
import signal
import socket
import threading
import time
import weakref
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

from ddp_manual import terminal
from ddp_manual.errors import from_dict
from ddp_manual.messages import LONGEST_ANSWER, Beat, LineReader, Progress, encode
from ddp_manual.signals import Requests
from ddp_manual.worker import birth
from ddp_manual.worker.process_group import collectives_begun
from ddp_manual.worker.whereabouts import OWN_THREADS, whereabouts

LOOK_EVERY = 0.25
# While a checkpoint is being written and the agent waits for its end.
LOOK_WHILE_SAVING = 0.02
# Seconds, for what is being sent when the channel is closed.
SENT_WITHIN = 1.0

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """A process that a DataLoader forks would keep its parent's channel open after the parent's death."""
    for channel in list(_open):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)


class Reporter:
    """Speaks for one rank. Once the agent is gone it ends this process, since nobody would explain or end it any more.

    Args:
        channel: the worker's end of a socket pair.
        first: what is said before anything else.
        own_process: whether the process is ours; else it is a person's script.
    """

    def __init__(self, channel: socket.socket, first: Mapping[str, Any], *, own_process: bool) -> None:
        self.progress = Progress()
        self.requests = Requests()
        self.thread = threading.get_ident()
        """Of the thread that trains."""
        self.unwinding = False
        """Whether the thread that trains is on its way out of a failure, and closes what is open."""
        self.over = False
        """Whether this rank has left the run: the agent may go."""
        self.on_exit: Callable[[int], None] = lambda status: None
        """Called in the reporter's thread with the exit code, where the agent asks for the end of a process that is not
        its own."""
        self._channel = channel
        self.own_process = own_process
        _open.add(channel)
        self._reader = LineReader(LONGEST_ANSWER)
        self._turn = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._said: dict[str, dict[str, Any]] = {}
        self._agent_spoke = threading.Event()
        self._ending = False
        self._sent_beat: Beat | None = None
        self.send(first)
        self._thread = threading.Thread(target=self._run, name=f"{OWN_THREADS}reporter", daemon=True)
        self._thread.start()

    def send(self, message: Mapping[str, Any]) -> None:
        """From any thread, and from a signal's handler: whoever is sending already then sends this too."""
        self._unsent.append(encode(message))
        while self._unsent and self._turn.acquire(blocking=False):
            try:
                while self._unsent:
                    self._channel.sendall(self._unsent.popleft())
            except OSError:  # the agent is gone; the thread sees that too
                self._unsent.clear()
            finally:
                self._turn.release()

    def send_beat(self) -> None:
        """What this rank does now, if that has changed."""
        beat = Beat.of(self.progress, collectives_begun(), **whereabouts(self.thread)._asdict())
        self.send({"beat": vars(beat) if beat != self._sent_beat else None})
        self._sent_beat = beat

    @property
    def verdict(self) -> dict[str, Any] | None:
        """Why the run ends, once the agent has said so; only in a person's own script."""
        return self._said.get("verdict", {}).get("verdict")

    def wait(self, kind: str, timeout: float = math.inf) -> dict[str, Any]:
        """The message of a kind that comes once: start, place, close, over or verdict.

        Raises:
            TimeoutError: none has come within ``timeout`` seconds. DdpManualError: the run has ended meanwhile.
        """
        deadline = time.monotonic() + timeout
        while kind not in self._said or (self.verdict is not None and kind != "verdict"):
            if self.verdict is not None:
                raise from_dict(self.verdict, int(self.verdict["exit_code"]))
            if time.monotonic() >= deadline:
                raise TimeoutError(f"the agent did not say {kind}")
            self._agent_spoke.wait(0.2)  # Python hears of no signal in a long wait
            self._agent_spoke.clear()
        return self._said[kind]

    def close(self) -> None:
        self.over = True
        if self._turn.acquire(timeout=SENT_WITHIN):  # the thread may be sending
            self._turn.release()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._channel.close()

    def _run(self) -> None:
        """The thread."""
        next_beat = 0.0
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel, selectors.EVENT_READ)
            while True:
                if selector.select(LOOK_WHILE_SAVING if self._ending else LOOK_EVERY) and not self._read():
                    break
                if self._ending and not self._busy:
                    self._ending = False
                    self.send({"may_end": True})
                now = time.monotonic()
                if now >= next_beat:
                    next_beat = now + LOOK_EVERY
                    self.send_beat()
        if not self.over:
            os.kill(os.getpid(), signal.SIGKILL)

    @property
    def _busy(self) -> bool:
        """Whether it would lose something that is ended now."""
        return self.progress.saving or self.unwinding

    def _read(self) -> bool:
        """What the agent says; False: it is gone."""
        try:
            data = self._channel.recv(1 << 16)
        except OSError:
            return False
        for message in self._reader.feed(data):
            self._take(message)
        return bool(data)

    def _fall_silent(self) -> None:
        """What this process has said so far is written out; then its agent has the last word."""
        terminal.LOGGER.disabled = True
        if self.own_process:  # also before what the user's own threads, or torch, would still write
            birth.flush_briefly()
            with open(os.devnull, "wb") as nowhere:
                os.dup2(nowhere.fileno(), 1)
                os.dup2(nowhere.fileno(), 2)

    def _take(self, message: dict[str, Any]) -> None:
        self._said.update(dict.fromkeys(message, message))
        self._agent_spoke.set()
        if "stop" in message:
            self.requests.request_stop(int(message["stop"]))
        if "save" in message:
            self.requests.request_save()
        if "quiet" in message:
            self._fall_silent()
            self.send({"quiet": True})
        if "end" in message:
            self._ending = self._busy
            self.send({"may_end": not self._ending})
        if "exit" in message:
            self.on_exit(int(message["exit"]))
