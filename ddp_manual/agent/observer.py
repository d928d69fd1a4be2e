"""What a third terminal can see of a run: it asks the coordinator, and joins nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from ddp_manual.agent.connection import Seal, Unsealed
from ddp_manual.agent.probe import Probe
from ddp_manual.errors import MasterLost, TokenMismatch, from_dict

ANSWER_TIMEOUT = 5.0


async def look_at(
    there: Probe, where: str, token: bytes | None, *, stacks: bool = False, nonces: Sequence[str] = ()
) -> dict[str, Any]:
    """Ask the coordinator that has greeted for its run as it is now.

    Args:
        where: the coordinator's address, for an error message.
        stacks: ask for the Python stacks of every rank too, once the ranks have met.
        nonces: one for this look, to which its answer is bound, then that of the look before: a coordinator whose run
            fails sends a last answer, without being asked, to the look that it has read last.

    Raises:
        MasterLost: the run has ended, or its coordinator does not answer.
        TokenMismatch: one side has a token, and the other side does not have this token.
    """
    assert there.connection is not None
    seal, nonces = Seal(token), nonces or (secrets.token_hex(8),)
    nonce = nonces[0]
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
            if "last" in answer:
                return _open_last(seal, nonces, answer["last"])
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


def _open_last(seal: Seal, nonces: Sequence[str], answer: Mapping[str, Any]) -> dict[str, Any]:
    for nonce in nonces[1:]:
        with suppress(Unsealed):
            return dict(seal.open(f"last {nonce}", answer))
    return dict(seal.open(f"last {nonces[0]}", answer))
