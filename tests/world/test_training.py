"""Training on real processes: what it reaches on real images, what it writes, and that neither the world size nor DDP
changes the result. Facts of torch's arithmetic, of torchvision's reader and of a GPU."""

from __future__ import annotations

import csv
import gzip
import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch import nn

import ddp_manual
from ddp_manual import TrainConfig
from ddp_manual.training import data, models
from ddp_manual.training.data import Split
from ddp_manual.training.synthetic import draw_digits
from tests.conftest import REPOSITORY, Start, source

SUMMARY_KEYS = {
    "world_size",
    "backend",
    "device",
    "dataset",
    "model",
    "epochs",
    "final_test_accuracy",
    "best_test_accuracy",
    "final_test_loss",
    "rendezvous_seconds",
    "train_seconds",
    "samples_per_second",
    "torch_version",
    "roster",
}


# The worker says in its second backward pass whether it has a process group, and a connection to another host.
WATCHED = """
import sys
if "worker" in sys.orig_argv[1]:
    import psutil, torch, torch.distributed as dist
    backward, calls = torch.autograd.backward, []
    def watched(*arguments, **options):
        calls.append(None)
        if len(calls) == 2:
            others = {one.raddr.ip for one in psutil.Process().net_connections("inet") if one.raddr}
            others -= {"127.0.0.1", "::ffff:127.0.0.1"}  # torch's store, which it hosts itself
            print("has a process group:", dist.is_initialized(), "and connections:", *others, file=sys.stderr)
        return backward(*arguments, **options)
    torch.autograd.backward = watched
"""


def read(path: Path) -> Any:
    return json.loads(path.read_text())


@pytest.mark.soak(only=True)
def test_a_network_that_has_seen_only_synthetic_digits_reads_real_ones(mnist: Path) -> None:
    images, labels = draw_digits(12_000, seed=1)
    drawn = Split(images.unsqueeze(1), labels, data.DIGITS)
    normalise = source("synthetic").normalise(drawn)
    network = models.build("convnet", device=torch.device("cpu"), seed=0)
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for batch in torch.arange(len(drawn.images)).split(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(normalise(drawn.images[batch])), drawn.labels[batch]).backward()
        optimizer.step()
    real, truth = real_test_set(mnist)
    guess = network.eval()(normalise(real.unsqueeze(1))).argmax(dim=1)
    assert float((guess == truth).double().mean()) >= 0.9


