"""What ``launch`` decides between two attempts at a run, without a process."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
from msgspec.structs import replace

from ddp_manual import TrainConfig, WorldSpec, errors
from ddp_manual.agent.rank_result import leave_failure
from ddp_manual.cli import main as cli
from ddp_manual.environment.start_python import python_flags
from ddp_manual.errors import DdpManualError, PeerLost, Stopped
from ddp_manual.launch.attempts import may_be_fixed
from ddp_manual.launch.job import Hosts, Job
from ddp_manual.launch.this_host import Ranks, prepared
from ddp_manual.program import EXECUTABLE, Program
from ddp_manual.protocol.verdict_words import error_for, lost_rank, verdict_about
from ddp_manual.rank_output import RankOutput, copy
from ddp_manual.ranks_and_runs import LastWords, RankInfo
from ddp_manual.run_folder import RunPaths, own_run_dir
from ddp_manual.tools.recorded_run import read_end
from ddp_manual.training import checkpoint_files
from tests.runs import RUN


def failed(code: int, kind: type[DdpManualError] = PeerLost) -> DdpManualError:
    error = kind("rank 1 is gone", why="it said nothing", next="start it again")
    error.exit_code = code
    return error


def test_ranks_are_started_again_after_failures_that_may_not_recur() -> None:
    again = {code for code in range(1, 129) if may_be_fixed(failed(code, errors.BadOption))}
    assert again == {errors.TrainingFailed.exit_code, errors.PeerGone.exit_code}
    assert may_be_fixed(failed(128 + signal.SIGKILL)) and may_be_fixed(failed(128 + signal.SIGSEGV))
    assert may_be_fixed(failed(3, errors.TrainingFailed))  # of sys.exit(3)
    assert may_be_fixed(failed(3)) and may_be_fixed(failed(3, errors.MasterLost))  # of os._exit(3), or of a program
    assert not may_be_fixed(failed(128 + signal.SIGTERM))
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        assert not may_be_fixed(Stopped(number))


@pytest.mark.parametrize(
    ("options", "restarts"),
    [({}, 0), ({"max_restarts": 3}, 3), ({"max_restarts": 3, "on_loss": "wait", "on_loss_of_own_code": True}, 0)],
)
def test_all_ranks_are_started_again_unless_rank_0_starts_the_failed_one_again(options: Any, restarts: int) -> None:
    spec = WorldSpec(**options, sources=dict.fromkeys(options, "flag"))
    assert Job(spec=spec, run_id="id", run_dir=None, go_on="").max_restarts == restarts


@pytest.mark.parametrize(("exit_code", "again"), [(143, False), (137, True)])
def test_after_a_death_on_another_host_ranks_start_again_if_they_do_so_there(exit_code: int, again: bool) -> None:
    about = RankInfo(rank=1, world_size=2, host="hostB", pid=4711, agent=4710)
    error = lost_rank(about, "rank 1 is gone", why="", next="")
    error.exit_code = exit_code
    verdict = verdict_about(about, LastWords.of(error))
    assert [may_be_fixed(error_for(rank, verdict)) for rank in (0, 1)] == [again, again]


def test_a_progress_bar_is_shown_once_a_second_while_it_grows(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async def copied() -> None:
        reading, writing = os.pipe()
        with (tmp_path / "log").open("ab", buffering=0) as log, ThreadPoolExecutor(1) as writer:
            copying = asyncio.ensure_future(copy(reading, RankOutput(log, 1, writer), sys.stdout))
            os.write(writing, b"begun\r\n\r 1%")
            for state in range(2, 40):  # as tqdm writes them
                os.write(writing, b"\r%2d%%" % state)
            while "39%" not in (tmp_path / "log").read_text():  # though nothing follows it
                await asyncio.sleep(0.01)
            os.write(writing, b"\r    \rsaved\n\r42% done\n")
            os.close(writing)
            await copying
            await asyncio.sleep(0.01)  # until the pipe is closed

    asyncio.run(copied())
    first, *between, last, saved, done = capsys.readouterr().out.splitlines()
    assert first == "[rank 1] begun" and len(between) <= 1
    assert [last, saved, done] == ["[rank 1] 39%", "[rank 1] saved", "[rank 1] 42% done"]


def test_a_log_on_a_disk_that_is_almost_full_has_each_line_whole_or_its_rank_says_that_it_has_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The file is a fake, which takes three bytes at a time and then none."""
    log = Mock(**{"tell.return_value": 1, "write.side_effect": [OSError, 3, 3, 1, 3, OSError(28, "full"), OSError]})
    log.name = "log-rank0.txt"
    with ThreadPoolExecutor(1) as writer:
        output = RankOutput(log, 0, writer)
        for line in (b"first.\n", b"second\n", b"third\n"):
            output.write(line)
    said = ["first.", "second", "log-rank0.txt is incomplete from here on: full", "third"]
    assert capsys.readouterr().err.splitlines() == [f"[rank 0] {line}" for line in said]


def test_a_failure_that_is_set_aside_takes_the_first_number_that_is_free(tmp_path: Path) -> None:
    """Rank 0 sets aside the failures of ranks that are no more, too."""
    paths = RunPaths(tmp_path)
    for _ in range(2):
        for rank in range(3):
            paths.failure(rank).write_text("{}")
        paths.set_failures_aside(1)
        assert paths.failures() == [paths.failure(0), paths.failure(2)]
        paths.set_failures_aside(0, 2)
        assert paths.failures() == []
    aside = {f"failure-rank{rank}.restart{number}.json" for rank in range(3) for number in (0, 1)}
    assert {path.name for path in tmp_path.iterdir()} == aside


