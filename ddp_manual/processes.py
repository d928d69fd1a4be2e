"""How one process of a rank starts another."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ddp_manual import launchers, signals


def start_python(
    program: Path, descriptors: Sequence[int], who: Sequence[str] = (), **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program of this package: its arguments are these descriptors, which it inherits, the process that has
    started it, and ``who``.

    It is to hear of no signal before it can take one on: what comes until then is held back.
    """
    command = [sys.executable, str(program), *map(str, descriptors), str(os.getpid()), *who]
    with signals.held_back():
        return subprocess.Popen(command, pass_fds=descriptors, env=launchers.for_worker(), **options)
