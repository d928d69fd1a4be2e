"""Ports for the tests: no two test processes of this machine are given the same one."""

from __future__ import annotations

import fcntl
import functools
import os
import random
import socket
import tempfile
from contextlib import suppress
from pathlib import Path

# Which ports below 30,000 the test processes of this machine have been given: each is a locked byte of this file.
GIVEN_PORTS = Path(tempfile.gettempdir(), f"ddp-manual-test-ports-{os.getuid()}")


@functools.cache
def _given_ports() -> tuple[int, set[int]]:
    """Open the file, whose locks hold for other processes only and end with this one; and remember its own ports."""
    return os.open(GIVEN_PORTS, os.O_RDWR | os.O_CREAT, 0o600), set()


def free_port() -> int:
    """Return a port that is free on loopback, below the ports that the kernel gives to outgoing connections. No other
    test is given it: until a rank listens there, seconds may pass, in which it looks free."""
    file, own = _given_ports()
    while True:
        # Not the module's generator, which a test may seed: all test processes would draw the same port.
        candidate = random.SystemRandom().randrange(20_000, 30_000)
        if candidate in own:
            continue
        with suppress(OSError), socket.socket() as probe:
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, candidate)
            own.add(candidate)
            probe.bind(("127.0.0.1", candidate))
            return candidate
