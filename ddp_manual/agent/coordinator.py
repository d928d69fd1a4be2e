"""The coordinator's connections and its clock, a part of rank 0's agent. ``protocol/coordinator.py`` decides what
follows from each message.

The coordinator listens at rank 0's address, and has one connection per rank, rank 0's own among them.

Only the monotonic clock of rank 0's host counts, so the clocks of the hosts need not agree.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from ddp_manual.agent.connection import Connection
from ddp_manual.agent.network_interface import own_addresses
from ddp_manual.deadline import Waiting
from ddp_manual.errors import DdpManualError
from ddp_manual.messages import FromRank, FromStranger, Heartbeat, read_from_stranger
from ddp_manual.process_status import stopped_by
from ddp_manual.protocol.coordinator import CoordinatorProtocol
from ddp_manual.protocol.handshakes import LONGEST_HELLO, Peer
from ddp_manual.protocol.token_proof import Seal
from ddp_manual.protocol.wait_or_shrink import WaitOrShrink
from ddp_manual.ranks_and_runs import RankInfo, RunInfo, RunSoFar
from ddp_manual.run_folder import holds_another_run, own_run_dir
from ddp_manual.wording import as_ranges, in_words

TICK = 0.1
# Connections that are accepted before messages are read again; and connections that may wait to be accepted, of which
# the kernel allows at most net.core.somaxconn.
ACCEPTED_AT_ONCE = 16
MOST_WAITING = 65_535
# The share of this process's time that showing the run to observers may take.
LOOKS_SHARE = 0.2
# In a world of at least MANY_RANKS ranks, heartbeats pile up for GATHER seconds before they are read: to wake up for
# each heartbeat would cost more than to read it.
MANY_RANKS = 256
GATHER = 0.05


def stopped_agent(pid: int) -> str:
    """Say which signal has stopped an agent on this host, and what lets it go on; "" if none has."""
    signal = stopped_by(pid)
    return signal and f"{signal} has stopped its agent; kill -CONT {pid}, or fg in its terminal, lets it go on"


class Coordinator:
    """Accepts connections from ``serve`` until ``close``. See ``CoordinatorProtocol`` for the arguments."""

    def __init__(
        self, run: RunInfo, rank_0: RankInfo, seal: Seal, own_nonce: str, join_timeout: float, policy: WaitOrShrink
    ) -> None:
        self.protocol = CoordinatorProtocol(
            *(run, rank_0, seal, own_nonce, join_timeout, policy, time.monotonic()),
            own_addresses=own_addresses() if run.only_on_its_host else [],
            folder_of=self._folder_of,
            show=self._show_soon,
            stopped=stopped_agent,
        )
        self._server: asyncio.Server | None = None
        self._ticking: asyncio.TimerHandle | None = None
        self._gathering: asyncio.Handle | None = None
        self._looking = asyncio.Lock()
        self._working: set[asyncio.Future[None]] = set()

    @property
    def is_being_read(self) -> bool:
        return self.protocol.is_being_read(time.monotonic())

    async def serve(self, listener: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(
            lambda: Connection(read_from_stranger, self._accept, LONGEST_HELLO, stranger=True),
            sock=listener,
            backlog=ACCEPTED_AT_ONCE,
        )
        listener.listen(MOST_WAITING)  # not as ``backlog``: asyncio accepts that many connections in one turn
        self._tick()

    async def wait_for_goodbyes(self, log: Callable[[str], None], within: float) -> None:
        """Wait until the other ranks have left, ``within`` seconds at most: they need the store in rank 0's worker."""
        waiting = Waiting(within, log)
        while late := self.protocol.others_still_here:
            if waiting.over:
                log(f"not waiting longer for {in_words(as_ranges(late))}: no goodbye came")
                return
            if at_work := self.protocol.at_work(late):
                waiting.about(f"keeping the store for {in_words(as_ranges(at_work))}, still at work")
            await asyncio.sleep(0.02)
        waiting.ends()

    def end(self, error: DdpManualError | None = None) -> None:
        self.protocol.end(error, time.monotonic())

    def close(self, how_it_ended: Mapping[str, Any] | None = None) -> None:
        if self._ticking is not None:
            self._ticking.cancel()
        if self._server is not None:
            self._server.close()
        for peer in self.protocol.observers():  # their next question may come when nobody replies any more
            shown = {**self.protocol.describe(time.monotonic()), "ended": how_it_ended}
            self.protocol.handshakes.show(peer, shown)
        for peer in self.protocol.connections():
            peer.connection.close()

    def _accept(self, connection: Connection[Any]) -> None:
        now, wall_clock = time.monotonic(), time.time()
        peer = self.protocol.handshakes.greet(connection, secrets.token_hex(16), now, wall_clock)
        if peer is not None:
            connection.handle(partial(self._take, peer), partial(self._closed, peer))

    def _take(self, peer: Peer, message: FromRank | FromStranger) -> None:
        self.protocol.take(peer, message, time.monotonic())
        may_gather = self._gathering is None and isinstance(message, Heartbeat)
        if may_gather and self.protocol.run.world_size >= MANY_RANKS and self.protocol.roll_call.works:
            self._gathering = asyncio.get_running_loop().call_soon(self._let_heartbeats_pile_up)

    def _folder_of(self, so_far: RunSoFar) -> tuple[str | None, bool]:
        run_dir = own_run_dir(so_far.run_dir, self.protocol.recovery.policy.run_dir) or self.protocol.run.run_dir
        aside = run_dir is not None and holds_another_run(run_dir, so_far.run_id)  # such as on a new host of rank 0
        return f"{run_dir}-{so_far.run_id}" if aside else run_dir, aside

    def _closed(self, peer: Peer, reason: str) -> None:
        self.protocol.closed(peer, reason, time.monotonic())

    def _let_heartbeats_pile_up(self) -> None:
        """Let heartbeats pile up for GATHER seconds, after all messages that have come so far were read."""
        self._gathering = None
        time.sleep(GATHER)

    def _tick(self) -> None:
        self._ticking = asyncio.get_running_loop().call_later(TICK, self._tick)
        self.protocol.tick(time.monotonic())

    def _show_soon(self, peer: Peer, more: Mapping[str, Any]) -> None:
        self._working.add(work := asyncio.ensure_future(self._show(peer, more)))
        work.add_done_callback(self._working.discard)

    async def _show(self, peer: Peer, more: Mapping[str, Any]) -> None:
        async with self._looking:
            if not peer.connection.closed:
                began = time.monotonic()
                seen = {**self.protocol.describe(began), **more}
                self.protocol.handshakes.answer_look(peer, seen, began)
                await asyncio.sleep((1 / LOOKS_SHARE - 1) * (time.monotonic() - began))
