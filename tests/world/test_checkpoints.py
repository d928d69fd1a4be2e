"""A run that was stopped, killed or out of disk space resumes bit for bit as if nothing had happened: real ranks,
signals and disks."""

from __future__ import annotations

import json
import os
import random
import re
import runpy
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from ddp_manual.training import checkpoint_files
from tests.conftest import DRAWN, REPOSITORY, RankProcess, Start, free_port, gone

KILLS = int(os.environ.get("DDP_MANUAL_SOAK_KILLS", "2"))
# The last step of an epoch, of two ranks or of three, is a small one.
LONG = ("--global_batch_size", 36, "--epochs", 2, "--log_every", 10)
STEPS_OF_AN_EPOCH = 167
# A network of a user's own, with dropout, and with a buffer that is read and replaced in every step.
CENTRED = """
import torch
from torch import nn

class Centred(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.register_buffer("mean", torch.zeros(count))
        self.register_buffer("calls", torch.zeros(()))
    def forward(self, inputs):
        self.calls = self.calls + 1  # a new tensor, also while it is tested
        if self.training:
            with torch.no_grad():
                self.mean.lerp_(inputs.mean(0), 0.1)
        return inputs - self.mean

def network(shape, classes):
    return nn.Sequential(nn.Flatten(), Centred(784), nn.Linear(784, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, classes))
"""
# Writes a line of indices for each step: which samples of the data this rank trains on.
RECORD = """
import os, sys
if "worker" in sys.orig_argv[1]:
    from ddp_manual.training.position import EpochPlan
    share = EpochPlan.share
    def recorded(*where):
        samples = share(*where)
        with open(os.environ["RECORD"] + os.environ["RANK"], "a") as file:
            file.write(" ".join(map(str, samples.tolist())) + "\\n")
        return samples
    EpochPlan.share = recorded
"""
StartWorld = Callable[..., list[RankProcess]]


@pytest.fixture
def code(tmp_path: Path) -> Path:
    """A folder with the network ``centred:network``."""
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "centred.py").write_text(CENTRED)
    return tmp_path / "code"


@pytest.fixture
def start_world(start: Start, small_data: Path, code: Path) -> StartWorld:
    """Start all ranks of a world by hand that trains into ``run_dir``, on a free port."""

    def start_world(world_size: int, run_dir: Path, *options: object) -> list[RankProcess]:
        common = ["--world_size", world_size, "--master_port", free_port(), "--run_dir", run_dir, *options]
        common += ["--dataset", "synthetic", "--data_dir", small_data]
        program = [sys.executable, REPOSITORY / "run_multi_gpu_train.py", "--model", "centred:network"]
        return [start(*program, *common, "--rank", rank, cwd=code) for rank in range(world_size)]

    return start_world


@pytest.fixture
def launch(start: Start, small_data: Path, code: Path) -> Start:
    """Start all ranks with one command, whose ranks write into ``<run_dir>-samples<rank>`` what they train on."""
    (code / "sitecustomize.py").write_text(RECORD)

    def launch(nproc: int, run_dir: Path, *options: object) -> RankProcess:
        restarts = ["--max_restarts", 3]  # which a signal does not use
        command = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", nproc, *restarts, "--run_dir", run_dir]
        data = ["--dataset", "synthetic", "--data_dir", small_data]
        env = {"RECORD": f"{run_dir}-samples", "PYTHONPATH": f"{code}:{REPOSITORY}"}
        return start(*command, "--", "--model", "centred:network", *data, *options, cwd=code, **env)

    return launch


