"""What rank 0 asks agents, and what follows from their replies: the stacks of their workers, and their records."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_manual import messages
from ddp_manual.protocol.handshakes import Peers

# The number of each request for stacks; no other request has it.
STACKS = 0

Then = Callable[[Mapping[int, Any], float], None]
"""Takes the replies by rank, and the time."""


@dataclass(frozen=True)
class Inquiry:
    """A question to agents. ``then`` gets the replies once all agents have replied or are gone, or the time is up."""

    number: int
    awaited: set[int]
    """The ranks that have not replied yet."""
    until: float
    then: Then
    replies: dict[int, Any] = field(default_factory=dict)


class Inquiries:
    """The open inquiries. The key of each is the question that it answers, or the observer that has asked."""

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._inquiries: dict[object, Inquiry] = {}

    def __contains__(self, answers: object) -> bool:
        return answers in self._inquiries

    def ask(self, answers: object, inquiry: Inquiry, request: messages.Message, now: float) -> None:
        """Ask those of its ranks that are here; send no request to a rank that still owes a reply to the same one."""
        asked = {rank for one in self._inquiries.values() if one.number == inquiry.number for rank in one.awaited}
        inquiry.awaited.intersection_update(self._peers)
        self._inquiries[answers] = inquiry
        for rank in inquiry.awaited - asked:
            self._peers[rank].connection.send(request)
        self._end_if_over(answers, now)

    def take_reply(self, rank: int, number: int, reply: Any, now: float) -> None:
        for answers, inquiry in [*self._inquiries.items()]:
            if inquiry.number == number and rank in inquiry.awaited:
                inquiry.awaited.remove(rank)
                inquiry.replies[rank] = reply
                self._end_if_over(answers, now)

    def gone(self, rank: int) -> None:
        """Await no reply from a rank whose connection has ended."""
        for inquiry in self._inquiries.values():
            inquiry.awaited.discard(rank)

    def check(self, now: float) -> None:
        """End the inquiries for which the time is up."""
        for answers in [*self._inquiries]:
            self._end_if_over(answers, now)

    def end(self, now: float, without: Collection[object]) -> None:
        """End all inquiries, ``without`` some of them, with the replies that are here."""
        for answers in self._inquiries.keys() - {*without}:
            self._inquiries[answers].then(self._inquiries[answers].replies, now)

    def _end_if_over(self, answers: object, now: float) -> None:
        inquiry = self._inquiries.get(answers)
        if inquiry is not None and (not inquiry.awaited or now >= inquiry.until):
            del self._inquiries[answers]
            inquiry.then(inquiry.replies, now)
