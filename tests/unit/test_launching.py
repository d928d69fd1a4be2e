"""What ``launch`` decides between two attempts at a run, without a process."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest

from ddp_manual import checkpoint_file, errors
from ddp_manual.launching.command import check_train_options, options_to_go_on
from ddp_manual.launching.failure import Failure, root_cause
from ddp_manual.rundir import RunPaths


def failure(status: int, rank: int = 1) -> Failure:
    return Failure(rank=rank, pid=17, status=status)


def test_ranks_are_started_again_after_what_may_not_happen_again() -> None:
    again = {code for code in range(1, 160) if failure(code).may_be_mended}
    assert again == {errors.TrainingFailed.exit_code, errors.PeerGone.exit_code}
    assert failure(-signal.SIGKILL).may_be_mended and failure(-signal.SIGSEGV).may_be_mended
    assert not failure(-signal.SIGTERM).may_be_mended and not failure(-signal.SIGINT).may_be_mended


def test_the_root_cause_is_the_first_rank_that_lost_no_peer() -> None:
    lost, killed, raised = failure(14, rank=0), failure(-signal.SIGKILL, rank=2), failure(1, rank=3)
    assert root_cause([lost, killed, raised]) is killed
    assert root_cause([lost]) is lost
    assert killed.exit_code == 137


def test_a_failure_is_told_in_the_words_of_the_process_that_failed_and_no_other(tmp_path: Path) -> None:
    paths = RunPaths(tmp_path)
    assert failure(1).told(paths) == "rank 1 left with exit code 1"
    words = {"identifier": "training-failed", "what": "rank 1 on hostA: ValueError: no", "pid": 17}
    paths.failure(1).write_text(json.dumps(words))
    assert failure(1).told(paths) == "error[training-failed]: rank 1 on hostA: ValueError: no"
    assert Failure(rank=1, pid=18, status=1).told(paths) == "rank 1 left with exit code 1"
    paths.set_failure_aside(1, 0)
    assert failure(1).told(paths) == "rank 1 left with exit code 1"
    assert (tmp_path / "failure-rank1.restart0.json").exists()


@pytest.mark.parametrize("given", [["--resume", "other.pt"], ["--resume=other.pt"]])
def test_a_run_that_began_with_anothers_checkpoint_goes_on_with_its_own_once_it_has_one(
    tmp_path: Path, given: list[str]
) -> None:
    paths = RunPaths(tmp_path)
    assert options_to_go_on(["--epochs", "2"], paths) == ["--epochs", "2", "--resume", "auto"]
    assert options_to_go_on([*given, "--epochs", "2"], paths) == [*given, "--epochs", "2"]
    paths.checkpoints.mkdir()
    checkpoint_file.write(paths.checkpoints, 8, b"", {})
    assert options_to_go_on([*given, "--epochs", "2"], paths) == ["--epochs", "2", "--resume", "auto"]


def test_a_script_is_refused_with_what_starts_its_ranks() -> None:
    check_train_options(2, ["--model", "own.py", "--epochs=2"])
    check_train_options(2, [])
    with pytest.raises(errors.BadOption, match=r"was given own\.py") as caught:
        check_train_options(2, ["own.py", "--epochs", "2"])
    assert "torchrun --nproc-per-node 2 own.py" in caught.value.next
