"""The commands ``evaluate`` and ``show-data``, on folders of small images."""

from __future__ import annotations

import io
import json
import re
import shutil
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image

from ddp_manual.cli import main as cli
from ddp_manual.training import checkpoint_files, models
from ddp_manual.training.options import TrainConfig

FILES = ["confusion.csv", "confusion.png", "mistakes.png", "predictions.csv"]
MEAN, STD = (100.0, 50.0, 20.0), (60.0, 70.0, 80.0)


@pytest.fixture
def pets(tmp_path: Path) -> Path:
    """Small colour images of three classes, of which one has none to be tested on."""
    return write_images(tmp_path / "pets", train=("ant", "bee", "cat"), test=("ant", "bee"))


def write_images(folder: Path, *, train: tuple[str, ...], test: tuple[str, ...]) -> Path:
    for part, classes in (("train", train), ("test", test)):
        for place, name in enumerate(classes):
            (folder / part / name).mkdir(parents=True)
            for index in range(4):
                colour = (80 * place, 60 * index, 50 * (place + index) % 256)
                Image.new("RGB", (8, 8), colour).save(folder / part / name / f"{index}.png")
    return folder


def describe(run: Path, facts: dict[str, Any] | None = None, **options: str) -> None:
    """Write the ``config.json`` of a run, in which these options and facts replace those that are there."""
    there = json.loads((run / "config.json").read_text())
    (run / "config.json").write_text(json.dumps({**there, **options, "run": {**there["run"], **(facts or {})}}))


@pytest.fixture
def run(tmp_path: Path, pets: Path) -> Path:
    """Those files of a run that are needed; its model has learnt nothing."""
    run = tmp_path / "run"
    run.mkdir()
    facts = {"mean": MEAN, "std": STD, "shape": [3, 8, 8], "classes": ["ant", "bee", "cat"]}
    described = {**TrainConfig(model="mlp", dataset=f"folder:{pets}").values(), "run": facts}
    (run / "config.json").write_text(json.dumps(described))
    torch.save(untrained().state_dict(), run / "model.pt")
    return run


def untrained() -> torch.nn.Module:
    return models.build("mlp", device=torch.device("cpu"), seed=3, shape=(3, 8, 8), classes=3)


def save_checkpoint(run: Path, step: int) -> Path:
    content = io.BytesIO()
    torch.save({"position": {}, "model": untrained().state_dict()}, content)
    return checkpoint_files.write(run / "checkpoints", step, content.getvalue(), {})


def evaluated(capsys: pytest.CaptureFixture[str], *arguments: object) -> Any:
    assert cli.run(["evaluate", "--json", *map(str, arguments)]) == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], code: int, *arguments: object) -> str:
    assert cli.run(["evaluate", *map(str, arguments)]) == code
    said = capsys.readouterr().err
    assert "  why:  " in said and "  next: " in said
    return said


