"""The fixture ``hosts``: several hosts on this one, gone with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.conftest import Start
from tests.hosts import slurm as slurm_of_tests
from tests.hosts import sshd
from tests.hosts.hosts import Host, Network, RankCommand, remove_leftovers, why_not
from tests.hosts.sshd import SshHosts

Hosts = Callable[..., list[Host]]
SshInto = Callable[..., SshHosts]


@pytest.fixture(scope="session")
def _namespaces() -> None:
    """Skip the test where namespaces cannot be made; remove those of test processes that were killed."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    remove_leftovers()


@pytest.fixture
def hosts(_namespaces: None, start: Start, rank_command: RankCommand, port: int) -> Iterator[Hosts]:
    """``hosts(2)`` is a list of two hosts on a network of their own: see ``Host``."""
    networks: list[Network] = []

    def hosts(count: int, *, ipv4: bool = True, ipv6: bool = False) -> list[Host]:
        number = len(networks) + 1
        how = {"ipv4": ipv4, "ipv6": ipv6, "start": start, "rank_command": rank_command, "port": port}
        network = Network(number, count, **how)
        networks.append(network)
        network.add()
        return network.hosts

    yield hosts
    for network in networks:
        network.remove()


@pytest.fixture
def ssh_into(hosts: Hosts, tmp_path: Path) -> SshInto:
    """``ssh_into(2)`` are two hosts with an sshd each: see ``SshHosts``. They end with the fixture ``hosts``.

    ``ipv6=True``: hosts with IPv6 addresses only.
    """
    if reason := sshd.why_not():
        pytest.skip(reason)

    def ssh_into(count: int, *, ipv6: bool = False, **env: str) -> SshHosts:
        return SshHosts(hosts(count, ipv4=not ipv6, ipv6=ipv6), tmp_path / "ssh", **env)

    return ssh_into


@pytest.fixture(scope="session")
def slurm(_namespaces: None) -> Iterator[slurm_of_tests.Slurm]:
    """A Slurm of two nodes, for all tests of this process that use it."""
    if reason := slurm_of_tests.why_not():
        pytest.skip(reason)
    network = Network(slurm_of_tests.NETWORK, 3, ipv4=True, ipv6=False)
    slurm = slurm_of_tests.Slurm(network)
    try:
        network.add()
        slurm.add()
        yield slurm
    finally:
        network.remove()
        slurm.reap()
