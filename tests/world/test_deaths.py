"""What ends, stops or holds up a process, as the kernel, torch and a debugger tell it: ranks of a person's script name
the rank by its host, pid and line, leave with 14 in time, and leave no process and no port behind.

A rank is two processes: its worker, which has torch, and its agent. Seconds count from the line in which the fault says
that it strikes, or from the signal.
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
from collections.abc import Callable, Sequence
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import NamedTuple

import psutil
import pytest

from tests.conftest import HOST, RankProcess, Start, clean_environment, gone, wait_until
from tests.memory import memory_group
from tests.real_scripts import FOLDER, environment, struck

HELD_SECONDS = int(os.environ.get("DDP_MANUAL_SOAK_HELD_SECONDS", "5"))
PEER_TIMEOUT = 3
# Seconds within which all others have left, where torch itself waits for 30 minutes. The agents take tenths of a second
# for it, as the simulation holds; Python's and torch's own way out takes several beside busy cores.
WHERE_SOCKETS_CLOSE = 20.0
WHERE_SILENT = PEER_TIMEOUT + 20.0
# Bytes: a rank takes less than half of it.
MEMORY = 1 << 30
Run = Callable[..., RankProcess]


@pytest.fixture
def run(start: Start, port: int, tmp_path: Path) -> Run:
    """Start one rank of a script by hand; it has the fault that is meant for it."""

    def run(rank: int, fault: str, *options: object, within: Sequence[object] = (), world_size: int = 2) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, "--peer_timeout", PEER_TIMEOUT]
        words = [sys.executable, "-m", "ddp_manual", "run", *meeting, "--run_dir", tmp_path / "run", *options]
        return start(*within, *words, FOLDER / "plain_ddp.py", "--steps", 10**6, **environment(fault))

    return run


class Fault(NamedTuple):
    """What the kernel, torch or Python does to a rank's worker, and what every rank says of it."""

    strikes: str
    identifier: str
    what: str
    why: str
    codes: tuple[int, int]


