"""Which pairs of hosts could not connect to each other: asked, gathered and told by rank 0.

The agents try it (``agent/reachability.py``) while their workers load torch, and again once all ranks wait in a
collective and none is behind.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence

from ddp_manual.errors import PeerUnreachable
from ddp_manual.messages import Probe
from ddp_manual.ranks_and_runs import Place, RankInfo
from ddp_manual.text_wrapping import whole
from ddp_manual.wire import printable
from ddp_manual.wording import at

# Up to this many hosts all pairs are tried. Beyond it each host tries those that are 1, 2, 4, 8, ... further on in rank
# order, so that every host is still tried in both directions.
ALL_PAIRS_UP_TO = 32
REPORT_TIMEOUT = 8.0
# Seconds between two looks. If more have passed, this process was stopped in between.
A_PAUSE = 4.0
CUT_OFF = "connected, but only"
# Pairs named in an error.
MOST_SHOWN = 16


def targets(node: int, nodes: int) -> list[int]:
    """Return the hosts that host ``node`` tries: see ALL_PAIRS_UP_TO."""
    if nodes <= ALL_PAIRS_UP_TO:
        return [other for other in range(nodes) if other != node]
    return [(node + (1 << power)) % nodes for power in range((nodes - 1).bit_length())]


Pair = tuple[RankInfo, RankInfo | None, str]
"""From, to (None: the first has not reported), and how the network responded."""

# Each report names the round that it belongs to.
_rounds = itertools.count()


class Probes:
    """The probes between the hosts of a run.

    Args:
        infos, places: of all ranks.
        now: rank 0's monotonic clock, in seconds.
    """

    def __init__(self, infos: Sequence[RankInfo], places: Mapping[int, Place], now: float) -> None:
        leaders = sorted({(place.node, place.host_leader) for place in places.values()})
        self._hosts = [infos[leader] for _, leader in leaders]
        self._silent = set(range(len(leaders))) if len(leaders) > 1 else set()
        self._failing: list[Pair] = []
        self._until, self._looked, self.since = now + REPORT_TIMEOUT, now, now
        self._round = next(_rounds)

    def requests(self) -> Iterator[tuple[int, Probe]]:
        """Yield a rank and the request that tells it which hosts to try."""
        for node in sorted(self._silent):
            others = [(other, self._hosts[other]) for other in targets(node, len(self._hosts))]
            wanted = [(other, info.address, info.answer_port) for other, info in others]
            yield self._hosts[node].rank, Probe((self._round, node), wanted)

    def take(self, key: tuple[int, int], failures: Sequence[tuple[int, str]]) -> None:
        """Note the report of a host: the hosts that it could not reach, each with how the network responded.

        Args:
            key: the key of the request that it replies to.
        """
        round_, node = key
        if round_ != self._round or node not in self._silent:
            return  # it belongs to an earlier round, before a rank had left
        self._silent.discard(node)
        hosts = self._hosts
        self._failing += [
            (hosts[node], hosts[other], printable(answer)) for other, answer in failures if other in range(len(hosts))
        ]

    def failing(self, now: float) -> list[Pair] | None:
        """Return the pairs that failed, in the order of the ranks; None while reports are still to come."""
        if now - self._looked > A_PAUSE:  # this process was stopped, and has not read what came meanwhile
            self._until += now - self._looked
        self._looked = now
        if self._silent and now <= self._until:
            return None
        silent = [(self._hosts[node], None, f"said nothing for {REPORT_TIMEOUT:.0f} s") for node in self._silent]
        return sorted([*self._failing, *silent], key=lambda pair: pair[0].rank)


def compare_mtu(address: str) -> str:
    """Return what to do if small packets reach this address and large packets do not."""
    return (
        "compare the MTU of the interfaces of both hosts, and of tunnels between them:\n"
        f"{whole('ip link')}\n{whole(f'ping -M do -s 1472 {address}')}\n"
        f"or lower it on every host:\n{whole('ip link set dev <interface> mtu 1400')}"
    )


def unreachable(failing: Sequence[Pair]) -> PeerUnreachable:
    """Return the error that ends all ranks, and names these pairs."""
    named, lines = [], []
    for start, end, answer in failing[:MOST_SHOWN]:
        named.append(f"{start.host} -> {end.host}" if end else f"{start.host} is silent")
        tried = f" to {at(end.address, end.answer_port)} (rank {end.rank} on {end.host})" if end else ""
        lines.append(f"from {start.address} (rank {start.rank} on {start.host}){tried}: {answer}")
    if len(failing) > MOST_SHOWN:
        named.append("...")
    start, end, answer = failing[0]
    opened = f"from {start.address} to {end.address}" if end else f"between {start.host} and the others"
    rule = f"-p tcp -s {start.address} -j ACCEPT"
    on = end.host if end else start.host
    next = f"open all TCP ports {opened}, such as on {on}:\n{whole(f'iptables -I INPUT {rule}')}"
    if len(failing) > 1:
        next += "\nand so for each of the connections above"
    if end is not None and answer.startswith(CUT_OFF):
        next = compare_mtu(end.address)
    return PeerUnreachable(
        f"{len(failing)} of the connections between hosts cannot be made: {', '.join(named)}",
        why="\n".join(lines),
        next=f"{next}\nor name an interface that connects the hosts: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )
