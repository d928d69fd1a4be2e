"""``ddp_manual.train`` inside ``join``, in a user's own script."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import RankProcess, Start, has_ended

# A tracker of rank 0 needs until the other rank has left to finish.
SCRIPT = """
    import json, sys, time
    from pathlib import Path
    from ddp_manual import DdpManualError, TrainConfig, join, train
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
            try:
                summary = train(world, config)
            except DdpManualError as error:
                print(error.what, flush=True)
                raise
            assert str(world.run_dir) == summary["run_dir"]
            print(world.spec.rank, world.run_dir, summary["final_test_accuracy"], flush=True)
    if world.rank == 1:
        Path("rank-1-has-left").touch()
"""


@pytest.fixture
def train(start: Start, tmp_path: Path, small_data: Path) -> Callable[..., RankProcess]:
    """Launch two ranks of a script that trains twice in one ``join``, in ``tmp_path``; each has its own options."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def train(*options: dict[str, object]) -> RankProcess:
        texts = [json.dumps({"data_dir": str(small_data), "epochs": 1, **one}) for one in options]
        return start(sys.executable, "-m", "ddp_manual", "launch", "--nproc", 2, script, *texts, cwd=tmp_path)

    return train


def test_each_training_has_a_new_folder_that_all_ranks_know_and_no_rank_waits_for_a_tracker(
    train: Callable[..., RankProcess], tmp_path: Path
) -> None:
    launcher = train({"track": "jsonl"})
    assert launcher.wait() == 0, launcher.err
    said = [re.findall(rf"^\[rank {rank}\] {rank} (\S+) (\S+)$", launcher.out, re.M) for rank in range(2)]
    (first, second), others = said
    assert [first, second] == others
    assert first[0] != second[0] and first[1] == second[1]
    folders = [tmp_path / first[0], tmp_path / second[0]]
    assert sorted(folders) == sorted((tmp_path / "runs").iterdir())
    assert len({(folder / "model.pt").read_bytes() for folder in folders}) == 1
    assert "--track" not in launcher.err  # no warning: each tracker could finish, and no rank had to wait for it
    for folder in folders:
        assert json.loads((folder / "track.jsonl").read_text().splitlines()[-1])["complete"] is True


def test_ranks_that_are_to_train_differently_are_named_and_leave_that_in_the_folder(
    train: Callable[..., RankProcess], tmp_path: Path
) -> None:
    launcher = train({"run_dir": "here"}, {"run_dir": "not here", "lr": 0.5, "keep": 1})
    assert launcher.wait(30) == 12
    for rank in range(2):
        assert re.search(
            rf"^\[rank {rank}\] rank 1 .* is to train with other options than rank 0: lr", launcher.out, re.M
        )
    assert "lr: rank 0 has 0.04 (default), rank 1 has 0.5 (argument)" in launcher.err
    written = json.loads((tmp_path / "here" / "failure-rank0.json").read_text())
    assert written["identifier"] == "config-mismatch"
    # Rank 0's folder is not the one that rank 1 was given, which nobody uses.
    assert [path.name for path in (tmp_path / "here").glob("failure-*")] == ["failure-rank0.json"]
    assert not (tmp_path / "not here").exists()


# Two signals, one to a child that its network forks in its fifth call, one to itself while it writes its summary.
SIGNALLED = """
    import multiprocessing, os, signal, sys, time
    import torch
    from torch.utils.data import DataLoader
    from ddp_manual import TrainConfig, join, train
    from ddp_manual.training.write_run_files import RunFiles

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
                try:
                    while child.is_alive():
                        time.sleep(0.01)
                except RuntimeError as error:
                    print(error, file=sys.stderr, flush=True)
                print("its child has ended", file=sys.stderr, flush=True)
            return self.layer(images.flatten(1))

    def finish_interrupted(files, summary):
        os.kill(os.getpid(), signal.SIGINT)
        finish(files, summary)

    finish, RunFiles.finish = RunFiles.finish, finish_interrupted
    if __name__ == "__main__":
        with join(world_size=1, rank=0, device="cpu") as world:
            config = {"dataset": "synthetic", "model": "script:Net", "batch_size": 100, "epochs": 1, "run_dir": "run"}
            train(world, TrainConfig(**config, data_dir=sys.argv[1]))
"""


def test_neither_a_sigterm_to_a_forked_child_nor_ctrl_c_while_the_summary_is_written_fails_a_run(
    start: Start, tmp_path: Path, small_data: Path, port: int
) -> None:
    """Of a loader's worker torch itself raises that it was killed, unless it is known to have ended before."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SIGNALLED))
    rank = start(sys.executable, script, small_data, cwd=tmp_path, MASTER_PORT=str(port))
    rank.wait_for("forked ")
    child = int(rank.err.partition("forked ")[2].split()[0])
    os.kill(child, signal.SIGTERM)
    rank.wait_for("its child has ended")
    assert "stopped" not in rank.err and "stopping" not in rank.err
    assert has_ended(child)
    assert rank.wait(60) == 0, rank.err
    assert "Ctrl-C (SIGINT): this rank is done, and is leaving" in rank.err
    assert (tmp_path / "run" / "summary.json").exists()
