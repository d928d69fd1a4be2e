"""What a worker tells its agent over a real channel."""

from __future__ import annotations

import socket

from ddp_manual.messages import LineReader, encode
from ddp_manual.worker.reporter import Reporter


def test_the_first_message_comes_before_any_heartbeat() -> None:
    """Even if the agent has spoken already, which wakes the thread that sends heartbeats."""
    channel, agents = socket.socketpair()
    agents.sendall(encode({"start": {}}))
    reporter = Reporter(channel, {"born": 1}, own_process=False)
    reader, said = LineReader(), []
    while len(said) < 2:
        said += reader.feed(agents.recv(1 << 16))
    assert [list(message) for message in said[:2]] == [["born"], ["beat"]]
    assert reporter.wait("start", 5)["start"] == {}
    reporter.close()
    agents.close()
