"""Real processes lost in every way (``--on_loss wait`` and ``shrink``): held memory outlives them, and the run ends bit
for bit as an undisturbed one. What each rank says is in tests/scenarios."""

from __future__ import annotations

import itertools
import json
import os
import random
import signal
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import DRAWN, HOST, REPOSITORY, RankProcess, Start, wait_until
from tests.seats import Kept, differing, lose, steps_done

LOSSES = int(os.environ.get("DDP_MANUAL_SOAK_LOSSES", "5"))
# Of the training in which they are lost.
EPOCHS = -(-LOSSES // 10)
# How a rank may be lost; rank 0 also with its agent, whose place another process then takes.
WAYS = ("worker", "abort", "agent", "both", "stop")
StartKept = Callable[..., Kept]
# Writes a line for each step: where in the epoch it begins, the number of ranks, and which samples this rank trains on.
# Steps of two ranks wait, so that a third that is typed again has loaded torch before the epoch is over.
RECORD = """
import os, sys, time
if "worker" in sys.orig_argv[1]:
    from ddp_manual.training.position import EpochPlan
    share = EpochPlan.share
    def recorded(plan, order, start, *where):
        time.sleep(0.3 if plan.world_size == 2 else 0.01)
        samples = share(plan, order, start, *where)
        with open(os.environ["RECORD"], "a") as file:
            file.write(" ".join(map(str, [start, plan.world_size, *samples.tolist()])) + "\\n")
        return samples
    EpochPlan.share = recorded
"""

# Loading the data again, after a loss, takes 2 s.
SLOW_AGAIN = """
import os, sys, time
if "worker" in sys.orig_argv[1]:
    from ddp_manual.training import main
    load = main._load
    def load_slowly(world, config):
        if world.generation:
            print("loads again", flush=True)
            time.sleep(2)
        return load(world, config)
    main._load = load_slowly
"""


@pytest.fixture
def start_kept(start: Start, port: int, digits: Path, tmp_path: Path) -> StartKept:
    """Start ranks that train ConvNet on the real MNIST, and keep their seats."""

    def start_kept(world_size: int, *options: object, epochs: int = EPOCHS) -> Kept:
        def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
            meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port]
            return start(sys.executable, "run_multi_gpu_train.py", *meeting, *training, *options)

        training = ["--data_dir", digits, "--run_dir", tmp_path / "run", "--epochs", epochs, "--peer_timeout", 2]
        training += ["--log_every", 10, "--batch_size", 20, "--hold_every", 1]
        return Kept(start_rank, world_size, *options)

    return start_kept


@pytest.fixture
def undisturbed(start: Start, digits: Path, tmp_path: Path) -> Path:
    """The folder of a run of three ranks with the same options, of which none is lost."""
    launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 3, "--run_dir", tmp_path / "undisturbed", "--"]
    assert start(*launch, "--data_dir", digits, "--epochs", EPOCHS, "--batch_size", 20).wait(600) == 0
    return tmp_path / "undisturbed"


@pytest.mark.soak(only=True)
@pytest.mark.timeout(3600)
def test_ranks_lost_at_random_moments_in_every_way_end_with_the_parameters_of_an_undisturbed_run(
    start_kept: StartKept, undisturbed: Path, tmp_path: Path
) -> None:
    chosen, took = random.Random(LOSSES), []
    kept, losses = start_kept(3), 0
    kept.until_trained()
    ways = [*WAYS, *chosen.choices(WAYS, k=max(0, LOSSES - len(WAYS)))][:LOSSES]
    last = int(kept.ranks[0].err.rpartition("] step ")[2].split()[0].partition("/")[2])
    for way, step in zip(ways, sorted(chosen.randrange(last) for _ in ways), strict=True):
        rank = chosen.randrange(3)
        witness = (rank + 1) % 3
        kept.until_done(step)
        time.sleep(chosen.uniform(0, 0.1))
        before, since = kept.returns(witness), time.monotonic()
        if kept.ranks[0].process.poll() is not None:
            break  # the training was faster
        try:
            lose(kept, rank, way)
        except (AssertionError, psutil.NoSuchProcess):
            continue  # its worker has not come back yet
        losses += 1
        if rank != 0 or way in ("agent", "both"):
            kept.type_again(rank)
        if kept.ranks[witness].process.poll() == 0:
            break  # it was lost after its work was done
        kept.wait_for_return(witness, before)
        took.append(time.monotonic() - since)
    assert kept.codes(within=600) == [0, 0, 0], kept.ranks[0].err
    assert differing(tmp_path / "run", undisturbed) == []
    print(f"{losses} losses; from a loss until all went on: median {statistics.median(took):.1f} s")


