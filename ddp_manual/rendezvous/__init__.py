"""How ranks meet, check that they belong together, and watch over one another. Knows nothing of models or data."""

from __future__ import annotations

from ddp_manual.rendezvous.alone import alone
from ddp_manual.rendezvous.joining import rendezvous
from ddp_manual.rendezvous.world import World

__all__ = ["World", "alone", "rendezvous"]
