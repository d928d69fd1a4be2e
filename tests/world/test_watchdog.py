"""What can be seen of a run that hangs or drags; and that nothing is said of one that is slow, held up or crowded."""

from __future__ import annotations

import inspect
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import faulty as faulty_module
from tests.conftest import LONGER, RankProcess, Start
from tests.faulty import faulty, said_at
from tests.world.deaths import start_three, until_trained
from tests.world.test_check_and_status import look, looked

RankCommand = Callable[..., list[object]]

SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_SECONDS", "15"))
# Of evaluation and of loading, in the run that takes that long.
BUSY_SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_BUSY_SECONDS", "6"))
PEER_TIMEOUT = 10.0 if BUSY_SECONDS > 10 else 3.0
HOST = os.uname().nodename


def line_of_the_loop() -> int:
    lines, first = inspect.getsourcelines(faulty_module.loop_for_ever)
    return first + next(number for number, line in enumerate(lines) if line.strip() == "while True:")


def test_status_shows_the_line_of_a_dead_loop_as_often_as_it_is_asked(
    start: Start, rank_command: RankCommand, port: int
) -> None:
    three = start_three(start, rank_command, 2, "loop@training:150")
    three.process.wait_for("faulty: loop in training 150")
    line = line_of_the_loop()
    for _ in range(2):
        seen = look(start, port, "--stacks")
        assert seen.wait(30) == 0, seen.err
        of_rank_2 = seen.out[seen.out.index(f"\nrank 2 on {HOST} (pid {three.process.process.pid}):\n") :]
        # A loop of `while True: pass` is on one of its two lines.
        assert re.search(rf'tests/faulty\.py", line ({line}|{line + 1}), in loop_for_ever', of_rank_2), seen.out
        assert "in train_epoch" in of_rank_2
        for rank in (0, 1):
            assert f"\nrank {rank} on {HOST} (pid {three.ranks[rank].process.pid}):\n" in seen.out
        assert "backward" in seen.out
    assert all(rank.process.poll() is None for rank in three.ranks)
    assert "error[" not in "".join(rank.err for rank in three.ranks)


def test_a_straggler_is_named_once_in_rank_0s_log_and_in_status(
    start: Start, rank_command: RankCommand, port: int
) -> None:
    soon = ("--set", "ddp_manual.rendezvous.judging.SLOW_FOR=4")
    commands = [rank_command(rank, 3, *LONGER, 500) for rank in range(3)]
    # A step of the others takes about 2 ms.
    ranks = [
        start(*faulty(command, *soon, *(["slow:0.02@training:50"] * (number == 1))))
        for number, command in enumerate(commands)
    ]
    ranks[1].wait_for("faulty: phase training")
    since = said_at(ranks[1].err, "phase training")
    named = f"rank 1 ({HOST}, pid {ranks[1].process.pid}) is slow: its own part of a step takes "
    ranks[0].wait_for(named, 20)
    seconds = time.monotonic() - since
    assert seconds > 4
    told = re.search(r"takes ([\d.]+) ms, ([\d.]+) times the median", ranks[0].err)
    assert told and 18 < float(told[1]) < 60 and float(told[2]) > 1.5, ranks[0].err
    deadline = time.monotonic() + 10  # status is told twice a second
    while [line["slow"] for line in looked(start, port)["progress"]] != [False, True, False]:
        assert time.monotonic() < deadline
    assert "slow" in look_at(start, port)
    time.sleep(5)  # as long again as it took
    assert ranks[0].err.count(" is slow: ") == 1
    assert all(rank.process.poll() is None for rank in ranks)


def look_at(start: Start, port: int) -> str:
    seen = look(start, port)
    assert seen.wait(30) == 0, seen.err
    return seen.out


def quiet(ranks: list[RankProcess]) -> None:
    """None of them has said anything of a fault, or of anybody being slow."""
    for rank in ranks:
        assert "error[" not in rank.err and " is slow: " not in rank.err and "Traceback" not in rank.err, rank.err


def test_ranks_that_are_long_in_loading_evaluating_and_in_c_are_waited_for(
    start: Start, rank_command: RankCommand
) -> None:
    """Each for longer than a peer may be silent, but in C, where no other thread of the process can run."""
    held = 2.8
    faults = (
        (f"hold:{held}@training:10", f"hold:{held}@evaluating"),
        ("sleep:7@loading", f"hold:{held}@training:12"),
        ("sleep:7@evaluating", f"hold:{held}@training:5"),
    )
    commands = [rank_command(rank, 3, "--peer_timeout", 3) for rank in range(3)]
    ranks = [start(*faulty(command, *faults[rank])) for rank, command in enumerate(commands)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[0].err
    quiet(ranks)
    assert all(rank.err.count("faulty: hold") + rank.err.count("faulty: sleep") == 2 for rank in ranks)


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_for_less_than_peer_timeout_goes_on(
    start: Start, rank_command: RankCommand, stopped: int
) -> None:
    three = start_three(start, rank_command, stopped)
    until_trained(three)
    three.process.process.send_signal(signal.SIGSTOP)
    time.sleep(2.5)
    three.process.process.send_signal(signal.SIGCONT)
    before = three.ranks[0].err.count("[rank 0] step ")
    deadline = time.monotonic() + 20
    while three.ranks[0].err.count("[rank 0] step ") < before + 4:
        assert time.monotonic() < deadline, three.ranks[0].err
        time.sleep(0.05)
    time.sleep(2)  # whoever was judged has gone by then
    quiet(list(three.ranks))
    assert [rank.process.poll() for rank in three.ranks] == [None] * 3


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_nothing_is_said_of_a_run_on_cores_that_are_four_times_oversubscribed(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path
) -> None:
    """It trains for DDP_MANUAL_SOAK_SECONDS, and each rank is besides held up as long as it may be."""
    for _ in range(4 * len(os.sched_getaffinity(0))):
        start(sys.executable, "-c", "while True: pass")
    # C is given up to peer_timeout; with this many processes a thread may wait 0.2 s for its turn.
    held = PEER_TIMEOUT - 0.5
    faults = (
        (f"hold:{held}@training:100", f"sleep:{BUSY_SECONDS}@evaluating"),
        (f"sleep:{BUSY_SECONDS}@loading", f"hold:{held}@training:150", f"hold:{held}@evaluating:2"),
    )
    commands = [rank_command(rank, 2, *LONGER, 100_000, "--peer_timeout", PEER_TIMEOUT) for rank in range(2)]
    ranks = [start(*faulty(command, *faults[rank])) for rank, command in enumerate(commands)]
    for rank in ranks:
        rank.wait_for("faulty: phase training", 120 + BUSY_SECONDS)
    watching = look(start, port, "--watch", "--json")
    deadline = time.monotonic() + SECONDS
    while time.monotonic() < deadline:
        quiet(ranks)
        assert [rank.process.poll() for rank in ranks] == [None, None]
        time.sleep(1)
    ranks[1].wait_for("faulty: hold in training 150")
    time.sleep(2 * PEER_TIMEOUT)  # whoever was judged has gone by then
    lines = [line for text in watching.out.splitlines() for line in json.loads(text)["progress"]]
    steps = max(line["step"] for line in lines)
    silence = max(line["silent_seconds"] for line in lines)
    print(f"{SECONDS:g} s: {steps} steps; silent for {silence:.1f} s at most, of {PEER_TIMEOUT:g}", flush=True)
    quiet(ranks)
    assert [process.process.poll() for process in (watching, *ranks)] == [None] * 3, watching.err
