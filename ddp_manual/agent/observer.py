"""What a third terminal can see of a run: it asks the coordinator, and joins nothing."""

from __future__ import annotations

import asyncio
import secrets
from typing import Any

from ddp_manual.agent.connection import Seal, Unsealed
from ddp_manual.agent.probe import Probe
from ddp_manual.errors import MasterLost, TokenMismatch, from_dict

ANSWER_TIMEOUT = 5.0


async def look_at(
    there: Probe, where: str, token: bytes | None, *, stacks: bool = False, nonce: str | None = None
) -> dict[str, Any]:
    """Ask the coordinator that has greeted for its run as it is now.

    Args:
        where: the coordinator's address, for an error message.
        stacks: ask for the Python stacks of every rank too, once the ranks have met.
        nonce: what the answer is bound to; the same for all looks over one connection, because a coordinator whose run
            fails sends a last answer without being asked.

    Raises:
        MasterLost: the run has ended, or its coordinator does not answer.
        TokenMismatch: one side has a token, and the other side does not have this token.
    """
    assert there.connection is not None
    seal, nonce = Seal(token), nonce or secrets.token_hex(8)
    purpose = f"look {there.greeting['challenge']}"
    there.connection.send({"look": seal.close(purpose, {"stacks": stacks, "nonce": nonce})})
    try:
        answer = await asyncio.wait_for(there.connection.receive(), ANSWER_TIMEOUT)
    except (TimeoutError, asyncio.TimeoutError):
        raise MasterLost(
            f"rank 0's agent at {where} does not answer",
            why=f"it was asked for the run, and said nothing for {ANSWER_TIMEOUT:.0f} s",
            next="look whether rank 0 is stopped or frozen",
        ) from None
    reason = "it closed the connection"
    if answer is not None:
        try:
            if "refused" in answer:
                raise from_dict(seal.open(f"refused {nonce}", answer["refused"]))
            return dict(seal.open(f"seen {nonce}", answer["seen"]))
        except Unsealed as unsealed:
            reason = str(unsealed)
    elif there.greeting["token"] == bool(seal):
        raise MasterLost(
            f"the run at {where} has ended",
            why="its rank 0 closed the connection",
            next="look at rank 0's last lines",
        )
    raise TokenMismatch(
        f"rank 0 at {where} does not have this process's token, or this process lacks rank 0's",
        why=f"of its answer: {reason}",
        next="give the run's DDP_MANUAL_TOKEN or --token_file",
    )
