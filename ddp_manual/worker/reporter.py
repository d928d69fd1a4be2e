"""Reporter: tells the agent what the worker is doing, and takes the agent's messages, in a thread of its own.

While a C call holds the GIL this thread stands still, but the agent does not.
"""

from __future__ import annotations

import collections
import dis
import functools
import itertools
import logging
import math
import os
import select
import signal
import socket
import sys
import threading
import time
import traceback
import weakref
from collections.abc import Sequence
from contextlib import suppress
from types import CodeType, FrameType
from typing import NamedTuple, NoReturn, TypeVar

import torch

from ddp_manual import from_agent, from_worker, left_behind, terminal
from ddp_manual.ranks_and_runs import Beat
from ddp_manual.wire import LONGEST_ANSWER, LineReader, Unreadable, encode_local
from ddp_manual.wording import counted
from ddp_manual.worker.private_torch import (
    CODE_OF_COLLECTIVES,
    collectives_unfinished,
    innermost_frames,
    open_groups,
)
from ddp_manual.worker.stop_after_step import Stops

# Seconds.
LOOK_EVERY = 0.25
# While the agent waits for the end of a checkpoint.
LOOK_WHILE_SAVING = 0.02
# For a message that is being sent when the channel is closed.
SENT_WITHIN = 1.0
# For a terminal or a pipe that nobody may read.
FLUSH_WITHIN = 0.3

# What the place of a thread is read from: a wait in a collective, a debugger's prompt (pdb's, IPython's or that of
# code.interact()), and files of libraries, which are not the user's program.
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_IN_TORCH = tuple(os.path.join(_TORCH, *parts, "") for parts in (("distributed",), ("autograd",), ("nn", "parallel")))
# Methods in C that wait for the device: a collective of NCCL returns at once, and its result is waited for here. The
# method ``wait`` is that of a collective begun with async_op.
_OPEN = ("init_process_group", "new_group", "split_group")
_SYNCS = ("item", "tolist", "cpu", "to", "synchronize", "_cuda_synchronize")
_PROMPTS = {("cmd.py", "cmdloop"), ("debugger.py", "cmdloop"), ("code.py", "interact"), ("embed.py", "interact")}
_DEBUGGERS = ("cmd.py", "pdb.py", "bdb.py", "debugger.py", "code.py", "embed.py")
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OWN = tuple(os.path.join(_PACKAGE, room, "") for room in ("launch", "worker"))  # what is around a program
# Functions that write a checkpoint, and where they are.
_SAVE = ("save", "save_file")
_SAVING = (os.path.join("torch", "serialization.py"), os.path.join("safetensors", "torch.py"))
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")

M = TypeVar("M")

_open: weakref.WeakSet[socket.socket] = weakref.WeakSet()


def _close_in_child() -> None:
    """Close the channel in a fork, such as a DataLoader's: it would stay open after the parent's death."""
    for channel in list(_open):
        channel.close()


