"""When a fact could be known and when it was told, seen from outside.

The clock starts when the rank concerned is seen to connect to rank 0's port, or at a line that it prints before; that
leaves out its start-up, most of which is ``import torch``. Where neither can be had, the test says from when it counts.
"""

from __future__ import annotations

import time

import psutil
import pytest

from tests.conftest import RankProcess


def connected(process: RankProcess, port: int, timeout: float = 60) -> float:
    """The last moment at which a process was seen without a connection to rank 0's port."""
    watched = psutil.Process(process.process.pid)
    looked = process.started
    while time.monotonic() < process.started + timeout:
        looking = time.monotonic()
        try:
            connections = watched.net_connections("tcp")
        except psutil.Error:
            return looked
        if process.process.poll() is not None or any(one.raddr and one.raddr.port == port for one in connections):
            return looked
        looked = looking
        time.sleep(0.01)
    pytest.fail(f"{process.arguments} did not connect to port {port} within {timeout} s but said:\n{process.err}")


def said(process: RankProcess, text: str) -> float:
    """The moment at which a process has said ``text``."""
    process.wait_for(text)
    return time.monotonic()


def left(process: RankProcess, code: int, timeout: float = 60) -> float:
    """The moment at which a process has ended; it must be with this exit code."""
    assert process.wait(timeout) == code, process.err
    return time.monotonic()
