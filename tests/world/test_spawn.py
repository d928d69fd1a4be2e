"""``ddp_manual.spawn``: ranks that a script starts from a function of its own."""

from __future__ import annotations

import json
import os
import signal
import sys
import textwrap
from pathlib import Path

import psutil
import pytest

from tests.conftest import RankProcess, Start, gone

SCRIPT = """
    import json, sys, time
    import ddp_manual
    from ddp_manual import TrainConfig

    assert __name__ in ("__main__", "__mp_main__")  # and not imported once more, for its network

    def network():
        from torch import nn

        return nn.Sequential(nn.Flatten(), nn.Linear(784, 10))

    def train(world, options):
        summary = ddp_manual.train(world, TrainConfig(**options))
        print(world.rank, summary["run_dir"], flush=True)

    def sleep(world, options):
        print("asleep", file=sys.stderr, flush=True)
        time.sleep(60)

    class Odd(Exception):
        pass

    def fail(world, options):
        import torch
        import torch.distributed as dist

        dist.barrier()
        if world.rank == 1:
            raise Odd("no such thing", options)
        dist.all_reduce(torch.ones(1))

    if __name__ == "__main__":
        try:
            ddp_manual.spawn(globals()[sys.argv[1]], int(sys.argv[2]), args=[json.loads(sys.argv[3])], join_timeout=60)
        except ddp_manual.DdpManualError as error:
            print(error.render(), repr(error.__cause__), sep="\\n", file=sys.stderr)
            raise SystemExit(error.exit_code)
"""


@pytest.fixture
def spawn(start: Start, tmp_path: Path, small_data: Path) -> Start:
    """Start a script that spawns ranks, in ``tmp_path``: the name of a function of it, nprocs, what it trains with."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))

    def spawn(name: str, nprocs: int, **options: object) -> RankProcess:
        training = {"dataset": "synthetic", "data_dir": str(small_data), "model": "mlp", "run_dir": "run", **options}
        # A launcher's variables, which do not concern the ranks of the one script it has started.
        env = {"RANK": "0", "WORLD_SIZE": "1", "TORCHELASTIC_RESTART_COUNT": "3"}
        return start(sys.executable, script, name, nprocs, json.dumps(training), cwd=tmp_path, **env)

    return spawn


def ranks_of(script: RankProcess) -> list[psutil.Process]:
    return psutil.Process(script.process.pid).children(recursive=True)


def test_the_error_of_the_rank_that_began_it_is_raised_in_the_parent_with_its_exception(spawn: Start) -> None:
    script = spawn("fail", 2)
    assert script.wait() == 1
    error, cause = script.err[script.err.rindex("error[") :].rstrip().rsplit("\n", 1)
    assert error.startswith(f"error[training-failed]: rank 1 on {os.uname().nodename}: Odd: ('no such thing', ")
    assert 'raise Odd("no such thing", options)' in error
    assert cause.startswith("Odd('no such thing', {'dataset': ")


def test_a_signal_to_the_parent_stops_its_ranks_in_order_and_none_is_left(spawn: Start, tmp_path: Path) -> None:
    script = spawn("train", 1, epochs=200, model="script:network")
    script.wait_for("[rank 0] step 100/")
    ranks = ranks_of(script)
    assert ranks
    script.process.send_signal(signal.SIGINT)
    assert script.wait(20) == 130
    assert gone(ranks, 0.5)
    assert "\nstopped by Ctrl-C (SIGINT) after step " in script.err
    assert "TrainConfig(..., run_dir='run', resume='auto')" in script.err
    assert list((tmp_path / "run" / "checkpoints").glob("*.pt"))
    assert [path.name for path in (tmp_path / "run").glob("failure-*")] == ["failure-rank0.json"]  # and no .restart2


def test_ranks_do_not_outlive_a_parent_that_is_killed(spawn: Start) -> None:
    script = spawn("sleep", 1)
    script.wait_for("asleep")
    ranks = ranks_of(script)
    script.process.send_signal(signal.SIGKILL)
    assert gone(ranks, 15)


def test_a_script_whose_ranks_would_start_ranks_is_told_what_it_lacks(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("import ddp_manual\ndef train(world): pass\nddp_manual.spawn(train, 1)\n")
    unguarded = start(sys.executable, script)
    assert unguarded.wait() == 1
    assert unguarded.err.count("BadOption: importing script.py calls spawn") == 1
    assert 'put that below a line: if __name__ == "__main__":' in unguarded.err
