"""Ranks on several hosts: how they find one another, and what they are told when something is between them."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import pytest

from tests.conftest import RankProcess
from tests.hosts.conftest import Hosts
from tests.hosts.hosts import Host
from tests.world.test_rendezvous import last_error


def train(on: list[Host], folder: Path) -> dict:
    """One rank per host, to its end; the summary of the run."""
    ranks = [host.start_rank(rank, len(on)) for rank, host in enumerate(on)]
    codes = [rank.wait() for rank in ranks]
    assert codes == [0] * len(on), "\n".join(rank.err for rank in ranks)
    return json.loads((folder / "run" / "summary.json").read_text())


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
    roster = train(several, tmp_path)["roster"]
    assert [entry["host"] for entry in roster] == ["hostA", "hostB", "hostC"][:count]


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
    roster = train(two, tmp_path)["roster"]
    assert [entry["host"] for entry in roster] == ["hostA", "hostB"]


def test_a_rank_whose_packets_to_rank_0_are_dropped_says_so_while_it_waits(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    two[0].drop_from(two[1], port)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    lost = two[1].start_rank(1, 2, "--join_timeout", 4)
    # The system's own timeout for a connection is two minutes.
    assert lost.wait_for(f"no answer from {two[0].address}:{port}: dropped, or no route") < 6
    assert lost.wait(15) == 11
    assert last_error(lost.err).startswith("error[master-unreachable]: no answer from rank 0's address ")
    assert rank_0.process.poll() is None


def test_a_rank_that_rank_0s_firewall_rejects_is_told_that_nothing_listens(hosts: Hosts, port: int) -> None:
    two = hosts(2)
    two[0].reject_from(two[1], port)
    rank_0 = two[0].start_rank(0, 2)
    rank_0.wait_for("waiting for rank 1")
    lost = two[1].start_rank(1, 2, "--join_timeout", 3)
    assert lost.wait_for(f"nothing listens at {two[0].address}:{port}: is rank 0 started?") < 6
    assert lost.wait(15) == 11
    assert last_error(lost.err).startswith("error[master-refused]")
    assert rank_0.process.poll() is None
