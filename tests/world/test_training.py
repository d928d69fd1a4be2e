"""Training on real processes: what it reaches, what it writes, and that the world size does not change the result."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ddp_manual.training import data
from ddp_manual.training.data import Split
from ddp_manual.training.synthetic import draw_digits
from tests.conftest import ALL_DIGITS, DRAWN, REPOSITORY, Start, source

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


def read(path: Path) -> Any:
    return json.loads(path.read_text())


def textbook_network() -> nn.Module:
    """The ConvNet written down a second time, in the textbook's order, loading the same names."""

    class TextbookNetwork(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer1 = nn.Sequential(nn.Conv2d(1, 16, 5, padding=2), nn.BatchNorm2d(16), nn.ReLU(), nn.MaxPool2d(2))
            self.layer2 = nn.Sequential(nn.Conv2d(16, 32, 5, padding=2), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2))
            self.fc = nn.Linear(1568, 10)

        def forward(self, images: torch.Tensor) -> Any:
            return self.fc(self.layer2(self.layer1(images)).flatten(1))

    return TextbookNetwork()


@torch.inference_mode()
def independent_accuracy(model_file: Path, mnist: Path) -> float:
    """model.pt on the real test set through torchvision's own reader, one image after the other."""
    import torchvision  # not by every test process: it takes 3 s of a core

    network = textbook_network()
    network.load_state_dict(torch.load(model_file, weights_only=True))
    network.eval()
    test = torchvision.datasets.MNIST(str(mnist), train=False, transform=torchvision.transforms.ToTensor())
    correct = 0
    for images, labels in torch.utils.data.DataLoader(test, batch_size=500):
        correct += int((network((images - 0.1307) / 0.3081).argmax(dim=1) == labels).sum())
    return correct / len(test)


