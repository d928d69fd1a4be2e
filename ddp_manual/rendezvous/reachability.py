"""Whether ranks on different hosts can connect to each other, tried before anything waits for it.

While it meets the others, each process answers at a port of its own. When all are here the first rank of each host
connects to those of the other hosts, and rank 0 tells everybody which pairs failed, in which direction, and what the
network answered. On one host there is nothing to try.
"""

from __future__ import annotations

import logging
import os
import socket
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

from ddp_manual.errors import MasterLost, PeerUnreachable
from ddp_manual.rendezvous.address import at, family
from ddp_manual.rendezvous.entries import Place
from ddp_manual.rendezvous.lifeline import kept_from_children
from ddp_manual.rendezvous.stacks import OWN_THREADS
from ddp_manual.rendezvous.store import RunStore, interruptibly
from ddp_manual.rendezvous.verdicts import as_error
from ddp_manual.rendezvous.waiting import Waiting

logger = logging.getLogger(__name__)

# All pairs are tried up to this many hosts; beyond it a host tries those 1, 2, 4, 8, ... further on in rank order, so
# that every host is still tried in both directions.
ALL_PAIRS_UP_TO = 32
# Seconds. Failing pairs have to be known within 10 s of the roll call.
CONNECT_TIMEOUT = 3.0
REPORT_TIMEOUT = 8.0
OUTCOME_TIMEOUT = 60.0
ALIVE_TIMEOUT = 0.3
# More than one packet: where large ones are dropped, small ones still connect.
GREETING_BYTES = 16_384


