"""A run that was stopped, killed or out of disk space resumes as if nothing had happened: real ranks and signals."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ddp_manual import signals
from ddp_manual.training import checkpoint_files
from tests.conftest import DRAWN, REPOSITORY, RankProcess, Start, free_port

KILLS = int(os.environ.get("DDP_MANUAL_SOAK_KILLS", "2"))
# 300 steps of two ranks, a line of metrics every 10.
LONG = ("--batch_size", 20, "--epochs", 2, "--log_every", 10)
RECORDING = "tests/world/recording_rank.py"
SIGNALLED_WHILE_LEAVING = "tests/world/signalled_rank.py"

StartWorld = Callable[..., list[RankProcess]]


@pytest.fixture
def start_world(start: Start, small_data: Path) -> StartWorld:
    """Start all ranks of a world that trains into ``run_dir``, on a free port."""

    def start_world(
        world_size: int,
        run_dir: Path,
        *options: object,
        first_only: object = (),
        script: str = "run_multi_gpu_train.py",
        **env: str,
    ) -> Any:
        port = free_port()
        common = ["--dataset", "synthetic", "--model", "mlp", "--data_dir", small_data, "--run_dir", run_dir]
        return [
            start(
                *(sys.executable, script, "--world_size", world_size, "--rank", rank),
                *("--master_port", port, *common, *options, *(first_only if rank == 0 else ())),  # type: ignore[misc]
                **env,
            )
            for rank in range(world_size)
        ]

    return start_world


@pytest.fixture(scope="module")
def undisturbed_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("undisturbed")


@pytest.fixture
def undisturbed(undisturbed_folder: Path, start_world: StartWorld) -> Path:
    """The folder of a run of two ranks that nobody stops, trained for the first test that asks."""
    run = undisturbed_folder / "run"
    if not run.exists():
        assert [rank.wait() for rank in start_world(2, run, *LONG)] == [0, 0]
    return run


def parameters(run: Path) -> dict[str, torch.Tensor]:
    loaded: dict[str, torch.Tensor] = torch.load(run / "model.pt", weights_only=True)
    return loaded


def assert_same_run(run: Path, other: Path) -> None:
    """Assert bitwise equal parameters, and files as if the run had never stopped."""
    expected = parameters(other)
    assert all(torch.equal(value, expected[name]) for name, value in parameters(run).items())
    assert (run / "accuracies.json").read_text() == (other / "accuracies.json").read_text()
    assert [line["step"] for line in metrics(run)] == [line["step"] for line in metrics(other)]
    for ours, theirs in zip(metrics(run), metrics(other), strict=True):
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-9)
        assert (ours["accuracy"], ours["lr"]) == (theirs["accuracy"], theirs["lr"])


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def resumed_step(rank: RankProcess) -> int:
    found = re.search(r"going on after step (\d+)", rank.err)
    return int(found[1]) if found else 0


def test_every_rank_stops_after_the_same_step_and_the_run_goes_on_to_the_same_parameters(
    start_world: StartWorld, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks = start_world(2, run, *LONG)
    ranks[0].wait_for("step 40/300")
    ranks[1].process.send_signal(signal.SIGUSR1)
    ranks[0].wait_for("saved ")
    told = time.monotonic()
    ranks[1].process.send_signal(signal.SIGTERM)
    assert [rank.wait(30) for rank in ranks] == [143, 143]
    assert time.monotonic() - told < 5
    assert (
        "SIGTERM: stopping after the next step all ranks agree on; a second signal ends this rank at once"
        in ranks[1].err
    )
    (step,) = {
        re.findall(r"error\[stopped\]: stopped by SIGTERM on rank 1 after step (\d+)", rank.err)[0] for rank in ranks
    }
    newest, *_ = checkpoint_files.find(run / "checkpoints")
    assert newest.step == int(step)
    assert "--resume auto --run_dir" in ranks[1].err
    assert json.loads((run / "failure-rank1.json").read_text())["identifier"] == "stopped"

    resumed = start_world(2, run, *LONG, first_only=("--resume", "auto"))
    assert [rank.wait() for rank in resumed] == [0, 0]
    assert resumed_step(resumed[0]) == int(step)
    assert_same_run(run, undisturbed)


def test_ctrl_c_on_rank_0_stops_all_in_order_and_the_first_step_after_it_is_in_the_second_epoch(
    start_world: StartWorld, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ranks = start_world(2, run, *LONG)
    ranks[0].wait_for("step 150/300")
    ranks[0].process.send_signal(signal.SIGINT)
    assert [rank.wait(30) for rank in ranks] == [130, 130]
    resumed = start_world(2, run, *LONG, "--resume", "auto")
    assert [rank.wait() for rank in resumed] == [0, 0]
    assert resumed_step(resumed[0]) >= 150
    assert_same_run(run, undisturbed)


def test_a_second_signal_leaves_at_once_even_from_inside_a_collective(start_world: StartWorld, tmp_path: Path) -> None:
    ranks = start_world(2, tmp_path / "run", *LONG, "--epochs", 20)
    ranks[0].wait_for("step 20/")
    os.kill(ranks[1].worker, signal.SIGSTOP)
    ranks[0].process.send_signal(signal.SIGINT)
    ranks[0].wait_for("a second signal ends this rank at once", 10)
    time.sleep(signals.ONCE_WITHIN + 0.1)  # sooner it would count as the first one's echo
    told = time.monotonic()
    ranks[0].process.send_signal(signal.SIGINT)
    assert ranks[0].wait(10) == 130
    assert time.monotonic() - told < 2
    assert "error[stopped]: stopped by Ctrl-C (SIGINT) at once, by a second signal" in ranks[0].err


def test_a_signal_to_a_rank_that_is_leaving_changes_nothing(start_world: StartWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ranks = start_world(2, run, *LONG, script=SIGNALLED_WHILE_LEAVING)
    ranks[0].wait_for("step 20/300")
    ranks[1].process.send_signal(signal.SIGTERM)
    assert [rank.wait(30) for rank in ranks] == [143, 143]
    said = "Ctrl-C (SIGINT): this rank is done, and is leaving; a second signal ends this rank at once"
    assert said in ranks[0].err and "error[stopped]: stopped by SIGTERM on rank 1 after step" in ranks[0].err

    ranks = start_world(2, tmp_path / "whole", *LONG, "--epochs", 1, script=SIGNALLED_WHILE_LEAVING)
    assert [rank.wait(30) for rank in ranks] == [0, 0]
    assert said in ranks[0].err and (tmp_path / "whole" / "summary.json").exists()


@pytest.mark.parametrize(("batch", "number"), [(60, signal.SIGTERM), (104, signal.SIGHUP)])
def test_stopped_at_2_ranks_and_resumed_at_1_and_at_4_each_image_is_seen_once(
    start: Start, port: int, small_data: Path, tmp_path: Path, batch: int, number: int
) -> None:
    """104 images per step do not divide 6,000: the last step is a small one."""

    def start_recording(name: str, world_size: int, run: Path, *options: object) -> list[RankProcess]:
        return [
            start(
                *(sys.executable, RECORDING, "train", "--world_size", world_size, "--rank", rank),
                *("--master_port", port, "--dataset", "synthetic", "--model", "mlp", "--data_dir", small_data),
                *("--run_dir", run, "--epochs", 1, "--global_batch_size", batch, "--log_every", 5, *options),
                RECORD=str(tmp_path / f"{name}{rank}.txt"),
            )
            for rank in range(world_size)
        ]

    def seen(name: str, world_size: int) -> list[int]:
        files = [tmp_path / f"{name}{rank}.txt" for rank in range(world_size)]
        return [int(word) for file in files for word in file.read_text().split()]

    first = start_recording("two", 2, tmp_path / "run")
    first[0].wait_for("step 10/")
    first[1].process.send_signal(number)
    assert [rank.wait(30) for rank in first] == [128 + number] * 2
    before = seen("two", 2)
    assert 0 < len(before) < DRAWN["train"]
    for name, world_size in (("one", 1), ("four", 4)):
        run = tmp_path / name
        shutil.copytree(tmp_path / "run", run)
        ranks = start_recording(name, world_size, run, "--resume", "auto")
        assert [rank.wait() for rank in ranks] == [0] * world_size, ranks[0].err
        assert sorted([*before, *seen(name, world_size)]) == list(range(DRAWN["train"]))


def test_ranks_without_a_sample_in_the_last_step_train_the_same_network(start: Start, port: int) -> None:
    def train(world_size: int, port: int) -> list[float]:
        meeting = {"WORLD_SIZE": str(world_size), "MASTER_PORT": str(port)}
        script = [sys.executable, "tests/world/uneven_steps.py"]
        ranks = [start(*script, RANK=str(rank), **meeting) for rank in range(world_size)]
        assert [rank.wait() for rank in ranks] == [0] * world_size
        assert len({rank.out for rank in ranks}) == 1
        return [float(word) for word in ranks[0].out.split()]

    assert train(3, port) == pytest.approx(train(1, port + 1), rel=1e-5, abs=1e-6)


def test_three_ranks_sum_their_gradients_in_the_same_order_after_a_resume(
    start_world: StartWorld, tmp_path: Path
) -> None:
    """Of two ranks the order makes no difference; of three, DDP's buckets decide, which it lays out anew on its way."""
    run, other = tmp_path / "run", tmp_path / "other"
    options = ("--epochs", 1, "--batch_size", 200)
    ranks = start_world(3, run, *options, "--checkpoint_steps", 4)
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    (early,) = (run / "checkpoints").glob("step-00000004-*.pt")
    ranks = start_world(3, other, *options, first_only=("--resume", early))
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert resumed_step(ranks[0]) == 4
    assert all(torch.equal(value, parameters(other)[name]) for name, value in parameters(run).items())


