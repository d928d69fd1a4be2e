"""The example of a training loop of one's own, as its first lines say to use it: by hand, below ``run``."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
import torch

from tests.conftest import REPOSITORY, RankProcess, Start

STEPS = 400
Train = Callable[[int, str], RankProcess]


@pytest.fixture
def train(start: Start, tmp_path: Path, port: int) -> Train:
    """Start one rank of the example, each step of which takes 10 ms and is said, with this folder."""
    slow = tmp_path / "slow.py"
    text = (REPOSITORY / "examples" / "own_training.py").read_text()
    after = "        print('did step', step, file=sys.stderr)\n        __import__('time').sleep(0.01)\n"
    slow.write_text(text.replace("        step += 1\n", f"        step += 1\n{after}"))
    fast = tmp_path / "fast.py"
    fast.write_text(text)

    def train(rank: int, folder: str, *, fast: bool = False) -> RankProcess:
        command = [sys.executable, "-m", "ddp_manual", "run", "--world_size", 2, "--rank", rank, "--master_port", port]
        script = tmp_path / ("fast.py" if fast else "slow.py")
        options = ["--on_loss", "wait", "--run_dir", tmp_path / folder, script, STEPS]
        return start(*command, *options, cwd=tmp_path)

    return train


def worker_of(rank: RankProcess) -> psutil.Process:
    return next(child for child in psutil.Process(rank.process.pid).children() if "worker" in " ".join(child.cmdline()))


def wait_for_checkpoint(folder: Path, rank: RankProcess) -> None:
    """Wait until the example has saved."""
    deadline = time.monotonic() + 120
    while not (folder / "checkpoint.pt").exists():
        assert rank.process.poll() is None and time.monotonic() < deadline, rank.err
        time.sleep(0.05)


def test_it_ends_bit_for_bit_as_undisturbed_after_ctrl_c_the_end_of_a_host_and_a_killed_rank(
    train: Train, tmp_path: Path
) -> None:
    undisturbed = [train(rank, "undisturbed", fast=True) for rank in (0, 1)]  # type: ignore[call-arg]
    assert [rank.wait() for rank in undisturbed] == [0, 0], undisturbed[0].err
    expected = torch.load(tmp_path / "undisturbed" / "checkpoint.pt", weights_only=True)

    stopped = [train(rank, "stopped") for rank in (0, 1)]
    wait_for_checkpoint(tmp_path / "stopped", stopped[0])
    os.killpg(stopped[1].process.pid, signal.SIGINT)  # as a terminal does
    assert [rank.wait(30) for rank in stopped] == [130, 130], stopped[0].err
    for rank in stopped:
        assert "stopped by Ctrl-C (SIGINT) on rank 1 after the same step as all ranks" in rank.err
    step = int(torch.load(tmp_path / "stopped" / "checkpoint.pt", weights_only=True)["step"])
    assert 200 < step < STEPS and f"after step {step} of {STEPS} the losses are" in stopped[0].out
    for number, rank in enumerate(stopped):
        go_on = f"rank {number} was stopped after step {step} of {STEPS}: to go on, type the same command again"
        assert go_on in rank.out
    ended = [train(rank, "stopped") for rank in (0, 1)]
    ended[1].wait_for(f"did step {step + 3}")  # so that it has taken stops
    for process in (worker_of(ended[1]), ended[1].process):  # as a host that shuts down does
        process.send_signal(signal.SIGTERM)
    assert [rank.wait(30) for rank in ended] == [143, 143], ended[0].err
    assert "stopped by SIGTERM on rank 1 after the same step as all ranks" in ended[0].err
    again = [train(rank, "stopped") for rank in (0, 1)]
    again[0].wait_for("process group ready")
    worker_of(again[0]).kill()  # its agent starts another one
    assert [rank.wait() for rank in again] == [0, 0], again[0].err

    killed = [train(rank, "killed") for rank in (0, 1)]
    wait_for_checkpoint(tmp_path / "killed", killed[0])
    worker_of(killed[1]).kill()
    assert killed[1].wait(30) == 137
    back = train(1, "killed")
    assert [killed[0].wait(), back.wait()] == [0, 0], killed[0].err
    assert "the ranks repeat no step" in killed[0].err or "repeat at most" in killed[0].err
    for folder in ("stopped", "killed"):
        found = torch.load(tmp_path / folder / "checkpoint.pt", weights_only=True)
        assert found["step"] == STEPS
        for name, value in expected["model"].items():
            assert torch.equal(found["model"][name], value), f"{folder}: {name}"