class Answerer:
    """Answers at a port of its own for as long as it is open, to prove that this host can be reached.

    Args:
        address: this host's IP address on the interface that the ranks will use.
    """

    def __init__(self, address: str) -> None:
        self._listener = kept_from_children(socket.socket(family(address), socket.SOCK_STREAM))
        self._listener.bind((address, 0))
        self._listener.listen(256)
        self.port = int(self._listener.getsockname()[1])
        self._greeting = greeting(self.port)
        self._thread = threading.Thread(target=self._answer, name=f"{OWN_THREADS}answerer", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """From any thread, and as often as one likes."""
        # Closing alone would leave the thread in accept.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def _answer(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            with connection, suppress(OSError):
                connection.settimeout(CONNECT_TIMEOUT)
                connection.sendall(self._greeting)


def who_answers(places: Sequence[tuple[str, int]]) -> list[bool]:
    """Which of these addresses and ports accept a connection; a host that does not answer at all takes 0.3 s."""
    return [accepts is True for accepts in _who_accepts(places)]


def who_is_gone(places: Sequence[tuple[str, int]]) -> list[bool]:
    """At which of these nothing accepts connections any more; where nothing answers at all that is not known."""
    return [accepts is False for accepts in _who_accepts(places)]


def _who_accepts(places: Sequence[tuple[str, int]]) -> list[bool | None]:
    with ThreadPoolExecutor(max_workers=64) as pool:
        return list(pool.map(lambda place: accepts(*place), places))


def greeting(port: int) -> bytes:
    """What an Answerer sends: tells it from something else that listens there."""
    return f"ddp_manual {port}\n".encode().ljust(GREETING_BYTES, b".")


def accepts(address: str, port: int) -> bool | None:
    """Whether anything accepts connections there; the kernel does so even for a frozen process. None: no answer."""
    try:
        with socket.create_connection((address, port), ALIVE_TIMEOUT):
            return True
    except ConnectionRefusedError:
        return False
    except (OSError, ValueError):
        return None


def try_to_reach(address: str, port: int) -> str | None:
    """None if an Answerer answers there, else what the network answered."""
    expected = greeting(port)
    received = b""
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as connection:
            connection.settimeout(CONNECT_TIMEOUT)
            while len(received) < len(expected):
                piece = connection.recv(65536)
                if not piece:
                    break
                received += piece
    except ConnectionRefusedError:
        return "connection refused"
    except TimeoutError:
        if received:
            return f"connected, but only {len(received)} of {len(expected)} bytes came through (packet size?)"
        return f"no answer within {CONNECT_TIMEOUT:.0f} s: dropped"
    except OSError as error:
        return os.strerror(error.errno) if error.errno else str(error)
    return None if received == expected else "something else answers there"


def targets(node: int, nodes: int) -> list[int]:
    """The hosts that host ``node`` tries: all others, or beyond ALL_PAIRS_UP_TO hosts those 1, 2, 4, ... further on."""
    if nodes <= ALL_PAIRS_UP_TO:
        return [other for other in range(nodes) if other != node]
    return [(node + (1 << power)) % nodes for power in range((nodes - 1).bit_length())]


def check_pairs(store: RunStore, rank: int, place: Place) -> None:
    """Have the hosts try to reach each other; every rank learns the outcome.

    Args:
        store: a client for this alone: a thread blocks it, so that Ctrl-C is heard.

    Raises:
        PeerUnreachable: pairs that failed. PeerFailed: another rank has left meanwhile.
    """
    if place.nodes == 1:
        return
    about = "waiting for the hosts to try the connections between them"
    try:
        failing = interruptibly(lambda: _try_pairs(store, rank, place), Waiting(OUTCOME_TIMEOUT, logger), about)
    except TimeoutError:
        raise MasterLost(
            "rank 0 does not answer",
            why=f"all ranks had joined, but it did not say within {OUTCOME_TIMEOUT:.0f} s which hosts can connect",
            next="look whether rank 0 is stopped or frozen, then start all ranks again",
        ) from None
    if failing:
        words = store.failure_if_any()
        unlike_ours = words is not None and words["identifier"] != PeerUnreachable.identifier
        raise as_error(words) if unlike_ours else _unreachable(failing)


def _try_pairs(store: RunStore, rank: int, place: Place) -> list[dict[str, Any]]:
    if rank == place.host_leader:
        hosts = store.hosts()
        tried = targets(place.node, place.nodes)
        with ThreadPoolExecutor(max_workers=ALL_PAIRS_UP_TO) as pool:
            outcomes = pool.map(lambda other: try_to_reach(hosts[other]["address"], hosts[other]["port"]), tried)
            failures = [[other, outcome] for other, outcome in zip(tried, outcomes, strict=True) if outcome]
        store.report_reach(place.node, failures)
        if rank == 0:
            store.set_unreachable(_failing_pairs(_gathered(store, place.nodes), hosts))
    failing: list[dict[str, Any]] = store.unreachable()
    return failing


def _gathered(store: RunStore, nodes: int) -> dict[int, list[list[Any]] | None]:
    """What each host reported, None for one that has not in time, or before another rank failed."""
    deadline = time.monotonic() + REPORT_TIMEOUT
    while not store.have_reported_reach(range(nodes)):
        if time.monotonic() > deadline or store.failure_if_any() is not None:
            break
        time.sleep(0.02)
    return {node: store.reach(node) if store.have_reported_reach([node]) else None for node in range(nodes)}


def _failing_pairs(
    reports: Mapping[int, Sequence[Sequence[Any]] | None], hosts: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    pairs = []
    for node, failures in reports.items():
        if failures is None:
            pairs.append({"from": hosts[node], "to": None, "answer": f"said nothing for {REPORT_TIMEOUT:.0f} s"})
            continue
        pairs += [{"from": hosts[node], "to": hosts[other], "answer": answer} for other, answer in failures]
    return pairs


MOST_SHOWN = 16


def _unreachable(failing: Sequence[Mapping[str, Any]]) -> PeerUnreachable:
    named = ", ".join(_arrow(pair) for pair in failing[:MOST_SHOWN]) + (", ..." if len(failing) > MOST_SHOWN else "")
    lines = []
    for pair in failing[:MOST_SHOWN]:
        start, end = pair["from"], pair["to"]
        tried = f" to {at(end['address'], end['port'])} (rank {end['rank']} on {end['host']})" if end else ""
        lines.append(f"from {start['address']} (rank {start['rank']} on {start['host']}){tried}: {pair['answer']}")
    first = failing[0]
    opened = (
        f"from {first['from']['address']} to {first['to']['address']}"
        if first["to"]
        else f"between {first['from']['host']} and the others"
    )
    return PeerUnreachable(
        f"{len(failing)} of the connections between hosts cannot be made: {named}",
        why="\n".join(lines),
        next=f"open all TCP ports {opened}, such as: iptables -I INPUT -p tcp -s {first['from']['address']} -j ACCEPT\n"
        "or name an interface that connects the hosts: GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME",
    )


def _arrow(pair: Mapping[str, Any]) -> str:
    return f"{pair['from']['host']} -> {pair['to']['host']}" if pair["to"] else f"{pair['from']['host']} is silent"
