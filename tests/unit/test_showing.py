from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from PIL import Image

from ddp_manual import cli
from tests.unit.test_evaluating import write_images


@pytest.fixture(autouse=True)
def _in_a_folder_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def pets(tmp_path: Path) -> str:
    return f"folder:{write_images(tmp_path / 'pets', train=('ant', 'bee'), test=('bee',))}"


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, **variables: str) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", **variables}.items():
        monkeypatch.setenv(name, value)


def test_a_grid_is_written_and_each_class_is_counted(pets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show-data", "--dataset", pets, "--out", "pets.png"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{pets}, train: 8 images of 8x8 pixels, in colour"
    assert [line.split() for line in lines] == [["class", "images"], ["ant", "4"], ["bee", "4"], ["pets.png"]]
    with Image.open("pets.png") as picture:
        assert picture.format == "PNG" and picture.width > 8 * 80


def test_the_picture_goes_to_the_folder_that_is_named_and_otherwise_to_that_of_the_data(
    pets: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    for folder, options in (("mine", ["--out", "mine"]), ("deep/data", ["--data_dir", "deep/data"])):
        assert cli.run(["show-data", "--dataset", pets, *options]) == 0
        (written,) = Path(folder).glob("*-train.png")
        assert capsys.readouterr().out.splitlines()[-1].strip() == str(written)
    assert not [*Path().glob("*.png")]


def test_part_count_and_class_names_can_be_chosen(pets: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--part", "test", "--count", "2", "--classes", "x,y", "--image_size", "30"]
    assert cli.run(["show-data", "--dataset", pets, *options]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("test: 4 images of 30x30 pixels, in colour")
    assert [line.split() for line in lines[1:3]] == [["x", "0"], ["y", "4"]]
    (written,) = Path("data").glob("*.png")
    assert re.fullmatch(r".*-pets-[0-9a-f]{8}-test\.png", written.name)
    with Image.open(written) as picture:
        assert 2 * 80 < picture.width < 3 * 100


def test_a_terminal_with_colours_is_shown_half_blocks_of_the_images_colours(
    pets: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    on_a_terminal(monkeypatch, COLORTERM="truecolor")
    assert cli.run(["show-data", "--dataset", pets]) == 0
    said = capsys.readouterr().out
    # 8 pixels wide and 4 characters high, four side by side in 40 columns, two rows.
    assert said.count("\N{UPPER HALF BLOCK}") == 8 * 4 * 8
    assert "38;2;80;60;100;48;2;80;60;100m" in said  # bee 1
    words = [line.split() for line in said.splitlines()]
    assert ["ant"] * 4 in words and ["bee"] * 4 in words
    on_a_terminal(monkeypatch, NO_COLOR="1")
    assert cli.run(["show-data", "--dataset", pets]) == 0
    assert capsys.readouterr().out.startswith(f"{pets}, train: 8 images")


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        (["--out", "pets.jpg"], 2, "--out pets.jpg is not the name of a PNG file"),
        (["--out", "nothing/pets.png"], 2, "--out nothing/pets.png cannot be written"),
        (["--count", "0"], 2, "--count"),
        (["--classes", "only one"], 2, "--classes gives 1 name,"),
        (["--dataset", "folder:nothing"], 16, "nothing/train cannot be read as a folder of images"),
        (["--dataset", "mnist", "--data_dir", "file"], 2, "--data_dir"),
    ],
)
def test_a_bad_option_or_data_set_is_named(
    pets: str, arguments: list[str], code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert cli.run(["show-data", "--dataset", pets, *arguments]) == code
    said = capsys.readouterr().err
    assert named in said and "  why:  " in said and "  next: " in said
