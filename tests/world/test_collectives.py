"""Ranks of a person's own script that call different collectives of real gloo: who called what, on which line.

Left to gloo, a rank aborts because of other sizes, nobody notices other dtypes, and other operations hang.
"""

from __future__ import annotations

import json
import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY, RankProcess, Start

HEALTHY_SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_HEALTHY_SECONDS", "1"))
LAUNCH = (sys.executable, "-m", "ddp_manual", "launch")

SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist

    def alike(odd):
        dist.all_reduce(torch.ones(4))

    def operations(odd):
        dist.broadcast(torch.ones(4), src=0) if odd else dist.all_reduce(torch.ones(4))

    def never_in_its_group(odd):
        group = dist.new_group([0, 2], group_desc="dp")
        if dist.get_rank() == 0:
            dist.all_reduce(torch.ones(3), group=group)
        if odd:
            time.sleep(1000)

    dist.init_process_group("gloo")
    for _ in range(135):
        alike(False)
    globals()[sys.argv[1]](dist.get_rank() == 2)
    for _ in range(int(sys.argv[2])):
        alike(False)
        time.sleep(0.01)
"""


@pytest.fixture
def launch(start: Start, tmp_path: Path) -> Start:
    """Launch three ranks of the script with these options and this fault, and some rounds of the same afterwards."""

    def launch(*options: object, fault: str, rounds: int) -> RankProcess:
        script = tmp_path / "script.py"
        script.write_text(textwrap.dedent(SCRIPT))
        return start(*LAUNCH, "--nproc", 3, "--run_dir", tmp_path / "run", *options, script, fault, rounds)

    return launch


def test_ranks_that_call_a_collective_differently_are_named_with_what_each_called_and_where(
    launch: Start, tmp_path: Path
) -> None:
    launcher = launch(fault="operations", rounds=10**6)
    assert launcher.wait(60) == 14, launcher.err
    for rank in range(3):
        failure = json.loads((tmp_path / "run" / f"failure-rank{rank}.json").read_text())
        assert failure["identifier"] == "collective-mismatch"
        assert failure["what"] == (
            "rank 2 called broadcast float32[4] at script.py:9, ranks 0 and 1 called all_reduce float32[4] at "
            "script.py:9, as the 136th of the default group"
        )
        assert "in the same order" in failure["next"]
        assert "the last one alike was the 135th: all_reduce float32[4] at script.py:6" in failure["why"]


def test_ranks_that_wait_for_others_are_named_with_the_collective_and_the_group_they_are_in(launch: Start) -> None:
    launcher = launch("--stall_timeout", 2, fault="never_in_its_group", rounds=1)
    assert launcher.wait(60) == 14, launcher.err
    error = launcher.err.partition("error[")[2]
    assert re.match(r"peer-stalled\]: rank 2 .* is stuck while others wait: ranks 0-1 wait for ", error)
    for line in (
        "rank 0 began last the 1st of the group of ranks 0 and 2 (dp), all_reduce float32[3] at script.py:14",
        "rank 1 began last the 136th of the default group, all_reduce float32[4] at script.py:6",
        "rank 2 began last the 135th of the default group, all_reduce float32[4] at script.py:6",
    ):
        assert line in error, error


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_collectives_that_may_differ_are_no_mismatch(start: Start, port: int, tmp_path: Path) -> None:
    """Uneven inputs with join(), unused parameters, objects, lists, groups, FSDP2, DTensor, distributed checkpoints."""
    script = REPOSITORY / "tests" / "scripts" / "healthy_collectives.py"
    launcher = start(*LAUNCH, "--nproc", 4, "--master_port", port, script, HEALTHY_SECONDS, tmp_path)
    assert launcher.wait(HEALTHY_SECONDS + 120) == 0, launcher.err
    assert "healthy rounds" in launcher.out + launcher.err
    assert "error[" not in launcher.err