@pytest.fixture
def train_alone(port: int, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Train in this process, as one rank of a world of its own: it has torch already."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # as the ranks that it is compared with

    def train_alone(**options: Any) -> None:
        with ddp_manual.join(world_size=1, rank=0, master_port=port, device="cpu") as world:
            assert torch.distributed.is_initialized()
            ddp_manual.train(world, TrainConfig(**options))

    return train_alone


def test_no_ddp_needs_no_process_group_and_learns_the_same_parameters_bit_for_bit(
    start: Start, train_alone: Callable[..., None], few_images: Path, tmp_path: Path
) -> None:
    """With batch statistics, and random numbers in every step."""
    (tmp_path / "sitecustomize.py").write_text(WATCHED)
    options = ["--model", "cifar-cnn", "--dataset", f"folder:{few_images}", "--batch_size", 20, "--epochs", 3]
    command = [sys.executable, "run_multi_gpu_train.py", "--run_dir", tmp_path / "serial", *options]
    serial = start(*command, "--world_size", 1, "--no_ddp", PYTHONPATH=f"{tmp_path}:{REPOSITORY}")
    ddp = {"model": "cifar-cnn", "dataset": f"folder:{few_images}", "batch_size": 20, "epochs": 3}
    train_alone(**ddp, run_dir=str(tmp_path / "ddp"))
    assert serial.wait() == 0, serial.err
    assert "has a process group: False and connections:\n" in serial.err
    assert (tmp_path / "serial" / "model.pt").read_bytes() == (tmp_path / "ddp" / "model.pt").read_bytes()
    summary = read(tmp_path / "serial" / "summary.json")
    assert (summary["world_size"], summary["backend"], summary["roster"][0]["rank"]) == (1, "none", 0)


def test_three_ranks_learn_what_one_learns_and_their_predictions_are_those_of_the_same_network_in_plain_torch(
    start: Start, train_alone: Callable[..., None], digits: Path, tmp_path: Path
) -> None:
    """The same seed and global batch. Three ranks do not divide the images; a few steps leave mistakes enough."""
    run = tmp_path / "run"
    options = ["--model", "mlp", "--epochs", 1, "--global_batch_size", 300, "--log_every", 5, "--data_dir", digits]
    launch = start(sys.executable, "-m", "ddp_manual", "launch", "--nproc", 3, "--run_dir", run, "--", *options)
    alone = {"model": "mlp", "epochs": 1, "global_batch_size": 300, "data_dir": str(digits)}
    train_alone(**alone, run_dir=str(tmp_path / "alone"))
    assert launch.wait() == 0, launch.err
    learned = torch.load(run / "model.pt", weights_only=True)
    for name, parameter in torch.load(tmp_path / "alone" / "model.pt", weights_only=True).items():
        torch.testing.assert_close(learned[name], parameter, rtol=1e-5, atol=2e-6)

    images, labels = real_test_set(digits)
    probabilities = independent_probabilities(run / "model.pt", images)

    lines = table(run / "predictions.csv")
    ids = [int(line["id"]) for line in lines]
    assert sorted(ids) == list(range(len(images)))
    found = torch.tensor([[float(line[f"p_{digit}"]) for digit in range(10)] for line in lines])
    torch.testing.assert_close(found, probabilities[ids], rtol=1e-4, atol=1e-6)
    assert [int(line["truth"]) for line in lines] == labels[ids].tolist()
    assert [int(line["guess"]) for line in lines] == found.argmax(dim=1).tolist()
    assert torch.equal(torch.tensor([float(line["confidence"]) for line in lines]), found.amax(dim=1))
    assert all(line["correct"] == str(int(line["truth"] == line["guess"])) for line in lines)
    keys = [(int(line["correct"]), -float(line["confidence"])) for line in lines]
    assert keys == sorted(keys) and keys[0][0] == 0 and keys[-1][0] == 1

    right = sum(int(line["correct"]) for line in lines)
    summary = read(run / "summary.json")
    assert set(summary) >= SUMMARY_KEYS and right / len(images) == summary["final_test_accuracy"]
    kept = {"step", "epoch", "loss", "accuracy", "lr", "samples_per_second", "seconds"}
    assert all(set(json.loads(line)) == kept for line in (run / "metrics.jsonl").read_text().splitlines())
    pairs = Counter((line["truth"], line["guess"]) for line in lines)
    for truth, row in enumerate(table(run / "confusion.csv")):
        assert [int(row[str(guess)]) for guess in range(10)] == [pairs[str(truth), str(guess)] for guess in range(10)]
    for name in ("mistakes.png", "confusion.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def real_test_set(mnist: Path) -> tuple[torch.Tensor, torch.Tensor]:
    """uint8 [N, 28, 28] and int64 [N], read without any of the package's code."""
    raw = mnist / "MNIST" / "raw"

    def numbers(name: str, header: int) -> torch.Tensor:
        file = raw / name
        content = file.read_bytes() if file.exists() else gzip.decompress((raw / f"{name}.gz").read_bytes())
        return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header).copy())

    return numbers("t10k-images-idx3-ubyte", 16).view(-1, 28, 28), numbers("t10k-labels-idx1-ubyte", 8).long()


@torch.inference_mode()
def independent_probabilities(model: Path, images: torch.Tensor) -> torch.Tensor:
    """float32 [N, 10], by a network of one hidden layer that is written down here."""
    parameters = torch.load(model, weights_only=True)
    hidden, fc = nn.Linear(784, 128), nn.Linear(128, 10)
    hidden.load_state_dict({name: parameters[f"hidden.{name}"] for name in ("weight", "bias")})
    fc.load_state_dict({name: parameters[f"fc.{name}"] for name in ("weight", "bias")})
    pixels = (images.flatten(1).float() / 255 - 0.1307) / 0.3081
    return fc(hidden(pixels).tanh()).softmax(dim=1)


