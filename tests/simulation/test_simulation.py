"""Runs with seeds that nobody has tried before: none breaks an invariant.

A failure prints its plan, shrunk, and what its people saw; tests/scenarios is the place for a plan worth keeping.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.simulation.__main__ import first_failure, simulate
from tests.simulation.plan import draw

RUNS = int(os.environ.get("DDP_MANUAL_SOAK_RUNS", "3000"))
BLOCKS = 6


@pytest.mark.soak
@pytest.mark.timeout(0 if RUNS > 3000 else 300)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_runs_with_new_seeds_break_no_invariant(block: int) -> None:
    first = secrets.randbelow(1 << 40)
    for seed in range(first, first + RUNS // BLOCKS):
        run = simulate(draw(seed))
        assert not run.broken, first_failure(run)


def test_a_seed_gives_the_same_transcript_again() -> None:
    for seed in range(20):
        assert simulate(draw(seed)).transcript == simulate(draw(seed)).transcript


def test_sixty_four_ranks_meet_and_one_of_them_is_lost() -> None:
    for seed in range(3):
        run = simulate(draw(seed, ranks=64, faults=1))
        assert not run.broken, first_failure(run)
