"""Messages about a run that hangs, has a slow rank or is debugged; and no message about a run on a busy machine."""

from __future__ import annotations

import inspect
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests import faulty as faulty_module
from tests.catalogue import record
from tests.conftest import LONGER, REPOSITORY, RankProcess, Start, clean_environment
from tests.faulty import faulty, said_at
from tests.world.deaths import start_three, until_trained, wait_until
from tests.world.test_check_and_status import look, looked

RankCommand = Callable[..., list[object]]

SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_SECONDS", "3"))
# Duration of loading and of evaluation in the run on busy cores.
BUSY_SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_BUSY_SECONDS", "4"))
# Duration of a C call that holds the GIL; longer than peer_timeout.
HELD_SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_HELD_SECONDS", "8"))
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
        of_rank_2 = seen.out[seen.out.index(f"\nrank 2 on {HOST} (pid {three.process.worker}):\n") :]
        # A loop of `while True: pass` is on one of its two lines.
        assert re.search(rf'tests/faulty\.py", line ({line}|{line + 1}) in loop_for_ever', of_rank_2), seen.out
        assert "in train_epoch" in of_rank_2
        for rank in (0, 1):
            assert f"\nrank {rank} on {HOST} (pid {three.ranks[rank].worker}):\n" in seen.out
        assert "backward" in seen.out
    assert all(rank.process.poll() is None for rank in three.ranks)
    assert "error[" not in "".join(rank.err for rank in three.ranks)


def test_a_straggler_is_named_once_in_rank_0s_log_and_in_status(
    start: Start, rank_command: RankCommand, port: int
) -> None:
    soon = ("--set", "ddp_manual.protocol.health.SLOW_FOR=4")
    commands = [rank_command(rank, 3, *LONGER, 500) for rank in range(3)]
    # A step of the others takes about 2 ms.
    ranks = [
        start(*faulty(command, *soon, *(["slow:0.02@training:50"] * (number == 1))))
        for number, command in enumerate(commands)
    ]
    ranks[1].wait_for("faulty: phase training")
    since = said_at(ranks[1].err, "phase training")
    named = f"rank 1 ({HOST}, pid {ranks[1].worker}) is slow: its own part of a step takes "
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
    """Assert that no rank has reported a fault or a slow rank."""
    for rank in ranks:
        assert "error[" not in rank.err and " is slow: " not in rank.err and "Traceback" not in rank.err, rank.err


def test_the_others_wait_for_ranks_that_are_slow_in_loading_evaluating_and_in_c(
    start: Start, rank_command: RankCommand
) -> None:
    """Each takes longer than peer_timeout."""
    faults = (
        ("hold:4@training:10", "hold:4@evaluating"),
        ("sleep:5@loading", "hold:4@training:12"),
        ("sleep:5@evaluating", "hold:4@training:5"),
    )
    commands = [rank_command(rank, 3, "--peer_timeout", 3) for rank in range(3)]
    ranks = [start(*faulty(command, *faults[rank])) for rank, command in enumerate(commands)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0], ranks[0].err
    quiet(ranks)
    assert all(rank.err.count("faulty: hold") + rank.err.count("faulty: sleep") == 2 for rank in ranks)


@pytest.mark.soak
@pytest.mark.timeout(120 + HELD_SECONDS)
@pytest.mark.parametrize("holding", [0, 1])
def test_a_c_call_that_holds_the_gil_is_not_reported_as_a_fault_and_status_shows_its_line(
    start: Start, rank_command: RankCommand, port: int, holding: int
) -> None:
    """The call takes longer than peer_timeout: the rank's agent, another process, sends the heartbeats."""
    peer_timeout = 5 if HELD_SECONDS > 30 else 3
    commands = [rank_command(rank, 2, *LONGER, 500, "--peer_timeout", peer_timeout) for rank in range(2)]
    faults = (f"hold:{HELD_SECONDS}@training:120",)
    ranks = [start(*faulty(command, *(faults * (rank == holding)))) for rank, command in enumerate(commands)]
    ranks[holding].wait_for("faulty: hold in training 120")
    since = said_at(ranks[holding].err, "hold in training 120")
    seen = look(start, port, "--stacks")
    assert seen.wait(30) == 0, seen.err
    told = time.monotonic() - since
    stack = seen.out[seen.out.index(f"\nrank {holding} on {HOST} (pid {ranks[holding].worker}):\n") :]
    lines, first = inspect.getsourcelines(faulty_module.hold)
    assert re.search(rf'tests/faulty\.py", line {first + len(lines) - 1} in hold', stack), seen.out
    time.sleep(max(0.0, since + HELD_SECONDS - time.monotonic()))
    steps = ranks[0].err.count("[rank 0] step ")
    wait_until(lambda: ranks[0].err.count("[rank 0] step ") > steps + 1)
    quiet(ranks)
    assert [rank.process.poll() for rank in ranks] == [None, None]
    record(
        f"a C call of {HELD_SECONDS:g} s that keeps the GIL of rank {holding}, --peer_timeout {peer_timeout}",
        "none; status --stacks",
        "rank, host, pid, the line that calls it",
        seconds=told,
        within=5,
        codes=[],
        row=18,
    )


