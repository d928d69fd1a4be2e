"""What ranks of a script that calls ``join`` itself must have in common, and programs that are not there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RankProcess, Start

JOINING = """
import sys
import ddp_manual
import helper

with ddp_manual.join(device="cpu", allow_mismatch="--allow" in sys.argv) as world:
    print(world.rank, helper.VALUE)
"""


@pytest.fixture
def folders(tmp_path: Path) -> list[Path]:
    """The same script twice, beside modules that differ."""
    for name, value in (("one", 1), ("other", 2)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "script.py").write_text(JOINING)
        (tmp_path / name / "helper.py").write_text(f"VALUE = {value}\n")
    return [tmp_path / "one", tmp_path / "other"]


def start_script(start: Start, port: int, rank: int, folder: Path, *words: object, **env: str) -> RankProcess:
    meeting = {"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_PORT": str(port)}
    return start(sys.executable, folder / "script.py", *words, **meeting, **env)


def test_a_script_that_joins_beside_another_module_is_refused(start: Start, port: int, folders: list[Path]) -> None:
    rank_0 = start_script(start, port, 0, folders[0])
    rank_0.wait_for("listening at ")
    odd = start_script(start, port, 1, folders[1])
    assert odd.wait() == 1
    assert "ConfigMismatch: rank 1 (" in odd.err and "runs other code than rank 0: helper.py\n" in odd.err
    right = start_script(start, port, 1, folders[0])
    assert [rank_0.wait(), right.wait()] == [0, 0], rank_0.err
    assert (rank_0.out, right.out) == ("0 1\n", "1 1\n")


def test_a_script_that_joins_with_another_variable_is_refused_and_may_be_allowed(
    start: Start, port: int, folders: list[Path]
) -> None:
    rank_0 = start_script(start, port, 0, folders[0], TORCH_DISTRIBUTED_DEBUG="INFO")
    rank_0.wait_for("listening at ")
    odd = start_script(start, port, 1, folders[0])
    assert odd.wait() == 1
    assert "has other variables than rank 0: TORCH_DISTRIBUTED_DEBUG\n" in odd.err
    assert "has INFO, rank 1 has it unset\n" in odd.err
    assert "export TORCH_DISTRIBUTED_DEBUG=INFO\n" in odd.err
    right = start_script(start, port, 1, folders[1], "--allow")
    assert [rank_0.wait(), right.wait()] == [0, 0], rank_0.err
    assert "has other variables than rank 0: TORCH_DISTRIBUTED_DEBUG (allowed)\n" in rank_0.err
    assert "runs other code than rank 0: helper.py (allowed)\n" in rank_0.err


def test_a_script_that_joins_may_say_by_its_arguments_which_rank_it_is(
    start: Start, port: int, folders: list[Path]
) -> None:
    ranks = [start_script(start, port, rank, folders[0], rank, "--log", f"rank{rank}.txt") for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[1].err
    assert "arguments" not in ranks[0].err


@pytest.mark.parametrize("typed", [["no-such.py"], ["-m", "no.such"], ["--no_python", "no-such"]])
def test_a_program_that_is_not_there_ends_run_at_once_with_exit_code_2(start: Start, typed: list[str]) -> None:
    rank = start(sys.executable, "-m", "ddp_manual", "run", *typed, cwd=REPOSITORY)
    assert rank.wait(10) == 2
    assert rank.err.count("error[bad-option]") == 1
    assert "listening" not in rank.err
