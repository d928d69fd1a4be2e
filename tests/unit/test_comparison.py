"""``ddp-manual compare`` on folders as runs leave them: whole, half-written, damaged."""

from __future__ import annotations

import itertools
import json
import math
import os
import time
from pathlib import Path
from typing import Any

import pytest

from ddp_manual.atomic_files import append_json_line
from ddp_manual.cli import main as cli
from ddp_manual.errors import BadOption
from ddp_manual.from_worker import Progress
from ddp_manual.run_folder import RunPaths
from ddp_manual.tools import compare
from ddp_manual.training.options import TrainConfig
from ddp_manual.worker.training_loss import LossRecord


def leave_run(folder: Path, *, ranks: int = 1, rate: float = 1000.0, finished: bool = True, **options: Any) -> Path:
    """What a run of 2 epochs of 10 steps leaves, 50 samples per rank and step."""
    folder.mkdir(parents=True)
    paths = RunPaths(folder)
    run = {"world_size": ranks, "device": "cpu", "batch_size_per_rank": 50, "peak_lr": 0.04 * ranks}
    paths.config.write_text(json.dumps({**TrainConfig(**options).values(), "run": run}))
    for step in (5, 10, 15, 20):
        speed = {"samples_per_second": rate, "seconds": step * 50 * ranks / rate}
        append_json_line(paths.metrics, {"step": step, "loss": 2.0 / step, **speed})
    paths.accuracies.write_text("[0.91, 0.97]")
    if finished:
        summary = {"final_test_accuracy": 0.97, "final_test_loss": 0.1, "world_size": ranks, "device": "cpu"}
        paths.summary.write_text(json.dumps({**summary, "samples_per_second": rate, "train_seconds": 1000 / rate}))
    return folder


def compared(*runs: Path) -> dict[str, dict[str, Any]]:
    return {run["name"]: run for run in compare.compare(runs)["runs"]}


def table(text: str) -> dict[str, list[str]]:
    """Label -> cells, of the first table."""
    rows = [[cell.strip() for cell in line.split("  ") if cell.strip()] for line in text.split("\n\n")[0].splitlines()]
    return {row[0]: row[1:] for row in rows[1:] if len(row) > 1}