def table(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


# Draws with random, and starts processes that it then ends, as multiprocessing.Pool does; it speaks, also in a thread.
OWN = """
import multiprocessing, os, random, subprocess, sys, threading, time
import my_shapes
from torch import nn

def double(number):
    return 2 * number

def shapes():
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(double, range(3)) == [0, 2, 4]
    other = subprocess.Popen(["sleep", "60"])
    other.terminate()
    assert other.wait(10) == -15
    parts = my_shapes.shapes()
    random.shuffle(parts[0].places)
    return parts

class Network(nn.Sequential):
    calls = 0

    def forward(self, images):
        self.calls += self.training
        if self.calls == 30 and os.environ["RANK"] == "1":
            print("my last line")
            raise LookupError("of mine")
        return super().forward(images)

def network():
    def say_on():
        while True:
            print("said by a thread", file=sys.stderr)
            time.sleep(0.0005)
    threading.Thread(target=say_on, daemon=True).start()
    print("my first line")
    return Network(nn.Flatten(), nn.Linear(256, 16), nn.ReLU(), nn.Linear(16, 2))
"""


def test_a_users_model_and_data_are_trained_and_nothing_that_their_code_prints_follows_the_error(
    start: Start, port: int, tmp_path: Path
) -> None:
    """Also what Python still holds back, since stdout is a file, and what a thread goes on to say."""
    (tmp_path / "own.py").write_text(OWN)
    shutil.copy(REPOSITORY / "examples" / "my_shapes.py", tmp_path)
    program = [sys.executable, REPOSITORY / "run_multi_gpu_train.py", "--world_size", 2, "--master_port", port]
    program += ["--model", "own:network", "--dataset", "own:shapes", "--batch_size", 50, "--epochs", 8]
    program += ["--run_dir", tmp_path / "run"]
    ranks = [start(*program, "--rank", rank, cwd=tmp_path, PYTHONUNBUFFERED="") for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [14, 1]
    for rank in ranks:
        said, _, after = rank.err.partition("error[")
        assert "said by a thread" in said and "of mine" in after and "said by a thread" not in after
        assert "my first line" in rank.out
    assert "my last line" in ranks[1].out
    assert read(tmp_path / "run" / "accuracies.json")[5] > 0.95  # 4 steps are an epoch
    run = read(tmp_path / "run" / "config.json")["run"]
    assert run["classes"] == ["vertical", "horizontal"] and run["shape"] == [1, 16, 16]


def test_what_is_not_finite_stops_every_rank_at_that_step_and_is_not_saved(
    start: Start, small_data: Path, tmp_path: Path
) -> None:
    """The loss of the only step until then is finite; the network after it is not."""
    training = ["--dataset", "synthetic", "--data_dir", small_data, "--model", "mlp", "--lr", "1e6"]
    one_step = {"batch_size": 3000, "epochs": 1, "warmup_epochs": 0, "momentum": 0, "checkpoint_steps": 1}
    training += [word for name, value in one_step.items() for word in (f"--{name}", value)]
    training += ["--weight_decay", "1e38", "--clip_grad_norm", 0]
    launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, "--run_dir", tmp_path / "run", "--"]
    launcher = start(*launch, *training)
    assert launcher.wait() == 1
    assert "error[training-failed]: the parameters were not finite at step" in launcher.err
    assert launcher.err.count("  why:  ") == 1  # the other rank says that it is the same
    for rank in range(2):
        assert read(tmp_path / "run" / f"failure-rank{rank}.json")["identifier"] == "training-failed"
    assert not (tmp_path / "run" / "model.pt").exists()
    assert not (tmp_path / "run" / "checkpoints").exists()


@pytest.mark.gpu
def test_on_a_gpu_the_defaults_use_nccl_and_read_99_percent(
    start: Start, mnist: Path, tmp_path: Path, port: int
) -> None:
    options = ["--data_dir", mnist, "--run_dir", tmp_path / "run", "--master_port", port]  # a port: not alone
    rank = start(sys.executable, "run_multi_gpu_train.py", *options)
    assert rank.wait() == 0
    summary = read(tmp_path / "run" / "summary.json")
    assert (summary["backend"], summary["device"]) == ("nccl", "cuda")
    assert summary["roster"][0]["device"] == "cuda:0"
    assert summary["final_test_accuracy"] >= 0.99


@pytest.mark.gpu
def test_more_ranks_than_gpus_is_refused_and_names_the_device(start_rank: Start) -> None:
    gpus = torch.cuda.device_count()
    ranks = [start_rank(rank, gpus + 1, "--device", "cuda") for rank in range(gpus + 1)]
    assert ranks[-1].wait() == 17
    assert f"cuda:{gpus}, which does not exist" in ranks[-1].err
    assert all(rank.wait() != 0 for rank in ranks)


@pytest.mark.gpu
def test_ranks_that_each_see_one_of_several_gpus_each_take_index_0(start_rank: Start, tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    ranks = [start_rank(rank, 2, CUDA_VISIBLE_DEVICES=str(rank)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    roster = read(tmp_path / "run" / "summary.json")["roster"]
    assert [entry["device"] for entry in roster] == ["cuda:0", "cuda:0"]
    assert roster[0]["gpu"] != roster[1]["gpu"]


@pytest.mark.gpu
def test_more_ranks_than_gpus_train_on_the_cpu_by_default(start_rank: Start, tmp_path: Path) -> None:
    world_size = torch.cuda.device_count() + 1
    ranks = [start_rank(rank, world_size) for rank in range(world_size)]
    assert [rank.wait() for rank in ranks] == [0] * world_size
    assert all(f"has {world_size} ranks and {world_size - 1} GPU" in rank.err for rank in ranks)
    summary = read(tmp_path / "run" / "summary.json")
    assert (summary["backend"], summary["device"]) == ("gloo", "cpu")
