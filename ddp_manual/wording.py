"""Words for numbers: ranks, addresses, seconds and bytes, as every sentence has them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

# Ranges of ranks that a sentence names.
MOST_RANGES = 16


def duration(seconds: float) -> str:
    """Return ``0.4 s``, ``23 s``, ``1 min 43 s`` or ``2 h 5 min``."""
    if seconds < 1:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s" if minutes else f"{rest} s"


def at(address: str, port: int) -> str:
    """Return ``10.0.0.1:29500`` or ``[fe80::1]:29500``."""
    return f"[{address}]:{port}" if ":" in address else f"{address}:{port}"


def counted(number: int, noun: str) -> str:
    """Return ``1 rank`` or ``2 ranks``."""
    return f"{number} {noun}{'s' * (number != 1)}"


def as_ranges(ranks: Sequence[int]) -> list[tuple[int, int]]:
    """Return [(1, 3), (7, 7)] for [1, 2, 3, 7]: short even for thousands of missing ranks."""
    consecutive = itertools.groupby(enumerate(ranks), lambda pair: pair[1] - pair[0])
    ranges = [[rank for _, rank in pairs] for _, pairs in consecutive]
    return [(ranks[0], ranks[-1]) for ranks in ranges]


def in_words(ranges: Sequence[Sequence[int]]) -> str:
    """Return ``ranks 1-3, 7`` for [(1, 3), (7, 7)]; after MOST_RANGES ranges ``, ...`` follows."""
    alone = len(ranges) == 1 and ranges[0][0] == ranges[0][1]
    shown = [str(first) if first == last else f"{first}-{last}" for first, last in ranges[:MOST_RANGES]]
    return ("rank " if alone else "ranks ") + ", ".join([*shown, *["..."] * (len(ranges) > MOST_RANGES)])


def byte_size(count: float, unit: int = 1024) -> str:
    """Format bytes, such as ``64 MB``; ``unit`` is 1000 for bandwidths, which are counted so."""
    for name in ("B", "KB", "MB"):
        if count < 999.5:  # it would be shown as 1e+03
            return f"{count:.3g} {name}"
        count /= unit
    return f"{count:.3g} GB" if count < 999.5 else f"{count:.0f} GB"
