"""What answers at rank 0's address, the wait until rank 0's agent does, and what that agent shows of its run.

The coordinator speaks first, and the connection over which it greets is kept. A program that says nothing is sent a
question that torch's TCPStore answers, then one that a server that reads lines answers. An agent that was only busy
still greets, but closes the connection, since it cannot read such a question; then another connection is opened.
"""

from __future__ import annotations

import asyncio
import secrets
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import msgspec

from ddp_manual import messages
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.name_lookup import resolve_in_thread
from ddp_manual.deadline import POLL_EVERY, Waiting
from ddp_manual.errors import MasterLost, TokenMismatch
from ddp_manual.messages import read_from_rank_0
from ddp_manual.protocol.compatibility import other_version
from ddp_manual.protocol.handshakes import CLOSED
from ddp_manual.protocol.search_for_rank_0 import NOT_RANK_0, Answer, Search, Seen
from ddp_manual.protocol.token_proof import Seal, Unsealed
from ddp_manual.ranks_and_runs import more_seconds
from ddp_manual.wire import LONGEST_ANSWER, Read, printable, reader_of

# TCPStore.cpp: every client first sends VALIDATE and a magic number; PING is answered with its own four bytes.
VALIDATE = bytes.fromhex("00cef7853c")
_PING = b"\x0d"
# The end of an http request. Without a version Python's http.server would send a page and no status.
_LINE = b" / HTTP/1.0\r\n\r\n"
_GREETS = b'{"type":"greeting"'
# Seconds. A program that is not rank 0's agent must be named within 5 s.
CONNECT_TIMEOUT = 2.0
GREETED_WITHIN = 1.5
# Seconds for the greeting of an agent that has greeted too late once, since its host is overloaded.
BUSY_AGENT_GREETS_WITHIN = 5.0
REPLY_WITHIN = 1.0
SHOWN_WITHIN = 5.0
# Seconds. A name may get other addresses while a rank waits, such as when Kubernetes puts rank 0 on another host.
REFRESH_EVERY = 10.0

_read_run: Read[dict[str, Any]] = reader_of(dict[str, Any])


@dataclass(frozen=True)
class Probe(Seen):
    """What answered at an address; if it is rank 0's agent, also the open connection."""

    connection: Connection[messages.FromRank0] | None = None
    greeting: messages.Greeting | None = None
    nonces: list[str] = field(default_factory=list)
    """The nonces of the last two questions to rank 0, which signs its answer with that of the last one it has read."""


async def probe(address: str, port: int, *, more: float = 0.0) -> Probe:
    """Connect to an address, and find out within 5 s what listens there; a busy agent has 5 s more to greet.

    Args:
        more: seconds to wait longer for a greeting: an agent may have to greet thousands of other ranks first.
    """
    found = await _probe(address, port, GREETED_WITHIN + more)
    if found.answer is Answer.BUSY:  # the agent cannot read the questions, and closes that connection
        found = await _probe(address, port, BUSY_AGENT_GREETS_WITHIN + more)
    return found


async def _probe(address: str, port: int, greeted_within: float) -> Probe:
    try:
        opening = asyncio.get_running_loop().create_connection(lambda: Connection(read_from_rank_0), address, port)
        _, connection = await asyncio.wait_for(opening, CONNECT_TIMEOUT)
    except ConnectionRefusedError:
        return Probe(address, Answer.REFUSED)
    except (TimeoutError, asyncio.TimeoutError):
        return Probe(address, Answer.SILENT, "timed out")
    except OSError as error:
        return Probe(address, Answer.SILENT, error.strerror or str(error))
    nonce = b""
    for asked in range(3):  # at first nothing: rank 0's agent greets by itself
        if asked == 1:
            nonce = secrets.token_hex(2).encode()  # without a byte that other servers take for the end of a line
            connection.write(VALIDATE + _PING + nonce)
        elif asked == 2:
            connection.write(_LINE)
        with suppress(TimeoutError, asyncio.TimeoutError):
            greeting = await asyncio.wait_for(connection.receive(), REPLY_WITHIN if asked else greeted_within)
            if isinstance(greeting, messages.Greeting) and not asked:
                return Probe(address, Answer.GREETED, connection=connection, greeting=greeting)
            break
        if connection.first_bytes:  # bytes, but no whole line
            break
    connection.close()
    first = connection.first_bytes
    if first and first == nonce:
        return Probe(address, Answer.STORE)
    if first and _GREETS.startswith(first[: len(_GREETS)]) and (asked or not connection.ended):
        return Probe(address, Answer.BUSY)
    if first:
        return Probe(address, Answer.STRANGER, repr(first.decode("ascii", "backslashreplace"))[1:-1])
    if not connection.ended:
        return Probe(address, Answer.MUTE)
    if not asked:
        return Probe(address, Answer.CLOSED, connection.ended)
    closed = "it closed the connection when it was asked"
    return Probe(address, Answer.STRANGER, closed if connection.ended == CLOSED else connection.ended)


