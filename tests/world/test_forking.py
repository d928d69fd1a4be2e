"""A rank that the fork server starts is one that Python would have started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.conftest import Start, free_port
from tests.forking import Forked

LOOK_AROUND = """
import os, random, signal, sys, threading
sys.path = [place for place in sys.path if place]
print("torch" in sys.modules, __name__, __spec__, getattr(sys.modules["__main__"], "__file__", None))
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), os.getsid(0) == os.getpgid(0) == os.getpid())
print({name: value for name, value in os.environ.items() if not name.startswith("PYTEST")})
print(sorted(os.listdir("/proc/self/fd")), threading.active_count(), os.readlink("/proc/self/fd/0"))
print([signal.getsignal(number) for number in (signal.SIGINT, signal.SIGPIPE, signal.SIGTERM, signal.SIGCHLD)])
import torch
print(torch.get_num_threads(), torch.__spec__.origin, torch.distributed.is_initialized())
print(random.random(), torch.initial_seed(), file=sys.stderr)
sys.exit(7)
"""


@pytest.mark.parametrize("command", [["-c", LOOK_AROUND, "--an", "argument"], ["script.py", "--an", "argument"]])
def test_a_fork_sees_what_a_new_python_sees_and_draws_other_numbers(
    start: Start, tmp_path: Path, command: list[str]
) -> None:
    (tmp_path / "script.py").write_text(LOOK_AROUND)
    several = [start(sys.executable, *command, cwd=tmp_path, A="b", fresh=fresh) for fresh in (False, False, True)]
    assert [process.wait(20) for process in several] == [7, 7, 7], several[0].err
    assert [isinstance(process.process, Forked) for process in several] == [True, True, False]
    assert several[0].out == several[1].out == several[2].out
    assert len({word for process in several for word in process.err.split()}) == 6


def test_the_signal_that_ends_a_fork_is_its_exit_code(start: Start) -> None:
    for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
        process = start(sys.executable, "-c", "import sys, time; print('up', file=sys.stderr); time.sleep(60)")
        process.wait_for("up")
        with pytest.raises(subprocess.TimeoutExpired):
            process.process.wait(0.01)
        process.process.send_signal(number)
        assert process.wait(10) == -number


def test_no_fork_outlives_the_process_that_started_it_however_that_ends(start: Start) -> None:
    starts_another = (
        "import os, signal, sys\n"
        "from pathlib import Path\n"
        "from tests import forking\n"
        "command = [sys.executable, '-c', 'import time; time.sleep(60)']\n"
        "files = {'out': sys.stdout, 'err': sys.stderr, 'cwd': Path(), 'place': None, 'fresh': False}\n"
        "print(forking.start(command, Path('note'), env=dict(os.environ), **files).pid, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = start(sys.executable, "-c", starts_another)
    assert killed.wait(60) == -signal.SIGKILL  # its server loads torch
    deadline = time.monotonic() + 5
    while psutil.pid_exists(int(killed.out)):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_worker_of_an_agent_that_is_a_fork_is_one_too_and_has_no_more_than_a_new_python_has(
    start_rank: Start,
) -> None:
    ranks = [start_rank(1, 2, "--master_port", free_port(), fresh=fresh) for fresh in (False, True)]
    workers = [psutil.Process(rank.worker) for rank in ranks]
    assert ["forkserver.py" in " ".join(worker.cmdline()) for worker in workers] == [True, False]
    for worker in workers:
        deadline = time.monotonic() + 60
        while not any("libtorch" in one.path for one in worker.memory_maps()) or worker.num_threads() < 2:
            assert time.monotonic() < deadline
            time.sleep(0.1)
    deadline = time.monotonic() + 10
    while signals_of(workers[0].pid) != signals_of(workers[1].pid):  # all are blocked while a thread is started
        assert time.monotonic() < deadline, [signals_of(worker.pid) for worker in workers]
        time.sleep(0.01)
    kinds = [sorted(kind_of(worker.pid, number) for number in descriptors(worker.pid)) for worker in workers]
    assert kinds[0] == kinds[1]
    assert [os.getpgid(worker.pid) for worker in workers] == [rank.process.pid for rank in ranks]


def signals_of(pid: int) -> list[str]:
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return [line for line in lines if line.startswith(("SigBlk", "SigIgn"))]


def descriptors(pid: int) -> list[str]:
    return os.listdir(f"/proc/{pid}/fd")


def kind_of(pid: int, number: str) -> str:
    """``socket``, ``pipe``, or where a file is, without what the test calls it."""
    target = os.readlink(f"/proc/{pid}/fd/{number}")
    return target.partition(":")[0] if ":[" in target else "file" if "/process" in target else target


def test_a_test_that_is_not_marked_gpu_sees_none(start: Start) -> None:
    count = start(
        sys.executable, "-c", "import os, torch; print(os.environ['CUDA_VISIBLE_DEVICES'], torch.cuda.device_count())"
    )
    assert count.wait() == 0
    assert count.out == "-1 0\n"
