"""What ends, stops or holds up a process, as the kernel, torch and a debugger tell it: ranks of a person's script name
the rank by its host, pid and line, leave with 14 in time, and leave no process and no port behind.

Seconds count from the line in which the fault says that it strikes, or from the signal.
"""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import pytest

from tests.conftest import HOST, RankProcess, Start, clean_environment, gone, last_error, wait_until
from tests.memory import MemoryGroup, memory_group
from tests.real_scripts import FOLDER, environment, struck

HELD_SECONDS = int(os.environ.get("DDP_MANUAL_SOAK_HELD_SECONDS", "5"))
PEER_TIMEOUT = 3
# Seconds within which all others have left, where torch itself waits for 30 minutes. The agents take tenths of a second
# for it, as the simulation holds; Python's and torch's own way out takes several beside busy cores.
WHERE_SOCKETS_CLOSE = 20.0
WHERE_SILENT = PEER_TIMEOUT + 20.0
# Bytes: two ranks and the process that forks them take a third of it.
MEMORY = 1 << 30
ADDING = FOLDER / "adding.py"
DDP_MANUAL = (sys.executable, "-m", "ddp_manual")
# How a fault strikes rank 1 in the middle of its work.
AT_WORK = "{}@1:30:torch.distributed.all_reduce"
Launch = Callable[..., RankProcess]


@pytest.fixture
def launch(start: Start, port: int, tmp_path: Path) -> Launch:
    """Launch two ranks, of which rank 1 has a fault."""

    def launch(fault: str, group: MemoryGroup | None = None) -> RankProcess:
        meeting = ["--nproc", 2, "--master_port", port, "--peer_timeout", PEER_TIMEOUT, "--run_dir", tmp_path / "run"]
        words = [*DDP_MANUAL, "launch", *meeting, ADDING]
        return start(*(group.command(words) if group else words), **environment(AT_WORK.format(fault)))

    return launch


def failures(folder: Path) -> list[dict[str, Any]]:
    """How each of the two ranks says that it has ended."""
    return [json.loads((folder / "run" / f"failure-rank{rank}.json").read_text()) for rank in range(2)]


class Fault(NamedTuple):
    """What the kernel, torch or Python does to a rank's worker, and what every rank says of it."""

    strikes: str
    what: str
    why: str
    code: int