def test_model_data_and_normalisation_come_from_the_run(
    run: Path, pets: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    report = evaluated(capsys, "--checkpoint", run)
    pixels = [numpy.array(Image.open(path)) for path in sorted((pets / "test").rglob("*.png"))]
    images = torch.from_numpy(numpy.stack(pixels)).permute(0, 3, 1, 2)
    labels = torch.tensor([0] * 4 + [1] * 4)
    with torch.inference_mode():
        scores = untrained()((images - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1))
    right = (scores.argmax(dim=1) == labels).double()
    assert (report["samples"], report["accuracy"]) == (8, right.mean().item())
    assert report["loss"] == pytest.approx(torch.nn.functional.cross_entropy(scores, labels).item(), rel=1e-4)
    by_class = [(one["name"], one["images"], one["accuracy"]) for one in report["classes"]]
    assert by_class == [("ant", 4, right[:4].mean().item()), ("bee", 4, right[4:].mean().item()), ("cat", 0, None)]


def test_each_data_set_and_each_checkpoint_gets_its_own_evaluation_folder(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    other = write_images(tmp_path / "others", train=("ant", "bee", "cat"), test=("cat",))
    saved = save_checkpoint(run, 7)
    folders = [
        Path(evaluated(capsys, "--checkpoint", *arguments)["files"][0]).parent
        for arguments in ([run], [run, "--dataset", f"folder:{other}"], [saved], [saved.with_suffix(".json")])
    ]
    assert re.fullmatch(r"evaluation-.*-pets-[0-9a-f]{8}", folders[0].name)
    assert re.fullmatch(r"evaluation-.*-others-[0-9a-f]{8}", folders[1].name)
    assert folders[2] == folders[3] == folders[0].with_name(f"{folders[0].name}-{saved.stem}")
    assert all(folder.parent == run and sorted(path.name for path in folder.iterdir()) == FILES for folder in folders)


def test_code_that_no_flag_names_is_not_imported(
    run: Path, pets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shipped.py").write_text("raise AssertionError('imported')")
    describe(run, model="shipped:net", dataset="shipped:data")
    said = refused(capsys, 2, "--checkpoint", run)
    assert "the model and the dataset of" in said and "add --model shipped:net --dataset shipped:data" in said
    own_data = ["--dataset", f"folder:{pets}"]
    assert "add --model shipped:net\n" in refused(capsys, 2, "--checkpoint", run, *own_data)
    assert evaluated(capsys, "--checkpoint", run, *own_data, "--model", "mlp")["samples"] == 8
    assert "cannot be imported" in refused(capsys, 2, "--checkpoint", run, *own_data, "--model", "shipped:net")


def test_a_run_that_has_no_model_yet_is_evaluated_at_its_newest_checkpoint_that_is_whole(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole, damaged = (save_checkpoint(run, step) for step in (7, 8))
    damaged.write_bytes(damaged.read_bytes()[:-1])
    with_model = evaluated(capsys, "--checkpoint", run)
    (run / "model.pt").unlink()
    for place in (run, run / "checkpoints"):
        report = evaluated(capsys, "--checkpoint", place)
        assert report["checkpoint"] == str(whole) and report["loss"] == with_model["loss"]
    assert "is not the checkpoint that was written" in refused(capsys, 15, "--checkpoint", damaged)


def test_a_model_without_its_run_is_evaluated_as_flags_say(
    run: Path, pets: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moved = tmp_path / "moved.pt"
    shutil.copy(run / "model.pt", moved)
    told = evaluated(capsys, "--checkpoint", moved, "--model", "mlp", "--dataset", f"folder:{pets}")["loss"]
    assert told == evaluated(capsys, "--checkpoint", run, "--normalization", "dataset")["loss"]
    assert told != evaluated(capsys, "--checkpoint", run, "--normalization", "none")["loss"]


PARAMETERS = {"position": torch.zeros(2), "model": torch.zeros(3)}


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "model.pt holds no model\n  why:  torch.load with weights_only=True cannot read it"),
        (Fraction(1, 2), "torch.load with weights_only=True cannot read it: UnpicklingError\n"),
        ({"epoch": 3, "accuracy": 0.5}, "it holds epoch, accuracy, where tensors are wanted"),
        # A parameter may have the name of a part of a checkpoint.
        (PARAMETERS, "is no mlp"),
        ({"model": PARAMETERS, "position": {}}, "is no mlp"),
        ({**PARAMETERS, "a._extra_state": {"n": 1}}, "is no mlp"),
        ({name: value * torch.nan for name, value in untrained().state_dict().items()}, "scores that are not numbers"),
    ],
    ids=range(7),
)
def test_a_file_that_is_no_model_or_no_model_of_the_run_is_refused(
    run: Path, content: Any, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    model = run / "model.pt"
    if content is None:
        model.write_bytes(model.read_bytes()[:-2000])
    else:
        torch.save(content, model)
    assert said in refused(capsys, 15, "--checkpoint", run)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (".", 15, "error[checkpoint-missing]: no model at ."),
        ("run/modle.pt", 15, "error[checkpoint-missing]: no model at run/modle.pt"),
        ("/dev/zero", 2, "no regular file"),
        ("moved.pt --model mlp", 2, "does not say which dataset it is of"),
        ("run --model convnet", 15, "is no convnet for 3x8x8 images of 3 classes"),
        ("run --dataset folder:two", 15, "on 3x8x8 images of 3 classes; folder:two has 3x8x8 images of 2 classes"),
        ("run --image_size 16", 15, "has 3x16x16 images of 3 classes"),
        ("run --out_dir run", 2, "--out_dir run is the folder of a run"),
        ("run --out_dir begun", 2, "--out_dir begun is the folder of a run"),
        ("run --out_dir moved.pt/out", 2, "--out_dir"),
    ],
)
def test_what_cannot_be_evaluated_is_named_and_nothing_is_written(
    run: Path, arguments: str, code: int, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(run.parent)
    write_images(Path("two"), train=("ant", "bee"), test=("ant", "bee"))
    shutil.copy("run/model.pt", "moved.pt")
    Path("begun/checkpoints").mkdir(parents=True)
    assert said in refused(capsys, code, "--checkpoint", *arguments.split())
    assert {path.name for path in run.iterdir()} == {"config.json", "model.pt"}


def test_other_names_for_as_many_classes_are_a_warning(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--classes", "ant,wasp,cat", "--out_dir", str(run / "a")]
    assert cli.run(["evaluate", "--checkpoint", str(run), *options]) == 0
    said = capsys.readouterr()
    assert "the classes have other names than those the model was trained on: wasp instead of bee" in said.err
    first, _, *lines = said.out.splitlines()
    assert first.startswith(f"mlp of {run / 'model.pt'} on folder:") and first.endswith("over 8 images")
    assert [line.split()[0] for line in lines[:3]] == ["ant", "wasp", "cat"]
    assert sorted(line.strip() for line in lines[3:]) == [str(run / "a" / name) for name in FILES]


def test_the_same_classes_in_another_order_are_numbered_as_in_training(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    as_trained, order = evaluated(capsys, "--checkpoint", run), [1, 2, 0]
    describe(run, {"classes": ["bee", "cat", "ant"]})
    parameters = torch.load(run / "model.pt", weights_only=True)
    torch.save({n: v[order] if n.startswith("fc.") else v for n, v in parameters.items()}, run / "model.pt")
    report = evaluated(capsys, "--checkpoint", run)
    assert [one["name"] for one in report["classes"]] == ["bee", "cat", "ant"]
    assert report["loss"] == pytest.approx(as_trained["loss"]) and report["accuracy"] == as_trained["accuracy"]
    assert sorted(report["classes"], key=lambda one: str(one["name"])) == as_trained["classes"]


# -- show-data ------------------------------------------------------------------------------------------------------


@pytest.fixture
def animals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The data set as it is named from a current folder of its own."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    return f"folder:{write_images(tmp_path / 'animals', train=('ant', 'bee'), test=('bee',))}"


def test_show_data_writes_a_grid_and_counts_each_class(animals: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show-data", "--dataset", animals, "--out", "animals.png"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{animals}, train: 8 images of 8x8 pixels, in colour"
    assert [line.split() for line in lines] == [["class", "images"], ["ant", "4"], ["bee", "4"], ["animals.png"]]
    with Image.open("animals.png") as picture:
        assert picture.format == "PNG" and picture.width > 8 * 80


@pytest.mark.parametrize(("folder", "option"), [("mine", "--out"), ("deep/data", "--data_dir")])
def test_part_count_names_and_the_folder_can_be_chosen(
    animals: str, folder: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    options = ["--part", "test", "--count", "2", "--classes", "x,y", "--image_size", "30", option, folder]
    assert cli.run(["show-data", "--dataset", animals, *options]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("test: 4 images of 30x30 pixels, in colour")
    assert [line.split() for line in lines[1:3]] == [["x", "0"], ["y", "4"]]
    (written,) = Path(folder).glob("*-animals-????????-test.png")
    assert lines[-1].strip() == str(written)
    with Image.open(written) as picture:
        assert 2 * 80 < picture.width < 3 * 100


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("--out a.jpg", 2, "--out a.jpg is not the name of a PNG file"),
        ("--out nothing/a.png", 2, "--out nothing/a.png cannot be written"),
        ("--classes cat", 2, "--classes gives 1 name,"),
        ("--dataset folder:nothing", 16, "nothing/train cannot be read as a folder of images"),
    ],
)
def test_a_bad_option_or_data_set_is_named(
    animals: str, arguments: str, code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["show-data", "--dataset", animals, *arguments.split()]) == code
    assert named in capsys.readouterr().err
