"""What proc(5) says of a process: its state, its end and its signals."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

from ddp_manual.errors import signal_name


def process_stat(pid: int) -> list[str]:
    """Return the fields of /proc/<pid>/stat from the state on, see proc(5); [] if there is no such process."""
    try:
        with open(f"/proc/{pid}/stat", encoding="ascii", errors="replace") as file:
            return file.read().rpartition(")")[2].split()
    except OSError:
        return []


def command_line(pid: int) -> bytes:
    """Return the arguments of a process; b"" if there is no such process, or it has ended."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    return b""


def stopped_by(pid: int) -> str:
    """Return the name of the signal that has stopped a process; "" while it runs."""
    if process_stat(pid)[:1] != ["T"]:
        return ""
    with suppress(OSError):
        if any(process_stat(int(thread))[:1] != ["T"] for thread in os.listdir(f"/proc/{pid}/task")):
            return ""  # not all of its threads have stopped yet
    fields = process_stat(pid)
    if fields[:1] != ["T"]:
        return ""
    # The kernel forgets the number once a shell knows of the stop.
    return signal_name(int(fields[-1])) if int(fields[-1]) else "a stop signal (such as Ctrl-Z)"


def exit_status(pid: int) -> int | None:
    """Return the exit code, or minus the signal's number, of a process that has ended and was not waited for yet."""
    fields = process_stat(pid)
    return os.waitstatus_to_exitcode(int(fields[-1])) if fields and fields[0] == "Z" else None


def is_caught(pid: int, number: int) -> bool:
    """Return whether a process has a handler for this signal; True where the kernel does not say."""
    try:
        return number in signals_of(pid, "SigCgt")
    except (OSError, ValueError, IndexError):
        return True


def signals_of(pid: int, field: str) -> set[int]:
    """Return the signals in a field of /proc/<pid>/status, see proc(5)."""
    with open(f"/proc/{pid}/status", errors="replace") as file:
        mask = int(file.read().partition(f"{field}:")[2].split()[0], 16)
    return {number for number in range(1, 65) if mask >> (number - 1) & 1}