def test_a_checkpoint_that_rank_0_cannot_resume_from_ends_every_rank_with_the_reason(
    start_world: StartWorld, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    ranks = start_world(2, run, *LONG, "--seed", 1, "--resume", "auto")
    assert [rank.wait(30) for rank in ranks] == [15, 14]
    assert "error[checkpoint-mismatch]" in ranks[0].err
    assert "seed: 0 in the checkpoint / 1 here (flag)" in ranks[0].err
    assert "left with error[checkpoint-mismatch]" in ranks[1].err and "seed: 0 in" in ranks[1].err
    assert_same_run(run, undisturbed)


def test_a_damaged_checkpoint_is_named_and_the_one_before_it_is_used(
    start_world: StartWorld, undisturbed: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(undisturbed, run)
    newest, *_ = checkpoint_files.find(run / "checkpoints")
    newest.path.write_bytes(newest.path.read_bytes()[:-1])
    ranks = start_world(2, run, *LONG, "--resume", "auto")
    assert [rank.wait() for rank in ranks] == [0, 0]
    assert f"{newest.path} is not the checkpoint that was written: it has" in ranks[0].err
    assert resumed_step(ranks[0]) == 150
    assert_same_run(run, undisturbed)

    again = start_world(1, run, *LONG, "--resume", "auto", "--track", "jsonl")
    assert again[0].wait() == 0
    assert "the run is complete" in again[0].err and "test accuracy after 2 epochs" in again[0].out
    assert_same_run(run, undisturbed)
    assert not (run / "track.jsonl").exists()  # there is nothing to add to what was followed to its end
    copy = start_world(1, tmp_path / "copy", *LONG, "--resume", run, "--track", "jsonl")
    assert copy[0].wait() == 0
    assert json.loads((tmp_path / "copy" / "track.jsonl").read_text().splitlines()[-1])["complete"] is True
    for name in ("model.pt", "accuracies.json", "config.json", "summary.json", "samples.png"):
        assert (tmp_path / "copy" / name).exists(), name
    more = start_world(1, tmp_path / "more", *LONG, "--epochs", 3, "--resume", run)
    assert more[0].wait() == 0
    assert len(json.loads((tmp_path / "more" / "accuracies.json").read_text())) == 3


def test_a_folder_that_a_run_trains_into_is_refused_to_another(start_world: StartWorld, tmp_path: Path) -> None:
    run = tmp_path / "run"
    (first,) = start_world(1, run, *LONG, "--epochs", 200)
    first.wait_for("step 10/")
    (second,) = start_world(1, run, *LONG, "--resume", "auto")
    assert second.wait(30) == 2
    assert f"error[bad-option]: --run_dir {run} is in use" in second.err
    assert f"pid {first.worker} on" in second.err


def test_a_disk_that_fills_up_leaves_every_checkpoint_that_was_written(small_data: Path, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("only root can mount a small file system (run the tests as root)")
    full = tmp_path / "full"
    full.mkdir()
    options = f"--dataset synthetic --model mlp --data_dir {small_data} --epochs 1 --master_port 0"
    train = f"{sys.executable} run_multi_gpu_train.py {options}"
    script = f"""
        mount -t tmpfs -o size=20m none {full}
        {train} --run_dir {full}/run --batch_size 10 --checkpoint_steps 5 --keep 100 2>&1; echo "first: $?"
        ls -A {full}/run/checkpoints
        {sys.executable} -m ddp_manual checkpoints {full}/run --json > {tmp_path}/list.json; echo "list: $?"
        {train} --resume {full}/run --run_dir {tmp_path}/run --batch_size 100 2>&1; echo "second: $?"
    """
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", script], cwd=REPOSITORY, env=env, capture_output=True, text=True, check=False
    )
    assert "error[disk-full]: no space left to write" in done.stdout, done
    assert "first: 15" in done.stdout and "list: 0" in done.stdout and "second: 0" in done.stdout, done.stdout
    assert ".tmp" not in done.stdout
    listed = json.loads((tmp_path / "list.json").read_text())
    assert len(listed) > 15 and {one["verdict"] for one in listed} == {"ok"}
    assert f"going on after step {listed[0]['step']}" in done.stdout


@pytest.mark.soak
@pytest.mark.timeout(120 + 60 * KILLS)
def test_a_run_that_is_killed_again_and_again_ends_with_the_parameters_of_one_that_was_not(
    start_world: StartWorld, tmp_path: Path
) -> None:
    """Each kill costs at most the 20 steps between two checkpoints."""
    order = random.Random(KILLS)
    epochs = 1 + KILLS // 4
    options = ("--batch_size", 20, "--epochs", epochs, "--log_every", 1, "--checkpoint_steps", 20)
    run = tmp_path / "run"
    reached = 0
    for _ in range(KILLS):
        ranks = start_world(2, run, *options, "--resume", "auto")
        ranks[0].wait_for("training mlp on")
        went_on = resumed_step(ranks[0])
        assert reached - 20 <= went_on <= reached, ranks[0].err
        ranks[0].wait_for(f"step {went_on + 1}/")
        time.sleep(order.uniform(0, 0.4))
        victims = order.choice(([0], [1], [0, 1]))
        for victim in victims:
            os.kill(order.choice((ranks[victim].process.pid, ranks[victim].worker)), signal.SIGKILL)
        for rank in ranks:
            assert rank.wait(30) != 0
        said = [int(step) for step in re.findall(r"step (\d+)/", ranks[0].err)]
        reached = max(said)
        assert "checkpoint-corrupt" not in ranks[0].err and "is not the checkpoint that was written" not in ranks[0].err
    ranks = start_world(2, run, *options, "--resume", "auto")
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    assert resumed_step(ranks[0]) >= reached - 20
    ranks = start_world(2, tmp_path / "undisturbed", *options)
    assert [rank.wait(200) for rank in ranks] == [0, 0]
    assert_same_run(run, tmp_path / "undisturbed")
