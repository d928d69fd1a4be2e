from __future__ import annotations

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


def test_a_grid_is_written_and_each_class_is_counted(pets: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["show-data", "--dataset", pets, "--out", "pets.png"]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first == f"{pets}, train: 8 images of 8x8 pixels, in colour"
    assert [line.split() for line in lines] == [["class", "images"], ["ant", "4"], ["bee", "4"], ["pets.png"]]
    with Image.open("pets.png") as picture:
        assert picture.format == "PNG" and picture.width > 8 * 80


@pytest.mark.parametrize(("folder", "option"), [("mine", "--out"), ("deep/data", "--data_dir")])
def test_part_count_names_and_the_folder_can_be_chosen(
    pets: str, folder: str, option: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("mine").mkdir()
    options = ["--part", "test", "--count", "2", "--classes", "x,y", "--image_size", "30", option, folder]
    assert cli.run(["show-data", "--dataset", pets, *options]) == 0
    first, *lines = capsys.readouterr().out.splitlines()
    assert first.endswith("test: 4 images of 30x30 pixels, in colour")
    assert [line.split() for line in lines[1:3]] == [["x", "0"], ["y", "4"]]
    (written,) = Path(folder).glob("*-pets-????????-test.png")
    assert lines[-1].strip() == str(written)
    with Image.open(written) as picture:
        assert 2 * 80 < picture.width < 3 * 100


@pytest.mark.parametrize(("variable", "shown"), [("COLORTERM", 8 * 4 * 8), ("NO_COLOR", 0)])
def test_a_terminal_with_colours_is_shown_half_blocks_of_the_images_colours(
    pets: str, variable: str, shown: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """8 pixels wide and 4 characters high, four side by side in 40 columns, two rows."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    for name, value in {"TERM": "xterm-256color", "COLUMNS": "40", variable: "truecolor"}.items():
        monkeypatch.setenv(name, value)
    assert cli.run(["show-data", "--dataset", pets]) == 0
    said = capsys.readouterr().out
    assert said.count("\N{UPPER HALF BLOCK}") == shown
    assert ("38;2;80;60;100;48;2;80;60;100m" in said) is (shown > 0)  # bee 1


@pytest.mark.parametrize(
    ("arguments", "code", "named"),
    [
        ("--out pets.jpg", 2, "--out pets.jpg is not the name of a PNG file"),
        ("--out nothing/pets.png", 2, "--out nothing/pets.png cannot be written"),
        ("--count 0", 2, "--count"),
        ("--classes cat", 2, "--classes gives 1 name,"),
        ("--dataset folder:nothing", 16, "nothing/train cannot be read as a folder of images"),
        ("--dataset mnist --data_dir file", 2, "--data_dir"),
    ],
)
def test_a_bad_option_or_data_set_is_named(
    pets: str, arguments: str, code: int, named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("file").touch()
    assert cli.run(["show-data", "--dataset", pets, *arguments.split()]) == code
    assert named in capsys.readouterr().err
