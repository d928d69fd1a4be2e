"""The example of a training loop of one's own, as its first lines say to use it: by hand, below ``run``."""

from __future__ import annotations

import os
import re
import signal
import sys
from pathlib import Path
from typing import Any

import psutil
import torch

from tests.conftest import REPOSITORY, RankProcess, Start, wait_until

STEPS = 400
RUN = (sys.executable, "-m", "ddp_manual")


def worker_of(rank: RankProcess) -> psutil.Process:
    return next(child for child in psutil.Process(rank.process.pid).children() if "worker" in " ".join(child.cmdline()))


def saved_in(folder: Path) -> Any:
    return torch.load(folder / "checkpoint.pt", weights_only=True)


def test_it_ends_bit_for_bit_as_undisturbed_after_a_killed_rank_ctrl_c_and_the_end_of_a_host(
    start: Start, tmp_path: Path, port: int
) -> None:
    """Each step takes 10 ms and is said, so that the disturbed ranks are disturbed on their way. To save starts, the
    undisturbed ranks, and those that go on from the last end, are started by ``launch``."""
    example = REPOSITORY / "examples" / "own_training.py"
    after = "        print('did step', step, file=sys.stderr)\n        __import__('time').sleep(0.01)\n"
    slow = tmp_path / "slow.py"
    slow.write_text(example.read_text().replace("        step += 1\n", f"        step += 1\n{after}"))
    stopped = tmp_path / "stopped"

    def launch(folder: Path) -> RankProcess:
        return start(*RUN, "launch", "--nproc", 2, "--run_dir", folder, example, STEPS, cwd=tmp_path)

    def run(rank: int) -> RankProcess:
        identity = ["--world_size", 2, "--rank", rank, "--master_port", port]
        return start(*RUN, "run", *identity, "--on_loss", "wait", "--run_dir", stopped, slow, STEPS, cwd=tmp_path)

    def assert_all_were_stopped(ranks: list[RankProcess], by: str, number: int, after: int) -> int:
        """Return the step after which they were."""
        assert [rank.wait(30) for rank in ranks] == [128 + number] * 2, ranks[0].err
        step: int = saved_in(stopped)["step"]
        assert after < step < STEPS and f"after step {step} of {STEPS} the losses are" in ranks[0].out
        for place, rank in enumerate(ranks):
            assert f"stopped by {by} on rank 1 after the same step as all ranks" in rank.err
            go_on = f"rank {place} was stopped after step {step} of {STEPS}: to go on, type the same command again"
            assert go_on in rank.out
        return step

    undisturbed = launch(tmp_path / "undisturbed")
    rank_0, lost = run(0), run(1)
    wait_until((stopped / "checkpoint.pt").exists)
    worker_of(lost).kill()
    assert lost.wait(30) == 137
    back = run(1)
    back.wait_for("did step ")
    went_on = re.search(r"all 2 go on after step (\d+); .*, and the ranks repeat (no step|at most)", rank_0.err)
    assert went_on, rank_0.err
    back.wait_for(f"did step {int(went_on[1]) + 3}")  # so that it has taken stops
    os.killpg(back.process.pid, signal.SIGINT)  # as a terminal does
    step = assert_all_were_stopped([rank_0, back], "Ctrl-C (SIGINT)", signal.SIGINT, after=200)

    rank_0, rank_1 = run(0), run(1)
    rank_0.wait_for("process group ready")
    worker_of(rank_0).kill()  # its agent starts another one
    rank_1.wait_for("rank 0 is back, on ")
    rank_1.wait_for(f"did step {step + 3}")
    for process in (worker_of(rank_1), rank_1.process):  # as a host that shuts down does
        process.send_signal(signal.SIGTERM)
    assert_all_were_stopped([rank_0, rank_1], "SIGTERM", signal.SIGTERM, after=step)

    ended = launch(stopped)
    assert [ended.wait(), undisturbed.wait()] == [0, 0], ended.err
    found, expected = saved_in(stopped), saved_in(tmp_path / "undisturbed")
    assert found["step"] == expected["step"] == STEPS
    for name, value in expected["model"].items():
        assert torch.equal(found["model"][name], value), name
