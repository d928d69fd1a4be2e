"""The Python stacks that a worker's faulthandler writes, and how errors and ``status --stacks`` show them."""

from __future__ import annotations

import asyncio
import os
import re
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from ddp_manual import signal_handlers
from ddp_manual.deadline import wait_until
from ddp_manual.wording import counted

# Seconds. faulthandler takes a millisecond; a stack is complete when nothing more has come for ENDS_AFTER.
WRITTEN_WITHIN = 1.0
ENDS_AFTER = 0.1
LONGEST = 1 << 16
# Frames that are not the user's program: those of installed packages, of Python, and of what starts the program.
_FOLDERS = (Path(__file__).parent.parent / "worker", Path(os.__file__).parent)
_LIBRARY = re.compile(
    r'  File "(?:<frozen |[^"]*/(?:site|dist)-packages/|'
    + "|".join(re.escape(f"{folder}/") for folder in _FOLDERS)
    + ")"
)
_STARTS_IT = re.compile(rf'  File "(?:<frozen runpy>|{re.escape(str(_FOLDERS[0]))}/(?:__main__|main|script)\.py)"')
# How many innermost frames are shown even if they are a library's: they say what the thread does or waits for.
_INNERMOST = 3
# What faulthandler writes after the 100 innermost frames of a thread.
_CUT = "  ..."


class WorkerStack:
    """What a worker's faulthandler writes, because it was asked to or because the worker crashes.

    Args:
        faults: the reading end of the pipe that it writes to.
    """

    def __init__(self, faults: int) -> None:
        self._faults, self._written = faults, ""

    def open(self) -> None:
        os.set_blocking(self._faults, False)
        asyncio.get_running_loop().add_reader(self._faults, self.read)

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._faults)
        os.close(self._faults)

    def text(self, place: str) -> str:
        """Return what was written last; for ``place`` see ``readable_stack``."""
        return readable_stack(self._written, place)

    async def ask(self, send: Callable[[int], None], place: str) -> str:
        """Have the worker write its stacks, by a signal that ``send`` sends, and return them; "" if it writes none."""
        self._written = before = ""
        send(signal_handlers.STACKS)
        await wait_until(lambda: bool(self._written), WRITTEN_WITHIN)
        while self._written != before:
            before = self._written
            await asyncio.sleep(ENDS_AFTER)
        self._written = ""
        return readable_stack(before, place)

    def read(self) -> None:
        """Read what is in the pipe."""
        with suppress(OSError):  # such as BlockingIOError: that was all for now
            while piece := os.read(self._faults, 65536):
                self._written = (self._written + piece.decode(errors="replace"))[-LONGEST:]
            asyncio.get_running_loop().remove_reader(self._faults)


def readable_stack(text: str, place: str = "") -> str:
    """Return what faulthandler has written, the main thread first, without this package's own threads, and of the
    frames of libraries only the innermost ones.

    Args:
        place: the program's innermost line, from its last heartbeat: faulthandler writes only 100 frames of a thread,
            which may all be those of libraries.
    """
    text = re.sub(r"(?m)^Extension modules: .*\n?", "", text)
    threads = re.split(r"(?m)^(?=(?:Current thread|Thread) 0x)", text)
    own = os.path.join("ddp_manual", "worker", "reporter.py")
    shown = [_folded(thread.strip()) for thread in threads[1:] if own not in thread]
    if shown and place and threads[-1].rstrip().endswith(f"\n{_CUT}") and len(shown[-1].splitlines()) <= _INNERMOST + 3:
        shown[-1] += f"\n  (the program's own line, below them: {place})"
    # faulthandler begins with the youngest thread; the main one is the oldest.
    return "\n".join(filter(None, [threads[0].strip(), *reversed(shown)]))


def _folded(thread: str) -> str:
    """Return the stack of a thread without the frames of libraries below the innermost ones."""
    title, *frames = thread.splitlines()
    frames = [frame for place, frame in enumerate(frames) if place == 0 or not _STARTS_IT.match(frame)]
    kept = [frame for place, frame in enumerate(frames) if place < _INNERMOST or not _LIBRARY.match(frame)]
    left_out = len(frames) - len(kept)
    note = [f"  ({counted(left_out, 'frame')} of libraries left out)"] * bool(left_out)
    return "\n".join([title, *kept, *note])
