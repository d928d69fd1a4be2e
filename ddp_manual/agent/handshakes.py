"""Rank 0's connections that belong to no rank yet: each is greeted, proves the token, and is admitted or refused.

These strangers are bounded in number and time. A process that asks for a rank which another process holds has to wait:
see ``RollCall.admit``.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ddp_manual.agent.connection import Connection, Seal, Unsealed, claimed
from ddp_manual.agent.roll_call import RollCall
from ddp_manual.errors import DdpManualError, TokenMismatch, VersionMismatch
from ddp_manual.messages import RankInfo
from ddp_manual.wire import LONGEST_LINE, printable

PROTOCOL = 1
# Seconds until a connection must have said which rank it is, and more for each connection that is read before it.
HELLO_WITHIN = 5.0
HELLO_EACH = 0.005
# Strangers besides as many as there are ranks.
MOST_STRANGERS = 64
LONGEST_HELLO = 1 << 16


@dataclass(eq=False)
class Peer:
    """A connection to rank 0. ``rank`` is None until it belongs to a rank."""

    connection: Connection
    challenge: str
    since: float
    rank: int | None = None
    nonce: str = ""
    left: bool = False
    """Whether this rank has said goodbye."""
    was_rank: bool = False
    """Whether this was a rank that has lost its seat."""
    begins_again: bool = False
    """Whether its agent replaces its worker, and has not said yet that the new one is ready."""
    awaits_answer: bool = False
    """Whether it has asked to see the run, and has not been shown it yet; until then it may say nothing more."""


class Handshakes:
    """The connections that belong to no rank.

    Args:
        own_nonce: the nonce in the hello of rank 0's own agent; no other process may be rank 0.
    """

    def __init__(self, roll_call: RollCall, seal: Seal, own_nonce: str) -> None:
        self._roll_call = roll_call
        self._seal = seal
        self._own_nonce = own_nonce
        # In the order in which they came, as a dict keeps it.
        self.strangers: dict[Peer, None] = {}
        self.claims: dict[Peer, RankInfo] = {}
        """Strangers that have said which rank they want to be; ``admit_claims`` decides."""

    def greet(self, connection: Connection) -> Peer | None:
        """Take a new connection, and send it the challenge; None: there are too many."""
        if len(self.strangers) >= self._roll_call.run.world_size + MOST_STRANGERS:
            # The stranger that has been silent for longest makes room: a rank says at once who it is.
            silent = next((peer for peer in self.strangers if peer not in self.claims), None)
            if silent is not None:
                del self.strangers[silent]
            (silent.connection if silent is not None else connection).abort("too many strangers")
            if silent is None:
                return None
        peer = Peer(connection, secrets.token_hex(16), time.monotonic())
        self.strangers[peer] = None
        run = self._roll_call.run
        rank_0 = {"host": run.host, "pid": run.pid, "token": bool(self._seal)}
        connection.send({"ddp_manual": PROTOCOL, "challenge": peer.challenge, **rank_0})
        return peer

    def open_sealed(self, peer: Peer, kind: str, sealed: Mapping[str, Any]) -> dict[str, Any] | None:
        """Return what a connection asks for, its ``hello`` or its ``look``; None: it was refused."""
        says = claimed(sealed)
        peer.nonce = printable(str(says.get("nonce", "")))
        try:
            return dict(self._seal.open(f"{kind} {peer.challenge}", sealed))
        except Unsealed as reason:
            who = f"a process that says it is rank {says.get('rank')!r:.20} on {says.get('host')!r:.60}"
            run = self._roll_call.run
            error = TokenMismatch(
                f"{who if kind == 'hello' else 'this process'} does not have rank 0's token",
                why=f"rank 0 on {run.host} (pid {run.pid}) says of its request: {reason}",
                next="give every rank, and status, the same DDP_MANUAL_TOKEN or --token_file",
            )
            if kind == "hello":
                self._roll_call.refuse(who, error, time.monotonic())
            # A process without a token reads the refusal unsealed; a process with another token sees that it is signed.
            self.refuse(peer, error, sealed="sealed" in sealed)
            return None

    def send_sealed(self, peer: Peer, kind: str, content: Mapping[str, Any]) -> None:
        peer.connection.send({kind: self._seal.close(f"{kind} {peer.nonce}", content)})

    def read_hello(self, peer: Peer, sealed: Mapping[str, Any]) -> RankInfo | None:
        """Return which rank a connection wants to be; None: it was refused."""
        hello = self.open_sealed(peer, "hello", sealed)
        if hello is None:
            return None
        del hello["nonce"]
        try:
            return RankInfo.from_message(hello)
        except (TypeError, ValueError) as reason:
            who = f"a process on {hello.get('host')!r:.60}"
            other_version = VersionMismatch(
                f"{who} was started with another version of ddp_manual than rank 0",
                why=f"rank 0 on {self._roll_call.run.host} cannot read what it says of itself: {reason}",
                next="install the same version on every host",
            )
            self._roll_call.refuse(who, other_version, time.monotonic())
            self.refuse(peer, other_version)
            return None

    def admit_claims(self, only: Peer | None = None) -> dict[int, Peer]:
        """Return rank -> connection for those that belong to a rank from now on; refuse others, and let some wait.

        Args:
            only: decide about this claim alone: a job of 1,024 ranks that was started twice has 1,023 that wait.
        """
        admitted = {}
        for peer, info in [(only, self.claims[only])] if only is not None else list(self.claims.items()):
            false_rank_0 = info.rank == 0 and peer.nonce != self._own_nonce
            now, wall_clock = time.monotonic(), time.time()
            decision = self._roll_call.admit(info, now, peer.since, wall_clock, false_rank_0=false_rank_0)
            if isinstance(decision, DdpManualError):
                self.refuse(peer, decision)
            elif decision:
                self.forget(peer)
                peer.rank = info.rank
                peer.connection.let_send(LONGEST_LINE)
                self.send_sealed(peer, "welcome", {"run": vars(self._roll_call.run)})
                admitted[info.rank] = peer
        return admitted

    def answer_look(self, peer: Peer, content: Mapping[str, Any]) -> None:
        """Show the run to an observer, which may then look again."""
        self.send_sealed(peer, "seen", content)
        peer.awaits_answer = False
        if peer in self.strangers:  # it is the last to make room for others
            self.strangers[peer] = self.strangers.pop(peer)
            peer.since = time.monotonic()
            peer.connection.let_send(LONGEST_HELLO, stranger=True)

    def refuse(self, peer: Peer, error: DdpManualError, *, sealed: bool = True) -> None:
        """Send the reason; close the connection, unless it belongs to a rank, which closes it itself."""
        if sealed:
            self.send_sealed(peer, "refused", error.as_dict())
        else:
            peer.connection.send({"refused": error.as_dict()})
        self.forget(peer)
        if peer.rank is None:
            peer.connection.close()

    def forget(self, peer: Peer) -> None:
        self.strangers.pop(peer, None)
        self.claims.pop(peer, None)

    def abort_silent(self, now: float) -> None:
        """Abort the connections that have not said in time which rank they are."""
        patience = HELLO_WITHIN + len(self.strangers) * HELLO_EACH
        for peer in [peer for peer in self.strangers if now - peer.since > patience]:
            if peer not in self.claims and not peer.awaits_answer:
                peer.connection.abort("it did not say which rank it is")
