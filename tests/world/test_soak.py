"""Long trials of ranks that are started, and end, in any way while every core is busy; ``./scripts/soak`` makes 50."""

from __future__ import annotations

import os
import random
import sys
import time
from pathlib import Path

import pytest

from tests import real_scripts
from tests.conftest import SHORT, RankProcess, Start

STARTS = int(os.environ.get("DDP_MANUAL_SOAK_STARTS", "1"))
PLAIN, JOINS = "tests/scripts/plain_ddp.py", "examples/own_script.py"
# Fault -> the exit code of its rank, as the rank's own process or its agent has it.
ENDS = {"raise": 1, "kill": 137, "exit:3": 3, "_exit:3": 3, "_exit:0": 14}


@pytest.fixture
def busy_cores(start: Start) -> None:
    """Keep every core busy with something else."""
    for _ in range(len(os.sched_getaffinity(0))):
        start(sys.executable, "-c", "while True: pass")


@pytest.mark.soak(only=True)
@pytest.mark.alone
@pytest.mark.timeout(7200)
@pytest.mark.usefixtures("busy_cores")
def test_ranks_that_start_and_end_in_any_way_say_how(start: Start, port: int, small_data: Path, tmp_path: Path) -> None:
    order = random.Random(0)
    for number in range(STARTS):
        how, size = order.choice(("train", "run", "join", "launch")), order.choice((2, 3))
        script, who = order.choice((PLAIN, JOINS)) if how != "join" else JOINS, order.randrange(size)
        end = "" if how == "train" else order.choice(("", *ENDS))
        env = real_scripts.environment(f"{end}@{who}:{order.choice((1, 20))}" if end else "")
        env |= {"DDP_MANUAL_TOKEN": "of the soak"} if number % 2 else {}
        words = ["--master_port", port + number % 50]
        ranks = dict[int, RankProcess]()
        for rank in order.sample(range(size), size) if how != "launch" else [who]:
            of_rank, identity = {}, ["--world_size", size, "--rank", rank]
            if how == "train":
                run_dir = ["--run_dir", tmp_path / f"run{number}", "--data_dir", small_data]
                command = ["run_multi_gpu_train.py", *identity, *words, *run_dir, *SHORT]
            elif how == "join":
                command = [script]
                of_rank = {"WORLD_SIZE": str(size), "RANK": str(rank), "MASTER_PORT": str(words[1])}
            else:
                identity = ["--nproc", size] if how == "launch" else identity
                command = ["-m", "ddp_manual", how, *identity, *words, script]
            ranks[rank] = start(sys.executable, *command, **env, **of_rank)
            time.sleep(order.random())  # people do not type at the same moment
        codes = {rank: process.wait(120) for rank, process in ranks.items()}
        said = {rank: process.err + process.out for rank, process in ranks.items()}
        tried = f"{number}: {how} {script}, {size} ranks, {end or 'nothing'} at {who}: {codes}\n{said}"
        if not end:
            assert not any(codes.values()) and "error[" not in str(said) and "was refused" not in str(said), tried
            continue
        own = 0 if end == "_exit:0" and (script == PLAIN or how == "join") else ENDS[end]
        if how == "launch":  # whose exit code is that of the rank that failed first
            own = own or 14
        assert codes.pop(who) in (own, -9 if how == "join" and end == "kill" else own), tried
        assert all(code in (1, 14) for code in codes.values()), tried
        assert all(f"rank {who} " in text for rank, text in said.items() if rank in codes or how == "launch"), tried
