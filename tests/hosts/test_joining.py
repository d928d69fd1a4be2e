"""Ranks on several hosts train together where bare torch does not: what the resolver, the interfaces and the disks of
each host are."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from tests.conftest import DRAWN, REPOSITORY, RankProcess, last_error, source, wait_until
from tests.hosts.conftest import Hosts

SCRIPT = """
import datetime, os, pathlib, sys, time
import torch, torch.distributed as dist, ddp_manual

pathlib.Path(os.environ["RANK"]).touch()
while not all(pathlib.Path(rank).exists() for rank in "01"):
    time.sleep(0.01)
began = time.monotonic()
if sys.argv[1:] == ["bare"]:
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=60))
with ddp_manual.join(device="cpu"):
    print(time.monotonic() - began)
"""


def test_ranks_join_on_hosts_whose_own_name_is_a_loopback_address_where_bare_torch_fails(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    """Also without a name server that answers, which delays each look-up of torch's store by 5 s."""
    two = hosts(2)
    for host in two:
        assert host.run("getent", "ahostsv4", host.name).stdout.split()[0] == "127.0.1.1"
    (tmp_path / "script.py").write_text(SCRIPT)
    meeting = {"MASTER_ADDR": two[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}

    def start(*words: object) -> list[RankProcess]:
        command = [sys.executable, "script.py", *words]
        return [host.start(*command, cwd=tmp_path, RANK=str(rank), **meeting) for rank, host in enumerate(two)]

    bare = start("bare")
    wait_until(lambda: any(process.process.poll() is not None for process in bare))
    # The other one, to which this one was to connect, waits for five times the timeout.
    ended = next(process for process in bare if process.process.poll() is not None)
    assert "Gloo connectFullMesh failed" in ended.err and "Connection refused, remote=[127.0." in ended.err
    for process in bare:
        process.kill()
    for host in two:
        host.resolver(host.network.silent)
        (tmp_path / str(two.index(host))).unlink()
    ranks = start()
    assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
    assert max(float(rank.out) for rank in ranks) < 5


def test_nccl_is_told_its_interface_only_where_it_would_listen_on_a_wrong_one(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import os, sys, ddp_manual\n"
        "with ddp_manual.join(device='cpu'):\n"
        "    names = 'GLOO_SOCKET_IFNAME', 'NCCL_SOCKET_IFNAME'\n"
        "    print(*map(os.environ.get, names), file=sys.stderr, flush=True)\n"
    )
    two = hosts(2)  # eth0 is the first interface of each
    two[0].run(*["ip", "link", "add", "rail", "type", "veth", "peer", "name", "rail", "netns"], two[1].namespace.name)
    for position, host in enumerate(two, start=1):
        host.run(*f"ip address add 10.88.0.{position}/24 dev rail".split())
        host.run(*["ip", "link", "set", "rail", "up"])
    for at, (address, expected) in enumerate([(two[0].address, "eth0 None"), ("10.88.0.1", "rail =rail")]):
        env = {"MASTER_ADDR": address, "WORLD_SIZE": "2", "MASTER_PORT": str(port + at)}
        ranks = [host.start(sys.executable, script, RANK=str(rank), **env) for rank, host in enumerate(two)]
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
        assert all(f"{expected}\n" in rank.err for rank in ranks), ranks[0].err


def test_the_host_whose_data_differ_by_one_byte_is_named_on_every_rank(
    hosts: Hosts, small_data: Path, tmp_path: Path
) -> None:
    two = hosts(2)
    shutil.copytree(small_data, tmp_path / "other")
    other = source("synthetic", tmp_path / "other")
    test, cache = other.load("test"), other.cache("test")
    assert cache is not None
    test.images[0, 0, 14, 14] ^= 1
    next((tmp_path / "other").rglob("synthetic-test-*.cache")).unlink()
    cache.save(test)
    folders = [small_data, tmp_path / "other"]
    ranks = [host.start_rank(rank, 2, "--data_dir", folders[rank]) for rank, host in enumerate(two)]
    assert [rank.wait() for rank in ranks] == [16, 16]
    for rank in ranks:
        error = last_error(rank.err)
        assert error.startswith("error[data-differs]: the data on hostB are not those of rank 0 on hostA: rank 1\n")
        assert f"test: rank 1 (hostB) has {DRAWN['test']} samples, digest " in error and "train: " not in error


def write_program(folder: Path, value: int, version: str) -> Path:
    """Write a program with a module of its own and a package that only says that it is installed."""
    site = folder / "site-packages"
    info = site / f"oddly-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: oddly\nVersion: {version}\n")
    (site / "oddly.py").write_text("")
    (folder / "train.py").write_text("import helper, oddly\nimport sys\nprint(helper.VALUE, *sys.argv[1:])\n")
    (folder / "helper.py").write_text(f"VALUE = {value}\n")
    return folder


def test_a_program_whose_files_packages_arguments_and_variables_differ_is_refused_and_may_be_allowed(
    hosts: Hosts, port: int, tmp_path: Path
) -> None:
    two = hosts(2)
    folders = [write_program(tmp_path / "one", 1, "1.0"), write_program(tmp_path / "other", 2, "2.0")]
    env = [{}, {"NCCL_ALGO": "Ring"}]

    def start(rank: int, *options: object) -> RankProcess:
        meeting = ["--world_size", 2, "--rank", rank, "--master_addr", two[0].address, "--master_port", port]
        program = ["train.py", "--lr", 0.1 * (rank + 1), "--seed", rank]
        path = f"{folders[rank] / 'site-packages'}:{REPOSITORY}"
        words = [sys.executable, "-m", "ddp_manual", "run", *meeting, *options, *program]
        return two[rank].start(*words, cwd=folders[rank], PYTHONPATH=path, **env[rank])

    ranks = [start(0, "--may_differ", "lr,seed"), start(1)]
    assert ranks[1].wait(30) == 12
    error = last_error(ranks[1].err)
    assert error.startswith(f"error[version-mismatch]: rank 1 (hostB, pid {ranks[1].worker}) has other versions than")
    assert "oddly: rank 0 (hostA) has 1.0, rank 1 has 2.0" in error and "on hostB: pip install oddly==1.0" in error
    ranks[1] = start(1, "--allow_mismatch")
    assert [rank.wait(60) for rank in ranks] == [0, 0], ranks[0].err
    assert (ranks[0].out, ranks[1].out) == ("1 --lr 0.1 --seed 0\n", "2 --lr 0.2 --seed 1\n")
    for rank in ranks:
        assert "has other versions than rank 0: oddly (allowed)\n" in rank.err
        assert "runs other code than rank 0: helper.py (allowed)\n" in rank.err
        assert "has other variables than rank 0: NCCL_ALGO (allowed)\n" in rank.err
        assert "other arguments" not in rank.err
