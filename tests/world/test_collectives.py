"""Ranks of a person's own script that call different collectives: who called what, on which line, and how soon."""

from __future__ import annotations

import os
import re
import sys
import textwrap
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import said, with_site
from tests.conftest import REPOSITORY, RankProcess, Start

HEALTHY_SECONDS = float(os.environ.get("DDP_MANUAL_SOAK_HEALTHY_SECONDS", "1"))

SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist
    import ddp_manual

    def alike(odd):
        dist.all_reduce(torch.ones(4))

    def sizes(odd):
        dist.all_reduce(torch.ones(5 if odd else 4))

    def dtypes(odd):
        dist.all_reduce(torch.ones(4, dtype=torch.float64) if odd else torch.ones(8))

    def operations(odd):
        dist.broadcast(torch.ones(4), src=0) if odd else dist.all_reduce(torch.ones(4))

    def order(odd):
        first, second = (dist.barrier, alike) if odd else (alike, dist.barrier)
        first(*[odd] * (first is alike))
        second(*[odd] * (second is alike))

    def skipped(odd):
        if not odd:
            dist.all_reduce(torch.ones(4))
        dist.all_gather_into_tensor(torch.ones(3), torch.ones(1))

    def reduce_operations(odd):
        dist.all_reduce(torch.ones(4), op=dist.ReduceOp.MAX if odd else dist.ReduceOp.SUM)

    def roots(odd):
        dist.broadcast(torch.ones(4), src=1 if odd else 0)

    def in_a_group(odd):
        group = dist.new_group([0, 2], group_desc="dp")
        if dist.get_rank() != 1:
            dist.all_reduce(torch.ones(4 if odd else 3), group=group)

    def far_behind(odd):
        if odd:
            dist.broadcast(torch.ones(4), src=0)
        for work in [dist.all_reduce(torch.ones(4), async_op=True) for _ in range(100)]:
            work.wait()

    with ddp_manual.join(device="cpu") as world:
        for _ in range(135):
            alike(False)
        print("begins at", time.monotonic(), file=sys.stderr, flush=True)
        globals()[sys.argv[1]](world.rank == 2)
        while True:
            alike(False)
            time.sleep(0.01)
"""
ALIKE = "the last one alike was the 136th: all_reduce float32[4] at script.py:7"
ONE_EACH = "rank 2 called {} at script.py:{}, ranks 0 and 1 called {} at script.py:{}, as the 137th of {}"
# Seconds from the moment a second rank has begun the collective.
NAMED_WITHIN = 3.0


def start_ranks(
    start: Start, port: int, script: Path, *arguments: object, ranks: int = 3, **env: str
) -> list[RankProcess]:
    meeting = {"WORLD_SIZE": str(ranks), "MASTER_PORT": str(port), **env}
    return [start(sys.executable, script, *arguments, RANK=str(rank), **meeting) for rank in range(ranks)]


def begun(ranks: list[RankProcess]) -> float:
    """Return when the second rank came to what the ranks call differently."""
    for rank in ranks:
        said(rank, "begins at")
    return sorted(float(re.search(r"begins at (\S+)", rank.err)[1]) for rank in ranks)[1]  # type: ignore[index]


@pytest.mark.parametrize(
    ("fault", "called", "advice"),
    [
        ("sizes", ("all_reduce float32[5]", 10, "all_reduce float32[4]", 10), "of the same number of elements"),
        ("dtypes", ("all_reduce float64[4]", 13, "all_reduce float32[8]", 13), "of the same dtype"),
        ("operations", ("broadcast float32[4]", 16, "all_reduce float32[4]", 16), "in the same order"),
        ("order", ("barrier", 20, "all_reduce float32[4]", 7), "in the same order"),
        ("skipped", ("all_gather_into_tensor float32[1]", 26, "all_reduce float32[4]", 25), "in the same order"),
        (
            "reduce_operations",
            ("all_reduce float32[4] (max)", 29, "all_reduce float32[4] (sum)", 29),
            "the same reduce",
        ),
        ("far_behind", ("broadcast float32[4]", 41, "all_reduce float32[4]", 42), "in the same order"),
        ("roots", ("broadcast float32[4] (from rank 1)", 32, "broadcast float32[4] (from rank 0)", 32), "the same"),
    ],
    ids=lambda value: value if isinstance(value, str) and " " not in value else "",
)
def test_ranks_that_call_a_collective_differently_are_named_with_what_each_called_and_where(
    start: Start, port: int, tmp_path: Path, fault: str, called: tuple[str, int, str, int], advice: str
) -> None:
    """Left to gloo, a rank aborts because of the sizes, and nobody notices the dtypes."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = start_ranks(start, port, script, fault)
    since = begun(ranks)
    what = "error[collective-mismatch]: " + ONE_EACH.format(*called, "the default group") + "\n"
    told = max(said(rank, what, timeout=20) for rank in ranks)
    codes = [rank.wait(20) for rank in ranks]
    for rank in ranks:
        assert ALIKE in rank.err and advice in rank.err.partition("next: ")[2], rank.err
    assert codes == [14, 14, 14]
    record(
        f"rank 2 of 3 calls other {fault.replace('_', ' ')}" if fault.endswith("s") else f"rank 2 of 3: {fault}",
        "collective-mismatch",
        "who called what, on which line, as which collective of which group",
        seconds=told - since,
        within=NAMED_WITHIN,
        codes=codes,
        row=21,
    )


