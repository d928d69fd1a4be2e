"""Where a process is in its Python code, read from another thread: also while a loop or a collective never ends."""

from __future__ import annotations

import dis
import functools
import os
import sys
import traceback
from types import CodeType, FrameType
from typing import NamedTuple

# This package's own threads, which wait for messages all the time.
OWN_THREADS = "ddp_manual "
_PARTS = [os.path.join("torch", *parts, "") for parts in (("distributed",), ("autograd",), ("nn", "parallel"))]
_DEBUGGERS = ("cmd.py", "pdb.py", "bdb.py", "debugger.py", "code.py", "embed.py")
_LIBRARIES = (os.path.join("torch", ""), os.path.join("torchvision", ""), "threading.py", "contextlib.py")


# A person sits at a prompt: pdb's, IPython's, or that of code.interact().
_PROMPTS = {("cmd.py", "cmdloop"), ("debugger.py", "cmdloop"), ("code.py", "interact"), ("embed.py", "interact")}


class Whereabouts(NamedTuple):
    """Where a thread is.

    ``inside``: it waits in a collective, or is in a backward pass of torch, which may hold one. ``place``:
    ``file.py:12 in function`` of the innermost frame that is not a library's; "" if there is none. ``debugging``: it
    waits for a person in a debugger.
    """

    inside: bool = False
    place: str = ""
    debugging: bool = False


def whereabouts(thread: int) -> Whereabouts:
    """Where the thread is whose ``threading.get_ident()`` this is."""
    frame = sys._current_frames().get(thread)
    if frame is None:
        return Whereabouts()
    called: FrameType | None = frame
    while called is not None:
        name = (os.path.basename(called.f_code.co_filename), called.f_code.co_name)
        if name in _PROMPTS:
            return Whereabouts(place=_below_the_debugger(called), debugging=True)
        called = called.f_back
    inside = any(part in frame.f_code.co_filename for part in _PARTS) or _waits(frame.f_code, frame.f_lasti)
    return Whereabouts(inside, _own_line(frame))


def _below_the_debugger(frame: FrameType) -> str:
    while frame.f_back is not None and os.path.basename(frame.f_code.co_filename) in _DEBUGGERS:
        frame = frame.f_back
    return _own_line(frame)


def _own_line(frame: FrameType) -> str:
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return _line(frame, frame.f_lineno)


def raised_at(error: BaseException) -> str:
    """The line of the program that has raised it, as in ``whereabouts``."""
    own = [_line(*called) for called in traceback.walk_tb(error.__traceback__) if not _is_library(called[0])]
    return own[-1] if own else ""


def _line(frame: FrameType, number: int) -> str:
    return f"{os.path.basename(frame.f_code.co_filename)}:{number} in {frame.f_code.co_name}"


@functools.lru_cache(maxsize=64)
def _waits(code: CodeType, instruction: int) -> bool:
    """Whether a method ``wait`` is called there: if it is no Python, that of a collective begun with async_op."""
    if "wait" not in code.co_names:
        return False
    called = ""
    for one in dis.get_instructions(code):
        if one.offset >= instruction:
            break
        if one.opname.startswith(("LOAD_ATTR", "LOAD_METHOD", "CALL")):
            called = "" if one.opname.startswith("CALL") else one.argval
    return called == "wait"


def _is_library(frame: FrameType) -> bool:
    name = frame.f_code.co_filename
    return "site-packages" in name or any(part in name for part in _LIBRARIES)
