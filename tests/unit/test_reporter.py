"""What a worker tells its agent over a real channel."""

from __future__ import annotations

import os
import select
import signal
import socket
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from ddp_manual import from_agent, from_worker
from ddp_manual.errors import Stopped
from ddp_manual.ranks_and_runs import LastWords
from ddp_manual.wire import LineReader, encode_local
from ddp_manual.worker import reporter as reporter_module
from ddp_manual.worker.private_torch import OpenGroups
from ddp_manual.worker.reporter import Reporter
from ddp_manual.worker.whereabouts import Whereabouts


def first_messages(agents: socket.socket, at_least: int) -> list[from_worker.FromWorker]:
    agents.settimeout(10)
    reader = LineReader(from_worker.read)
    said: list[from_worker.FromWorker] = []
    while len(said) < at_least:
        said += reader.feed(agents.recv(1 << 16))
    return said


def test_the_first_message_comes_before_any_heartbeat() -> None:
    """Even if the agent has spoken already, which wakes the thread that sends heartbeats."""
    channel, agents = socket.socketpair()
    agents.sendall(encode_local(from_agent.Save()))
    reporter = Reporter(channel, from_worker.Born(1))
    assert [type(message) for message in first_messages(agents, 2)[:2]] == [from_worker.Born, from_worker.Doing]
    assert reporter.wait(from_agent.Save, 5) == from_agent.Save()
    reporter.close()
    agents.close()


def test_a_heartbeat_that_fails_is_not_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where torch raises: the thread also ends this process once the agent is gone."""
    fails = iter([True])
    monkeypatch.setattr(
        reporter_module, "open_groups", lambda: OpenGroups({}, {}, 1 // 0 if next(fails, 0) else 0, False)
    )
    channel, agents = socket.socketpair()
    reporter = Reporter(channel, from_worker.Born(1))
    assert type(first_messages(agents, 2)[1]) is from_worker.Doing
    reporter.close()
    agents.close()


@pytest.mark.parametrize(
    ("unfinished", "syncs", "nccl", "inside"),
    [
        (1, False, True, True),
        (0, True, True, False),
        (None, True, True, True),
        (None, False, True, False),
        (None, True, False, False),  # such as the synchronize() of a script that uses gloo
    ],
)
def test_a_rank_whose_gpu_has_collectives_to_complete_waits_for_others(
    monkeypatch: pytest.MonkeyPatch, unfinished: int | None, syncs: bool, nccl: bool, inside: bool
) -> None:
    """What torch says of NCCL is a fake, for want of a GPU. Where torch says nothing, the line of the thread counts."""
    monkeypatch.setattr(reporter_module, "open_groups", lambda: OpenGroups({"0": 7}, {}, 7, nccl))
    monkeypatch.setattr(reporter_module, "collectives_unfinished", lambda: unfinished)
    monkeypatch.setattr(reporter_module, "whereabouts", lambda thread: Whereabouts(syncs=syncs))
    channel, agents = socket.socketpair()
    reporter = Reporter(channel, from_worker.Born(1))
    said = first_messages(agents, 4)
    reporter.close()
    agents.close()
    last = [message.beat for message in said if isinstance(message, from_worker.Doing) and message.beat][-1]
    assert last.collectives == {"0": 7} and last.unfinished == (unfinished or 0)
    assert last.inside is inside


def test_a_script_that_waits_for_anything_is_told_why_the_run_ends() -> None:
    channel, agents = socket.socketpair()
    reporter = Reporter(channel, from_worker.Born(1))
    with pytest.raises(TimeoutError):
        reporter.wait(from_agent.TakePlace, 0.01)
    agents.sendall(encode_local(from_agent.RunEnds(LastWords.of(Stopped(signal.SIGTERM)), own=False)))
    assert reporter.wait(from_agent.RunEnds, 5) == reporter.verdict
    with pytest.raises(Stopped) as ended:
        reporter.wait(from_agent.TakePlace, 5)
    assert ended.value.exit_code == 128 + signal.SIGTERM
    reporter.close()
    agents.close()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # of a process with threads, in newer Pythons
def test_the_last_message_is_sent_before_a_process_ends_even_if_another_thread_was_sending() -> None:
    """A worker ended by os._exit just after its last message; a heartbeat of its thread was on its way, the message
    stayed behind it, and a rank that had done all its work was taken for gone without a word."""
    channel, agents = socket.socketpair()
    reporter = Reporter(channel, from_worker.Born(1))
    reporter.over = True  # so that the end of the channel does not end this process
    with ThreadPoolExecutor() as threads:
        is_long = threads.submit(reporter.send, from_worker.NotCompared("." * (1 << 20)))
        while not channel_is_full(channel):
            time.sleep(0.001)
        if (fork := os.fork()) == 0:  # in which nobody ends what that thread has begun
            began = time.monotonic()
            reporter.flush()
            os._exit(time.monotonic() - began > 1)
        assert os.waitpid(fork, 0) == (fork, 0)
        reporter.send(from_worker.Left())
        heard = threads.submit(read_to_the_end, agents)
        reporter.flush()
        channel.shutdown(socket.SHUT_RDWR)  # as the kernel does at the end of a process
        assert from_worker.Left() in heard.result()
        is_long.result()
    reporter.close()
    agents.close()


def channel_is_full(channel: socket.socket) -> bool:
    return not select.select([], [channel], [], 0)[1]


def read_to_the_end(agents: socket.socket) -> list[from_worker.FromWorker]:
    time.sleep(0.2)  # until then the channel is full
    with agents.makefile("rb") as said:
        return [*LineReader(from_worker.read, 2 << 20).feed(said.read())]
