"""Which folder a start leaves, however it ends, and what ``ddp-manual runs`` says of it."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONGER, REPOSITORY, SHORT, RankProcess, Start
from tests.world.deaths import wait_until

COMMAND = (sys.executable, "-m", "ddp_manual")
StartHere = Callable[..., RankProcess]


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The current folder of all ranks, below which the default of --run_dir is."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def start_here(start: Start, small_data: Path, port: int, here: Path) -> StartHere:
    """Start a rank without --run_dir."""

    def start_here(rank: int, world_size: int, *options: object, **env: str) -> RankProcess:
        identity = ["--world_size", world_size, "--rank", rank, "--master_port", port]
        program = [sys.executable, REPOSITORY / "run_multi_gpu_train.py", *identity]
        return start(*program, *SHORT, "--data_dir", small_data, *options, cwd=here, **env)

    return start_here


def patched(folder: Path, code: str) -> dict[str, str]:
    """The environment of ranks whose workers run ``code`` first."""
    lines = "".join(f"    {line}\n" for line in code.splitlines())
    (folder / "sitecustomize.py").write_text(f"import os, sys, time\nif sys.orig_argv[1].endswith('worker'):\n{lines}")
    return {"PYTHONPATH": f"{folder}:{REPOSITORY}"}


RAISES = """
from ddp_manual.training.loop import Trainer
steps, train_step = [], Trainer._train_step
def failing(*arguments):
    steps.append(arguments)
    if len(steps) == STEP and os.environ["RANK"] == "1":
        raise ValueError("such a step")
    return train_step(*arguments)
Trainer._train_step = failing
"""
LOADS_FOREVER = """
from ddp_manual.training import main
load = main._load
def forever(*arguments):
    print("loading for ever", file=sys.stderr, flush=True)
    time.sleep(600)