OWN_TIMEOUT = """
    import datetime, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}))
    for _ in range(5):
        dist.all_reduce(torch.ones(4))
    if dist.get_rank() == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""


def test_a_stuck_rank_is_named_before_torchs_own_time_out_ends_the_ranks_that_wait(
    start: Start, port: int, tmp_path: Path
) -> None:
    """Both are as long. torch's would end rank 0, which would be named for it."""
    timeout = 10
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(OWN_TIMEOUT).format(timeout=timeout))
    run = [sys.executable, "-m", "ddp_manual", "run", "--world_size", 2, "--master_port", port]
    ranks = [start(*run, "--stall_timeout", timeout, "--rank", rank, script) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [14, 14]
    for rank in ranks:
        [error] = re.findall(r"error\[.*", rank.err, flags=re.DOTALL)
        assert (
            error.startswith("error[peer-stalled]: rank 1 ") and " is stuck while others wait: rank 0 waits " in error
        )
        assert f'File "{script}", line 9' in error and "left with error" not in error, error
        assert "needs a larger timeout in\n" in error and f"init_process_group or new_group: it is {timeout} s" in error
    assert "that is this rank; the others have not waited for it" in ranks[1].err


def test_a_rank_in_a_debugger_is_named_to_the_others_and_no_rank_is_ended(
    start: Start, rank_command: RankCommand
) -> None:
    """The worker uses the same terminal as its agent."""
    stall_timeout = 2
    commands = [rank_command(rank, 2, *LONGER, 500, "--stall_timeout", stall_timeout) for rank in range(2)]
    other = start(*faulty(commands[0]))
    controlling, terminal = pty.openpty()
    words = [str(word) for word in faulty(commands[1], "break@training:120")]
    debugged = subprocess.Popen(
        words,
        cwd=REPOSITORY,
        env=clean_environment(),
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        start_new_session=True,
    )
    os.close(terminal)
    try:
        shown = read_until(controlling, b"(Pdb) ")
        since = time.monotonic()
        line = (
            r"\[rank 0\] rank 1 \("
            + HOST
            + r", pid \d+\) is in a debugger, on faulty\.py:\d+ in \w+: the other ranks wait"
        )
        wait_until(lambda: bool(re.search(line, other.err)))
        told = time.monotonic() - since
        time.sleep(max(0.0, since + stall_timeout + 2 - time.monotonic()))
        assert other.process.poll() is None and debugged.poll() is None
        steps = other.err.count("[rank 0] step ")
        os.write(controlling, b"p 6 * 7\n")
        shown += read_until(controlling, b"42")
        os.write(controlling, b"continue\n")
        wait_until(lambda: other.err.count("[rank 0] step ") > steps + 1)
        quiet([other])
        assert other.err.count("is in a debugger") == 1 and b"error[" not in shown
    finally:
        os.killpg(debugged.pid, signal.SIGKILL)
        debugged.wait()
        os.close(controlling)
    record(
        f"breakpoint() in rank 1 of 2, --stall_timeout {stall_timeout}",
        "a line on rank 0",
        "rank, host, pid, the line it is on",
        seconds=told,
        within=2,
        codes=[],
        row=19,
    )


def read_until(terminal: int, text: bytes, timeout: float = 60) -> bytes:
    """What is shown on a terminal until it has shown a text."""
    shown = b""
    deadline = time.monotonic() + timeout
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown.decode()
        shown += os.read(terminal, 65536)
    return shown


@pytest.mark.parametrize("stopped", [0, 1])
def test_a_rank_that_is_stopped_for_less_than_peer_timeout_goes_on(
    start: Start, rank_command: RankCommand, stopped: int
) -> None:
    """Its agent and its worker are both stopped."""
    # Steps that take 7 ms and not 2 ms leave the cores to other tests.
    three = start_three(start, rank_command, stopped, "slow:0.005@training:100")
    until_trained(three)
    os.killpg(three.process.process.pid, signal.SIGSTOP)
    time.sleep(2.5)
    os.killpg(three.process.process.pid, signal.SIGCONT)
    before = three.ranks[0].err.count("[rank 0] step ")
    wait_until(lambda: three.ranks[0].err.count("[rank 0] step ") >= before + 4)
    time.sleep(2)  # by then a rank that was judged would have left
    quiet(list(three.ranks))
    assert [rank.process.poll() for rank in three.ranks] == [None] * 3


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(300 + 2 * SECONDS)
def test_a_run_on_cores_that_are_four_times_oversubscribed_reports_no_fault(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path
) -> None:
    """It trains for DDP_MANUAL_SOAK_SECONDS, and each rank is held up longer than peer_timeout."""
    for _ in range(4 * len(os.sched_getaffinity(0))):
        start(sys.executable, "-c", "while True: pass")
    held = PEER_TIMEOUT + 1
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
    time.sleep(2 * PEER_TIMEOUT)  # by then a rank that was judged would have left
    lines = [line for text in watching.out.splitlines() for line in json.loads(text)["progress"]]
    steps = max(line["step"] for line in lines)
    silence = max(line["silent_seconds"] for line in lines)
    print(f"{SECONDS:g} s: {steps} steps; silent for {silence:.1f} s at most, of {PEER_TIMEOUT:g}", flush=True)
    quiet(ranks)
    assert [process.process.poll() for process in (watching, *ranks)] == [None] * 3, watching.err