def test_a_resume_that_is_refused_leaves_the_end_of_the_run_as_it_was(tmp_path: Path) -> None:
    paths, refused = RunPaths(tmp_path), errors.BadOption("--batch_size 9 is too large", why="-", next="-")
    paths.config.write_text(json.dumps({"run": {"run_id": RUN.run_id}}))
    leave_failure(str(tmp_path), 0, 1, Stopped(2), RUN)
    leave_failure(str(tmp_path), 0, 1, refused, replace(RUN, run_id="the next one's"))
    assert read_end(paths).state == "stopped"
    assert json.loads((tmp_path / "failure-rank0.restart0.json").read_text())["identifier"] == refused.identifier


@pytest.mark.parametrize(
    ("named", "own", "used"),
    [
        ("runs/20260101-101010-0a1b", "runs/20260101-101013-{run_id}", "runs/20260101-101010-0a1b"),
        ("/mnt/run", "/mnt/run", "/mnt/run"),
        ("/mnt/run-7", "/mnt/run-{run_id}", "/mnt/run-7"),
        ("/root/.ssh", "runs/20260101-101013-{run_id}", None),
        ("runs/../../.ssh", "runs/20260101-101013-{run_id}", None),
        ("runs/a/b", "runs/20260101-101013-{run_id}", None),
        ("runs/20260101-101010-0a1b", "runs/20260202-202020-77", None),
        ("/mnt/run-../x", "/mnt/run-{run_id}", None),
        ("/mnt/run", None, None),
        (None, "/mnt/run", None),
    ],
)
def test_a_rank_writes_to_the_folder_that_rank_0_names_only_if_it_is_its_own(
    named: str | None, own: str | None, used: str | None
) -> None:
    assert own_run_dir(named, own) == used


def test_a_run_that_began_with_another_runs_checkpoint_resumes_from_its_own_once_it_has_one(tmp_path: Path) -> None:
    def to_go_on(config: TrainConfig) -> TrainConfig | None:
        job = Job(spec=WorldSpec(), run_id="id", run_dir=str(tmp_path), go_on="go on", config=config)
        return Ranks(job, Hosts([2]), ThreadPoolExecutor(1))._to_go_on()

    began, another = TrainConfig(epochs=2), TrainConfig(epochs=2, resume="other.pt")
    assert (to_go_on(began), to_go_on(another)) == (began.with_flags(resume="auto"), another)
    checkpoint_files.write(RunPaths(tmp_path).checkpoints, 8, b"", {})
    assert to_go_on(another) == another.with_flags(resume="auto")


def test_a_signal_that_comes_before_or_between_attempts_reaches_the_ranks_as_soon_as_they_are_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(spec=WorldSpec(), run_id="id", run_dir=None, go_on="", config=TrainConfig())
    ranks, got = Ranks(job, Hosts([2]), ThreadPoolExecutor(1)), list[tuple[int, int]]()

    def agent(rank: int, config: Any, restarts: int, output: RankOutput) -> Any:
        async def run() -> Any:
            return SimpleNamespace(error=None, result=None)

        spec, protocol = SimpleNamespace(rank=rank + 1), SimpleNamespace(has_trained=False)
        return SimpleNamespace(
            spec=spec, protocol=protocol, run=run, take_signal=lambda number: got.append((restarts, number))
        )

    monkeypatch.setattr(ranks, "_agent", agent)
    ranks.starter = SimpleNamespace(start_again=lambda: None)  # type: ignore[assignment]
    for attempt in range(3):
        if attempt < 2:
            ranks.take_signal(signal.SIGINT)
        asyncio.run(ranks.attempt(attempt, lambda failure: None))
    assert got == [(0, signal.SIGINT)] * 2 + [(1, signal.SIGINT)] * 2


def test_only_ranks_that_may_take_the_seats_of_lost_ones_start_where_a_run_has_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()

    def job(**options: str) -> Job:
        config = TrainConfig(dataset="synthetic")
        return Job(spec=WorldSpec(**options), run_id="id", run_dir=str(tmp_path), go_on="", config=config)  # type: ignore[arg-type]

    prepared(job(on_loss="wait"), Hosts([1]))
    with pytest.raises(errors.BadOption, match="already holds a run"):
        prepared(job(), Hosts([1]))
    # What a program of the user's own writes there is its own affair.
    prepared(dataclasses.replace(job(), config=None, program=Program(kind=EXECUTABLE, name="true")), Hosts([1]))
    (tmp_path / "log-rank1.txt").mkdir()
    with pytest.raises(errors.BadOption, match=r"log-rank1\.txt cannot be written"):
        prepared(job(on_loss="wait"), Hosts([2]))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model", "nowhere:net"], "--model nowhere:net: there is no module nowhere"),
        (["--model", "own.net"], "--model own.net has no colon between the module and its function or class"),
        (["--resume", "nowhere"], "no checkpoint at nowhere"),
        (["--global_batch_size", "3"], "--global_batch_size 3 cannot be divided over 2 ranks"),
        (["--token_file", "nowhere"], "--token_file nowhere cannot be read"),
    ],
)
def test_what_can_be_known_before_ranks_are_started_is_said_once_and_leaves_nothing(
    options: list[str], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    assert cli.run(["launch", "--nproc", "2", "--run_dir", str(run), "--", *options]) in (2, 15)
    first, *rest = capsys.readouterr().err.splitlines()
    assert said in first and not any("error[" in line for line in rest)
    assert not run.exists()


@pytest.mark.parametrize(
    ("typed", "passed_on"), [("-E -s -B -Werror -m a -O", "-E -s -Werror"), ("-IO -X dev a.py -u", "-E -s -O -Xdev")]
)
def test_a_worker_has_those_flags_of_this_python_that_mean_a_program(
    typed: str, passed_on: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "orig_argv", ["python", *typed.split()])
    assert python_flags() == passed_on.split()
