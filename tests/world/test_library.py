"""The rendezvous in a user's own script, and how a failure of one rank reaches the others."""

from __future__ import annotations

import json
import re
import signal
import sys
import textwrap
import time
from pathlib import Path

import pytest

from tests.conftest import RankProcess, Start

FAILING = """
    import sys, time
    import torch, torch.distributed as dist
    from ddp_manual import WorldSpec
    from ddp_manual.rendezvous import rendezvous

    with rendezvous(WorldSpec.from_environment(), run_dir=sys.argv[1]) as world:
        print("in the world", file=sys.stderr, flush=True)
        for step in range(10_000):
            if step == 50 and world.rank == int(sys.argv[2]):
                {failure}
            dist.all_reduce(torch.ones(1000))
            time.sleep(0.002)
"""


def start_world(
    start: Start, port: int, tmp_path: Path, failing: int, failure: str, size: int = 3
) -> list[RankProcess]:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(FAILING).format(failure=failure))
    meeting = {"WORLD_SIZE": str(size), "MASTER_PORT": str(port)}
    return [start(sys.executable, script, tmp_path / "run", failing, RANK=str(rank), **meeting) for rank in range(size)]


def test_the_example_runs_on_two_ranks_and_is_about_twenty_lines(start: Start, port: int) -> None:
    example = Path("examples/own_script.py")
    ranks = [start(sys.executable, example, WORLD_SIZE="2", RANK=str(rank), MASTER_PORT=str(port)) for rank in range(2)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    for number, rank in enumerate(ranks):
        assert re.match(rf"rank {number} of 2, (cpu|cuda:{number}), (gloo|nccl): loss 0\.0", rank.out)
    code = example.read_text().split('"""')[2]
    assert len([line for line in code.splitlines() if line.strip()]) <= 20


@pytest.mark.parametrize("failing", [0, 1])
def test_a_rank_that_raises_is_named_by_all_others_with_its_traceback(
    start: Start, port: int, tmp_path: Path, failing: int
) -> None:
    ranks = start_world(start, port, tmp_path, failing, 'raise ValueError("no such thing")')
    assert ranks[failing].wait() == 1
    ended = time.monotonic()
    assert "ValueError: no such thing" in ranks[failing].err
    for number, rank in enumerate(ranks):
        if number == failing:
            continue
        rank.wait(10)
        assert time.monotonic() - ended < 2 + 1  # the others' interpreters may still have to end
        error = rank.err[rank.err.rindex("peer-failed") :] if "peer-failed" in rank.err else rank.err
        assert f"rank {failing} (" in error, rank.err
        assert "ValueError: no such thing" in error
        failure = json.loads((tmp_path / "run" / f"failure-rank{number}.json").read_text())
        assert failure["identifier"] == "peer-failed"


def test_a_rank_that_is_killed_ends_the_others(start: Start, port: int, tmp_path: Path) -> None:
    ranks = start_world(start, port, tmp_path, 1, "time.sleep(1000)")
    ranks[0].wait_for("in the world")
    time.sleep(1)
    ranks[1].process.send_signal(signal.SIGKILL)
    for rank in (ranks[0], ranks[2]):
        assert rank.wait(10) != 0
        assert re.search("peer-lost|PeerLost|peer-failed|PeerFailed", rank.err)


def test_the_world_puts_its_identity_where_other_libraries_look(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            f"""
            import os
            from ddp_manual import WorldSpec
            from ddp_manual.rendezvous import rendezvous
            with rendezvous(WorldSpec(world_size=1, master_port={port})) as world:
                names = "RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT GLOO_SOCKET_IFNAME"
                print(*(os.environ[name] for name in names.split()))
            """
        )
    )
    rank = start(sys.executable, script)
    assert rank.wait() == 0
    assert rank.out.split() == ["0", "1", "0", "127.0.0.1", str(port), "lo"]


def test_one_rank_per_host_does_a_job_and_the_others_wait_for_it(start: Start, port: int, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        textwrap.dedent(
            """
            import sys, time
            from pathlib import Path
            from ddp_manual import WorldSpec
            from ddp_manual.rendezvous import rendezvous

            file = Path(sys.argv[1])

            def job():
                time.sleep(3)
                file.write_text(file.read_text() + "done" if file.exists() else "done")

            with rendezvous(WorldSpec.from_environment()) as world:
                world.once_per_host("write the file", job, timeout=60)
                print(file.read_text())
            """
        )
    )
    ranks = [
        start(sys.executable, script, tmp_path / "file", WORLD_SIZE="3", RANK=str(rank), MASTER_PORT=str(port))
        for rank in range(3)
    ]
    assert [rank.wait() for rank in ranks] == [0, 0, 0]
    assert [rank.out for rank in ranks] == ["done\n"] * 3
    for rank in ranks[1:]:
        assert "waiting for rank 0 on " in rank.err
