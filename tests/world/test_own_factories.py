"""A model and data of the user's own, by the example that the docs show, and by one that differs between ranks."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

import pytest
import torch

from tests.conftest import REPOSITORY, RankProcess, Start

OPTIONS = ("--model", "my_shapes:network", "--dataset", "my_shapes:shapes", "--batch_size", 50)


def own_folder(tmp_path: Path, rank: int) -> Path:
    """The folder in which ``start_own`` starts a rank; it has the example's module, unless a test has made it."""
    folder = tmp_path / f"rank{rank}"
    if not folder.exists():
        folder.mkdir()
        shutil.copy(REPOSITORY / "examples" / "my_shapes.py", folder)
    return folder


@pytest.fixture
def start_own(start: Start, port: int, tmp_path: Path) -> Start:
    """Start a rank in a folder of its own that has the example's module."""

    def start_own(rank: int, *options: object) -> RankProcess:
        folder = own_folder(tmp_path, rank)
        words = ["--world_size", 2, "--rank", rank, "--master_port", port, "--run_dir", tmp_path / "run", *options]
        return start(
            sys.executable, REPOSITORY / "run_multi_gpu_train.py", *OPTIONS, *words, cwd=folder, PYTHONUNBUFFERED=""
        )

    return start_own


def test_a_users_model_and_data_are_trained_from_the_current_folder(start_own: Start, tmp_path: Path) -> None:
    ranks = [start_own(rank, "--epochs", 4) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["final_test_accuracy"] > 0.95
    run = json.loads((tmp_path / "run" / "config.json").read_text())["run"]
    assert len(run["model_source"]) == len(run["dataset_source"]) == 16
    assert run["classes"] == ["vertical", "horizontal"] and run["shape"] == [1, 16, 16]
    assert "0.weight" in torch.load(tmp_path / "run" / "model.pt", weights_only=True)


def test_a_rank_whose_module_differs_is_turned_away_with_both_digests(start_own: Start, tmp_path: Path) -> None:
    rank_0 = start_own(0)
    rank_0.wait_for("listening")
    module = tmp_path / "rank1" / "my_shapes.py"
    module.parent.mkdir()
    module.write_text((tmp_path / "rank0" / "my_shapes.py").read_text() + "\n# another\n")
    rank_1 = start_own(1)
    assert rank_1.wait() == 12
    assert "error[config-mismatch]" in rank_1.err
    assert "model source: rank 0 has " in rank_1.err and str(module) in rank_1.err
    assert "bring that on" in rank_1.err


def test_what_a_factory_draws_is_the_same_on_every_rank_and_after_a_resume(start_own: Start, tmp_path: Path) -> None:
    drawn = "import random, my_shapes\ndef shapes():\n    parts = my_shapes.shapes()\n"
    drawn += "    random.shuffle(parts[0].places)\n    return parts\n"
    for rank in range(2):
        (own_folder(tmp_path, rank) / "drawn.py").write_text(drawn)
    ranks = [start_own(rank, "--dataset", "drawn:shapes", "--epochs", 1) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    alone = ("--world_size", 1, "--no_ddp", "--dataset", "drawn:shapes", "--epochs", 2, "--resume", "auto")
    changed = tmp_path / "rank1" / "drawn.py"
    changed.write_text(drawn.replace("    random", "    random.random()\n    random"))
    other = start_own(1, *alone, "--rank", 0)
    assert other.wait() == 15
    assert "error[checkpoint-mismatch]" in other.err and "is of a run on other data" in other.err
    same = start_own(0, *alone)
    assert same.wait() == 0, same.err


def test_the_output_of_the_users_code_is_shown_before_the_error_and_nothing_after_it(
    start_own: Start, tmp_path: Path
) -> None:
    """Also what Python still holds back, since stdout is a file, and what a thread goes on to say."""
    module = """
import os, sys, threading, time
import my_shapes
from torch import nn

class Network(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(256, 2)
        self.calls = 0

    def forward(self, images):
        self.calls += self.training
        if self.calls == 8 and os.environ["RANK"] == "1":
            print("my last line")
            raise LookupError("of mine")
        return self.layer(images.flatten(1))

def network():
    def say_on():
        while True:
            print("said by a thread", file=sys.stderr)
            time.sleep(0.0005)
    threading.Thread(target=say_on, daemon=True).start()
    print("my first line")
    return Network()
"""
    for rank in range(2):
        (own_folder(tmp_path, rank) / "talking.py").write_text(module)
    ranks = [start_own(rank, "--model", "talking:network", "--epochs", 40) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [14, 1]
    for rank in ranks:
        said, _, after = rank.err.partition("error[")
        assert "said by a thread" in said and "of mine" in after and "said by a thread" not in after
        assert "my first line" in rank.out
    assert "my last line" in ranks[1].out


def test_processes_that_the_users_own_code_starts_can_be_terminated(start_own: Start, tmp_path: Path) -> None:
    """As a ``multiprocessing.Pool`` does at its end, which waits for them."""
    module = """
import multiprocessing, subprocess
import my_shapes

def double(number):
    return 2 * number

def shapes():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(double, range(3)) == [0, 2, 4]
    other = subprocess.Popen(["sleep", "60"])
    other.terminate()
    assert other.wait(10) == -15
    return my_shapes.shapes()
"""
    (own_folder(tmp_path, 0) / "pooled.py").write_text(module)
    rank = start_own(0, "--dataset", "pooled:shapes", "--epochs", 1, "--world_size", 1)
    assert rank.wait(60) == 0, rank.err


def test_what_a_factory_raises_is_shown_on_every_rank(start_own: Start, tmp_path: Path) -> None:
    module = "def network(): raise LookupError('of mine')\ndef shapes(): raise OSError('no disk of mine')\n"
    for rank in range(2):
        (tmp_path / f"rank{rank}").mkdir()
        (tmp_path / f"rank{rank}" / "my_shapes.py").write_text(module)
    ranks = [start_own(rank) for rank in range(2)]
    assert sorted(rank.wait() for rank in ranks) == [1, 14]
    for rank in ranks:
        assert "no disk of mine" in rank.err and "my_shapes.py" in rank.err


def test_a_missing_module_is_told_before_the_other_ranks_have_come(start_own: Start) -> None:
    rank = start_own(0, "--model", "nowhere:network")
    assert rank.wait(10) == 2
    assert "there is no module nowhere" in rank.err


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
    return nn.Sequential(nn.Flatten(), Centred(256), nn.Linear(256, 9), nn.Tanh(), nn.Dropout(), nn.Linear(9, classes))
"""


def test_dropout_and_a_buffer_that_is_read_go_on_from_a_checkpoint_as_if_the_run_had_not_stopped(
    start_own: Start, tmp_path: Path
) -> None:
    whole, rest = tmp_path / "whole", tmp_path / "rest"
    options = ("--model", "centred:network", "--epochs", 2, "--checkpoint_steps", 3)
    for rank in range(2):
        folder = tmp_path / f"rank{rank}"
        folder.mkdir()
        shutil.copy(REPOSITORY / "examples" / "my_shapes.py", folder)
        (folder / "centred.py").write_text(CENTRED)

    def train(run_dir: Path, *more: object) -> None:
        ranks = [start_own(rank, *options, "--keep", 9, "--run_dir", run_dir, *more) for rank in range(2)]
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err

    train(whole)
    (third_step,) = (whole / "checkpoints").glob("step-00000003-*.pt")
    train(rest, "--resume", third_step)
    first, second = (torch.load(folder / "model.pt", weights_only=True) for folder in (whole, rest))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_signal_stops_a_run_within_2_s_on_a_device_that_takes_steps_after_their_launch(
    start_own: Start, tmp_path: Path
) -> None:
    """The device is a fake, for want of a GPU: a thread that takes 0.1 s for each step, for which only a copy to the
    host waits. 200 steps of an epoch are launched in less than a second."""
    module = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
from torch import nn
from ddp_manual.training import ddp

device, to_host = ThreadPoolExecutor(1), ddp.to_host

def wait(tensor):
    device.submit(int).result()
    return to_host(tensor)

ddp.to_host = wait

class Network(nn.Linear):
    steps = 0

    def forward(self, images):
        if self.training:
            device.submit(time.sleep, 0.1)
            self.steps += 1
            print(f"launching step {self.steps}.", file=sys.stderr)
        return super().forward(images.flatten(1))

def network():
    return Network(256, 2)
"""
    for rank in range(2):
        (own_folder(tmp_path, rank) / "device.py").write_text(module)
    options = ("--model", "device:network", "--batch_size", 1, "--log_every", 1000)
    ranks = [start_own(rank, *options) for rank in range(2)]
    ranks[1].wait_for("launching step 25.")
    ranks[1].process.send_signal(signal.SIGTERM)
    assert [rank.wait() for rank in ranks] == [143, 143], ranks[0].err
    assert "error[stopped]: " in ranks[0].err
    assert "launching step 51." not in ranks[0].err
