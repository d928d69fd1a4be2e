"""Each section of docs/from-tutorials.md, typed as it stands there."""

from __future__ import annotations

import base64
import csv
import json
import re
from pathlib import Path

import nbformat
import pytest
import torch

from tests import tracked, tutorials
from tests.conftest import first_of_each_class, jupyter_below


def test_1_the_serial_script_and_its_five_changes(tmp_path: Path, mnist: Path, cifar10: Path) -> None:
    folder = tutorials.workspace(tmp_path, mnist, cifar10)
    shown, serial, spawned = tutorials.type_in(folder, 1, OMP_NUM_THREADS="1")
    assert "mnist, train: 60000 images of 28x28 pixels, grey" in shown
    assert (folder / "mnist-train.png").read_bytes().startswith(b"\x89PNG")
    accuracy = re.search(r"mlp on mnist: (\S+)% test accuracy after 1 epochs on 1 rank\(s\) \(none, ", serial)
    assert accuracy and float(accuracy[1]) > 95
    loss = re.search(r"^2 ranks, 1 epoch\(s\): loss (\S+), saved in spawned.pt$", spawned, re.MULTILINE)
    assert loss and float(loss[1]) < 1
    assert set(torch.load(folder / "spawned.pt")) == {"1.weight", "1.bias", "3.weight", "3.bias"}
    [shown_script] = [text for language, text in tutorials.BLOCK.findall(tutorials.section(1)) if language == "python"]
    assert shown_script in (folder / "examples" / "spawned_ranks.py").read_text()


def test_3_the_notebook(tmp_path: Path, mnist: Path, cifar10: Path) -> None:
    few = first_of_each_class(cifar10, tmp_path / "few", train=13, test=5)
    (tmp_path / "typed").mkdir()
    folder = tutorials.workspace(tmp_path / "typed", mnist, few)
    tutorials.type_in(folder, 3, OMP_NUM_THREADS="1", **jupyter_below(tmp_path))
    notebook = nbformat.read(folder / "cifar10_two_ranks.ipynb", as_version=4)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    said = "".join(output.text for output in outputs["training"])
    for rank in range(2):
        assert f"[rank {rank}] process group ready" in said
        assert f"[rank {rank}] epoch 3/3: test accuracy " in said
    [run_dir] = (folder / "runs").iterdir()
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["model"], config["dataset"], config["flip"]) == ("cifar-cnn", "folder:cifar10", True)
    assert config["run"]["world_size"] == 2
    accuracy = json.loads((run_dir / "summary.json").read_text())["final_test_accuracy"]
    assert f"epoch 3/3: test accuracy {100 * accuracy:.2f}%" in said
    assert ["image/png" in output.get("data", {}) for output in outputs["curves"]] == [True]
    told, picture = outputs["predictions"]
    with open(run_dir / "predictions.csv") as file:
        first = next(csv.DictReader(file))
    assert told.text.splitlines()[1].split()[:3] == [first["id"], first["guess"], f"({first['truth']})"]
    assert base64.b64decode(picture.data["image/png"]) == (run_dir / "predictions.png").read_bytes()


def test_4_a_minimal_torchrun_script(tmp_path: Path, mnist: Path, cifar10: Path) -> None:
    (tmp_path / "typed").mkdir()
    folder = tutorials.workspace(tmp_path / "typed", mnist, cifar10)
    home = {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    *said, compared = tutorials.type_in(folder, 4, OMP_NUM_THREADS="1", **home)
    last_losses = []
    for text, run, world_size in zip(said, (folder / "runs" / "two", folder / "runs" / "one"), (2, 1), strict=True):
        assert "wandb: offline (no login and no WANDB_API_KEY)" in text
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics] == list(range(50, 601, 50))
        last_losses.append(metrics[-1]["loss"])
        (file,) = tracked.wandb_files(run)
        assert tracked.wandb_run(file)["display_name"].startswith(f"mlp-mnist-{world_size}ranks-")
        curves = tracked.wandb_curves(file)
        for name, key in (("train/loss", "loss"), ("samples_per_second", "samples_per_second"), ("lr", "lr")):
            assert {step: curves[name][step] for step in curves[name]} == {line["step"]: line[key] for line in metrics}
        assert list(curves["test/accuracy"].values()) == json.loads((run / "accuracies.json").read_text())
        assert curves["test/accuracy"][600] > 0.96
        assert tracked.wandb_processes(run) == []
    assert last_losses[0] == pytest.approx(last_losses[1], rel=1e-3)
    assert re.search(r"^ +one +two$", compared, re.MULTILINE)
    assert re.search(r"^ +ranks +1 +2$", compared, re.MULTILINE)
    assert re.search(r"^ +test accuracy +(\S+) +\1$", compared, re.MULTILINE)


def test_5_ranks_by_hand(tmp_path: Path, mnist: Path, cifar10: Path) -> None:
    rank_0, rank_1, recipe = tutorials.type_in(tutorials.workspace(tmp_path, mnist, cifar10), 5, OMP_NUM_THREADS="1")
    assert "[rank 0] process group ready" in rank_0 and "[rank 1] process group ready" in rank_1
    accuracies = []
    for said in (rank_0, recipe):
        [run_dir] = re.findall(r"  (runs/\S+)/summary.json", said)
        accuracies.append(json.loads((tmp_path / run_dir / "summary.json").read_text())["final_test_accuracy"])
    assert accuracies[0] >= 0.99
    assert accuracies[1] == pytest.approx(0.815, abs=0.02)
