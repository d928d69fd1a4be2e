"""Each section of docs/from-tutorials.md, typed as it stands there: with a part of MNIST, in a soak with all of it."""

from __future__ import annotations

import base64
import json
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import nbformat
import pytest
import torch

from ddp_manual import TrainConfig
from tests import tracked, tutorials
from tests.conftest import ALL_DIGITS, REPOSITORY, clean_environment, first_of_each_class, free_port

with_flytekit = pytest.mark.skipif(not find_spec("flytekit"), reason="there is no flytekit for this Python")


@with_flytekit
@pytest.mark.soak(only=True)
def test_2_a_workflow_task(tmp_path: Path, digits: Path, cifar10: Path) -> None:
    (tmp_path / "typed").mkdir()
    (tmp_path / "temporary").mkdir()
    folder = tutorials.workspace(tmp_path / "typed", digits, cifar10)
    places = {"HOME": str(tmp_path), "TMPDIR": str(tmp_path / "temporary")}
    _, data, said = tutorials.type_in(folder, 2, OMP_NUM_THREADS="1", **places)
    assert data.splitlines()[-1] == "data"
    outputs: dict[str, list[Path]] = {}
    for name, path in re.findall(r"^(\w+): (/.*)$", said, re.MULTILINE):
        outputs.setdefault(name, []).append(Path(path))
    assert list(outputs) == ["accuracies", "model", "predictions", "figures"]
    accuracies = json.loads(outputs["accuracies"][0].read_text())
    assert len(accuracies) == 2 and accuracies[-1] > (0.95 if ALL_DIGITS else 0.7)
    assert f"[rank 0] epoch 2/2: test accuracy {100 * accuracies[-1]:.2f}%" in said
    assert {path.name for path in outputs["figures"]} == {"confusion.png", "mistakes.png", "samples.png"}
    config = outputs["model"][0].parent / "config.json"
    assert json.loads(config.read_text())["run"]["world_size"] == 2
    assert TrainConfig.from_file(str(config)) == TrainConfig(model="mlp", epochs=2, batch_size=200)
    assert not [path for path in tmp_path.iterdir() if path.name not in ("typed", "temporary")]


