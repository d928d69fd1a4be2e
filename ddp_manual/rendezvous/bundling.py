"""When rank 0 tells those who wait of a change: soon enough for people, seldom enough for a store of thousands."""

from __future__ import annotations

import time

from ddp_manual.rendezvous.waiting import LINE_EVERY

# Seconds without a change, for each rank that is here, before anybody is told: the store then serves about 2,000
# readers a second, and whoever comes in a rush that brings all ranks gets one answer, which says where it stands.
LULL = 1 / 2000
SHORTEST_LULL = 0.05
# Seconds that a change may be kept back at most, for each rank that is here; a rank that has no answer after 2 s says
# so to its user, and after 5 s it leaves.
BUNDLE = 1 / 1000
SHORTEST_BUNDLE, LONGEST_BUNDLE = 1.5, 3.0
# Up to this many ranks everybody is told of each change.
SMALL_WORLD = 64
# Seconds after which a small change among many ranks is told too: a waiting rank says a line as often.
TELL_EVERY = LINE_EVERY


class Bundle:
    """The changes that nobody was told of yet."""

    def __init__(self) -> None:
        self.due: float | None = None
        """When to tell of them, by the monotonic clock; None if there are none."""
        self._since: float | None = None
        self._noteworthy = False
        self._told_at = time.monotonic()
        self._told_of = 0

    @property
    def is_due(self) -> bool:
        return self.due is not None and time.monotonic() >= self.due

    def add(self, here: int, *, noteworthy: bool) -> None:
        """Something has changed, and ``here`` ranks are here now.

        Args:
            noteworthy: more than that one more rank has come.
        """
        now = time.monotonic()
        self._noteworthy |= noteworthy
        if self._since is None:
            self._since = now
        self.due = min(
            now + max(SHORTEST_LULL, here * LULL),
            self._since + min(max(SHORTEST_BUNDLE, here * BUNDLE), LONGEST_BUNDLE),
        )

    def is_for_all(self, here: int) -> bool:
        """Every message is read by all who wait. Of many ranks that come one by one, half as many as were here are one
        change: so all the messages together are read O(world_size) times, but for one every TELL_EVERY."""
        return (
            self._noteworthy
            or here <= SMALL_WORLD
            or here >= self._told_of * 3 / 2
            or time.monotonic() >= self._told_at + TELL_EVERY
        )

    def told_newcomers(self) -> None:
        """The others are told later."""
        self._since, self.due = None, self._told_at + TELL_EVERY

    def told_all(self, here: int) -> None:
        self._since = self.due = None
        self._noteworthy = False
        self._told_at, self._told_of = time.monotonic(), here
