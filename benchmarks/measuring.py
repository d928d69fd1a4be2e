"""Interleaved repetitions, and how to report them: a median with its range."""

from __future__ import annotations

import os
import platform
import socket
import statistics
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent


def interleave(sides: Mapping[str, Callable[[], float]], repetitions: int) -> dict[str, list[float]]:
    """Run the sides in turn, ``repetitions`` times, so that a machine that slows down slows all sides down."""
    results: dict[str, list[float]] = {name: [] for name in sides}
    for repetition in range(repetitions):
        for name, side in sides.items():
            results[name].append(side())
            print(f"  {repetition + 1}/{repetitions} {name}: {results[name][-1]:.4g}", flush=True)
    return results


def ratio(over: Sequence[float], under: Sequence[float], digits: int = 2) -> str:
    """Return ``1.52 (1.44 to 1.60)``: the median of the pairwise ratios, and their range."""
    ratios = [one / other for one, other in zip(over, under, strict=True)]
    return f"{statistics.median(ratios):.{digits}f} ({min(ratios):.{digits}f} to {max(ratios):.{digits}f})"


def machine() -> str:
    import torch

    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, torch {torch.__version__}"


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
