"""Ranks that torchrun starts on two hosts meet, explain on both why a rank has ended, and go on after a restart."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.conftest import RankProcess
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


def start_on(nodes: list[Host], *program: object) -> list[RankProcess]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nnodes", 2, "--nproc-per-node", 1]
    # By its name: given its address, a host whose own name is 127.0.1.1 to it does not see that it is meant.
    meeting = ["--rdzv-backend", "c10d", "--rdzv-id", "job7", "--rdzv-endpoint", f"{nodes[0].name}:{RENDEZVOUS_PORT}"]
    return [host.start(*torchrun, "--max-restarts", 1, *meeting, *program) for host in nodes]


def both(nodes: list[RankProcess]) -> str:
    return "".join(node.out + node.err for node in nodes)


def test_a_script_whose_rank_fails_is_explained_on_both_hosts_and_works_after_the_restart(
    hosts: Hosts, tmp_path: Path
) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    nodes = start_on(hosts(2), "-m", "ddp_manual", "run", tmp_path / "script.py")
    assert [node.wait() for node in nodes] == [0, 0], both(nodes)
    ends = [node.err.count("ValueError: the file of rank 1 is damaged") for node in nodes]
    assert min(ends) > 0, both(nodes)
    assert both(nodes).count("error[training-failed]: rank 1 on host") == 1
    assert both(nodes).count("error[peer-failed]: rank 1 (host") == 1
    for rank in range(2):
        assert f"rank {rank} of 2, attempt 1" in both(nodes)
    assert "--rank 1" not in both(nodes)
