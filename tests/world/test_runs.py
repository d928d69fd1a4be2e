"""Which folder a real start leaves on the disk, however it ends, and what ``ddp-manual runs`` says of it."""

from __future__ import annotations

import json
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.conftest import LONGER, SHORT, RankProcess, Start, wait_until
from tests.real_scripts import environment

COMMAND = (sys.executable, "-m", "ddp_manual")


@pytest.fixture
def here(tmp_path: Path) -> Path:
    """The current folder of all ranks, below which the default of --run_dir is."""
    (tmp_path / "here").mkdir()
    return tmp_path / "here"


@pytest.fixture
def launch_here(start: Start, small_data: Path, here: Path) -> Callable[..., RankProcess]:
    """Launch two ranks of our training; ``before`` are options of ``launch``."""

    def launch_here(*options: object, before: tuple[object, ...] = (), **env: str) -> RankProcess:
        training = [*SHORT, "--data_dir", small_data, *options]
        return start(*COMMAND, "launch", "--nproc", 2, *before, "--", *training, cwd=here, **env)

    return launch_here


def runs_in(folder: Path, start: Start, *options: object) -> list[dict[str, Any]]:
    process = start(*COMMAND, "runs", *options, "--json", cwd=folder)
    assert process.wait(20) == 0, process.err
    found: list[dict[str, Any]] = json.loads(process.out)
    return found


def test_ranks_that_never_train_leave_no_folder_unless_it_was_named(start: Start, port: int, here: Path) -> None:
    """Neither one that nobody joins, nor one that is stopped, nor one whose options differ; a named one says why."""
    train = [*COMMAND, "train", *SHORT, "--world_size", 2, "--master_port", port]
    refused = start(*train, "--rank", 1, "--lr", 0.1, cwd=here)
    refused.wait_for("nothing listens")
    lonely = start(*train, "--rank", 0, "--join_timeout", 3, cwd=here)
    assert [lonely.wait(20), refused.wait(20)] == [10, 12]
    stopped = start(*train, "--rank", 0, cwd=here)
    stopped.wait_for("waiting for rank 1")
    stopped.process.send_signal(signal.SIGINT)
    assert stopped.wait(20) == 130
    assert list(here.iterdir()) == []
    assert start(*train, "--rank", 0, "--join_timeout", 1, "--run_dir", "deep/named", cwd=here).wait(20) == 10
    assert [path.name for path in (here / "deep/named").iterdir()] == ["failure-rank0.json"]
    (run,) = runs_in(here, start, "deep")
    assert (run["state"], run["world_size"]) == ("failed: rank-missing", None)


def test_runs_tells_how_a_run_has_failed_that_it_is_resumed_and_trains_and_that_it_was_killed(
    start: Start, launch_here: Callable[..., RankProcess], here: Path
) -> None:
    """The kernel's lock on a file of the folder says whether it trains; meanwhile no other run may use the folder."""
    training = (*LONGER, 1000)
    assert launch_here(*training, "--checkpoint_steps", 8, **environment("raise@1:20")).wait(60) == 1
    (run,) = runs_in(here, start)
    assert (run["state"], run["world_size"]) == ("failed: training-failed", 2)
    assert run["why"].endswith("ValueError: rank 1 was told to fail")
    folder = here / run["run_dir"]
    assert sorted(path.name for path in folder.glob("failure-*")) == ["failure-rank0.json", "failure-rank1.json"]
    trains = launch_here(*training, "--resume", "auto", before=("--run_dir", folder))
    trains.wait_for("epoch ")  # not "step ", which it says as it reads the checkpoint
    set_aside = [f"failure-rank{rank}.restart0.json" for rank in (0, 1)]
    assert sorted(path.name for path in folder.glob("failure-*")) == set_aside
    assert [(run["state"], run["why"]) for run in runs_in(here, start)] == [("running", None)]
    second = launch_here(*training, "--resume", "auto", before=("--run_dir", folder))
    assert second.wait(60) == 2
    assert f"error[bad-option]: --run_dir {folder} is in use" in second.err
    assert sorted(path.name for path in folder.glob("failure-*")) == set_aside
    trains.kill()
    wait_until(lambda: runs_in(here, start)[0]["state"] == "unfinished", 20)


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