FAULTS = {
    "the OOM killer ends it": Fault(
        *("eat", "is gone: SIGKILL, since memory ran out"),
        *("the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill", 137),
    ),
    "std::terminate is called": Fault(
        *("abort", "is gone: SIGABRT", r'its Python stack:.*in strike.*adding\.py", line \d+ in main', 134),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_a_worker_is_named_by_all_ranks(launch: Launch, port: int, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    with memory_group(MEMORY, tmp_path / "cgroup") if "OOM" in name else nullcontext() as group:
        launcher = launch(fault.strikes, group)
        since = struck([launcher])
        processes = psutil.Process(launcher.process.pid).children(recursive=True)
        if group:
            wait_until(lambda: not all(map(psutil.Process.is_running, processes)), 30)
            since = time.monotonic()
        assert launcher.wait(WHERE_SOCKETS_CLOSE + 20) == fault.code, launcher.err
    assert time.monotonic() - since < WHERE_SOCKETS_CLOSE
    for failure, code in zip(failures(tmp_path), (14, fault.code), strict=True):
        assert (failure["identifier"], failure["exit_code"]) == ("peer-lost", code)
        who = re.fullmatch(rf"rank 1 \({HOST}, pid (\d+)\) {fault.what}", failure["what"])
        assert who and int(who[1]) in [process.pid for process in processes], failure
        assert re.search(fault.why, failure["why"], re.DOTALL), failure
    assert gone(processes, 0)
    assert is_free(port)


def is_free(port: int) -> bool:
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended may linger
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError:
            return False
        return True


def test_a_stopped_worker_is_named_at_once_and_lost_if_it_is_not_continued(launch: Launch, tmp_path: Path) -> None:
    launcher = launch("stop")
    struck([launcher])
    launcher.wait_for("is stopped: SIGSTOP", 5)
    (named,) = re.findall(rf"rank 1 \({HOST}, pid (\d+)\) is stopped: SIGSTOP", launcher.err)
    worker = int(named)
    assert f"on {HOST}, kill -CONT {worker} lets it go on\n" in launcher.err
    os.kill(worker, signal.SIGCONT)
    time.sleep(PEER_TIMEOUT + 1.5)  # by then a rank that was judged would have left
    assert launcher.process.poll() is None
    since = time.monotonic()
    os.kill(worker, signal.SIGSTOP)
    assert launcher.wait(20) == 14
    assert time.monotonic() - since < WHERE_SILENT
    for failure in failures(tmp_path):
        assert (failure["identifier"], failure["exit_code"]) == ("peer-lost", 14)
        assert re.fullmatch(rf"rank 1 \(.*, pid {worker}\) has been stopped by SIGSTOP for \d s", failure["what"])


def test_a_worker_goes_with_its_agent_and_rank_0s_port_is_free_at_once(start: Start, port: int) -> None:
    """The kernel ends the worker, which does not inherit the listening socket. Rank 1's agent: tests/scenarios."""
    words = [*DDP_MANUAL, "run", "--world_size", 2, "--master_port", port, "--rank"]
    ranks = [start(*words, rank, "--no_python", "sleep", 60) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("starting sleep as rank")
    worker = psutil.Process(ranks[0].worker)
    os.kill(ranks[0].process.pid, signal.SIGKILL)
    assert gone([worker], 10)
    assert is_free(port)
    assert ranks[1].wait(10) == 14
    first = f"error[master-lost]: rank 0 ({HOST}, pid {worker.pid}) is gone without a word\n"
    assert last_error(ranks[1].err).startswith(first)


OWN_TIMEOUT = """
    import datetime, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds={timeout}))
    rank = dist.get_rank()
    for _ in range(5):
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if rank else dist.ReduceOp.SUM)
    if rank == 1:
        time.sleep(1000)
    dist.all_reduce(torch.ones(4))
"""


def test_a_stuck_rank_is_named_before_torchs_own_time_out_also_where_collectives_are_not_compared(
    start: Start, port: int, tmp_path: Path
) -> None:
    """Both are as long. torch's would end rank 0, which would be named for it. Before, the ranks add up differently."""
    timeout = 7
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(OWN_TIMEOUT).format(timeout=timeout))
    options = ["--nproc", 2, "--master_port", port, "--stall_timeout", timeout, "--collectives", "off"]
    launcher = start(*DDP_MANUAL, "launch", *options, script)
    assert launcher.wait(60) == 14
    said = re.sub(r"^\[rank \d\] ?", "", launcher.err, flags=re.MULTILINE)
    error = said[said.index("error[") :]
    assert re.match(r"error\[peer-stalled\]: rank 1 .* is stuck while others wait: rank 0 waits ", error), error
    assert f'File "{script}", line 10' in error and "left with error" not in error, error
    assert "needs a larger timeout in\n" in error and f"init_process_group or new_group: it is {timeout} s" in error


def test_a_rank_in_a_debugger_is_named_to_the_others_and_no_rank_is_ended(start: Start, port: int) -> None:
    """The worker uses the same terminal as its agent."""
    stall_timeout = 2
    meeting = ["--world_size", 2, "--master_port", port, "--stall_timeout", stall_timeout, "--rank"]
    other = start(*DDP_MANUAL, "run", *meeting, 0, ADDING)
    controlling, terminal = pty.openpty()
    debugged = subprocess.Popen(
        [str(word) for word in (*DDP_MANUAL, "run", *meeting, 1, ADDING)],
        env=clean_environment(**environment(AT_WORK.format("break"))),
        **dict.fromkeys(("stdin", "stdout", "stderr"), terminal),
        start_new_session=True,
    )
    os.close(terminal)
    try:
        read_until(controlling, b"(Pdb) ")
        line = rf"\[rank 0\] rank 1 \({HOST}, pid \d+\) is in a debugger, on \S+:\d+ in \w+: the other ranks wait"
        wait_until(lambda: re.search(line, other.err), 5)
        time.sleep(stall_timeout + 2)
        assert other.process.poll() is None and debugged.poll() is None
        os.write(controlling, b"p 6 * 7\n")
        read_until(controlling, b"42")
        os.write(controlling, b"continue\n")
        time.sleep(1)
        assert other.err.count("is in a debugger") == 1 and "error[" not in other.err
    finally:
        os.killpg(debugged.pid, signal.SIGKILL)
        debugged.wait()
        os.close(controlling)


def read_until(terminal: int, text: bytes, timeout: float = 60) -> bytes:
    """What is shown on a terminal until it has shown a text."""
    shown = b""
    deadline = time.monotonic() + timeout
    while text not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, deadline - time.monotonic()))
        assert ready, shown.decode()
        shown += os.read(terminal, 65536)
    return shown


@pytest.mark.soak
@pytest.mark.timeout(180 + HELD_SECONDS)
def test_a_c_call_that_holds_the_gil_is_no_fault_and_status_shows_its_line(
    start: Start, launch: Launch, port: int
) -> None:
    """The call takes longer than peer_timeout: the rank's agent, another process, sends the heartbeats."""
    launcher = launch(f"hold:{HELD_SECONDS}")
    since = struck([launcher])
    status = start(*DDP_MANUAL, "status", "--master_port", port, "--stacks")
    assert status.wait(30) == 0, status.err
    assert time.monotonic() - since < HELD_SECONDS
    of_rank_1 = status.out.partition(f"\nrank 1 on {HOST} (pid ")[2]
    stack = r'sitecustomize\.py", line \d+ in hold.*adding\.py", line \d+ in main'
    assert re.search(stack, of_rank_1, re.DOTALL), status.out
    time.sleep(max(0.0, since + HELD_SECONDS + PEER_TIMEOUT - time.monotonic()))
    assert launcher.process.poll() is None
    assert "error[" not in launcher.err and " is slow: " not in launcher.err
