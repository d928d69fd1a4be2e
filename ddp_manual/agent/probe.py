"""What answers at rank 0's address: its agent, or what else; and the wait until it is its agent.

The coordinator speaks first, so the connection over which it greets is the one that is kept. Whatever says nothing is
asked, over a second connection, whether it is torch's TCPStore or a server that waits for a line.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from ddp_manual import launchers
from ddp_manual.agent.address import at, is_loopback
from ddp_manual.agent.connection import Connection
from ddp_manual.errors import MasterAddressError, MasterLost, MasterNotAStore, MasterRefused, MasterUnreachable
from ddp_manual.messages import LONGEST_ANSWER
from ddp_manual.terminal import POLL_EVERY, Waiting
from ddp_manual.world_spec import WorldSpec

# TCPStore.cpp: every client first sends VALIDATE and a magic number; PING is answered with its own four bytes.
_VALIDATE = bytes.fromhex("00cef7853c")
_PING = b"\x0d"
# The end of an http request: without a version Python's http.server answers with a page and no status.
_LINE = b" / HTTP/1.0\r\n\r\n"
# Seconds. Something that is not rank 0's agent has to be named within 5 s.
CONNECT_TIMEOUT = 2.0
GREETED_WITHIN = 3.5
ASK_AFTER = 0.5
ANSWER_TIMEOUT = 1.2
LINE_TIMEOUT = 0.5


class Answer(Enum):
    """What came back from an address and port."""

    GREETED = "rank 0's agent answers"
    OVER = "the agent of a rank 0 whose run is ending"
    REFUSED = "nothing listens"
    SILENT = "no answer: the packets are dropped, or there is no route"
    MUTE = "something accepts connections there but says nothing"
    CLOSED = "something accepts connections there and closes them"
    STORE = "a TCPStore of torch answers"
    STRANGER = "something else answers"


@dataclass(frozen=True)
class Probe:
    """What ``address`` answered; ``detail`` has the first bytes or the operating system's words."""

    address: str
    answer: Answer
    detail: str = ""
    connection: Connection | None = None
    greeting: Mapping[str, Any] = field(default_factory=dict)


async def probe(address: str, port: int) -> Probe:
    """Connect to an address, and find out within 5 s what listens there; joins nothing."""
    loop = asyncio.get_running_loop()
    try:
        opening = loop.create_connection(lambda: Connection(longest=LONGEST_ANSWER), address, port)
        _, connection = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
    except ConnectionRefusedError:
        return Probe(address, Answer.REFUSED)
    except (TimeoutError, asyncio.TimeoutError):
        return Probe(address, Answer.SILENT, "timed out")
    except OSError as error:
        return Probe(address, Answer.SILENT, error.strerror or str(error))
    greeting = asyncio.ensure_future(connection.receive())
    asking = asyncio.create_task(_ask(address, port, after=ASK_AFTER))
    waiting: list[asyncio.Future[Any]] = [greeting, asking]
    await asyncio.wait(waiting, timeout=GREETED_WITHIN - LINE_TIMEOUT, return_when=asyncio.FIRST_COMPLETED)
    if not greeting.done() and (not asking.done() or asking.result().answer is Answer.MUTE):
        connection.write(_LINE)  # what takes one connection at a time has waited for a line on this one
        await asyncio.wait([greeting], timeout=LINE_TIMEOUT)
    first = greeting.result() if greeting.done() else None
    if not greeting.done():
        found = asking.result() if asking.done() else Probe(address, Answer.MUTE)
    elif first is not None and "challenge" in first:
        if not first.get("over"):
            asking.cancel()
            return Probe(address, Answer.GREETED, connection=connection, greeting=first)
        found = Probe(address, Answer.OVER)
    elif connection.first_bytes:
        found = Probe(address, Answer.STRANGER, _shown(connection.first_bytes))
    else:
        found = Probe(address, Answer.CLOSED, connection.ended)
    for one in waiting:
        one.cancel()
    connection.close()
    return found


