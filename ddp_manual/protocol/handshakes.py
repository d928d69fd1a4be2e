"""Rank 0's connections that belong to no rank yet: each is greeted, proves the token, and is admitted or refused.

These strangers are bounded in number and time. A process that asks for a rank which another process holds has to wait:
see ``RollCall.admit``.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import msgspec

from ddp_manual import messages
from ddp_manual.errors import DdpManualError, TokenMismatch
from ddp_manual.messages import Signed, read_from_rank
from ddp_manual.protocol.compatibility import other_version
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.token_proof import Seal, Unsealed, claimed
from ddp_manual.ranks_and_runs import LastWords, RankInfo
from ddp_manual.wire import LONGEST_LINE, Read, encode, printable, reader_of

# Seconds within which a connection must say which rank it is, and more for each stranger, which may be read before it.
HELLO_WITHIN = 5.0
HELLO_EACH = 0.005
# Strangers that may be here at once: this many more than there are ranks.
MOST_STRANGERS = 64
LONGEST_HELLO = 1 << 16
# How a connection has ended if nothing has broken it.
CLOSED = "closed by the other side"

T = TypeVar("T")
_read_claim: Read[messages.Claim] = reader_of(messages.Claim)
_read_question: Read[messages.Question] = reader_of(messages.Question)


class Channel(Protocol):
    """What the coordinator asks of a connection: see ``agent/connection.py``. No method waits."""

    closed: bool

    @property
    def unsent(self) -> int: ...
    def send(self, message: messages.Message) -> None: ...
    def write(self, line: bytes) -> None: ...
    def let_send(self, longest: int, read: Read[Any] | None = None, *, stranger: bool = False) -> None: ...
    def close(self) -> None: ...
    def abort(self, reason: str) -> None: ...


@dataclass(eq=False)
class Peer:
    """A connection to rank 0. ``rank`` is None until it belongs to a rank."""

    connection: Channel
    challenge: str
    since: float
    wall_clock: float
    """When the connection came, in seconds since the epoch."""
    rank: int | None = None
    nonce: str = ""
    left: bool = False
    """Whether this rank has said goodbye."""
    worker: int = 0
    """How often its agent was asked for another worker."""
    awaits_answer: bool = False
    """Whether it has asked to see the run, and has not been shown it yet; until then it may say nothing more."""


class Peers(dict[int, Peer]):
    """Rank -> its connection, for the ranks that have one."""

    def send_to_all(self, message: messages.Message, without: Collection[int] = ()) -> None:
        line, without = encode(message), frozenset(without)
        for rank, peer in self.items():
            if rank not in without:
                peer.connection.write(line)


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

    def greet(self, connection: Channel, challenge: str, now: float, wall_clock: float) -> Peer | None:
        """Take a new connection, and send it the challenge; return None if there are too many strangers."""
        if len(self.strangers) >= self._roll_call.run.world_size + MOST_STRANGERS:
            # The stranger that has been silent for longest makes room: a rank says at once who it is.
            silent = next((peer for peer in self.strangers if peer not in self.claims), None)
            if silent is not None:
                del self.strangers[silent]
            (silent.connection if silent is not None else connection).abort("too many strangers")
            if silent is None:
                return None
        peer = Peer(connection, challenge, now, wall_clock)
        self.strangers[peer] = None
        run = self._roll_call.run
        connection.send(messages.Greeting(messages.PROTOCOL, peer.challenge, run.host, run.pid, bool(self._seal)))
        return peer

    def read_look(self, peer: Peer, look: messages.Look, now: float) -> messages.Question | None:
        """Return what an observer asks for; None: it was refused."""
        return self._open(peer, look, _read_question, "this process", now)

    def read_hello(self, peer: Peer, hello: messages.Hello, now: float) -> RankInfo | None:
        """Return which rank a connection asks to be; None: it was refused."""
        says = claimed(hello).get("info")
        says = says if isinstance(says, dict) else {}
        who = f"a process that says it is rank {says.get('rank')!r:.20} on {says.get('host')!r:.60}"
        claim = self._open(peer, hello, _read_claim, who, now)
        return claim.info if claim is not None else None

    def _open(self, peer: Peer, message: Signed, read: Read[T], who: str, now: float) -> T | None:
        """Return the content of the message with which a connection asks for something; None: it was refused."""
        run = self._roll_call.run
        peer.nonce = printable(str(claimed(message).get("nonce", "")))
        try:
            return self._seal.open(message, peer.challenge, read)
        except Unsealed as reason:
            error: DdpManualError = TokenMismatch(
                f"{who} does not have rank 0's token",
                why=f"rank 0 on {run.host} (pid {run.pid}) says of its request: {reason}",
                next="give every rank, and status, the same DDP_MANUAL_TOKEN or --token_file",
            )
            # A process without a token reads the refusal unsigned; a process with another token sees that it is signed.
            seal = self._seal if message.signature else Seal(None)
        except (msgspec.MsgspecError, ValueError, RecursionError) as reason:
            why = f"rank 0 on {run.host} cannot read what it says of itself: {printable(str(reason))}"
            error = other_version(who, "rank 0", why)
            seal = self._seal
        if isinstance(message, messages.Hello):
            self._roll_call.refuse(who, error, now)
        self.refuse(peer, error, seal)
        return None

    def admit_claims(self, now: float, only: Peer | None = None) -> dict[int, Peer]:
        """Return rank -> connection for those that belong to a rank from now on; refuse others, and let some wait.

        Args:
            only: decide about this claim alone: a job of 1,024 ranks that was started twice has 1,023 that wait.
        """
        admitted = {}
        for peer, info in [(only, self.claims[only])] if only is not None else list(self.claims.items()):
            false_rank_0 = info.rank == 0 and peer.nonce != self._own_nonce
            decision = self._roll_call.admit(info, now, peer.since, peer.wall_clock, false_rank_0=false_rank_0)
            if isinstance(decision, DdpManualError):
                self.refuse(peer, decision)
            elif decision:
                self.forget(peer)
                peer.rank = info.rank
                peer.connection.let_send(LONGEST_LINE, read_from_rank)
                peer.connection.send(self._seal.close(messages.Welcome, peer.nonce, self._roll_call.run))
                admitted[info.rank] = peer
        return admitted

    def show(self, peer: Peer, content: Any) -> None:
        """Show the run to an observer."""
        peer.connection.send(self._seal.close(messages.Seen, peer.nonce, content))

    def answer_look(self, peer: Peer, content: Any, now: float) -> None:
        """Show the run to an observer, which may then look again."""
        self.show(peer, content)
        peer.awaits_answer = False
        if peer in self.strangers:  # it is the last to make room for others
            self.strangers[peer] = self.strangers.pop(peer)
            peer.since = now
            peer.connection.let_send(LONGEST_HELLO, stranger=True)

    def refuse(self, peer: Peer, error: DdpManualError, seal: Seal | None = None) -> None:
        """Send ``error``; close the connection, unless it belongs to a rank, which closes it itself."""
        seal = self._seal if seal is None else seal
        peer.connection.send(seal.close(messages.Refused, peer.nonce, LastWords.of(error)))
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