async def find_rank_0(search: Search, addresses: list[str], waiting: Waiting) -> Probe:
    """Wait until rank 0's agent greets at one of its addresses; return that probe, with the open connection.

    Raises:
        MasterNotAStore: something else answers. MasterRefused, MasterUnreachable, MasterLost: at the deadline.
    """
    spec = search.spec
    refresh_at, looking = waiting.waited + REFRESH_EVERY, None
    while True:
        if waiting.waited > refresh_at and (looking is None or looking.done()):
            refresh_at, looking = waiting.waited + REFRESH_EVERY, resolve_in_thread(spec.master_addr)
        if looking is not None and looking.done() and isinstance(found := looking.result(), list):
            addresses = found
        more = more_seconds(spec.world_size)
        probes = await asyncio.gather(*(probe(address, spec.master_port, more=more) for address in addresses))
        greeted = [found for found in probes if found.connection is not None]
        for other in greeted[1:]:
            other.connection.close()  # type: ignore[union-attr]
        if greeted:
            return greeted[0]
        elsewhere = search.hint()
        seen, finding = search.judge(probes, waiting.waited, elsewhere)
        if seen.answer in NOT_RANK_0 and not search.patient:
            raise finding.error
        # A network that is cut gives different answers in turn, such as "timed out" and "No route to host".
        kind = f"{seen.answer.name} {elsewhere}"
        waiting.wait_on(*finding, kind=kind, advice=search.advice(seen))
        await asyncio.sleep(min(POLL_EVERY, waiting.remaining))


async def look_at(there: Probe, where: str, token: bytes | None, **asked: bool) -> dict[str, Any]:
    """Ask the coordinator that has greeted for its run, and return the run as it is now, or as it was when it ended.

    Args:
        where: the coordinator's address, for an error message.
        asked: ``stacks``, for the Python stacks of every rank too, once the ranks have met; ``shrink``, to have the run
            go on without the ranks that are missing.

    Raises:
        MasterLost: the run has ended, or its coordinator does not answer.
        TokenMismatch: one side has a token, and the other side does not have this token.
    """
    assert there.connection is not None and there.greeting is not None
    there.connection.let_send(LONGEST_ANSWER)
    seal = Seal(token)
    there.nonces[:] = [there.nonces[-1] if there.nonces else "", secrets.token_hex(8)]
    question = messages.Question(there.nonces[-1], **asked)
    there.connection.send(seal.close(messages.Look, there.greeting.challenge, question))
    reason = "it closed the connection"
    try:
        answer = await asyncio.wait_for(there.connection.receive(), SHOWN_WITHIN)
        if isinstance(answer, messages.Refused):
            raise seal.refusal(answer, there.nonces[-1])
        if isinstance(answer, messages.Seen):
            with suppress(Unsealed):  # the question before: the run ended before rank 0 read this one
                return seal.open(answer, there.nonces[-2], _read_run)
            return seal.open(answer, there.nonces[-1], _read_run)
    except (TimeoutError, asyncio.TimeoutError):
        raise MasterLost(
            f"rank 0's agent at {where} does not answer",
            why=f"it was asked for the run, and said nothing for {SHOWN_WITHIN:.0f} s",
            next="look whether rank 0 is stopped or frozen",
        ) from None
    except Unsealed as unsealed:
        reason = str(unsealed)
    except (msgspec.MsgspecError, ValueError) as unreadable:
        why = f"this process cannot read its answer: {printable(str(unreadable))}"
        raise other_version(f"rank 0 at {where}", "this process", why) from None
    if answer is None and there.greeting.token == bool(seal):
        raise MasterLost(
            f"the run at {where} has ended", why="its rank 0 closed the connection", next="look at rank 0's last lines"
        )
    raise TokenMismatch(
        f"rank 0 at {where} does not have this process's token, or this process lacks rank 0's",
        why=f"of its answer: {reason}",
        next="give the run's DDP_MANUAL_TOKEN or --token_file",
    )