async def _ask(address: str, port: int, *, after: float) -> Probe:
    """Ask what waits for its client to speak: a TCPStore, or a server of lines, as an http server is."""
    await asyncio.sleep(after)
    nonce = secrets.token_hex(2).encode()  # no byte that a server of another kind takes for the end of a line
    writer = None
    try:
        reader, writer = await asyncio.wait_for(asyncio.open_connection(address, port), CONNECT_TIMEOUT)
        writer.write(_VALIDATE + _PING + nonce)
        reply = b""
        with suppress(TimeoutError, asyncio.TimeoutError):
            reply = await asyncio.wait_for(reader.read(64), ANSWER_TIMEOUT)
        if not reply and not reader.at_eof():
            writer.write(_LINE)
            reply = await asyncio.wait_for(reader.read(64), ANSWER_TIMEOUT)
    except (TimeoutError, asyncio.TimeoutError):
        return Probe(address, Answer.MUTE)
    except OSError as error:
        return Probe(address, Answer.CLOSED, error.strerror or str(error))
    finally:
        if writer is not None:
            writer.close()
    if reply == nonce:
        return Probe(address, Answer.STORE)
    return Probe(address, Answer.STRANGER, _shown(reply)) if reply else Probe(address, Answer.CLOSED, "it closed")


def _shown(first: bytes) -> str:
    return repr(first.decode("ascii", "backslashreplace"))[1:-1]


async def find_rank_0(
    spec: WorldSpec,
    addresses: list[str],
    waiting: Waiting,
    rank_0_command: str,
    *,
    who: str | None = None,
) -> Probe:
    """Wait until rank 0's agent greets at one of its addresses; returns that, with the connection.

    Args:
        rank_0_command: what starts rank 0, for the advice.
        who: whoever asks, if it is not a rank.

    Raises:
        MasterNotAStore: something else answers. MasterRefused, MasterUnreachable: at the deadline, as is MasterLost
            where a run is ending there.
    """
    where = at(spec.master_addr, spec.master_port)
    resolved = "" if addresses == [spec.master_addr] else f" ({spec.master_addr} is {', '.join(addresses)})"
    who = who or f"rank {spec.rank}"
    if all(is_loopback(address) for address in addresses):
        resolved += f", which is {launchers.host_name()} itself"
    closed_before = False
    while True:
        probes = await asyncio.gather(*(probe(address, spec.master_port) for address in addresses))
        greeted = [one for one in probes if one.connection is not None]
        for other in greeted[1:]:
            other.connection.close()  # type: ignore[union-attr]
        if greeted:
            return greeted[0]
        worst = max(probes, key=lambda one: list(Answer).index(one.answer))
        # A process that is just ending does so too, once.
        ending = worst.answer is Answer.CLOSED and not closed_before
        closed_before = worst.answer is Answer.CLOSED
        if worst.answer in (Answer.STORE, Answer.STRANGER, Answer.MUTE, Answer.CLOSED) and not ending:
            raise _not_rank_0(spec, where, worst)
        refused = any(one.answer is Answer.REFUSED for one in probes)
        if any(one.answer is Answer.OVER for one in probes):
            said = f"a run at {where} is ending; waiting for the next run"
        elif refused:
            said = f"nothing listens at {where}{resolved}: is rank 0 started?"
        else:
            said = f"no answer from {where}{resolved}: dropped, or no route ({worst.detail})"
        waiting.about(said)
        waiting.advise([rank_0_command])
        if waiting.over and any(one.answer is Answer.OVER for one in probes):
            raise MasterLost(
                f"the run at {where} is ending, and no other has begun",
                why=f"its rank 0 still answers; {who} has waited {waiting.waited:.0f} s for the next one",
                next=rank_0_command,
            )
        if waiting.over:
            raise _never_came(spec, where + resolved, probes, waiting, rank_0_command if refused else None, who)
        await asyncio.sleep(min(POLL_EVERY, waiting.remaining))


def _not_rank_0(spec: WorldSpec, where: str, found: Probe) -> MasterNotAStore:
    if found.answer is Answer.STORE:
        return MasterNotAStore(
            f"the store at {where} has no roll call",
            why="a TCPStore of torch answers there, but no rank 0 of this program",
            next="start rank 0 with this program, or choose another --master_port",
        )
    answered = "" if found.answer is Answer.MUTE else f": {found.detail}"
    return MasterNotAStore(
        f"what listens at {where} is not rank 0",
        why=f"asked at {found.address}, {found.answer.value}{answered}",
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
            why=f"{who} on {launchers.host_name()} tried {tried}",
            next=f"{rank_0_command}\nthen try again; if rank 0 does run, compare its address and port with these",
        )
    return MasterUnreachable(
        f"no answer{waited} from rank 0's address {where}",
        why=f"{who} on {launchers.host_name()} tried {tried}",
        next=f"open TCP port {spec.master_port} on rank 0's host, or check the route: ping {spec.master_addr}",
    )
