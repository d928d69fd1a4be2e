"""Ranks on several hosts: how they find one another, and what they are told when something is between them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import all_started, said
from tests.conftest import RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host, start_ranks
from tests.world.test_rendezvous import last_error


def train(on: list[Host], folder: Path) -> tuple[dict, float]:
    """Train one rank per host; return the summary of the run, and the seconds until its process group was ready."""
    ranks = start_ranks(on)
    seconds = max(said(rank, "process group ready") for rank in ranks) - all_started(ranks)
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * len(on), "\n".join(rank.err for rank in ranks)
    return json.loads((folder / "run" / "summary.json").read_text()), seconds


def first_to_end(processes: list[RankProcess], timeout: float = 60) -> RankProcess:
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        for process in processes:
            if process.process.poll() is not None:
                return process
        time.sleep(0.02)
    pytest.fail(f"all still run after {timeout} s")


@pytest.mark.parametrize("count", [2, 3])
def test_hosts_whose_own_name_is_a_loopback_address_join_and_train(hosts: Hosts, count: int, tmp_path: Path) -> None:
    several = hosts(count)
    for host in several:
        assert host.run("getent", "ahostsv4", host.name).stdout.split()[0] == "127.0.1.1"
    summary, seconds = train(several, tmp_path)
    assert [entry["host"] for entry in summary["roster"]] == ["hostA", "hostB", "hostC"][:count]
    fault = f"the own name of each of {count} hosts is 127.0.1.1"
    record(fault, "(joins)", "", seconds=seconds, within=30, codes=[0] * count, row=7)


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
    on_eth0, chosen = {"MASTER_ADDR": two[0].address}, {"NCCL_SOCKET_IFNAME": "eth,rail"}
    told = {"eth0 None": on_eth0, "rail =rail": {"MASTER_ADDR": "10.88.0.1"}, "eth0 eth,rail": {**on_eth0, **chosen}}
    for at, (expected, env) in enumerate(told.items()):
        env |= {"WORLD_SIZE": "2", "MASTER_PORT": str(port + at)}
        ranks = [host.start(sys.executable, script, RANK=str(rank), **env) for rank, host in enumerate(two)]
        assert [rank.wait() for rank in ranks] == [0, 0], ranks[0].err
        assert all(f"{expected}\n" in rank.err for rank in ranks), ranks[0].err


def test_bare_torch_fails_on_the_same_hosts(hosts: Hosts, port: int) -> None:
    bare = (
        "import datetime, torch.distributed as dist\n"
        "dist.init_process_group('gloo', timeout=datetime.timedelta(seconds=60))\n"
    )
    two = hosts(2)
    meeting = {"MASTER_ADDR": two[0].address, "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    ranks = [host.start(sys.executable, "-c", bare, RANK=str(rank), **meeting) for rank, host in enumerate(two)]
    first = first_to_end(ranks)
    assert first.wait() == 1
    # The other one, to which this one was to connect, waits for five times the timeout.
    assert "Gloo connectFullMesh failed" in first.err
    assert "Connection refused, remote=[127.0." in first.err


def test_hosts_that_have_ipv6_addresses_only_join_and_train(hosts: Hosts, tmp_path: Path) -> None:
    two = hosts(2, ipv4=False, ipv6=True)
    assert two[0].address.startswith("fd00:77:")
    summary, seconds = train(two, tmp_path)
    assert [entry["host"] for entry in summary["roster"]] == ["hostA", "hostB"]
    record("hosts with IPv6 addresses only", "(joins)", "", seconds=seconds, within=30, codes=[0, 0], row=27)


def test_a_rank_whose_packets_to_rank_0_are_dropped_says_so_while_it_waits(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    two[0].drop_from(two[1], port)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("listening at ")
    lost = two[1].start_rank(1, 2, "--join_timeout", 4)
    # A connection is given 2 s; the system's own timeout for one is two minutes.
    seconds = said(lost, f"no answer from {two[0].address}:{port}: dropped, or no route") - lost.started
    ended = said(lost, "error[master-unreachable]: no answer for ") - lost.started
    assert lost.wait(15) == 11
    assert "nothing listens" not in lost.err
    assert f"rank 1 on hostB tried {two[0].address}:{port}: no answer" in last_error(lost.err)
    two[0].open_all()
    codes = [process.wait() for process in (rank_0, two[1].start_rank(1, 2), lost)]
    assert codes == [0, 0, 11], rank_0.err
    fault, named = "packets to rank 0's port dropped", "address, port, dropped or no route"
    record(fault, "master-unreachable (its line)", named, seconds=seconds, within=4, codes=codes, row=4)
    record(fault, "master-unreachable, --join_timeout 4", named, seconds=ended, within=8, codes=codes, row=4)


def test_a_rank_that_rank_0s_firewall_rejects_is_told_that_nothing_listens(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    two[0].reject_from(two[1], port)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("listening at ")
    lost = two[1].start_rank(1, 2, "--join_timeout", 3)
    seconds = said(lost, f"nothing listens at {two[0].address}:{port}: is rank 0 started?") - lost.started
    assert lost.wait(15) == 11
    assert last_error(lost.err).startswith("error[master-refused]")
    assert "no answer" not in lost.err
    two[0].open_all()
    codes = [process.wait() for process in (rank_0, two[1].start_rank(1, 2), lost)]
    assert codes == [0, 0, 11], rank_0.err
    fault, named = "packets to rank 0's port rejected", "address, port, that nothing listens"
    record(fault, "master-refused (its line)", named, seconds=seconds, within=2, codes=codes, row=4)


def test_ranks_with_both_address_families_are_probed_where_gloo_will_connect(hosts: Hosts, tmp_path: Path) -> None:
    two = hosts(2, ipv6=True)
    ranks = [host.start_rank(rank, 2, "--master_addr", two[0].ipv6) for rank, host in enumerate(two)]
    assert [rank.wait() for rank in ranks] == [0, 0]
    roster = json.loads((tmp_path / "run" / "summary.json").read_text())["roster"]
    # gloo takes the first address of the interface, which is its IPv4 address.
    assert [line["address"] for line in roster] == [host.ipv4 for host in two]
