"""Ranks that torchrun starts on two hosts meet, explain on both why a rank has ended, and go on after a restart."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from tests.conftest import RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host

RENDEZVOUS_PORT = 29400
# Without torch, which each agent of torchrun loads for itself. Rank 1 fails once rank 0 works.
SCRIPT = """
import os, pathlib, time

rank, attempt = (int(os.environ[name]) for name in ("RANK", "TORCHELASTIC_RESTART_COUNT"))
works = [pathlib.Path(__file__).with_name(f"rank{number}-{attempt}") for number in range(2)]
works[rank].touch()
while not all(path.exists() for path in works):
    time.sleep(0.02)
if attempt == 0 and rank == 1:
    raise ValueError("the file of rank 1 is damaged")
time.sleep(0 if attempt else 60)
print(f"rank {rank} of {os.environ['WORLD_SIZE']}, attempt {attempt}", flush=True)
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
    nodes = start_on(hosts(2), "-m", "ddp_manual", "run", "--no_python", sys.executable, tmp_path / "script.py")
    assert [node.wait() for node in nodes] == [0, 0], both(nodes)
    for node in nodes:
        assert re.search(r"error\[peer-lost\]: rank 1 \(host[AB], pid \d+\) is gone: ", node.err), both(nodes)
    assert "ValueError: the file of rank 1 is damaged" in both(nodes)
    for rank in range(2):
        assert f"rank {rank} of 2, attempt 1" in both(nodes)
    assert "--rank 1" not in both(nodes)
