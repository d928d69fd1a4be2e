"""Where a process is in its Python code, read from another thread: also while a loop or a collective never ends."""

from __future__ import annotations

import dis
import functools
import os
import sys
import threading
import traceback
from types import CodeType, FrameType

LONGEST = 20_000
# This package's own threads, which wait for messages all the time.
OWN_THREADS = "ddp_manual "
_PARTS = [os.path.join("torch", *parts, "") for parts in (("distributed",), ("autograd",), ("nn", "parallel"))]
_LIBRARIES = (os.path.join("torch", ""), os.path.join("torchvision", ""), "threading.py", "contextlib.py")


def whereabouts(thread: int) -> tuple[bool, str]:
    """Whether a thread waits in a collective, or is inside a backward pass of torch, and the line of the program.

    Args:
        thread: its ``threading.get_ident()``.

    Returns:
        inside, and ``file.py:12 in function`` of the innermost frame that is not a library's; "" if there is none.
    """
    frame = sys._current_frames().get(thread)
    if frame is None:
        return False, ""
    inside = any(part in frame.f_code.co_filename for part in _PARTS) or _waits(frame.f_code, frame.f_lasti)
    while frame.f_back is not None and _is_library(frame):
        frame = frame.f_back
    return inside, _line(frame, frame.f_lineno)


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


def stacks() -> str:
    """The Python stack of every thread but this package's own, the main thread's first."""
    frames = sys._current_frames()
    main = threading.main_thread()
    threads = sorted(threading.enumerate(), key=lambda thread: thread is not main)
    parts = []
    for thread in threads:
        frame = frames.get(thread.ident or 0)
        if frame is not None and not thread.name.startswith(OWN_THREADS):
            parts.append(f"thread {thread.name}, most recent call last:\n" + "".join(traceback.format_stack(frame)))
    return _shortened("".join(parts).rstrip())


def _shortened(text: str) -> str:
    """The innermost calls are at the end."""
    return text if len(text) <= LONGEST else "...\n" + text[-LONGEST:]