def test_survivors_train_again_soon_and_a_world_shrinks_and_grows_within_an_epoch_that_sees_each_sample_once(
    start: Start, port: int, small_data: Path, tmp_path: Path
) -> None:
    """Rank 0's worker is started again by its agent, so that what it takes is the survivors' own part. Nothing grows
    with the losses."""
    (tmp_path / "sitecustomize.py").write_text(RECORD)
    training = ["--dataset", "synthetic", "--model", "mlp", "--epochs", 1, "--data_dir", small_data]

    def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, "--run_dir", tmp_path / "run"]
        record = {"RECORD": str(tmp_path / f"samples{rank}"), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        return start(sys.executable, "run_multi_gpu_train.py", *meeting, *training, *options, **record)

    kept = Kept(start_rank, 3, "--global_batch_size", 9, "--log_every", 10, "--hold_every", 1)
    kept.until_trained()
    kept.ranks[1].process.send_signal(signal.SIGUSR1)
    kept.ranks[0].wait_for("saved ")  # for all
    agent = psutil.Process(kept.ranks[1].process.pid)

    def open_now() -> tuple[int, int, int]:
        return agent.num_fds(), agent.num_threads(), len(agent.children(recursive=True))

    took, before = [], open_now()
    for losses in range(2):
        since, done = time.monotonic(), steps_done(kept.ranks[1])
        lose(kept, 0, "worker")
        wait_until(lambda done=done: steps_done(kept.ranks[1]) > done + 1, 30)  # type: ignore[misc]
        took.append(time.monotonic() - since)
        kept.wait_for_return(1, before=losses)
        # It opens one file of /proc for a moment; what grows with each loss has grown twice at the second one.
        wait_until(lambda: all(now <= was for now, was in zip(open_now(), before, strict=True)))
    assert statistics.median(took) < 5

    status = [sys.executable, "-m", "ddp_manual", "status", "--master_port", port]
    early = start(*status, "--shrink")
    assert early.wait() == 2 and "--shrink has nothing to do" in early.err
    lose(kept, 2, "both")
    kept.ranks[0].wait_for("or go on without it:\n")
    shrunk = start(*status, "--shrink", "--json")
    assert shrunk.wait() == 0 and json.loads(shrunk.out)["left_out"] == [[2, 2]]
    kept.ranks[0].wait_for("2 of 3 ranks go on after step ")
    kept.ranks[0].wait_for("--global_batch_size 9 cannot be divided over 2 ranks: a step takes 8 samples")
    done = steps_done(kept.ranks[0])
    wait_until(lambda: steps_done(kept.ranks[0]) >= done + 5)
    kept.type_again(2)
    kept.ranks[0].wait_for(f"rank 2 is back, on {HOST}: all 3 go on after step ")
    assert kept.codes() == [0, 0, 0]
    sizes, seen = samples_seen([tmp_path / f"samples{rank}" for rank in range(3)])
    assert sizes == [3, 2, 3]
    assert sorted(seen) == list(range(DRAWN["train"]))
    print(f"survivors train again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")


def test_a_signal_while_ranks_load_their_data_again_stops_them_with_what_they_hold_saved(
    start: Start, port: int, small_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW_AGAIN)
    training = ["--dataset", "synthetic", "--model", "mlp", "--epochs", 9, "--batch_size", 2, "--data_dir", small_data]

    def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, "--run_dir", tmp_path / "run"]
        command = [sys.executable, "run_multi_gpu_train.py", *meeting, *training, *options]
        return start(*command, PYTHONPATH=f"{tmp_path}:{REPOSITORY}")

    kept = Kept(start_rank, 2, "--log_every", 1, "--hold_every", 1)
    kept.until_trained()
    lose(kept, 0, "worker")
    wait_until(lambda: "loads again" in kept.ranks[1].out, 30)
    kept.ranks[1].process.send_signal(signal.SIGTERM)
    assert kept.codes() == [143, 143]
    assert all("rank 0 has saved a checkpoint in " in rank.err for rank in kept.ranks)


def samples_seen(records: Sequence[Path]) -> tuple[list[int], list[int]]:
    """Return the numbers of ranks one after the other, and the samples of the epoch as they count.

    Of a step that was in flight when a rank was lost there are two records; the second one counts, in which the number
    of ranks may be another one.
    """
    found = [[[int(word) for word in line.split()] for line in record.read_text().splitlines()] for record in records]
    steps = {start: size for start, size, *_ in found[0]}
    last = {(rank, start): (size, rest) for rank, lines in enumerate(found) for start, size, *rest in lines}
    seen = [index for (_, start), (size, rest) in last.items() if steps[start] == size for index in rest]
    return [size for size, _ in itertools.groupby(steps[start] for start in sorted(steps))], seen
