"""How often heartbeats are sent, and after how many seconds without one a rank counts as silent."""

from __future__ import annotations

from ddp_manual.ranks_and_runs import RunInfo


def heartbeat_period(run: RunInfo) -> float:
    """Return the seconds between heartbeats in both directions: rank 0 reads at most about 4,000 per second."""
    return max(0.5, run.world_size / 4000)


def silent_after(run: RunInfo) -> float:
    """Return the seconds after which a rank counts as silent: one heartbeat may be unsent, another one on its way."""
    return run.peer_timeout + 2 * heartbeat_period(run)
