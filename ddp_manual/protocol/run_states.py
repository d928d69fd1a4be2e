"""The states of a roll call: ranks are missing or load torch, all work together, or rank 0 leaves."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_manual.protocol.reachability import Probes
from ddp_manual.ranks_and_runs import RankInfo, Ready

# Seconds for ranks that are here to load torch, even from a slow file server.
LOAD_WITHIN = 600.0


@dataclass
class Member:
    """A rank that is here."""

    info: RankInfo
    heard: float
    ready: Ready | None = None
    has_worked: bool = False
    """Whether it has gone on together with the others, with this rank 0."""


@dataclass
class Gathering:
    """Ranks are missing or load torch, at the start or after a loss. Those that are missing have ``within`` seconds,
    for which the clock stands still while all are here; then they have at least ``LOAD_WITHIN`` to load torch."""

    missing_since: float
    within: float
    loading_since: float | None = None
    probes: Probes | None = None
    """The probes of the network, once all ranks are here."""

    def tick(self, now: float, *, all_here: bool) -> float:
        """Run the clock for missing ranks or, if all are here, for loading torch; return its seconds, of ``limit``."""
        if all_here and self.loading_since is None:
            self.loading_since = now
        elif not all_here and self.loading_since is not None:  # a rank that comes and is lost restarts no clock
            self.missing_since, self.loading_since = now - self.missing_for(now), None
        return now - self.since

    def missing_for(self, now: float) -> float:
        """Return the seconds for which ranks were missing, without those in which all were here."""
        return (now if self.loading_since is None else self.loading_since) - self.missing_since

    def load_again(self, now: float) -> None:
        """Give the ranks, which are all here, the whole time to load torch once more."""
        self.missing_since, self.loading_since = now - self.missing_for(now), now

    @property
    def since(self) -> float:
        return self.missing_since if self.loading_since is None else self.loading_since

    @property
    def limit(self) -> float:
        return self.within if self.loading_since is None else max(self.within, LOAD_WITHIN)


@dataclass(frozen=True)
class Working:
    """All ranks have gone on together. A process that comes now is too late, unless ranks were left out."""

    missing_for: float
    """Seconds for which ranks were missing before."""


@dataclass(frozen=True)
class Over:
    """Rank 0 leaves: nobody is admitted any more, and no end of a connection is a loss."""

    was: Gathering | Working
