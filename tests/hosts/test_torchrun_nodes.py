"""Ranks that torchrun starts on two hosts meet, explain on both why a rank has ended, and go on after a restart."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.conftest import ALL_DIGITS, RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host

RENDEZVOUS_PORT = 29400
SCRIPT = """
import os, sys
import torch
import torch.distributed as dist

dist.init_process_group("gloo")
total = torch.ones(1)
dist.all_reduce(total)
attempt = int(os.environ["TORCHELASTIC_RESTART_COUNT"])
if attempt == 0 and dist.get_rank() == 1:
    raise ValueError("the file of rank 1 is damaged")
dist.barrier()
print(f"rank {dist.get_rank()} of {total.item():.0f}, attempt {attempt}", flush=True)
dist.destroy_process_group()
"""


def rendezvous(kind: str, node: int, first: Host) -> list[object]:
    """The options of torchrun on node ``node``."""
    options: list[object] = ["--nnodes", 2, "--nproc-per-node", 1, "--max-restarts", 1]
    if kind == "static":
        return [*options, "--node-rank", node, "--master-addr", first.address, "--master-port", RENDEZVOUS_PORT]
    # By its name: given its address, a host whose own name is 127.0.1.1 to it does not see that it is meant.
    endpoint = f"{first.name}:{RENDEZVOUS_PORT}"
    return [*options, "--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", endpoint]


def start_on(nodes: list[Host], kind: str, *program: object) -> list[RankProcess]:
    torchrun = [sys.executable, "-m", "torch.distributed.run"]
    return [host.start(*torchrun, *rendezvous(kind, node, nodes[0]), *program) for node, host in enumerate(nodes)]


def both(nodes: list[RankProcess]) -> str:
    return "".join(node.out + node.err for node in nodes)


# The short form has c10d in the test below.
@pytest.mark.parametrize("kind", ["static", *([pytest.param("c10d", marks=pytest.mark.soak)] if ALL_DIGITS else [])])
def test_a_script_whose_rank_fails_is_explained_on_both_hosts_and_works_after_the_restart(
    hosts: Hosts, tmp_path: Path, kind: str
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    nodes = start_on(hosts(2), kind, "-m", "ddp_manual", "run", tmp_path / "script.py")
    assert [node.wait() for node in nodes] == [0, 0], both(nodes)
    ends = [node.err.count("ValueError: the file of rank 1 is damaged") for node in nodes]
    assert min(ends) > 0, both(nodes)
    assert both(nodes).count("error[training-failed]: rank 1 on host") == 1
    assert both(nodes).count("error[peer-failed]: rank 1 (host") == 1
    for rank in range(2):
        assert f"rank {rank} of 2, attempt 1" in both(nodes)
    assert "--rank 1" not in both(nodes)


@pytest.mark.soak
@pytest.mark.timeout(600)
def test_training_goes_on_after_a_worker_was_killed_on_one_of_two_hosts(
    hosts: Hosts, digits: Path, tmp_path: Path
) -> None:
    steps = 200 if ALL_DIGITS else 30
    training = ["--epochs", 1, "--checkpoint_steps", steps, "--resume", "auto", "--log_every", 1]
    training += [] if ALL_DIGITS else ["--batch_size", 20]  # so that there are steps left to be interrupted in
    files = ["--data_dir", digits, "--run_dir", tmp_path / "run"]
    nodes = start_on(hosts(2), "c10d", "run_multi_gpu_train.py", *training, *files)
    rank_0 = next(node for node in nodes if node.wait_for("process group ready") and "rank 0 of 2 on" in node.err)
    rank_0.wait_for("saved ")
    failing = next(node for node in nodes if node is not rank_0)
    os.kill(worker_of(failing), signal.SIGKILL)
    assert [node.wait(500) for node in nodes] == [0, 0], both(nodes)
    for node in nodes:
        assert "is gone: SIGKILL" in node.err
    steps_done = [int(step) for step in re.findall(r"^\[rank 0\] step (\d+)/", rank_0.err + failing.err, re.MULTILINE)]
    assert steps_done.count(1) == 1, "the second attempt has begun anew"
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["world_size"] == 2
    assert summary["final_test_accuracy"] >= (0.985 if ALL_DIGITS else 0.5)


def worker_of(torchrun: RankProcess) -> int:
    """The pid of the worker of the only rank that torchrun has started: the child of its agent."""
    agents = psutil.Process(torchrun.process.pid).children()
    children = (child for agent in agents for child in agent.children())
    (worker,) = (child for child in children if any("ddp_manual/worker" in word for word in child.cmdline()))
    return worker.pid