main._load = forever
"""


def runs_in(folder: Path, start: Start, *options: object) -> list[dict[str, Any]]:
    process = start(*COMMAND, "runs", *options, "--json", cwd=folder)
    assert process.wait(20) == 0, process.err
    found: list[dict[str, Any]] = json.loads(process.out)
    return found


def test_a_rank_that_nobody_joins_or_that_is_stopped_while_it_waits_leaves_no_folder(
    start_here: StartHere, here: Path
) -> None:
    lonely = start_here(0, 2, "--join_timeout", 2)
    assert lonely.wait(20) == 10
    assert "error[rank-missing]" in lonely.err
    stopped = start_here(0, 2)
    stopped.wait_for("waiting for rank 1")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait(20) == 130
    assert list(here.iterdir()) == []


def test_ranks_that_do_not_belong_together_leave_no_folder(start_here: StartHere, here: Path) -> None:
    waiting = start_here(0, 2, "--join_timeout", 6)
    waiting.wait_for("waiting for rank 1")
    assert start_here(1, 2, "--lr", 0.1).wait(20) == 12
    assert waiting.wait(30) == 10
    assert list(here.iterdir()) == []


def test_data_that_cannot_be_read_leave_no_folder(start_here: StartHere, here: Path, tmp_path: Path) -> None:
    raw = tmp_path / "damaged" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for part in ("train", "t10k"):
        for name in ("images-idx3-ubyte", "labels-idx1-ubyte"):
            (raw / f"{part}-{name}.gz").write_bytes(b"not what its name says")
    ranks = [start_here(rank, 2, "--dataset", "mnist", "--data_dir", tmp_path / "damaged") for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [16, 16], ranks[0].err
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("what", ["ctrl-c", "the worker of rank 1 is killed"])
def test_a_run_that_ends_while_it_loads_leaves_no_folder(
    start_here: StartHere, here: Path, tmp_path: Path, what: str
) -> None:
    ranks = [start_here(rank, 2, **patched(tmp_path, LOADS_FOREVER)) for rank in range(2)]
    for rank in ranks:
        rank.wait_for("loading for ever")
    (run,) = (here / "runs").iterdir()
    assert [path.name for path in run.iterdir()] == [".lock"]
    if what == "ctrl-c":
        ranks[0].process.send_signal(signal.SIGINT)
        assert ranks[0].wait(20) == 130
    else:
        os.kill(ranks[1].worker, signal.SIGKILL)
        assert [rank.wait(20) for rank in ranks] == [14, 137]
    ranks[1].wait(20)
    assert list(here.iterdir()) == []


@pytest.mark.parametrize("step", [1, 20])
def test_a_run_that_fails_in_its_first_step_leaves_no_folder_and_after_that_step_it_leaves_why(
    start: Start, start_here: StartHere, here: Path, tmp_path: Path, step: int
) -> None:
    env = patched(tmp_path, RAISES.replace("STEP", str(step)))
    ranks = [start_here(rank, 2, **env) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [14, 1]
    assert "ValueError: such a step" in ranks[0].err
    if step == 1:
        assert list(here.iterdir()) == []
        return
    (run,) = runs_in(here, start)
    assert (run["state"], run["world_size"]) == ("failed: training-failed", 2)
    assert run["why"].endswith("ValueError: such a step")
    assert {path.name for path in Path(here / run["run_dir"]).glob("failure-*")} == {
        "failure-rank0.json",
        "failure-rank1.json",
    }


def test_a_launch_that_fails_before_its_first_step_leaves_no_folder(
    start: Start, here: Path, small_data: Path, tmp_path: Path
) -> None:
    options = [*SHORT, "--data_dir", small_data]
    launched = start(*COMMAND, "launch", "--nproc", 2, "--", *options, "--batch_size", 60_000, cwd=here)
    assert launched.wait(60) == 2
    env = patched(tmp_path, RAISES.replace("STEP", "1"))
    raising = start(*COMMAND, "launch", "--nproc", 2, "--max_restarts", 1, "--", *options, cwd=here, **env)
    assert raising.wait(60) == 1
    assert "restart 1 of 1" in raising.err
    waiting = start(*COMMAND, "launch", "--nproc", 2, "--", *options, cwd=here, **patched(tmp_path, LOADS_FOREVER))
    waiting.wait_for("loading for ever")
    waiting.process.send_signal(signal.SIGINT)
    assert waiting.wait(20) == 130
    assert list(here.iterdir()) == []


def test_a_script_whose_training_fails_before_its_first_step_leaves_no_folder(
    start: Start, here: Path, small_data: Path, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import ddp_manual\n"
        f"config = dict(dataset='synthetic', model='mlp', data_dir={str(small_data)!r}, epochs=1)\n"
        "with ddp_manual.join(world_size=1, rank=0, device='cpu') as world:\n"
        "    ddp_manual.train(world, ddp_manual.TrainConfig(**config, batch_size=60_000))\n"
    )
    process = start(sys.executable, script, cwd=here)
    assert process.wait(60) == 1
    assert "BadOption" in process.err
    wait_until(lambda: list(here.iterdir()) == [])  # by the agent, which ends after the script


def test_a_folder_that_was_named_keeps_why_a_start_failed_and_none_is_left_empty(
    start: Start, start_here: StartHere, here: Path
) -> None:
    assert start_here(0, 2, "--join_timeout", 2, "--run_dir", "deep/named").wait(20) == 10
    assert [path.name for path in (here / "deep/named").iterdir()] == ["failure-rank0.json"]
    (run,) = runs_in(here, start, "deep")
    assert (run["state"], run["world_size"]) == ("failed: rank-missing", None)
    waiting = start_here(0, 2)
    waiting.wait_for("waiting for rank 1")
    taken = start_here(0, 2, "--run_dir", "other/named")
    assert taken.wait(20) == 11  # before it had a run
    assert not (here / "other").exists()


def test_a_run_that_is_resumed_by_hand_sets_aside_why_it_failed_before(
    start: Start, start_here: StartHere, here: Path, tmp_path: Path
) -> None:
    env = patched(tmp_path, RAISES.replace("STEP", "20"))
    steps = ("--checkpoint_steps", 8, "--run_dir", "run", "--resume", "auto")
    assert [rank.wait(60) for rank in [start_here(rank, 2, *steps, **env) for rank in range(2)]] == [14, 1]
    assert start_here(0, 1, *steps).wait(60) == 0
    assert sorted(path.name for path in (here / "run").glob("failure-*")) == [
        f"failure-rank{rank}.restart0.json" for rank in (0, 1)
    ]
    (run,) = runs_in(here, start, "run")
    assert (run["state"], run["why"]) == ("finished", None)


def test_runs_shows_each_run_with_how_it_stands(start: Start, start_here: StartHere, here: Path) -> None:
    assert start_here(0, 1).wait(60) == 0
    killed = start_here(0, 1, *LONGER, 1000)
    killed.wait_for("step ")
    killed.kill()
    stopped = start_here(0, 1, *LONGER, 1000)
    stopped.wait_for("step ")
    process = start(*COMMAND, "runs", cwd=here)
    assert process.wait(20) == 0
    assert [line.split()[1] for line in process.out.splitlines()[1:] if "no rank has said" not in line] == [
        "finished",
        "unfinished",
        "running",
    ]
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait(30) == 130
    process = start(*COMMAND, "runs", cwd=here)
    assert process.wait(20) == 0
    finished, unfinished, why, last, stop = process.out.splitlines()[1:]
    accuracy = json.loads(next((here / "runs").glob("*/summary.json")).read_text())["final_test_accuracy"]
    assert f" {accuracy:.2%} " in finished
    assert "unfinished" in unfinished and why == "    no rank has said why: killed, or its host went down"
    assert "stopped" in last and stop.startswith("    stopped by Ctrl-C (SIGINT) after step ")
    assert max(map(len, (finished, unfinished, last))) <= 81


def test_what_a_script_has_put_into_a_folder_that_it_has_named_stays_when_it_fails(
    start: Start, port: int, here: Path
) -> None:
    """Also if the script gives it the name that a run would choose, and never says which step it is at."""
    script = here / "script.py"
    script.write_text(
        "import time, ddp_manual\n"
        "folder = time.strftime('runs/%Y%m%d-%H%M%S-{run_id}')\n"
        "with ddp_manual.join(run_dir=folder) as world:\n"
        "    world.run_dir.mkdir(parents=True)\n"
        "    (world.run_dir / 'config.json').write_text('{}')\n"
        "    raise ValueError('after hours')\n"
    )
    process = start(sys.executable, script, MASTER_PORT=str(port), cwd=here)
    assert process.wait(60) == 1
    [folder] = (here / "runs").iterdir()
    assert {path.name for path in folder.iterdir()} == {"config.json", "failure-rank0.json"}


def test_a_start_into_the_folder_of_a_running_run_changes_nothing_there(start_here: StartHere, here: Path) -> None:
    running = start_here(0, 1, *LONGER, 1000, "--run_dir", "runs/mine")
    running.wait_for("] step ")
    failure = here / "runs" / "mine" / "failure-rank3.json"
    failure.write_text("{}")
    second = start_here(0, 1, *LONGER, 1000, "--run_dir", "runs/mine", "--resume", "auto", "--master_port", 0)
    assert second.wait(60) == 2
    assert "error[bad-option]: --run_dir runs/mine is in use" in second.err
    assert sorted(path.name for path in failure.parent.glob("failure*")) == [failure.name]
    running.process.send_signal(signal.SIGTERM)
    assert running.wait(30) == 143
