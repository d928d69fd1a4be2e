"""Ranks of a user's own script leave in order when their work is done, and leave in any case, whatever hangs."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RankProcess, Start, clean_environment

StartScript = Callable[..., list[RankProcess]]


@pytest.fixture
def start_script(start: Start, port: int, tmp_path: Path) -> StartScript:
    """Return a function that starts two ranks of a script with this body."""

    def start_script(body: str, **env: str) -> list[RankProcess]:
        script = tmp_path / "script.py"
        script.write_text(
            "import sys, time\n"
            "import torch.distributed as dist\n"
            "import ddp_manual\n"
            "with ddp_manual.join(peer_timeout=3) as world:\n"
            + "".join(f"    {line}\n" for line in body.splitlines())
            + "print('came out', flush=True)\n"
        )
        ranks = [{"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_PORT": str(port)} for rank in range(2)]
        return [start(sys.executable, script, **rank, **env) for rank in ranks]

    return start_script


def test_a_script_that_exits_with_0_in_the_body_has_done_its_work(start_script: StartScript) -> None:
    ranks = start_script("if world.rank == 0: sys.exit(0)\ntime.sleep(3)")
    assert [rank.wait(30) for rank in ranks] == [0, 0], ranks[1].err
    assert "came out" in ranks[1].out
    assert "error[" not in ranks[0].err + ranks[1].err


def test_a_script_that_exits_with_3_has_failed_and_the_others_are_told(start_script: StartScript) -> None:
    ranks = start_script("if world.rank == 1: sys.exit(3)\ntime.sleep(60)")
    assert [rank.wait(30) for rank in ranks] == [14, 3]
    assert "rank 1" in ranks[0].err and "SystemExit: 3" in ranks[0].err


def test_a_rank_that_works_on_alone_after_rank_0_has_left_ends_well(start_script: StartScript, tmp_path: Path) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if os.path.basename(sys.orig_argv[1]) == 'agent':\n"
        "    from ddp_manual.protocol import agent\n"
        "    agent.LEAVE_TIMEOUT = 1\n"
    )
    body = (
        "import torch\n"
        "ends = time.monotonic() + 6 * world.rank\n"
        "layer = torch.nn.Linear(500, 500)\n"
        "while time.monotonic() < ends: layer(torch.ones(500, 500)).sum().backward()\n"
    )
    ranks = start_script(body, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    assert [rank.wait(30) for rank in ranks] == [0, 0], ranks[1].err
    assert "rank 0 has finished and left; this rank goes on alone" in ranks[1].err
    assert "came out" in ranks[1].out


def test_a_collective_that_breaks_while_rank_0_is_frozen_does_not_hang_the_rank(start_script: StartScript) -> None:
    body = (
        "from datetime import timedelta\n"
        "group = dist.new_group(timeout=timedelta(seconds=1))\n"
        "print('ready', file=sys.stderr, flush=True)\n"
        "while True: dist.barrier(group); time.sleep(0.01)"
    )
    ranks = start_script(body)
    ranks[1].wait_for("ready")
    ranks[0].process.send_signal(signal.SIGSTOP)
    assert ranks[1].wait(15) != 0
    assert re.search(r"\S+: rank 0 \(.*stopped", ranks[1].err)
    ranks[0].process.send_signal(signal.SIGCONT)
    assert ranks[0].wait(15) != 0


def test_a_terminal_that_nobody_reads_does_not_keep_a_rank(
    start_script: StartScript, port: int, tmp_path: Path
) -> None:
    """Its main thread is inside a write, with the lock of the stream that would be flushed at the end."""
    body = "print('ready', file=sys.stderr, flush=True)\nwhile world.rank == 1: print('x' * 1000)\ntime.sleep(60)"
    rank_0, unheard = start_script(body)
    unheard.kill()
    env = clean_environment(RANK="1", WORLD_SIZE="2", MASTER_PORT=str(port), PYTHONUNBUFFERED="")
    with (tmp_path / "err").open("wb") as err:
        rank_1 = subprocess.Popen([sys.executable, tmp_path / "script.py"], env=env, stdout=subprocess.PIPE, stderr=err)
    try:
        rank_0.wait_for("ready")
        deadline = time.monotonic() + 30
        while _state(rank_1.pid) != "S" or "ready" not in (tmp_path / "err").read_text():
            assert time.monotonic() < deadline, (tmp_path / "err").read_text()
            time.sleep(0.05)
        rank_0.process.send_signal(signal.SIGKILL)
        assert rank_1.wait(10) == 14
        assert "error[master-lost]: rank 0" in (tmp_path / "err").read_text()
    finally:
        rank_1.kill()
        rank_1.communicate()


def _state(pid: int) -> str:
    """Return the state of a process; ``S`` is waiting, here for a reader of the pipe."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2][0] if os.path.exists(f"/proc/{pid}") else ""
