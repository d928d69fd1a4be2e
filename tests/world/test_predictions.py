"""The predictions of a run for each test image, compared with those of plain torch for ``model.pt``."""

from __future__ import annotations

import csv
import gzip
import json
from collections import Counter
from pathlib import Path

import numpy
import pytest
import torch
from torch import Tensor, nn

from ddp_manual import cli
from tests.conftest import Start


def real_test_set(mnist: Path) -> tuple[Tensor, Tensor]:
    """uint8 [10000, 28, 28] and int64 [10000], read without any of the package's code."""
    raw = mnist / "MNIST" / "raw"

    def numbers(name: str, header: int) -> Tensor:
        file = raw / name
        content = file.read_bytes() if file.exists() else gzip.decompress((raw / f"{name}.gz").read_bytes())
        return torch.from_numpy(numpy.frombuffer(content, numpy.uint8, offset=header).copy())

    return numbers("t10k-images-idx3-ubyte", 16).view(-1, 28, 28), numbers("t10k-labels-idx1-ubyte", 8).long()


@torch.inference_mode()
def independent_probabilities(model: Path, images: Tensor) -> Tensor:
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


def test_the_predictions_equal_those_of_the_same_network_in_plain_torch(
    start_rank: Start, mnist: Path, tmp_path: Path
) -> None:
    """Three ranks do not divide 10,000 images; a few steps leave mistakes enough."""
    ranks = [start_rank(rank, 3, "--dataset", "mnist", "--data_dir", mnist, "--batch_size", 2000) for rank in range(3)]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    run = tmp_path / "run"
    images, labels = real_test_set(mnist)
    probabilities = independent_probabilities(run / "model.pt", images)

    lines = table(run / "predictions.csv")
    ids = [int(line["id"]) for line in lines]
    assert sorted(ids) == list(range(10_000))
    found = torch.tensor([[float(line[f"p_{digit}"]) for digit in range(10)] for line in lines])
    torch.testing.assert_close(found, probabilities[ids], rtol=1e-4, atol=1e-6)
    assert [int(line["truth"]) for line in lines] == labels[ids].tolist()
    assert [int(line["guess"]) for line in lines] == found.argmax(dim=1).tolist()
    assert torch.equal(torch.tensor([float(line["confidence"]) for line in lines]), found.amax(dim=1))
    assert all(line["correct"] == str(int(line["truth"] == line["guess"])) for line in lines)
    keys = [(int(line["correct"]), -float(line["confidence"])) for line in lines]
    assert keys == sorted(keys) and keys[0][0] == 0 and keys[-1][0] == 1

    right = sum(int(line["correct"]) for line in lines)
    assert right / 10_000 == json.loads((run / "summary.json").read_text())["final_test_accuracy"]
    pairs = Counter((line["truth"], line["guess"]) for line in lines)
    for truth, row in enumerate(table(run / "confusion.csv")):
        assert [int(row[str(guess)]) for guess in range(10)] == [pairs[str(truth), str(guess)] for guess in range(10)]
    for name in ("predictions.png", "confusion.png"):
        assert (run / name).read_bytes().startswith(b"\x89PNG")


def test_evaluate_finds_the_accuracy_of_a_complete_run_and_a_resume_restores_missing_predictions(
    start_rank: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A run that was killed between its last checkpoint and its end has no predictions."""
    assert start_rank(0, 1).wait() == 0
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    (checkpoint,) = (tmp_path / "run" / "checkpoints").glob("*.pt")
    assert cli.run(["evaluate", "--checkpoint", str(checkpoint), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["accuracy"] == pytest.approx(summary["final_test_accuracy"], abs=1e-4)
    assert report["loss"] == pytest.approx(summary["final_test_loss"], rel=1e-4)
    names = ("predictions.csv", "predictions.png", "confusion.csv", "confusion.png")
    before = {name: (tmp_path / "run" / name).read_bytes() for name in names}
    for name in (*names, "summary.json"):
        (tmp_path / "run" / name).unlink()
    assert start_rank(0, 1, "--resume", "auto").wait() == 0
    assert {name: (tmp_path / "run" / name).read_bytes() for name in names} == before
    assert (tmp_path / "run" / "summary.json").exists()
