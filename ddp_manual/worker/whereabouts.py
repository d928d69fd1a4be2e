"""Where a thread of the program is: on which line of the user, and whether it waits in a collective or a debugger."""

from __future__ import annotations

import dis
import functools
import itertools
import os
import sys
import threading
import traceback
from collections.abc import Sequence
from datetime import timedelta
from types import CodeType, FrameType
from typing import NamedTuple

import torch

from ddp_manual.wording import counted
from ddp_manual.worker.private_torch import CODE_OF_COLLECTIVES, innermost_frames

# What the place of a thread is read from: a wait in a collective, a debugger's prompt (pdb's, IPython's or that of
# code.interact()), and files of libraries, which are not the user's program.
_TORCH = os.path.join(os.path.dirname(torch.__file__), "")
_IN_TORCH = tuple(os.path.join(_TORCH, *parts, "") for parts in (("distributed",), ("autograd",), ("nn", "parallel")))
# The functions that open a group; and methods in C that wait for the device: a collective of NCCL returns at once, and
# such a method waits for its result. The method ``wait`` is that of a collective begun with async_op.
_OPEN = ("init_process_group", "new_group", "split_group")
_SYNCS = ("item", "tolist", "cpu", "to", "synchronize", "_cuda_synchronize")
_PROMPTS = {("cmd.py", "cmdloop"), ("debugger.py", "cmdloop"), ("code.py", "interact"), ("embed.py", "interact")}
# Where Python waits for the end of a thread: ``Thread.join``, before 3.13 a function of it.
_JOINS = {("threading.py", "join"), ("threading.py", "_wait_for_tstate_lock")}
_DEBUGGERS = ("cmd.py", "pdb.py", "bdb.py", "debugger.py", "code.py", "embed.py")
_INSTALLED = tuple(f"{os.sep}{name}{os.sep}" for name in ("site-packages", "dist-packages"))
_PACKAGE = os.path.dirname(os.path.dirname(__file__))
_OWN = tuple(os.path.join(_PACKAGE, room, "") for room in ("launch", "worker"))  # code of ours that runs a program
# Functions that write a checkpoint, and where they are.
_SAVE = ("save", "save_file")
_SAVING = (os.path.join("torch", "serialization.py"), os.path.join("safetensors", "torch.py"))
_PYTHON = os.path.join(os.path.dirname(os.__file__), "")


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
    timeout: float | None = None
    """The seconds after which torch ends its wait for other ranks there, if that is known."""


def whereabouts(thread: int) -> Whereabouts:
    """Return where a thread is, by its ``threading.get_ident()``, also while a loop or a collective never ends.

    While it waits for the end of another thread that is in a collective, that one counts in its place.
    """
    frames = _frames(thread)
    if frames and (_file(frames[0]), frames[0].f_code.co_name) in _JOINS:
        joined = frames[0].f_locals.get("self")
        if isinstance(joined, threading.Thread) and (instead := _whereabouts(_frames(joined.ident or 0))).inside:
            return instead
    return _whereabouts(frames)


def _frames(thread: int) -> list[FrameType]:
    innermost = innermost_frames().get(thread)
    return [frame for frame, _ in traceback.walk_stack(innermost)] if innermost is not None else []


def _whereabouts(frames: Sequence[FrameType]) -> Whereabouts:
    if not frames:
        return Whereabouts()
    for depth, frame in enumerate(frames):
        if (_file(frame), frame.f_code.co_name) in _PROMPTS:
            below = itertools.dropwhile(lambda frame: _file(frame) in _DEBUGGERS, frames[depth:])
            return Whereabouts(place=_own_line([*below] or frames[-1:]), debugging=True)
    in_torch = frames[0].f_code.co_filename.startswith(_IN_TORCH)
    called = _calls(frames[0].f_code).get(frames[0].f_lasti)
    of_collectives = [frame for frame in frames if frame.f_code.co_filename == CODE_OF_COLLECTIVES]
    opening = any(frame.f_code.co_name in _OPEN for frame in of_collectives)
    given = (frame.f_locals.get("timeout") for frame in (of_collectives if opening else ()))
    timeout = next((time for time in given if isinstance(time, timedelta)), None)
    return Whereabouts(
        inside=in_torch or called == "wait",
        syncs=called in _SYNCS,
        place=_own_line(frames),
        opening=opening,
        timeout=timeout.total_seconds() if timeout is not None else None,
    )


def _own_line(frames: Sequence[FrameType]) -> str:
    """Return the line of the innermost frame that is not a library's, otherwise of the outermost frame; "" if that is
    where the program is started."""
    own = next((frame for frame in frames if not is_library(frame.f_code.co_filename)), frames[-1])
    starts_it = own.f_code.co_filename.startswith(("<frozen ", *_OWN))
    return "" if starts_it else f"{_file(own)}:{own.f_lineno} in {own.f_code.co_name}"


def raised_at(error: BaseException) -> str:
    """Return the line of the user's program that raised ``error``, as in ``Whereabouts.place``; "" without one."""
    called = reversed(traceback.extract_tb(error.__traceback__))
    own = next((one for one in called if not is_library(one.filename)), None)
    return f"{os.path.basename(own.filename)}:{own.lineno} in {own.name}" if own is not None else ""


def writes_a_file() -> bool:
    """Return whether a thread of the program is in ``torch.save``, or in safetensors' ``save_file``."""
    frames = (frame for innermost in innermost_frames().values() for frame, _ in traceback.walk_stack(innermost))
    return any(frame.f_code.co_name in _SAVE and frame.f_code.co_filename.endswith(_SAVING) for frame in frames)


def own_traceback(error: BaseException, *, whole: bool = False) -> str:
    """Return the traceback of an exception, and of those that it was raised from, with only the frames of the user's
    program and, but for an exit's, the innermost one. Return all frames if none is the user's, or with ``whole``."""
    shown = traceback.TracebackException.from_exception(error, compact=True)
    left_out, pending = 0, [shown]
    while pending:
        one = pending.pop()
        pending += filter(None, (one.__cause__, one.__context__))
        is_own = [not is_library(frame.filename) for frame in one.stack]
        if any(is_own) and not whole:
            is_own[-1] |= one is not shown or not isinstance(
                error, SystemExit
            )  # sys.exit says nothing of why it is called
            kept = [*itertools.compress(one.stack, is_own)]
            left_out += len(one.stack) - len(kept)
            one.stack = traceback.StackSummary.from_list(kept)
    text = "".join(shown.format()).rstrip()
    return f"{text}\n({counted(left_out, 'frame')} of libraries left out: --full_traceback)" if left_out else text


def _file(frame: FrameType) -> str:
    return os.path.basename(frame.f_code.co_filename)


@functools.lru_cache(maxsize=256)
def _calls(code: CodeType) -> dict[int, str]:
    """Return a mapping: offset of a call -> name of its method; empty for code that calls no method that may wait."""
    if not {"wait", *_SYNCS}.intersection(code.co_names):
        return {}
    calls: dict[int, str] = {}
    loaded: dict[tuple[int | None, ...], str] = {}
    for step in dis.get_instructions(code):
        # Loading ``x.to`` and calling it have the same start in the file; the call's arguments start elsewhere.
        # Before Python 3.11 there are no positions: then the attribute that was loaded last counts.
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
