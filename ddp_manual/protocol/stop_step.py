"""After which step all ranks stop, once a signal has come to one of them: the first that no rank has passed."""

from __future__ import annotations

from collections.abc import Callable, Collection

from ddp_manual import messages
from ddp_manual.protocol.handshakes import Peers


class StopStep:
    """The ranks that a signal has asked to stop, and how many steps each rank has done.

    Ranks that are asked do their next step at most, and so that step is one that all can stop after.
    """

    def __init__(self, peers: Peers) -> None:
        self._peers = peers
        self._asked: dict[int, int] = {}
        """Rank -> the first signal that it has got."""
        self._done: dict[int, int] = {}
        self._named: messages.StopAfter | None = None

    def ask(self, rank: int, number: int) -> None:
        """Note that a signal has come to this rank, and ask all ranks for their steps if it is the first."""
        if not self._asked:
            self._peers.send_to_all(messages.AskStep())
        self._asked.setdefault(rank, number)

    def take(self, rank: int, steps: int) -> None:
        """Note how many steps a rank has done."""
        self._done[rank] = steps

    def name(self, awaited: Callable[[], Collection[int]]) -> None:
        """Send all ranks the step to stop after, once all ``awaited`` ranks have said how many steps they have done."""
        is_due = self._asked and self._named is None
        if is_due and self._done.keys() >= {*awaited()}:
            number, ranks = next(iter(self._asked.values())), sorted(self._asked)
            self._named = messages.StopAfter(max(self._done.values(), default=0) + 1, number, ranks)
            self._peers.send_to_all(self._named)
