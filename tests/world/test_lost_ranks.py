"""Real processes lost in every way (``--on_loss wait`` and ``shrink``): held memory outlives them, and the run ends bit
for bit as an undisturbed one. What each rank says is in tests/scenarios."""

from __future__ import annotations

import itertools
import json
import os
import random
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest

from tests.conftest import DRAWN, HOST, REPOSITORY, RankProcess, Start
from tests.seats import Kept, differing, lose, steps_done

LOSSES = int(os.environ.get("DDP_MANUAL_SOAK_LOSSES", "5"))
# Of the training in which they are lost.
EPOCHS = -(-LOSSES // 10)
# How a rank may be lost; rank 0 also with its agent, whose place another process then takes.
WAYS = ("worker", "abort", "agent", "both", "stop")
StartKept = Callable[..., Kept]
# Writes a line for each step: where in the epoch it begins, the number of ranks, and which samples this rank trains on.
# Each step waits, so that a rank that is typed again has loaded torch before the epoch is over.
RECORD = """
import os, sys, time
if "worker" in sys.orig_argv[1]:
    from ddp_manual.training import sampling
    share = sampling.share
    def recorded(order, **where):
        time.sleep(0.03)
        samples = share(order, **where)
        with open(os.environ["RECORD"], "a") as file:
            file.write(" ".join(map(str, [where["start"], where["world_size"], *samples.tolist()])) + "\\n")
        return samples
    sampling.share = recorded
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


def test_a_world_shrinks_and_grows_in_the_middle_of_an_epoch_and_sees_each_sample_once(
    start: Start, port: int, small_data: Path, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(RECORD)
    training = ["--dataset", "synthetic", "--model", "mlp", "--epochs", 1, "--data_dir", small_data]

    def start_rank(rank: int, world_size: int, *options: object) -> RankProcess:
        meeting = ["--world_size", world_size, "--rank", rank, "--master_port", port, "--run_dir", tmp_path / "run"]
        record = {"RECORD": str(tmp_path / f"samples{rank}"), "PYTHONPATH": f"{tmp_path}:{REPOSITORY}"}
        return start(sys.executable, "run_multi_gpu_train.py", *meeting, *training, *options, **record)

    kept = Kept(start_rank, 3, "--global_batch_size", 9, "--log_every", 10, "--hold_every", 1)
    kept.until_trained()
    status = [sys.executable, "-m", "ddp_manual", "status", "--master_port", port]
    early = start(*status, "--shrink")
    assert early.wait() == 2 and "--shrink has nothing to do" in early.err
    lose(kept, 2, "both")
    kept.ranks[0].wait_for("or go on without it:\n")
    shrunk = start(*status, "--shrink", "--json")
    assert shrunk.wait() == 0 and json.loads(shrunk.out)["left_out"] == [[2, 2]]
    kept.wait_for_return(0, before=0)
    assert "2 of 3 ranks go on after step " in kept.ranks[0].err
    kept.ranks[0].wait_for("--global_batch_size 9 cannot be divided over 2 ranks: a step takes 8 samples")
    done = steps_done(kept.ranks[0])
    while steps_done(kept.ranks[0]) < done + 5:
        time.sleep(0.01)
    kept.type_again(2)
    kept.wait_for_return(0, before=1)
    assert f"rank 2 is back, on {HOST}: all 3 go on after step " in kept.ranks[0].err
    assert kept.codes() == [0, 0, 0]
    sizes, seen = samples_seen([tmp_path / f"samples{rank}" for rank in range(3)])
    assert sizes == [3, 2, 3]
    assert sorted(seen) == list(range(DRAWN["train"]))


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


def test_survivors_are_training_again_soon_nothing_grows_and_a_newcomer_without_the_data_costs_only_itself(
    start_kept: StartKept, tmp_path: Path
) -> None:
    """Rank 0's worker is started again by its agent, so that what it takes is the survivors' own part."""
    kept = start_kept(2, epochs=20)
    kept.until_trained()
    took, grown = [], []
    for _ in range(2):
        before = kept.returns(1)
        lose(kept, 0, "worker")
        since, done = time.monotonic(), steps_done(kept.ranks[1])
        while steps_done(kept.ranks[1]) <= done + 1:
            assert time.monotonic() - since < 30, kept.ranks[1].err
            time.sleep(0.005)
        took.append(time.monotonic() - since)
        kept.wait_for_return(1, before)
        agent = psutil.Process(kept.ranks[1].process.pid)
        grown.append((agent.num_fds(), agent.num_threads(), len(agent.children(recursive=True))))
    assert statistics.median(took) < 5
    assert len(set(grown)) == 1, grown
    before = kept.returns(0)
    lose(kept, 1, "both")
    elsewhere = kept.type(1, "--data_dir", tmp_path / "nowhere")
    assert elsewhere.wait(60) == 16 and "error[data-missing]" in elsewhere.err
    assert re.search(r"then start this rank again, on .*: the others wait for it\n", elsewhere.err)
    kept.type_again(1)
    kept.wait_for_return(0, before=before + 1)
    print(f"survivors train again after {', '.join(f'{seconds:.2f}' for seconds in took)} s")