STACK = r'plain_ddp\.py", line \d+ in main'
FAULTS = {
    "the OOM killer ends it": Fault(
        *("eat@1:300", "peer-lost", r"is gone: SIGKILL, since memory ran out\n"),
        *("the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill\n", (14, 137)),
    ),
    "std::terminate is called": Fault(
        *("abort@1:300", "peer-lost", r"is gone: SIGABRT\n", rf"its Python stack:.*in strike.*{STACK}", (14, 134)),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_what_happens_to_a_worker_is_named_by_all_ranks(run: Run, port: int, tmp_path: Path, name: str) -> None:
    fault = FAULTS[name]
    with memory_group(MEMORY, tmp_path / "cgroup") if "OOM" in name else nullcontext() as group:
        ranks = [run(0, fault.strikes)]
        ranks.append(run(1, fault.strikes, within=group.command([]) if group else ()))
        worker = ranks[1].worker
        since = struck(ranks)
        if group:
            wait_until(lambda: not psutil.pid_exists(worker), 30)
            since = time.monotonic()
        codes = [rank.wait(WHERE_SOCKETS_CLOSE + 20) for rank in ranks]
    seconds = time.monotonic() - since
    assert codes == list(fault.codes), ranks[0].err + ranks[1].err
    assert seconds < WHERE_SOCKETS_CLOSE
    for number, rank in enumerate(ranks):
        error = last_lines(rank.err)
        who = f"error[{fault.identifier}]: rank 1 ({HOST}, pid {worker}) "
        assert re.match(re.escape(who) + fault.what, error), error
        assert re.search(fault.why, error, re.DOTALL), error
        written = json.loads((tmp_path / "run" / f"failure-rank{number}.json").read_text())
        assert error.startswith(f"error[{written['identifier']}]: {written['what']}\n")
    assert left_behind(ranks, port) == []


def last_lines(text: str) -> str:
    """Return the error, which has to be the very end of the text."""
    error = r"^(error\[[a-z-]+\]: .*\n(?:  why:  .*\n(?: {8}.*\n|\n)*)?  next: .*\n(?: {8}.*\n)*)"
    match = re.search(error + r"  exit code \d+, after .*\n\Z", text, re.MULTILINE)
    assert match, text
    return match[1]


def left_behind(ranks: Sequence[RankProcess], port: int) -> list[str]:
    """List processes of the ranks' sessions that still run, and rank 0's port if it is still taken."""
    sessions = {rank.process.pid for rank in ranks}
    found = []
    for process in psutil.process_iter():
        with suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) in sessions and process.status() != psutil.STATUS_ZOMBIE:
                found.append(f"pid {process.pid} still runs: {process.cmdline()}")
    with socket.socket() as listener:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # connections that have ended may linger
        try:
            listener.bind(("127.0.0.1", port))
            listener.listen()
        except OSError as error:
            found.append(f"port {port}: {error}")
    return found


def test_a_stopped_worker_is_named_at_once_and_lost_if_it_is_not_continued(run: Run) -> None:
    ranks = [run(rank, "stop@1:300") for rank in range(2)]
    worker = ranks[1].worker
    line = f"rank 1 ({HOST}, pid {worker}) is stopped: SIGSTOP; on {HOST}, kill -CONT {worker} lets it go on\n"
    struck(ranks)
    for rank in ranks:
        rank.wait_for(line, 5)
    os.kill(worker, signal.SIGCONT)
    time.sleep(PEER_TIMEOUT + 1.5)  # by then a rank that was judged would have left
    assert [rank.process.poll() for rank in ranks] == [None, None]
    since = time.monotonic()
    os.kill(worker, signal.SIGSTOP)
    assert [rank.wait(20) for rank in ranks] == [14, 14]
    assert time.monotonic() - since < WHERE_SILENT
    for rank in ranks:
        assert re.search(r"error\[peer-lost\]: rank 1 \(.*\) has been stopped by SIGSTOP for \d s", rank.err)
    assert "this is rank 1; the others have not waited for it" in last_lines(ranks[1].err)


@pytest.mark.parametrize("killed", [0, 1])
def test_a_worker_goes_with_its_agent_and_rank_0s_port_is_free_at_once(start: Start, port: int, killed: int) -> None:
    """The kernel ends the worker, which does not inherit the listening socket."""
    words = [sys.executable, "-m", "ddp_manual", "run", "--world_size", 2, "--master_port", port, "--no_python"]
    ranks = [start(*words[:-1], "--rank", rank, words[-1], "sleep", 60) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("starting sleep as rank")
    worker = psutil.Process(ranks[killed].worker)
    os.kill(ranks[killed].process.pid, signal.SIGKILL)
    assert gone([worker], 10)
    assert ranks[1 - killed].wait(10) == 14
    identifier = "peer-lost" if killed else "master-lost"
    first = f"error[{identifier}]: rank {killed} ({HOST}, pid {worker.pid}) is gone without a word\n"
    assert last_lines(ranks[1 - killed].err).startswith(first)
    again = start(*words[:-1], "--rank", 0, words[-1], "sleep", 60)
    again.wait_for("listening at ")
    assert time.monotonic() - again.started < 10


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
    launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, "--stall_timeout", timeout]
    launcher = start(*launch, "--master_port", port, script)
    assert launcher.wait(60) == 14
    said = re.sub(r"^\[rank \d\] ?", "", launcher.err, flags=re.MULTILINE)
    error = said[said.index("error[") :]
    assert re.match(r"error\[peer-stalled\]: rank 1 .* is stuck while others wait: rank 0 waits ", error), error
    assert f'File "{script}", line 9' in error and "left with error" not in error, error
    assert "needs a larger timeout in\n" in error and f"init_process_group or new_group: it is {timeout} s" in error


def test_a_rank_in_a_debugger_is_named_to_the_others_and_no_rank_is_ended(run: Run, port: int, tmp_path: Path) -> None:
    """The worker uses the same terminal as its agent."""
    stall_timeout = 2
    other = run(0, "", "--stall_timeout", stall_timeout)
    controlling, terminal = pty.openpty()
    words = [sys.executable, "-m", "ddp_manual", "run", "--world_size", 2, "--rank", 1, "--master_port", port]
    words += ["--stall_timeout", stall_timeout, "--run_dir", tmp_path / "run"]
    debugged = subprocess.Popen(
        [str(word) for word in [*words, FOLDER / "plain_ddp.py", "--steps", 10**6]],
        env=clean_environment(**environment("break@1:300")),
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
def test_a_c_call_that_holds_the_gil_is_no_fault_and_status_shows_its_line(start: Start, run: Run, port: int) -> None:
    """The call takes longer than peer_timeout: the rank's agent, another process, sends the heartbeats."""
    ranks = [run(rank, f"hold:{HELD_SECONDS}@1:300") for rank in range(2)]
    since = struck(ranks)
    status = start(sys.executable, "-m", "ddp_manual", "status", "--master_port", port, "--stacks")
    assert status.wait(30) == 0, status.err
    assert time.monotonic() - since < HELD_SECONDS
    of_rank_1 = status.out[status.out.index(f"\nrank 1 on {HOST} (pid {ranks[1].worker}):\n") :]
    assert re.search(rf'sitecustomize\.py", line \d+ in hold.*{STACK}', of_rank_1, re.DOTALL), status.out
    time.sleep(max(0.0, since + HELD_SECONDS + PEER_TIMEOUT - time.monotonic()))
    assert [rank.process.poll() for rank in ranks] == [None, None]
    assert "error[" not in ranks[0].err + ranks[1].err and " is slow: " not in ranks[0].err


# -- at random moments ----------------------------------------------------------------------------------------------
