"""The fixture ``hosts``: several hosts on this one, gone with the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.conftest import Start
from tests.hosts.hosts import Host, Network, RankCommand, remove_leftovers, why_not

Hosts = Callable[..., list[Host]]


@pytest.fixture(scope="session")
def _namespaces() -> None:
    """Skip the test where namespaces cannot be made; remove those of test processes that were killed."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    remove_leftovers()


@pytest.fixture
def hosts(_namespaces: None, start: Start, rank_command: RankCommand) -> Iterator[Hosts]:
    """``hosts(2)`` is a list of two hosts on a network of their own: see ``Host``."""
    networks: list[Network] = []

    def hosts(count: int, *, ipv4: bool = True, ipv6: bool = False) -> list[Host]:
        number = len(networks) + 1
        network = Network(number, count, ipv4=ipv4, ipv6=ipv6, start=start, rank_command=rank_command)
        networks.append(network)
        network.add()
        return network.hosts

    yield hosts
    for network in networks:
        network.remove()
