"""What a worker tells its agent over a real channel."""

from __future__ import annotations

import socket

import pytest
import torch

from ddp_manual.wire import LineReader, encode_local, read_local
from ddp_manual.worker import reporter as reporter_module
from ddp_manual.worker.reporter import Reporter, Whereabouts


def test_the_first_message_comes_before_any_heartbeat() -> None:
    """Even if the agent has spoken already, which wakes the thread that sends heartbeats."""
    channel, agents = socket.socketpair()
    agents.sendall(encode_local({"start": {}}))
    reporter = Reporter(channel, {"born": 1}, own_process=False)
    reader, said = LineReader(read_local), []
    while len(said) < 2:
        said += reader.feed(agents.recv(1 << 16))
    assert [list(message) for message in said[:2]] == [["born"], ["beat", "blocked"]]
    assert reporter.wait("start", 5)["start"] == {}
    reporter.close()
    agents.close()


@pytest.mark.parametrize(
    ("unfinished", "syncs", "gpu", "inside"),
    [
        (1, False, True, True),
        (0, True, True, False),
        (0, False, True, False),
        (None, True, True, True),
        (None, False, True, False),
        (None, True, False, False),  # such as the to() of a tensor of the CPU
    ],
)
def test_a_rank_whose_gpu_has_collectives_to_complete_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, unfinished: int | None, syncs: bool, gpu: bool, inside: bool
) -> None:
    """What torch says of NCCL is a fake, for want of a GPU. Where torch says nothing, the line of the thread counts."""
    monkeypatch.setattr(reporter_module, "collectives_begun", lambda: {"0": 7})
    monkeypatch.setattr(reporter_module, "collectives_unfinished", lambda: unfinished)
    monkeypatch.setattr(reporter_module, "whereabouts", lambda thread: Whereabouts(syncs=syncs))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: gpu)
    channel, agents = socket.socketpair()
    agents.settimeout(10)
    reporter = Reporter(channel, {"born": 1}, own_process=False)
    reader, beats = LineReader(read_local), []
    while len(beats) < 3:
        beats += [message["beat"] for message in reader.feed(agents.recv(1 << 16)) if "beat" in message]
    reporter.close()
    agents.close()
    last = [beat for beat in beats if beat is not None][-1]
    assert last["collectives"] == {"0": 7} and last.get("unfinished", 0) == (unfinished or 0)
    assert last.get("inside", False) is inside
