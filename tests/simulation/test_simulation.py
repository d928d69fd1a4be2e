"""Simulated runs: none breaks an invariant.

A failure prints its plan, shrunk, and what its people saw; tests/scenarios is the place for a plan worth keeping. The
tests take the same seeds each time, the soak seeds that nobody has tried before.
"""

from __future__ import annotations

import os
import secrets

import pytest

from tests.simulation.__main__ import first_failure, simulate
from tests.simulation.plan import Plan, draw
from tests.simulation.planted import FAULTS, REPOSITORY, Planted, found_by, place_of

RUNS = int(os.environ.get("DDP_MANUAL_SOAK_RUNS", "600"))
FIRST = secrets.randbelow(1 << 40) if RUNS > 600 else 0
BLOCKS = 12
# Runs in which the soak finds each planted fault; the tests plant one that a few runs find.
RUNS_TO_FIND = int(os.environ.get("DDP_MANUAL_SOAK_PLANTED", "100"))
PLANTED = [one for one in FAULTS if RUNS_TO_FIND > 100 or one.name == "no state is said to be held"]


@pytest.mark.soak
@pytest.mark.timeout(0 if RUNS > 600 else 600)
@pytest.mark.parametrize("block", range(BLOCKS))
def test_simulated_runs_break_no_invariant(block: int) -> None:
    number = RUNS // BLOCKS
    for seed in range(FIRST + block * number, FIRST + (block + 1) * number):
        run = simulate(draw(seed))
        assert not run.broken, first_failure(run)


@pytest.mark.soak
@pytest.mark.timeout(0 if RUNS_TO_FIND > 100 else 300)
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.name.replace(" ", "-"))
def test_simulated_runs_find_a_planted_fault(planted: Planted) -> None:
    finding = found_by(planted, RUNS_TO_FIND)
    assert finding.runs is not None, finding.said


@pytest.mark.parametrize("planted", FAULTS, ids=lambda planted: planted.name.replace(" ", "-"))
def test_a_fault_can_still_be_planted(planted: Planted) -> None:
    assert place_of(planted, REPOSITORY)


def test_a_plan_is_read_as_it_was_put_into_words() -> None:
    for seed in range(300):
        words = str(draw(seed))
        assert str(Plan.from_words(words)) == words


def test_a_seed_gives_the_same_transcript_again() -> None:
    for seed in range(5):
        assert simulate(draw(seed)).transcript == simulate(draw(seed)).transcript


def test_sixty_four_ranks_meet_and_one_of_them_is_lost() -> None:
    for seed in range(3):
        run = simulate(draw(seed, ranks=64, faults=1))
        assert not run.broken, first_failure(run)
