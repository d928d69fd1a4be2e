"""What answers at rank 0's address, found out without joining anything, and the wait until a store does.

Nothing here needs torch: a store is recognised by two messages of its protocol, on a plain socket.
"""

from __future__ import annotations

import secrets
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from ddp_manual import environment
from ddp_manual.errors import BadOption, MasterAddressError, MasterNotAStore, MasterRefused, MasterUnreachable
from ddp_manual.rendezvous.address import at, is_loopback
from ddp_manual.rendezvous.waiting import POLL_EVERY, Waiting
from ddp_manual.world_spec import WorldSpec

# TCPStore.cpp: every client first sends VALIDATE and a magic number; PING is answered with its own four bytes.
_VALIDATE = bytes.fromhex("00cef7853c")
_PING = b"\x0d"
CONNECT_TIMEOUT = 2.0
ANSWER_TIMEOUT = 3.0


class Answer(Enum):
    """What came back from an address and port."""

    STORE = "a TCPStore answers"
    REFUSED = "nothing listens"
    SILENT = "no answer: the packets are dropped, or there is no route"
    MUTE = "something accepts connections there but says nothing"
    CLOSED = "something accepts connections there and closes them"
    STRANGER = "something else answers"


@dataclass(frozen=True)
class Probe:
    """What ``address`` answered; ``detail`` has the first bytes or the operating system's words."""

    address: str
    answer: Answer
    detail: str = ""


def probe(address: str, port: int) -> Probe:
    """Ask what listens at an address, joining nothing, in at most 5 s."""
    nonce = secrets.token_hex(2).encode()  # no byte that a server of another kind takes for the end of a line
    try:
        with socket.create_connection((address, port), CONNECT_TIMEOUT) as connection:
            connection.settimeout(ANSWER_TIMEOUT)
            try:
                connection.sendall(_VALIDATE + _PING + nonce)
                reply = _first_bytes(connection)
            except TimeoutError:
                return Probe(address, Answer.MUTE)
            except OSError as error:
                return Probe(address, Answer.CLOSED, error.strerror or str(error))
    except ConnectionRefusedError:
        return Probe(address, Answer.REFUSED)
    except TimeoutError:
        return Probe(address, Answer.SILENT, "timed out")
    except OSError as error:
        return Probe(address, Answer.SILENT, error.strerror or str(error))
    if reply == nonce:
        return Probe(address, Answer.STORE)
    if not reply:
        return Probe(address, Answer.CLOSED, "it closed the connection")
    return Probe(address, Answer.STRANGER, repr(reply.decode("ascii", "backslashreplace"))[1:-1])


def _first_bytes(connection: socket.socket) -> bytes:
    """What the other side says; a server that waits for a line, as an http server does, is given the end of one.

    As that of an http request: without a version Python's http.server answers with a page and no status.
    """
    connection.settimeout(ANSWER_TIMEOUT / 2)
    with suppress(TimeoutError):
        return connection.recv(64)
    connection.sendall(b" / HTTP/1.0\r\n\r\n")
    return connection.recv(64)


def wait_for_store(
    spec: WorldSpec, addresses: list[str], waiting: Waiting, rank_0_command: str, who: str | None = None
) -> str:
    """Block until a store answers at one of rank 0's addresses; returns the one that answered.

    Args:
        rank_0_command: what starts rank 0, for the advice.
        who: whoever asks, if it is not a rank.

    Raises:
        MasterNotAStore: at once; MasterRefused, MasterUnreachable: at the deadline.
        BadOption: an agent's store is expected, and it is not there.
    """
    where = at(spec.master_addr, spec.master_port)
    resolved = "" if addresses == [spec.master_addr] else f" ({spec.master_addr} is {', '.join(addresses)})"
    who = who or f"rank {spec.rank}"
    if all(is_loopback(address) for address in addresses):
        resolved += f", which is {environment.host_name()} itself"
    closed_before = False
    while True:
        with ThreadPoolExecutor(max_workers=len(addresses)) as pool:
            probes = list(pool.map(lambda address: probe(address, spec.master_port), addresses))
        for one in probes:
            if one.answer is Answer.STORE:
                return one.address
        worst = max(probes, key=lambda one: list(Answer).index(one.answer))
        # A store that is just ending does so too, once.
        ending = worst.answer is Answer.CLOSED and not closed_before
        closed_before = worst.answer is Answer.CLOSED
        if worst.answer in (Answer.STRANGER, Answer.MUTE, Answer.CLOSED) and not ending:
            raise _not_a_store(spec, where, worst)
        refused = any(one.answer is Answer.REFUSED for one in probes)
        if refused and spec.rank == 0 and spec.agent_store:
            raise _no_agent(spec, where)
        said = (
            f"nothing listens at {where}{resolved}: is rank 0 started?"
            if refused
            else f"no answer from {where}{resolved}: dropped, or no route ({worst.detail})"
        )
        waiting.about(said)
        waiting.advise([rank_0_command])
        if waiting.over:
            raise _never_came(spec, where + resolved, probes, waiting, rank_0_command if refused else None, who)
        time.sleep(min(POLL_EVERY, waiting.remaining))


def _no_agent(spec: WorldSpec, where: str) -> BadOption:
    """torchrun's agent listens before it starts any rank, so one that does not is not there."""
    return BadOption(
        f"variables of another launcher say that its agent hosts the store at {where}, but nothing listens there",
        why="; ".join([environment.agent_variables(), *(spec.named(name) for name in ("world_size", "rank"))]),
        next="unset TORCHELASTIC_USE_AGENT_STORE RANK WORLD_SIZE LOCAL_RANK MASTER_ADDR MASTER_PORT\n"
        "then start every rank again, with flags",
    )


def _not_a_store(spec: WorldSpec, where: str, found: Probe) -> MasterNotAStore:
    answered = "" if found.answer is Answer.MUTE else f": {found.detail}"
    return MasterNotAStore(
        f"what listens at {where} is not rank 0's store",
        why=f"asked as a TCPStore client at {found.address}, {found.answer.value}{answered}",
        next=f"check --master_addr and --master_port against rank 0's, or see what it is on {spec.master_addr}: "
        f"ss -ltnp 'sport = :{spec.master_port}'" + ("" if answered else "\n(or it is a rank 0 that was stopped)"),
    )


def _never_came(
    spec: WorldSpec, where: str, probes: list[Probe], waiting: Waiting, rank_0_command: str | None, who: str
) -> MasterAddressError:
    waited = f" for {waiting.waited:.0f} s" if waiting.waited >= 1 else ""
    tried = "; ".join(
        f"{at(one.address, spec.master_port)}: {one.answer.value}{f' ({one.detail})' if one.detail else ''}"
        for one in probes
    )
    if rank_0_command:
        return MasterRefused(
            f"nothing {f'has listened{waited}' if waited else 'listens'} at rank 0's address {where}",
            why=f"{who} on {environment.host_name()} tried {tried}",
            next=f"{rank_0_command}\nthen try again; if rank 0 does run, compare its address and port with these",
        )
    return MasterUnreachable(
        f"no answer{waited} from rank 0's address {where}",
        why=f"{who} on {environment.host_name()} tried {tried}",
        next=f"open TCP port {spec.master_port} on rank 0's host, or check the route: ping {spec.master_addr}",
    )
