"""The Python stacks that faulthandler writes of a worker, as errors and ``status --stacks`` show them."""

from __future__ import annotations

import os
import re
from pathlib import Path

from ddp_manual.terminal import counted

# Frames that are not the user's program: those of installed packages, of Python, and of what starts the program.
_FOLDERS = (Path(__file__).parent.parent / "worker", Path(os.__file__).parent)
_LIBRARY = re.compile(
    r'  File "(?:<frozen |[^"]*/(?:site|dist)-packages/|'
    + "|".join(re.escape(f"{folder}/") for folder in _FOLDERS)
    + ")"
)
_STARTS_IT = re.compile(rf'  File "{re.escape(str(_FOLDERS[0]))}/(?:__main__|main|script)\.py"')
# Innermost frames that are shown even of a library: they say what the thread does, or waits for.
_INNERMOST = 3
# What faulthandler writes after the 100 innermost frames of a thread.
_CUT = "  ..."


def readable_stack(text: str, place: str = "") -> str:
    """Return what faulthandler has written, without this package's own threads, the main thread first; of libraries
    only the innermost frames.

    Args:
        place: the program's innermost line, as its heartbeat said it: below 100 frames of libraries faulthandler writes
            none of the program's.
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
