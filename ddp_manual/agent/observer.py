"""What a third terminal can see of a run: it asks the coordinator, and joins nothing."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from typing import Any

from ddp_manual import environment
from ddp_manual.agent.address import at, resolve
from ddp_manual.agent.connection import Seal, Unsealed
from ddp_manual.agent.probe import Probe, find_rank_0
from ddp_manual.agent.waiting import Waiting
from ddp_manual.errors import MasterLost, TokenMismatch, from_dict
from ddp_manual.world_spec import WorldSpec

LOOK_EVERY = 1.0
ANSWER_TIMEOUT = 5.0


class Observer:
    """Looks at the run of the coordinator that has greeted."""

    def __init__(self, there: Probe, where: str, token: bytes | None) -> None:
        assert there.connection is not None
        self._connection, self._greeting = there.connection, there.greeting
        self._where = where
        self._seal = Seal(token)
        self.ended = False
        """Whether rank 0 has closed the connection."""

    async def look(self, *, stacks: bool = False) -> dict[str, Any]:
        """The run as it is now, with ``stacks`` those of every rank, once they have met.

        Raises:
            MasterLost: it has ended, or does not answer. TokenMismatch: one side has a token, the other not this one.
        """
        nonce = secrets.token_hex(8)
        wanted = {"stacks": stacks, "nonce": nonce}
        self._connection.send({"look": self._seal.close(f"look {self._greeting['challenge']}", wanted)})
        try:
            answer = await asyncio.wait_for(self._connection.receive(), ANSWER_TIMEOUT)
        except (TimeoutError, asyncio.TimeoutError):
            raise MasterLost(
                f"rank 0's agent at {self._where} does not answer",
                why=f"it was asked for the run, and said nothing for {ANSWER_TIMEOUT:.0f} s",
                next="look whether rank 0 is stopped or frozen",
            ) from None
        if answer is None:
            self.ended = True
            if self._greeting["token"] != bool(self._seal):
                raise self._other_token("it closed the connection")
            raise MasterLost(
                f"the run at {self._where} has ended",
                why="its rank 0 closed the connection",
                next="look at rank 0's last lines",
            )
        try:
            if "refused" in answer:
                raise from_dict(self._seal.open(f"refused {nonce}", answer["refused"]))
            seen: dict[str, Any] = self._seal.open(f"seen {nonce}", answer["seen"])
        except Unsealed as reason:
            raise self._other_token(str(reason)) from None
        return seen

    def _other_token(self, reason: str) -> TokenMismatch:
        return TokenMismatch(
            f"rank 0 at {self._where} does not have this process's token, or this one lacks rank 0's",
            why=f"of its answer: {reason}",
            next="give the run's DDP_MANUAL_TOKEN or --token_file",
        )

    def close(self) -> None:
        self._connection.close()


async def look(spec: WorldSpec, *, again: bool, stacks: bool = False) -> AsyncIterator[dict[str, Any]]:
    """The run at rank 0's address, now and with ``again`` every second until it has ended; ``stacks``: see Observer.

    Raises:
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: there is none, and why.
    """
    start_rank_0 = (
        f"ddp-manual train --world_size N --rank 0 --master_addr {spec.master_addr} --master_port {spec.master_port}"
    )
    token = environment.token(spec.token_file)
    waiting = Waiting(0.0, lambda line: None)
    there = await find_rank_0(spec, resolve(spec.master_addr), waiting, start_rank_0, who="status")
    observer = Observer(there, at(there.address, spec.master_port), token)
    try:
        yield await observer.look(stacks=stacks)
        while again:
            await asyncio.sleep(LOOK_EVERY)
            try:
                yield await observer.look(stacks=stacks)
            except MasterLost:
                if observer.ended:
                    return
                raise
    finally:
        observer.close()
