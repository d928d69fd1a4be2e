"""How often heartbeats are sent, and after which silence a rank is silent."""

from __future__ import annotations

from ddp_manual.ranks_and_runs import RunInfo


def heartbeat_period(run: RunInfo) -> float:
    """Return the seconds between heartbeats in both directions: rank 0 reads at most about 4,000 per second."""
    return max(0.5, run.world_size / 4000)


def silent_after(run: RunInfo) -> float:
    """Return the seconds after which a rank is silent: a heartbeat may be unsent, and another on its way."""
    return run.peer_timeout + 2 * heartbeat_period(run)
