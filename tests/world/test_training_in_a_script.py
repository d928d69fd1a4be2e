"""``ddp_manual.train`` inside ``join``, in a user's own script."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.conftest import RankProcess, Start

# A tracker of rank 0 needs until the other rank has left to finish.
SCRIPT = """
    import json, sys, time
    from pathlib import Path
    from ddp_manual import TrainConfig, join, train
    from ddp_manual.training.trackers import JsonLines

    def close_late(sink, summary):
        while not Path("rank-1-has-left").exists():
            time.sleep(0.01)
        close(sink, summary)

    close, JsonLines.close = JsonLines.close, close_late

    with join() as world:
        assert world.run_dir is None
        options = json.loads(sys.argv[1 + world.rank % (len(sys.argv) - 1)])
        config = TrainConfig(dataset="synthetic", model="mlp", batch_size=100, **options)
        for _ in range(2):
            summary = train(world, config)
            assert str(world.run_dir) == summary["run_dir"]
            print(world.spec.rank, world.run_dir, summary["final_test_accuracy"], flush=True)
    if world.rank == 1:
        Path("rank-1-has-left").touch()
"""


@pytest.fixture
def train(start: Start, port: int, tmp_path: Path, small_data: Path) -> Start:
    """Start two ranks of a script that trains twice in one ``join``, in ``tmp_path``; each has its own options."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def train(*options: dict[str, object]) -> list[RankProcess]:  # type: ignore[misc]
        texts = [json.dumps({"data_dir": str(small_data), "epochs": 1, **one}) for one in options]
        meeting = {"WORLD_SIZE": "2", "MASTER_PORT": str(port)}
        return [start(sys.executable, script, *texts, cwd=tmp_path, RANK=str(rank), **meeting) for rank in range(2)]

    return train  # type: ignore[return-value]


def test_each_training_has_a_new_folder_that_all_ranks_know_and_no_rank_waits_for_a_tracker(
    train: Start, tmp_path: Path
) -> None:
    ranks = train({"track": "jsonl"})
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    (first, second), others = ([line.split()[1:] for line in rank.out.splitlines()] for rank in ranks)
    assert [first, second] == others
    assert first[0] != second[0] and first[1] == second[1]
    folders = [tmp_path / first[0], tmp_path / second[0]]
    assert sorted(folders) == sorted((tmp_path / "runs").iterdir())
    assert len({(folder / "model.pt").read_bytes() for folder in folders}) == 1
    assert "--track" not in ranks[0].err  # no warning: each tracker could finish, and no rank had to wait for it
    assert [json.loads((folder / "track.jsonl").read_text().splitlines()[-1])["complete"] for folder in folders] == [
        *(True, True)
    ]


def test_ranks_that_are_to_train_differently_are_named_and_leave_that_in_the_folder(
    train: Start, tmp_path: Path
) -> None:
    ranks = train({"run_dir": "here"}, {"run_dir": "not here", "lr": 0.5, "keep": 1})
    assert [rank.wait(30) for rank in ranks] == [1, 1]
    for rank in ranks:
        assert "is to train with other options than rank 0: lr" in rank.err
        assert "lr: rank 0 has 0.04 (default), rank 1 has 0.5 (argument)" in rank.err
    written = json.loads((tmp_path / "here" / "failure-rank0.json").read_text())
    assert written["identifier"] == "config-mismatch"
    # Rank 0's folder is not the one that rank 1 was given, which nobody uses.
    assert [path.name for path in (tmp_path / "here").glob("failure-*")] == ["failure-rank0.json"]
    assert not (tmp_path / "not here").exists()


INTERRUPTED = """
    import os, signal, sys
    from ddp_manual import TrainConfig, join, train
    from ddp_manual.training.write_run_files import RunFiles

    def finish_interrupted(files, summary):
        os.kill(os.getpid(), signal.SIGINT)
        finish(files, summary)

    finish, RunFiles.finish = RunFiles.finish, finish_interrupted
    with join(world_size=1, rank=0) as world:
        train(world, TrainConfig(dataset="synthetic", model="mlp", epochs=1, data_dir=sys.argv[1], run_dir="run"))
"""


def test_ctrl_c_while_the_summary_is_written_does_not_fail_a_complete_run(
    start: Start, tmp_path: Path, small_data: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(INTERRUPTED))
    rank = start(sys.executable, script, small_data, cwd=tmp_path)
    assert rank.wait(60) == 0, rank.err
    assert "Ctrl-C (SIGINT): this rank is done, and is leaving" in rank.err
    assert (tmp_path / "run" / "summary.json").exists()


FORKING = """
    import multiprocessing, os, sys, time
    import torch
    from torch.utils.data import DataLoader
    from ddp_manual import TrainConfig, join, train

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = torch.nn.Linear(784, 10)
            self.calls = 0

        def forward(self, images):
            self.calls += 1
            if self.calls == 5:
                self.batches = iter(DataLoader(range(10**9), num_workers=2, multiprocessing_context="fork"))
                next(self.batches)
                (child, *_) = multiprocessing.active_children()
                print(f"forked {child.pid}", file=sys.stderr, flush=True)
                while child.is_alive():
                    time.sleep(0.01)
                print("its child has ended", file=sys.stderr, flush=True)
            return self.layer(images.flatten(1))

    if __name__ == "__main__":
        with join(world_size=1, device="cpu") as world:
            config = {"dataset": "synthetic", "model": "script:Net", "batch_size": 100, "epochs": 1}
            train(world, TrainConfig(**config, data_dir=sys.argv[1]))
        print("trained")
"""


def test_a_sigterm_to_a_forked_child_ends_the_child_and_does_not_stop_the_run(
    start: Start, tmp_path: Path, small_data: Path
) -> None:
    """Of a loader's worker torch itself says that it was killed."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FORKING))
    process = start(sys.executable, script, small_data, cwd=tmp_path)
    process.wait_for("forked ")
    child = int(process.err.partition("forked ")[2].split()[0])
    os.kill(child, signal.SIGTERM)
    code = process.wait(60)
    assert "stopped" not in process.err and "stopping" not in process.err
    if code:
        assert f"DataLoader worker (pid {child}) is killed by signal: Terminated" in process.err
    else:
        assert "its child has ended" in process.err and process.out.endswith("trained\n"), process.err
    assert not psutil.pid_exists(child)
