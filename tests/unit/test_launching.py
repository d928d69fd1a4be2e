"""What ``launch`` decides between two attempts at a run, without a process."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from pathlib import Path

import pytest

from ddp_manual import TrainConfig, errors
from ddp_manual.agent.local import Launch, check_train_options, copy, from_the_newest, may_be_mended
from ddp_manual.errors import PeerLost, Stopped
from ddp_manual.messages import LONGEST_LINE
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import RankOutput
from ddp_manual.training import checkpoint_files


def failed(code: int) -> PeerLost:
    error = PeerLost("rank 1 is gone", why="it said nothing", next="start it again")
    error.exit_code = code
    return error


def test_ranks_are_started_again_after_failures_that_may_not_recur() -> None:
    again = {code for code in range(1, 129) if may_be_mended(failed(code))}
    assert again == {errors.TrainingFailed.exit_code, errors.PeerGone.exit_code}
    assert may_be_mended(failed(128 + signal.SIGKILL)) and may_be_mended(failed(128 + signal.SIGSEGV))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert not may_be_mended(Stopped(number))


def test_a_progress_bar_is_shown_while_it_grows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async def copied() -> None:
        reading, writing = os.pipe()
        with (tmp_path / "log").open("ab") as log:
            copying = asyncio.ensure_future(copy(reading, RankOutput(log, 1), sys.stdout))
            for piece in (b"10%\r", b"20%\r", b"30% "):
                os.write(writing, piece)
            while "20%" not in (tmp_path / "log").read_text():
                await asyncio.sleep(0.01)
            await asyncio.to_thread(os.write, writing, b"done\n" + b"x" * (LONGEST_LINE + 1))
            os.close(writing)
            await copying
            await asyncio.sleep(0.01)  # until the pipe is closed

    asyncio.run(copied())
    assert capsys.readouterr().out.splitlines()[:3] == ["[rank 1] 10%", "[rank 1] 20%", "[rank 1] 30% done"]
    assert (tmp_path / "log").stat().st_size > LONGEST_LINE


def test_a_failure_that_was_set_aside_keeps_the_number_of_its_attempt(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    paths.failure(1).write_text(json.dumps({"identifier": "training-failed"}))
    paths.set_failure_aside(1, 0)
    assert [path.name for path in tmp_path.iterdir()] == ["failure-rank1.restart0.json"]


@pytest.mark.parametrize("given", [["--resume", "other.pt"], ["--resume=other.pt"]])
def test_a_run_that_began_with_another_runs_checkpoint_resumes_from_its_own_once_it_has_one(
    tmp_path: Path, given: list[str]
) -> None:
    paths = RunPaths(tmp_path)
    launch = Launch(2, "id", paths, 1, "go on")
    began, another = TrainConfig(epochs=2), TrainConfig(epochs=2, resume="other.pt")
    assert launch._to_go_on(began).resume == "auto"
    assert launch._to_go_on(another) is another
    paths.checkpoints.mkdir()
    checkpoint_files.write(paths.checkpoints, 8, b"", {})
    assert launch._to_go_on(another).resume == "auto"
    assert from_the_newest([*given, "--epochs", "2"]) == ["--epochs", "2", "--resume", "auto"]


def test_a_script_is_refused_with_the_command_that_starts_its_ranks() -> None:
    check_train_options(2, ["--model", "own.py", "--epochs=2"])
    check_train_options(2, [])
    with pytest.raises(errors.BadOption, match=r"was given own\.py") as caught:
        check_train_options(2, ["own.py", "--epochs", "2"])
    assert "torchrun --nproc-per-node 2 own.py" in caught.value.next
