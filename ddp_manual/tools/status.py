"""``status``: the run at rank 0's address, from any third terminal; it joins nothing."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

from ddp_manual import launchers
from ddp_manual.agent.address import resolve
from ddp_manual.agent.network_interface import at
from ddp_manual.agent.observer import look_at
from ddp_manual.agent.probe import find_rank_0
from ddp_manual.errors import MasterLost
from ddp_manual.terminal import Waiting
from ddp_manual.world_spec import WorldSpec

LOOK_EVERY = 1.0


async def look(spec: WorldSpec, *, again: bool, stacks: bool = False) -> AsyncIterator[dict[str, Any]]:
    """The run at rank 0's address, now and with ``again`` every second until it has ended; ``stacks``: see ``look_at``.

    Raises:
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: there is none, and why.
    """
    start_rank_0 = (
        f"ddp-manual train --world_size N --rank 0 --master_addr {spec.master_addr} --master_port {spec.master_port}"
    )
    token = launchers.token(spec.token_file)
    waiting = Waiting(0.0, lambda line: None)
    there = await find_rank_0(spec, resolve(spec.master_addr), waiting, start_rank_0, who="status")
    assert there.connection is not None
    where = at(there.address, spec.master_port)
    try:
        yield await look_at(there, where, token, stacks=stacks)
        while again:
            await asyncio.sleep(LOOK_EVERY)
            try:
                yield await look_at(there, where, token, stacks=stacks)
            except MasterLost:
                if not there.connection.closed:  # it is frozen, or stopped
                    raise
                return
    finally:
        there.connection.close()
