"""Ranks on several hosts train together where bare torch does not: what the resolver, the interfaces and the disks of
each host are."""

from __future__ import annotations

import shutil
import sys
from dataclasses import replace
from pathlib import Path

from tests.conftest import DRAWN, last_error, source, wait_until
from tests.hosts.conftest import Hosts

# A rank that loads torch once, and forks for each of its runs: the first of bare torch, which is ended with the file
# "go", and then one of ours for each address and port that it is given.
SCRIPT = """
import datetime, os, pathlib, signal, sys, time
import torch, torch.distributed as dist, ddp_manual

if not (bare := os.fork()):
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
while not pathlib.Path("go").exists():
    time.sleep(0.01)
os.kill(bare, signal.SIGKILL)
os.wait()
for place in sys.argv[1:]:
    os.environ["MASTER_ADDR"], _, os.environ["MASTER_PORT"] = place.partition(":")
    if not os.fork():
        began = time.monotonic()
        with ddp_manual.join(device="cpu"):
            took = time.monotonic() - began
            names = [os.environ.get(f"{name}_SOCKET_IFNAME") for name in ("GLOO", "NCCL")]
            print(took, *names, flush=True)
        os._exit(0)
    assert os.wait()[1] == 0
"""


def test_ranks_join_where_bare_torch_fails_and_nccl_is_told_its_interface_where_it_would_listen_on_a_wrong_one(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    """On hosts whose own name is a loopback address. Also without a name server that answers, which delays each look-up
    of torch's store by 5 s."""
    two = hosts(2)  # eth0 is the first interface of each
    two[0].run(*["ip", "link", "add", "rail", "type", "veth", "peer", "name", "rail", "netns"], two[1].namespace.name)
    for position, host in enumerate(two, start=1):
        host.run(*f"ip address add 10.88.0.{position}/24 dev rail".split())
        host.run(*["ip", "link", "set", "rail", "up"])
        assert host.run("getent", "ahostsv4", host.name).stdout.split()[0] == "127.0.1.1"
    (tmp_path / "script.py").write_text(SCRIPT)
    bare = {"MASTER_ADDR": two[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "script.py", f"{two[0].address}:{port + 1}", f"10.88.0.1:{port + 2}"]
    ranks = [host.start(*command, cwd=tmp_path, RANK=str(rank), **bare) for rank, host in enumerate(two)]
    # The other one, to which this one was to connect, waits for five times the timeout.
    wait_until(lambda: any("Gloo connectFullMesh failed" in rank.err for rank in ranks))
    assert any("Connection refused, remote=[127.0." in rank.err for rank in ranks), ranks[0].err
    for host in two:
        host.resolver(host.network.silent)
    (tmp_path / "go").touch()
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    for rank in ranks:
        runs = [line.split() for line in rank.out.splitlines()]
        assert [names for _, *names in runs] == [["eth0", "None"], ["rail", "=rail"]]
        assert max(float(took) for took, *_ in runs) < 5


def test_the_host_whose_data_differ_by_one_byte_is_named_on_every_rank(
    hosts: Hosts, small_data: Path, tmp_path: Path
) -> None:
    two = hosts(2)
    shutil.copytree(small_data, tmp_path / "other")
    other = source("synthetic", tmp_path / "other")
    test, cache = other.load("test"), other.cache("test")
    assert cache is not None
    images = test.images.clone()
    images[0, 0, 14, 14] ^= 1
    next((tmp_path / "other").rglob("synthetic-test-*.cache")).unlink()
    cache.save(replace(test, images=images, digest=""))
    folders = [small_data, tmp_path / "other"]
    ranks = [host.start_rank(rank, 2, "--data_dir", folders[rank]) for rank, host in enumerate(two)]
    assert [rank.wait() for rank in ranks] == [16, 16]
    for rank in ranks:
        error = last_error(rank.err)
        assert error.startswith("error[data-differs]: the data on hostB are not those of rank 0 on hostA: rank 1\n")
        assert f"test: rank 1 (hostB) has {DRAWN['test']} samples, digest " in error and "train: " not in error