def test_a_rank_that_is_ended_later_than_the_others_says_the_same(start: Start, port: int, tmp_path: Path) -> None:
    """The end of the others breaks its collective, which is not what the run ends of."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    late = "import os, ddp_manual.agent.worker_process as agent\nagent.GRACE += int(os.environ.get('RANK') == '1')"
    ranks = start_ranks(start, port, script, "dtypes", **with_site(tmp_path / "late", late))
    assert [rank.wait(60) for rank in ranks] == [14, 14, 14], ranks[1].err
    for rank in ranks:
        assert "error[collective-mismatch]: rank 2 called all_reduce float64[4]" in rank.err
        assert "Traceback" not in rank.err, rank.err


def test_a_mismatch_in_a_group_names_the_group(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT))
    ranks = start_ranks(start, port, script, "in_a_group")
    what = (
        "error[collective-mismatch]: rank 0 called all_reduce float32[3] at script.py:37, "
        "rank 2 called all_reduce float32[4] at script.py:37, as the 1st of the group of ranks 0 and 2 (dp)\n"
    )
    for rank in ranks:
        said(rank, what, timeout=20)
    assert [rank.wait(20) for rank in ranks] == [14, 14, 14]


def test_collectives_off_compares_nothing(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    code = textwrap.dedent(SCRIPT).replace('device="cpu"', 'device="cpu", collectives="off"')
    script.write_text(code.replace("while True", "for _ in range(100)"))
    ranks = start_ranks(start, port, script, "reduce_operations")
    assert [rank.wait(30) for rank in ranks] == [0, 0, 0]


NOT_SEEN_BY_CONTENT = """
    import os, time
    import torch, torch.distributed as dist

    dist.init_process_group("gloo")
    rank = dist.get_rank()
    group = dist.new_group([0, 2], group_desc="dp")
    for _ in range(20):
        dist.all_reduce(torch.ones(4))
    {fault}
    dist.barrier()
"""


@pytest.mark.parametrize(
    ("fault", "identifier", "what", "why"),
    [
        (
            "if rank != 1: dist.barrier()",
            "peer-lost",
            "rank 1 had finished while rank ",
            (
                "rank 1 began last the 21st of the default group\n",
                "ranks 0 and 2 began last the 22nd of the default group, barrier at script.py:11",
            ),
        ),
        (
            "time.sleep(1000) if rank == 2 else rank == 0 and dist.all_reduce(torch.ones(3), group=group)",
            "peer-stalled",
            "is stuck while others wait: ranks 0-1 wait for ",
            (
                "rank 0 began last the 1st of the group of ranks 0 and 2 (dp), all_reduce float32[3] at script.py:10",
                "rank 1 began last the 21st of the default group, barrier at script.py:11",
                "rank 2 began last the 20th of the default group, all_reduce float32[4] at script.py:9",
            ),
        ),
    ],
    ids=["one more at the end", "a rank that never comes to its group"],
)
def test_ranks_that_wait_for_others_are_named_with_the_collective_and_the_group_they_are_in(
    start: Start, port: int, tmp_path: Path, fault: str, identifier: str, what: str, why: tuple[str, ...]
) -> None:
    """With an unmodified script."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(NOT_SEEN_BY_CONTENT).format(fault=fault))
    meeting = ["--world_size", 3, "--master_port", port, "--stall_timeout", 2]
    run = [sys.executable, "-m", "ddp_manual", "run", *meeting]
    ranks = [start(*run, "--rank", rank, script) for rank in range(3)]
    assert [rank.wait(60) for rank in ranks].count(14) >= 2
    error = ranks[0].err.partition("error[")[2]
    assert error.startswith(f"{identifier}]: ") and what in error.splitlines()[0]
    assert all(line in error for line in why), error


@pytest.mark.soak
@pytest.mark.timeout(3600)
def test_collectives_that_may_differ_are_no_mismatch(start: Start, port: int, tmp_path: Path) -> None:
    """Uneven inputs with join(), unused parameters, objects, lists, groups, FSDP2, DTensor, distributed checkpoints."""
    launch = [sys.executable, "-m", "ddp_manual", "launch", "--nproc", 4, "--master_port", port]
    script = start(*launch, REPOSITORY / "tests" / "scripts" / "healthy_collectives.py", HEALTHY_SECONDS, tmp_path)
    assert script.wait(HEALTHY_SECONDS + 120) == 0, script.err
    assert "healthy rounds" in script.out + script.err
    assert "error[" not in script.err