@pytest.fixture(scope="session")
def unpacked_mnist(digits: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """torchvision reads only unpacked files: let it unpack a copy."""
    import torchvision

    folder = tmp_path_factory.mktemp("unpacked")
    raw = folder / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in (digits / "MNIST" / "raw").glob("*.gz"):
        torchvision.datasets.utils.extract_archive(str(archive), str(raw))
    return folder


@pytest.mark.soak
def test_four_ranks_with_the_defaults_read_99_percent_of_real_mnist_after_2_epochs(
    start: Start, port: int, digits: Path, unpacked_mnist: Path, tmp_path: Path
) -> None:
    """Two do so in test_tutorials.py. Of a part of MNIST they learn less."""
    world_size = 4
    program = [sys.executable, "run_multi_gpu_train.py", "--data_dir", digits, "--run_dir", tmp_path / "run"]
    ranks = [
        start(*program, "--world_size", world_size, "--rank", rank, "--master_port", port) for rank in range(world_size)
    ]
    assert [rank.wait(250) for rank in ranks] == [0] * world_size
    run = tmp_path / "run"
    summary = read(run / "summary.json")
    assert set(summary) >= SUMMARY_KEYS
    assert summary["final_test_accuracy"] >= (0.99 if ALL_DIGITS else 0.9)
    assert read(run / "accuracies.json")[-1] == summary["final_test_accuracy"]
    assert independent_accuracy(run / "model.pt", unpacked_mnist) == summary["final_test_accuracy"]
    assert len(summary["roster"]) == world_size
    roster = {"rank", "host", "pid", "device", "address", "since", "versions"}
    assert set(summary["roster"][0]) - {"gpu"} == roster
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    kept = {"step", "epoch", "loss", "accuracy", "lr", "samples_per_second", "seconds"}
    assert all(set(line) == kept for line in metrics)
    assert [line["step"] for line in metrics] == sorted({line["step"] for line in metrics})
    assert (run / "samples.png").read_bytes().startswith(b"\x89PNG")
    assert "test accuracy" in ranks[0].out
    assert all(rank.out == "" for rank in ranks[1:])
    for number, rank in enumerate(ranks):
        assert all(line.startswith((f"[rank {number}] ", "  ")) for line in rank.err.splitlines())


def test_a_network_that_has_seen_only_synthetic_digits_reads_real_ones(unpacked_mnist: Path, tmp_path: Path) -> None:
    torch.manual_seed(0)
    images, labels = draw_digits(12_000, seed=1)
    drawn = Split(images.unsqueeze(1), labels, data.DIGITS)
    normalise = source("synthetic").normalise(drawn)
    network = textbook_network()
    optimizer = torch.optim.AdamW(network.parameters(), lr=2e-3)
    for batch in torch.arange(len(drawn.images)).split(100):
        optimizer.zero_grad()
        torch.nn.functional.cross_entropy(network(normalise(drawn.images[batch])), drawn.labels[batch]).backward()
        optimizer.step()
    torch.save(network.state_dict(), tmp_path / "model.pt")
    accuracy = independent_accuracy(tmp_path / "model.pt", unpacked_mnist)
    print(f"accuracy on real digits: {accuracy}")
    assert accuracy >= 0.9


def test_the_same_seed_and_global_batch_end_in_the_same_parameters_at_1_2_and_4_ranks(
    start: Start, port: int, digits: Path, tmp_path: Path
) -> None:
    models = []
    for world_size in (1, 2, 4):
        run = tmp_path / f"run{world_size}"
        options = ["--model", "mlp", "--global_batch_size", 200, "--epochs", 1, "--data_dir", digits, "--run_dir", run]
        identity = ["--world_size", world_size, "--master_port", port]
        ranks = [
            start(sys.executable, "run_multi_gpu_train.py", *identity, "--rank", rank, *options)
            for rank in range(world_size)
        ]
        assert [rank.wait() for rank in ranks] == [0] * world_size
        models.append(torch.load(run / "model.pt", weights_only=True))
    for other in models[1:]:
        for name, parameter in models[0].items():
            torch.testing.assert_close(other[name], parameter, rtol=1e-5, atol=2e-6)


def test_three_ranks_count_every_test_image_once(start_rank: Start, tmp_path: Path, small_data: Path) -> None:
    """The number of test images is not divisible by 3."""
    ranks = [start_rank(rank, 3) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert f"over {DRAWN['test']} images" in ranks[0].err
    accuracy = read(tmp_path / "run" / "summary.json")["final_test_accuracy"]
    assert accuracy * DRAWN["test"] == pytest.approx(round(accuracy * DRAWN["test"]))
    from ddp_manual.training.models import MLP

    network = MLP()
    network.load_state_dict(torch.load(tmp_path / "run" / "model.pt", weights_only=True))
    test = source("synthetic", small_data).load("test")
    scores = network(source("synthetic").normalise(test)(test.images))
    assert (scores.argmax(dim=1) == test.labels).float().mean().item() == pytest.approx(accuracy)


def test_a_loss_that_is_not_finite_stops_every_rank_at_that_step_and_keeps_what_was_saved(
    start_rank: Start, tmp_path: Path
) -> None:
    options = ["--lr", "1e6", "--weight_decay", "1e30", "--clip_grad_norm", 0, "--epochs", 2, "--warmup_epochs", 1.5]
    ranks = [start_rank(rank, 2, *options) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [1, 1]
    for number, rank in enumerate(ranks):
        assert "error[training-failed]: the loss was not finite at step" in rank.err
        assert read(tmp_path / "run" / f"failure-rank{number}.json")["identifier"] == "training-failed"
    assert (tmp_path / "run" / "config.json").exists()
    assert not (tmp_path / "run" / "model.pt").exists()


@pytest.mark.parametrize("steps", [1, 2])
def test_parameters_that_blow_up_in_the_last_step_are_not_saved(start_rank: Start, tmp_path: Path, steps: int) -> None:
    """The loss of the only step until then is finite; the network after it is not."""
    one_step = ["--batch_size", DRAWN["train"] // steps, "--warmup_epochs", 0, "--momentum", 0, "--clip_grad_norm", 0]
    rank = start_rank(0, 1, *one_step, "--lr", "1e6", "--weight_decay", "1e38", "--checkpoint_steps", 1)
    assert rank.wait() == 1
    assert "error[training-failed]: the parameters were not finite at step 1" in rank.err
    assert not (tmp_path / "run" / "model.pt").exists() and not (tmp_path / "run" / "checkpoints").exists()


def test_a_batch_larger_than_a_ranks_share_is_refused_on_every_rank(start_rank: Start) -> None:
    ranks = [start_rank(rank, 2, "--batch_size", 3_001) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [2, 2]
    assert all("error[bad-option]: a batch of 3001 per rank" in rank.err for rank in ranks)


def test_without_files_and_without_a_network_every_rank_says_what_it_looked_for(
    start_rank: Start, tmp_path: Path
) -> None:
    no_network = {"http_proxy": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9"}
    options = ["--dataset", "kmnist", "--data_dir", tmp_path / "nothing"]
    ranks = [start_rank(rank, 2, *options, **no_network) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [16, 16]
    for rank in ranks:
        assert "error[data-missing]: kmnist is not in" in rank.err
        assert "train-images-idx3-ubyte" in rank.err
        assert "--dataset synthetic" in rank.err


def test_a_truncated_file_stops_every_rank_and_is_named(start_rank: Start, mnist: Path, tmp_path: Path) -> None:
    raw = tmp_path / "data" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for archive in (mnist / "MNIST" / "raw").glob("*.gz"):
        content = archive.read_bytes()
        (raw / archive.name).write_bytes(content[: len(content) // 2] if "train-images" in archive.name else content)
    ranks = [start_rank(rank, 2, "--dataset", "mnist", "--data_dir", tmp_path / "data") for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [16, 16]
    assert all("train-images-idx3-ubyte.gz cannot be read" in rank.err for rank in ranks)


def test_a_run_dir_that_holds_a_run_is_not_overwritten(start_rank: Start, tmp_path: Path) -> None:
    assert start_rank(0, 1).wait() == 0
    before = (tmp_path / "run" / "model.pt").read_bytes()
    again = start_rank(0, 1)
    assert again.wait() == 2
    assert "already holds a run" in again.err
    assert (tmp_path / "run" / "model.pt").read_bytes() == before


def test_a_run_dir_that_cannot_be_written_is_a_bad_option(start_rank: Start, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    rank = start_rank(0, 1, "--run_dir", tmp_path / "file" / "run")
    assert rank.wait() == 2
    assert "error[bad-option]: --run_dir" in rank.err


def test_the_default_run_dir_is_named_after_the_time_and_the_run(
    start: Start, small_data: Path, tmp_path: Path
) -> None:
    rank = start(
        *(sys.executable, REPOSITORY / "run_multi_gpu_train.py", "--dataset", "synthetic", "--data_dir", small_data),
        *("--model", "mlp", "--epochs", 1),
        cwd=tmp_path,
    )
    assert rank.wait() == 0
    (run,) = (tmp_path / "runs").iterdir()
    assert run.name.endswith(read(run / "summary.json")["run_id"])


def test_torchrun_starts_the_same_training(start: Start, small_data: Path, tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", 2]
    options = ["--dataset", "synthetic", "--data_dir", small_data, "--model", "mlp", "--global_batch_size", 200]
    run = start(*torchrun, "run_multi_gpu_train.py", *options, "--epochs", 1, "--run_dir", tmp_path / "run")
    assert run.wait() == 0
    summary = read(tmp_path / "run" / "summary.json")
    assert summary["world_size"] == 2
    assert [entry["rank"] for entry in summary["roster"]] == [0, 1]


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


def test_a_full_disk_is_named_and_the_previous_model_stays(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system (run the tests as root)")
    script = (
        "from pathlib import Path; from ddp_manual import run_folder, errors\n"
        f"path = Path({str(tmp_path)!r}) / 'model.pt'\n"
        "run_folder.write_bytes(path, b'old')\n"
        "try: run_folder.write_bytes(path, bytes(1 << 20))\n"
        "except errors.DiskFull as error: print(error.exit_code, path.read_bytes(), len(list(path.parent.iterdir())))\n"
    )
    mounted = f'mount -t tmpfs -o size=256k none {tmp_path} && exec {sys.executable} -c "$0"'
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", mounted, script],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout == "15 b'old' 1\n"