def test_runs_stand_side_by_side_with_what_differs_between_them(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one = leave_run(tmp_path / "one", ranks=1, rate=1000)
    two = leave_run(tmp_path / "two", ranks=2, rate=1500, finished=False, momentum=0.5)
    assert cli.run(["compare", str(two), str(one)]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0].split() == ["two", "one"]
    expected = {
        "state": ["unfinished", "finished"],
        "ranks": ["2", "1"],
        "global batch": ["100", "50"],
        "epochs": ["2 of 2", "2 of 2"],
        "samples/s": ["1,500", "1,000"],
        "efficiency": ["75%", "100%"],
        "train seconds": ["1.3", "1.0"],
        "test loss": ["-", "0.1000"],
        "test accuracy": ["97.00%", "97.00%"],
        "momentum": ["0.5", "0.9"],
    }
    assert expected.items() <= table(out).items() and "lr" not in table(out)
    assert "efficiency: samples/s per rank, relative to one" in out


@pytest.mark.parametrize(
    ("left", "efficiencies"),
    [
        ([{"ranks": 4, "rate": 3000}, {"ranks": 2, "rate": 2000}, {"ranks": 4, "model": "mlp"}], [0.75, 1.0, None]),
        ([{"ranks": 2, "rate": 2000}, {"ranks": 2, "rate": 4000}], [0.5, 1.0]),
        ([{"ranks": 1, "rate": 1000}, {"ranks": 2, "rate": 3000}], [1.0, 1.5]),
        ([{"dataset": "folder:pets", "image_size": size} for size in (32, 128)], [None, None]),
    ],
)
def test_efficiency_is_relative_to_the_fewest_ranks_and_only_for_the_same_work(
    tmp_path: Path, left: list[dict[str, Any]], efficiencies: list[float | None]
) -> None:
    """Images of another size, and another network, are other work."""
    runs = [leave_run(tmp_path / str(number), **options) for number, options in enumerate(left)]
    assert [run["efficiency"] for run in compared(*runs).values()] == efficiencies
    shown = compare.text(compare.compare(runs))
    assert ("efficiency:" in shown) == any(efficiencies)
    assert ("above 100%: each rank was faster than there" in shown) == (1.5 in efficiencies)


def test_without_a_summary_the_speed_is_that_since_the_run_was_last_resumed(tmp_path: Path) -> None:
    """With another number of ranks, which its config.json then has."""
    run, other = leave_run(tmp_path / "run", ranks=2, rate=3000, finished=False), leave_run(tmp_path / "other")
    lines = [json.loads(line) for line in RunPaths(run).metrics.read_text().splitlines()]
    slower = [{**line, "samples_per_second": 500} for line in lines[:2]]
    RunPaths(run).metrics.write_text("\n".join(map(json.dumps, (*slower, *lines[2:]))))
    config = json.loads(RunPaths(run).config.read_text())
    for began, rate in ((10, 3000), (0, 1750), (20, None)):
        config["run"]["goes_on_after_step"] = began
        RunPaths(run).config.write_text(json.dumps(config))
        assert compared(run, other)["run"]["samples_per_second"] == (rate and pytest.approx(rate))


def test_the_seconds_of_a_script_that_was_started_again_add_up(tmp_path: Path) -> None:
    run, other = leave_run(tmp_path / "run", finished=False), leave_run(tmp_path / "other")
    lines = [{"step": n, "loss": 1.0, "samples_per_second": r, "seconds": s} for n, r, s in POINTS]
    RunPaths(run).metrics.write_text("\n".join(map(json.dumps, lines)))
    found = compared(run, other)["run"]
    assert (found["train_seconds"], found["samples_per_second"]) == (150, pytest.approx(850))


def test_a_speed_that_is_no_finite_number_is_written_as_0_and_the_losses_after_it_too(tmp_path: Path) -> None:
    progress = Progress()
    record = LossRecord(tmp_path, progress)
    for loss in (0.5, 0.25):
        progress(loss=loss, samples_per_second=math.inf)
        record.write()
    written = [json.loads(line) for line in RunPaths(tmp_path).metrics.read_text().splitlines()]
    assert [(line["loss"], line["samples_per_second"]) for line in written] == [(0.5, 0), (0.25, 0)]


def test_failed_starts_are_passed_over_if_two_runs_remain(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one, two = (leave_run(tmp_path / name) for name in ("one", "two"))
    failed, mistyped = (tmp_path / name for name in ("failed", "mistyped"))
    for folder in (failed, mistyped):
        folder.mkdir()
    RunPaths(failed).failure(1).write_text("{}")
    assert cli.run(["compare", str(one), str(failed), str(mistyped), str(two)]) == 0
    said = capsys.readouterr()
    assert said.err == f"passed over, as nothing was trained there: {failed}, {mistyped}\n"
    assert said.out.splitlines()[0].split() == ["one", "two"]
    with pytest.raises(BadOption, match="failed is not the folder of a run"):
        compare.compare([one, failed])


def test_a_run_is_shown_as_running_stopped_failed_or_unfinished(tmp_path: Path) -> None:
    folders = {name: leave_run(tmp_path / name, finished=False) for name in ("on", "stopped", "failed", "killed")}
    for name, said in (("stopped", ["stopped"]), ("failed", ["peer-failed", "out-of-memory"])):
        for rank, identifier in enumerate(said):
            RunPaths(folders[name]).failure(rank).write_text(json.dumps({"identifier": identifier}))
    # What a rank said before the run was started again there.
    earlier = RunPaths(folders["killed"]).failure(0)
    earlier.write_text(json.dumps({"identifier": "stopped"}))
    os.utime(earlier, (time.time() - 60, time.time() - 60))
    with RunPaths(folders["on"]).locked():
        states = {name: run["state"] for name, run in compared(*folders.values()).items()}
    assert states == {"on": "running", "stopped": "stopped", "failed": "failed: out-of-memory", "killed": "unfinished"}


def test_folders_that_are_foreign_half_written_or_damaged_do_not_keep_runs_from_being_listed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "whole")
    leave_run(tmp_path / "damaged", finished=False)
    left = {
        "begun/log-rank0.txt": "",
        "failed/failure-rank0.json": '{"identifier": "bad-option", "what": "no\\u001b[2J such"}',
        "damaged/accuracies.json": "[0.9, nu",
        "script/failure-rank1.json": '{"identifier": "stopped", "what": "stopped by Ctrl-C"}',
        "a model/config.json": '{"model_type": "bert"}',
        "no folder": "",
    }
    for name, text in left.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cli.run(["runs", str(tmp_path), "--json"]) == 0
    states = {Path(run["run_dir"]).name: run["state"] for run in json.loads(capsys.readouterr().out)}
    ended = {"whole": "finished", "failed": "failed: bad-option", "script": "stopped"}
    assert states == {**ended, "damaged": "unreadable", "begun": "no failure"}
    assert cli.run(["runs", str(tmp_path)]) == 0
    out = capsys.readouterr().out
    assert "    bad-option: no\\x1b[2J such\n" in out and "accuracies.json cannot be read: it is damaged\n" in out
    assert cli.run(["runs", str(tmp_path / "nowhere")]) == 2


def test_a_run_that_has_just_begun_has_a_column_and_a_line_that_a_kill_cut_off_is_passed_over(tmp_path: Path) -> None:
    one, begun, cut = (leave_run(tmp_path / name, finished=False) for name in ("one", "begun", "cut"))
    RunPaths(begun).metrics.unlink()
    RunPaths(cut).metrics.write_bytes(RunPaths(cut).metrics.read_bytes()[:-20])
    assert [run["steps_done"] for run in compared(one, begun, cut).values()] == [20, 0, 15]


# (step, samples per second, seconds since the script began); it began again before the last two lines.
POINTS = [(1, 1000, 100), (1, 500, 10), (2, 562.5, 50)]
LINE = b'{"step": 5, "loss": %b, "samples_per_second": 1, "seconds": 1}'
DAMAGED = [
    *itertools.product(("config.json", "summary.json", "accuracies.json"), (b"", b"\xff", b"[" * 100_000, b"null")),
    *(("config.json", b'{"run": %b}' % run) for run in (b"[1]", b'{"world_size": "two"}')),
    ("config.json", b'{"run": {"peak_lr": 1%b}}' % (b"0" * 400)),
    *(("summary.json", b'{"train_seconds": %b}' % seconds) for seconds in (b'"few"', b"1e999")),
    *(("accuracies.json", content) for content in (b"[0.9, null]", b"[NaN]")),
    *(("metrics.jsonl", LINE % loss) for loss in (b'"low"', b"1e999")),
    *(("failure-rank0.json", content) for content in (b"{", b"{}", b'{"identifier": 5}')),
]


@pytest.mark.parametrize(("name", "content"), DAMAGED, ids=range(len(DAMAGED)))
def test_a_damaged_file_is_a_bad_option_that_names_it(
    tmp_path: Path, name: str, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    runs = [leave_run(tmp_path / "one"), leave_run(tmp_path / "damaged", finished=False)]
    (runs[1] / name).write_bytes(content)
    assert cli.run(["compare", *map(str, runs)]) == 2
    assert f"{runs[1] / name} cannot be read\n  why:  it is damaged\n" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("named", "what"),
    [
        ([], "no run named"),
        (["one"], "1 run named; a comparison takes at least two"),
        (["one", "nowhere"], "nowhere is not the folder of a run"),
        (["one", "empty"], "empty is not the folder of a run"),
        (["one", "x" * 300], "xxx/config.json cannot be read"),  # as with a folder of another user
    ],
)
def test_anything_but_two_different_folders_of_runs_is_a_bad_option(
    tmp_path: Path, named: list[str], what: str, capsys: pytest.CaptureFixture[str]
) -> None:
    leave_run(tmp_path / "one")
    (tmp_path / "empty").mkdir()
    assert cli.run(["compare", *(f"{tmp_path}/{name}" for name in named)]) == 2
    assert what in capsys.readouterr().err.splitlines()[0]
