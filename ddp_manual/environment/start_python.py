"""How a process of this package starts another Python, or becomes one."""

from __future__ import annotations

import getopt
import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn

from ddp_manual import orphans, signal_handlers

# The options of ``python``, in getopt's notation.
PYTHON_OPTIONS = "bBc:dEhiIm:OPqRsSuvVW:xX:?"


def start_python(
    program: Path, descriptors: Sequence[int], who: Sequence[str] = (), *, is_worker: bool = True, **options: Any
) -> subprocess.Popen[bytes]:
    """Start a program of this package, which inherits ``descriptors``. Its arguments are their numbers, our pid and
    ``who``.

    It starts with signals blocked until it can handle them.

    Args:
        is_worker: whether the user's program will run in it. It then gets the flags of this process's Python, and the
            descriptors that this process has inherited.
    """
    flags, inherited = (python_flags(), _inherited_descriptors()) if is_worker else ([], [])
    command = [sys.executable, *flags, str(program), *map(str, descriptors), str(os.getpid()), *who]
    # torch's C++ log is quiet, since our own log lines are clearer; MARK is how we know what a worker has started.
    environment = {"TORCH_CPP_LOG_LEVEL": "ERROR", **os.environ, orphans.MARK: str(os.getpid())}
    with signal_handlers.block_in_children():
        return subprocess.Popen(command, pass_fds=[*descriptors, *inherited], env=environment, **options)


def python_flags() -> list[str]:
    """Return the flags of this Python that a program of the user's is to have too: -E, -O, -s, -u, -W and -X. -I counts
    as -E and -s; not as -P too, since the program's own folder comes first in ``sys.path`` whatever starts it."""
    flags: list[str] = []
    with suppress(getopt.GetoptError):
        for flag, value in getopt.getopt(sys.orig_argv[1:], PYTHON_OPTIONS)[0]:
            if flag in ("-c", "-m"):  # what follows is the program's
                break
            flags += ["-E", "-s"] if flag == "-I" else [flag + value] if flag[1] in "EOsuWX" else []
    return flags


def _inherited_descriptors() -> list[int]:
    """Return the descriptors that this process has inherited besides its three streams, such as from a shell with
    ``<(command)``: Python's own descriptors are not inheritable."""
    found = []
    with suppress(OSError):
        for number in map(int, os.listdir("/dev/fd")):
            with suppress(OSError):  # the descriptor of the listing itself
                if number > 2 and os.get_inheritable(number):
                    found.append(number)
    return found


def become_new_python(descriptors: Sequence[int], parent: int, ignored: Iterable[int]) -> NoReturn:
    """Exec this program again, as ``start_python`` has started it, but with other descriptors. The pid stays the same
    for whoever watches this process.

    Args:
        descriptors: those that are inherited.
        ignored: what ``signal_handlers.ignored_at_start`` has returned.
    """
    who = [word for word in sys.argv[1:] if "=" in word]
    with signal_handlers.block_in_children():
        signal_handlers.handle_as_any_program(ignored)
        os.execv(
            sys.executable, [sys.executable, *python_flags(), sys.argv[0], *map(str, descriptors), str(parent), *who]
        )