@with_flytekit
def test_2_gpus_are_requested_only_where_they_are_wanted() -> None:
    """Looks at what would be sent to an engine."""
    script = """
import importlib, os, sys
sys.path.insert(0, "examples")
import flyte_workflow
from flytekit.configuration import Image, ImageConfig, SerializationSettings
from flytekit.models.task import Resources
from flytekit.tools.translator import get_serializable

settings = SerializationSettings(image_config=ImageConfig(default_image=Image("here", "there", "now")))
for gpus in ("0", "4"):
    os.environ["GPUS"] = gpus
    container = get_serializable({}, settings, importlib.reload(flyte_workflow).train).template.container
    requests = {request.name: request.value for request in container.resources.requests}
    print(requests.get(Resources.ResourceName.GPU), container.env["RANKS"])
"""
    command, env = [sys.executable, "-c", script], clean_environment()
    done = subprocess.run(command, cwd=REPOSITORY, env=env, check=True, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["None 2", "4 4"]


@pytest.mark.soak(only=True)
def test_1_the_serial_script_and_its_five_changes(tmp_path: Path, digits: Path, cifar10: Path) -> None:
    folder = tutorials.workspace(tmp_path, digits, cifar10)
    shown, serial, spawned = tutorials.type_in(folder, 1, OMP_NUM_THREADS="1")
    assert f"mnist, train: {60_000 if ALL_DIGITS else 5_000} images of 28x28 pixels, grey" in shown
    assert (folder / "data" / "mnist-train.png").read_bytes().startswith(b"\x89PNG")
    accuracy = re.search(r"mlp on mnist: (\S+)% test accuracy after 1 epoch on 1 rank \(none, ", serial)
    assert accuracy and float(accuracy[1]) > (95 if ALL_DIGITS else 70)
    loss = re.search(r"^\[rank 0\] 2 ranks, epoch 1: loss (\S+), saved in spawned.pt$", spawned, re.MULTILINE)
    assert loss and float(loss[1]) < (1 if ALL_DIGITS else 2)
    assert set(torch.load(folder / "spawned.pt")) == {"1.weight", "1.bias", "3.weight", "3.bias"}


@pytest.mark.soak(only=True)
def test_3_the_notebook(tmp_path: Path, digits: Path, cifar10: Path) -> None:
    few = first_of_each_class(cifar10, tmp_path / "few", train=13, test=5)
    (tmp_path / "typed").mkdir()
    folder = tutorials.workspace(tmp_path / "typed", digits, few)
    tutorials.type_in(folder, 3, OMP_NUM_THREADS="1", **tutorials.jupyter_below(tmp_path))
    notebook = nbformat.read(folder / "cifar10_two_ranks.ipynb", as_version=4)
    outputs = {cell.id: cell.outputs for cell in notebook.cells if cell.cell_type == "code"}
    said = "".join(output.text for output in outputs["training"])
    for rank in range(2):
        assert f"[rank {rank}] process group ready" in said
    assert said.count(" epoch 3/3: test accuracy ") == 1
    [run_dir] = (folder / "runs").iterdir()
    config = json.loads((run_dir / "config.json").read_text())
    assert (config["model"], config["dataset"], config["flip"]) == ("cifar-cnn", "folder:cifar10", True)
    assert config["run"]["world_size"] == 2
    accuracy = json.loads((run_dir / "summary.json").read_text())["final_test_accuracy"]
    assert f"epoch 3/3: test accuracy {100 * accuracy:.2f}%" in said
    assert ["image/png" in output.get("data", {}) for output in outputs["curves"]] == [True]
    _, picture = outputs["predictions"]
    assert base64.b64decode(picture.data["image/png"]) == (run_dir / "mistakes.png").read_bytes()


@pytest.mark.soak(only=True)
def test_4_a_minimal_torchrun_script(tmp_path: Path, digits: Path, cifar10: Path) -> None:
    (tmp_path / "typed").mkdir()
    folder = tutorials.workspace(tmp_path / "typed", digits, cifar10)
    home = {"HOME": str(tmp_path), "WANDB_ERROR_REPORTING": "false"}
    *said, compared = tutorials.type_in(folder, 4, OMP_NUM_THREADS="1", **home)
    last_losses: list[float] = []
    logged = [*range(50, 601, 50)] if ALL_DIGITS else [25, 50]  # 25 is the end of an epoch
    for text, run, world_size in zip(said, (folder / "runs" / "two", folder / "runs" / "one"), (2, 1), strict=True):
        assert "wandb: offline (no login and no WANDB_API_KEY)" in text
        metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
        assert [line["step"] for line in metrics] == logged
        last_losses.append(metrics[-1]["loss"])
        (file,) = tracked.wandb_files(run)
        assert tracked.wandb_run(file)["display_name"].startswith(f"mlp-mnist-{world_size}ranks-")
        curves = tracked.wandb_curves(file)
        for name, key in (("train/loss", "loss"), ("samples_per_second", "samples_per_second"), ("lr", "lr")):
            assert {step: curves[name][step] for step in curves[name]} == {line["step"]: line[key] for line in metrics}
        assert list(curves["test/accuracy"].values()) == json.loads((run / "accuracies.json").read_text())
        assert curves["test/accuracy"][logged[-1]] > (0.96 if ALL_DIGITS else 0.7)
        assert tracked.wandb_processes(run) == []
    assert last_losses[0] == pytest.approx(last_losses[1], rel=1e-3)
    assert re.search(r"^ +one +two$", compared, re.MULTILINE)
    assert re.search(r"^ +ranks +1 +2$", compared, re.MULTILINE)
    assert re.search(r"^ +test accuracy +(\S+) +\1$", compared, re.MULTILINE)


@pytest.mark.soak
def test_5_ranks_by_hand(tmp_path: Path, digits: Path, cifar10: Path) -> None:
    folder, where = tutorials.workspace(tmp_path, digits, cifar10), {"MASTER_PORT": str(free_port())}
    rank_0, rank_1, recipe = tutorials.type_in(folder, 5, OMP_NUM_THREADS="1", **where)
    assert "[rank 0] process group ready" in rank_0 and "[rank 1] process group ready" in rank_1
    assert "[rank 1] rank 0's terminal shows how far the training is" in rank_1
    accuracies = []
    for said in (rank_0, recipe):
        [run_dir] = re.findall(r"; files in (runs/\S+)$", said, re.MULTILINE)
        accuracies.append(json.loads((tmp_path / run_dir / "summary.json").read_text())["final_test_accuracy"])
    assert accuracies[0] >= (0.99 if ALL_DIGITS else 0.9)
    assert accuracies[1] == pytest.approx(0.815, abs=0.02) if ALL_DIGITS else accuracies[1] > 0.1