os.register_at_fork(after_in_child=_close_in_child)


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
        self.stops = Stops(self.send, lambda: self.wait(from_agent.StopAfter))
        self._channel = channel
        _open.add(channel)
        self._reader = LineReader(from_agent.read, LONGEST_ANSWER)
        self._turn = threading.Lock()
        self._unsent: collections.deque[bytes] = collections.deque()
        self._said: dict[type[object], from_agent.FromAgent] = {}
        self._agent_spoke = threading.Event()
        self._ending = False
        self._sent_beat: Beat | None = None
        self._next_beat = 0.0
        self.send(first)
        self._thread = threading.Thread(target=self._run, name="ddp_manual reporter", daemon=True)
        self._thread.start()

    def send(self, message: from_worker.FromWorker) -> None:
        """Send a message from any thread or signal handler; a thread that is sending already sends this one too."""
        self._unsent.append(encode_local(message))
        while self._unsent and self._turn.acquire(blocking=False):
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
        # Not while the rank begins others: some are unfinished at any time then, and torch's recorder is in use.
        unfinished = (
            collectives_unfinished() if self._sent_beat and groups.operations == self._sent_beat.operations else None
        )
        beat = self.progress.beat(
            collectives=groups.begun,
            operations=groups.operations,
            timeouts=groups.timeouts,
            unfinished=unfinished or 0,
            return_at_once=groups.return_at_once,
            # With gloo such a method waits for this rank's own GPU, or for nobody.
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

    def close(self) -> None:
        self.over = True
        if self._turn.acquire(timeout=SENT_WITHIN):  # the thread may be sending
            self._turn.release()
        with suppress(OSError):
            self._channel.shutdown(socket.SHUT_RDWR)
        self._thread.join(timeout=5)
        self._channel.close()

    def _run(self) -> None:
        spoken_to = select.poll()  # which has no descriptor that the program could close
        spoken_to.register(self._channel, select.POLLIN)
        while True:
            data: bytes | None = None
            if spoken_to.poll(1000 * (LOOK_WHILE_SAVING if self._ending else LOOK_EVERY)):
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
                    with suppress(Exception):  # others follow, and this thread ends the process if the agent is gone
                        self._take(message)
            except Unreadable:
                break
            with suppress(Exception):
                self._look()
        if not self.over:
            os.kill(os.getpid(), signal.SIGKILL)

    def _look(self) -> None:
        """Say what only time brings."""
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
            case from_agent.AskStep():
                self.stops.ask()
            case from_agent.Save():
                self.save_is_asked = True
            case from_agent.BeQuiet():  # the agent has the last word
                terminal.LOGGER.disabled = True
                self.send(from_worker.IsQuiet())
            case from_agent.BeforeTheEnd():
                self._ending = True
                self.send(from_worker.IsSaving())  # until the thread has looked what would be lost
            case from_agent.Exit() if self.verdict is not None:
                end_process(self.verdict.words.exit_code)


class Whereabouts(NamedTuple):
    """Where a thread is in its Python code."""

    inside: bool = False
    """Whether it waits in a collective, or is in a backward pass of torch, which may contain one."""
    syncs: bool = False
    """Whether it is in a method that may wait for its GPU, and so for the collectives that are not completed."""
    place: str = ""
    """``file.py:12 in function`` of the innermost frame that is not a library's; "" without such a frame."""
    debugging: bool = False
    """Whether a debugger waits for input."""
    opening: bool = False
    """Whether it opens a process group."""


def whereabouts(thread: int) -> Whereabouts:
    """Return where a thread is, by its ``threading.get_ident()``, also while a loop or a collective never ends."""
    innermost = innermost_frames().get(thread)
    if innermost is None:
        return Whereabouts()
    frames = [frame for frame, _ in traceback.walk_stack(innermost)]
    for depth, frame in enumerate(frames):
        if (_file(frame), frame.f_code.co_name) in _PROMPTS:
            below = itertools.dropwhile(lambda frame: _file(frame) in _DEBUGGERS, frames[depth:])
            return Whereabouts(place=_own_line([*below] or frames[-1:]), debugging=True)
    in_torch = innermost.f_code.co_filename.startswith(_IN_TORCH)
    called = _calls(innermost.f_code).get(innermost.f_lasti)
    opening = any(f.f_code.co_name in _OPEN and f.f_code.co_filename == CODE_OF_COLLECTIVES for f in frames)
    return Whereabouts(in_torch or called == "wait", called in _SYNCS, _own_line(frames), opening=opening)


def _own_line(frames: Sequence[FrameType]) -> str:
    """Return the line of the innermost frame that is not a library's, otherwise of the outermost frame; "" if that is
    where the program is started."""
    own = next((frame for frame in frames if not is_library(frame.f_code.co_filename)), frames[-1])
    starts_it = own.f_code.co_filename.startswith(("<frozen ", *_OWN))
    return "" if starts_it else f"{_file(own)}:{own.f_lineno} in {own.f_code.co_name}"


def raised_at(error: BaseException) -> str:
    """Return the line of the user's program that raised it, as in ``whereabouts``."""
    called = reversed(traceback.extract_tb(error.__traceback__))
    own = next((one for one in called if not is_library(one.filename)), None)
    return f"{os.path.basename(own.filename)}:{own.lineno} in {own.name}" if own is not None else ""


def writes_a_file() -> bool:
    """Return whether a thread of the program is in ``torch.save``, or in safetensors' ``save_file``."""
    frames = (frame for innermost in innermost_frames().values() for frame, _ in traceback.walk_stack(innermost))
    return any(frame.f_code.co_name in _SAVE and frame.f_code.co_filename.endswith(_SAVING) for frame in frames)


def own_traceback(error: BaseException, *, whole: bool = False) -> str:
    """Return the traceback of an exception, and of what it was raised from, with the frames of the user's program and
    the innermost one; without such frames, or the ``whole`` one, all of it."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    left_out, pending = 0, [shown]
    while pending:
        one = pending.pop()
        pending += filter(None, (one.__cause__, one.__context__))
        is_own = [not is_library(frame.filename) for frame in one.stack]
        if any(is_own) and not whole:
            kept = [*itertools.compress(one.stack[:-1], is_own), one.stack[-1]]
            left_out += len(one.stack) - len(kept)
            one.stack = traceback.StackSummary.from_list(kept)
    text = "".join(shown.format()).rstrip()
    return f"{text}\n({counted(left_out, 'frame')} of libraries left out: --full_traceback)" if left_out else text


def _file(frame: FrameType) -> str:
    return os.path.basename(frame.f_code.co_filename)


@functools.lru_cache(maxsize=256)
def _calls(code: CodeType) -> dict[int, str]:
    """Return offset of a call -> the method that is called; empty for code without a method that may wait."""
    if not {"wait", *_SYNCS}.intersection(code.co_names):
        return {}
    calls: dict[int, str] = {}
    loaded: dict[tuple[int | None, ...], str] = {}
    for step in dis.get_instructions(code):
        # ``x.to`` and the call of it begin at one place in the file, and what the call is given begins elsewhere.
        # Before Python 3.11 there are no places: then what was loaded last counts.
        place = getattr(step, "positions", None)
        begins = (place.lineno, place.col_offset) if place is not None else ()
        if step.opname.startswith(("LOAD_ATTR", "LOAD_METHOD")):
            loaded[begins] = step.argval
        elif step.opname.startswith(("CALL", "PRECALL")):
            calls[step.offset] = loaded.get(begins, "") if begins else loaded.pop(begins, "")
    return calls


def is_library(file: str) -> bool:
    """Return whether a file is a library's, Python's or this package's own, and not the user's program, which may also
    be a module of a library that python -m or its command runs."""
    is_main = file == getattr(sys.modules.get("__main__"), "__file__", None)
    return file.startswith(_OWN) or (not is_main and _is_installed(file))


@functools.lru_cache(maxsize=4096)
def _is_installed(file: str) -> bool:
    return any(part in file for part in _INSTALLED) or file.startswith(("<frozen ", _TORCH, _PYTHON))


def end_process(status: int) -> NoReturn:
    """End the process from any thread, without the interpreter's teardown: the main thread may be blocked for good.

    What is still in buffers is written, but a reader that is gone is not waited for.
    """

    def flush() -> None:
        logging.shutdown()
        sys.stdout.flush()
        sys.stderr.flush()

    flushing = threading.Thread(target=flush, daemon=True)
    flushing.start()
    flushing.join(FLUSH_WITHIN)
    left_behind.end_daemons()
    os._exit(status)
