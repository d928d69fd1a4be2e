"""A normal rank, except that rank 0 receives a Ctrl-C while it leaves."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

from ddp_manual.agent.main import Agent
from ddp_manual.cli import main

leave_in_order = Agent._leave_in_order


async def signalled(self: Agent, within: float) -> None:
    if self.spec.rank == 0:
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(0.1)  # it is told from the event loop
    await leave_in_order(self, within)


if __name__ == "__main__":
    Agent._leave_in_order = signalled  # type: ignore[method-assign]
    main(["train", *sys.argv[1:]])