def parameters(run: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(run / "model.pt", weights_only=True)
    return loaded


def assert_same_run(run: Path, other: Path) -> None:
    """Assert bitwise equal parameters, and files as if the run had never stopped."""
    expected = parameters(other)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(run).items())
    assert (run / "accuracies.json").read_text() == (other / "accuracies.json").read_text()
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(other)]
    for ours, theirs in zip(metrics(run), metrics(other), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert (ours["accuracy"], ours["lr"]) == (theirs["accuracy"], theirs["lr"])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def resumed_step(rank: RankProcess) -> int:
    found = re.search(r"going on after step (\d+)", rank.err)
    return int(found[1]) if found else 0


def samples(run: Path) -> list[list[int]]:
    """Step of this part of the run, the same number of steps on all ranks -> the samples that they trained on."""
    of_ranks = [file.read_text().splitlines() for file in run.parent.glob(f"{run.name}-samples?")]
    return [[int(word) for line in lines for word in line.split()] for lines in zip(*of_ranks, strict=True)]


def test_three_ranks_stop_after_the_same_step_and_the_run_goes_on_to_the_same_parameters_or_at_two_ranks(
    launch: Start, tmp_path: Path
) -> None:
    """Signals to processes: SIGUSR1 saves, the terminal's end stops. Of two ranks the order in which gradients are
    summed makes no difference; of three, DDP's buckets decide, which it lays out anew on its way."""
    run, undisturbed, elsewhere = tmp_path / "run", tmp_path / "undisturbed", tmp_path / "elsewhere"
    stopped = launch(3, run, *LONG)
    stopped.wait_for("step 40/334")
    stopped.process.send_signal(signal.SIGUSR1)
    stopped.wait_for("saved ")
    ranks = psutil.Process(stopped.worker).children()
    stopped.process.send_signal(signal.SIGHUP)
    assert stopped.wait(8) == 128 + signal.SIGHUP, stopped.err
    assert gone(ranks, 0.5)
    assert "error[" not in stopped.err  # nothing is lost
    assert stopped.err.count("stopping; a second signal ends all ranks at once") == 1
    assert "restart 1 of 3" not in stopped.err
    to_go_on = f"{stopped.typed} --resume auto"
    assert to_go_on in stopped.err[stopped.err.rindex("stopped by ") :] and stopped.err.count("--resume auto") == 1
    for rank in range(3):
        failure = json.loads((run / f"failure-rank{rank}.json").read_text())
        assert (failure["identifier"], failure["exit_code"]) == ("stopped", 128 + signal.SIGHUP)
        assert to_go_on in failure["next"]
    newest, *_ = checkpoint_files.find(run / "checkpoints")
    before = samples(run)
    assert len(before) == newest.step

    shutil.copytree(run, elsewhere)
    whole, resumed = launch(3, undisturbed, *LONG), launch(3, run, *LONG, "--resume", "auto")
    assert [whole.wait(), resumed.wait()] == [0, 0], resumed.err
    assert resumed_step(resumed) == newest.step
    assert_same_run(run, undisturbed)

    two = launch(2, elsewhere, *LONG, "--resume", "auto")
    assert two.wait() == 0, two.err
    steps = [*before, *samples(elsewhere)]
    for epoch in (steps[:STEPS_OF_AN_EPOCH], steps[STEPS_OF_AN_EPOCH:]):
        assert sorted(sample for step in epoch for sample in step) == list(range(DRAWN["train"]))


def test_ranks_without_a_sample_in_the_last_step_train_the_same_network(
    start: Start, port: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same as one rank alone does, which is trained in this process."""
    script = REPOSITORY / "tests" / "world" / "uneven_steps.py"
    launch = start(sys.executable, "-m", "ddp_manual", "launch", "--nproc", 3, script)
    assert launch.wait() == 0, launch.err
    (line,) = {line.partition("] ")[2] for line in launch.out.splitlines()}
    monkeypatch.setenv("MASTER_PORT", str(port))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    alone = runpy.run_path(str(script))["trained"]
    assert [float(word) for word in line.split()] == pytest.approx(alone, rel=1e-5, abs=1e-6)


def test_a_disk_that_fills_up_leaves_every_checkpoint_that_was_written(small_data: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system (run the tests as root)")
    full = tmp_path / "full"
    full.mkdir()
    options = f"--dataset synthetic --model mlp --data_dir {small_data} --epochs 1 --master_port 0"
    train = f"{sys.executable} run_multi_gpu_train.py {options}"
    script = f"""
        mount -t tmpfs -o size=20m none {full}
        {train} --run_dir {full}/run --batch_size 10 --checkpoint_steps 5 --keep 100 2>&1; echo "first: $?"
        ls -A {full}/run/checkpoints
        {sys.executable} -m ddp_manual checkpoints {full}/run --json > {tmp_path}/list.json; echo "list: $?"
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert "error[disk-full]: no space left to write" in done.stdout, done
    assert "first: 15" in done.stdout and "list: 0" in done.stdout, done.stdout
    assert ".tmp" not in done.stdout
    listed = json.loads((tmp_path / "list.json").read_text())
    assert len(listed) > 15 and {one["verdict"] for one in listed} == {"ok"}


@pytest.mark.soak(only=True)
@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_with_the_parameters_of_one_that_was_not(
    start_world: StartWorld, tmp_path: Path
) -> None:
    """Each kill costs at most the 20 steps between two checkpoints."""
    order = random.Random(KILLS)
    epochs = 1 + KILLS // 4
    options = ("--batch_size", 20, "--epochs", epochs, "--log_every", 1, "--checkpoint_steps", 20)
    run = tmp_path / "run"
    reached = 0
    for _ in range(KILLS):
        ranks = start_world(2, run, *options, "--resume", "auto")
        ranks[0].wait_for("training centred:network on")
        went_on = resumed_step(ranks[0])
        assert reached - 20 <= went_on <= reached, ranks[0].err
        ranks[0].wait_for(f"step {went_on + 1}/")
        time.sleep(order.uniform(0, 0.4))
        victims = order.choice(([0], [1], [0, 1]))
        for victim in victims:
            os.kill(order.choice((ranks[victim].process.pid, ranks[victim].worker)), signal.SIGKILL)
        for rank in ranks:
            assert rank.wait(30) != 0
        said = [int(step) for step in re.findall(r"step (\d+)/", ranks[0].err)]
        reached = max(said)
        assert "checkpoint-corrupt" not in ranks[0].err and "is not the checkpoint that was written" not in ranks[0].err
    ranks = start_world(2, run, *options, "--resume", "auto")
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    assert resumed_step(ranks[0]) >= reached - 20
    ranks = start_world(2, tmp_path / "undisturbed", *options)
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    assert_same_run(run, tmp_path / "undisturbed")
