"""Simulate runs, and say which broke an invariant.

python -m tests.simulation --runs 1000 [--ranks 4] [--seed 0] [--faults 1]
python -m tests.simulation --transcript --seed 17
python -m tests.simulation --record
"""

from __future__ import annotations

import sys
import time

import click

from tests.simulation import scenarios
from tests.simulation.invariants import Figures, check
from tests.simulation.plan import Plan, draw, shrunk
from tests.simulation.run import Run


def simulate(plan: Plan) -> Run:
    """Carry a plan out, and check it."""
    run = Run(plan)
    run.carry_out()
    check(run)
    return run


def first_failure(run: Run) -> str:
    """Shrink the plan of a run that has failed; return both plans, what its people saw, and the broken invariants."""
    number = run.broken[0].split(" at ")[0]
    plan = shrunk(run.plan, lambda plan: any(found.startswith(number) for found in simulate(plan).broken))
    smallest = simulate(plan)
    return "\n\n".join([str(run.plan), f"shrunk:\n{plan}", smallest.transcript, "\n".join(smallest.broken)])


@click.command(help=__doc__, context_settings={"show_default": True})
@click.option("--runs", default=1, help="How many runs.")
@click.option("--ranks", type=int, default=None, help="Ranks of each run (default: 2 to 6).")
@click.option("--faults", type=int, default=None, help="Faults of each run (default: 0 to 4).")
@click.option("--seed", default=0, help="The seed of the first run; the others follow.")
@click.option("--transcript", is_flag=True, help="Print one run as its people saw it, and nothing else.")
@click.option("--record", is_flag=True, help="Write what the people of tests/scenarios see anew.")
@click.option("--first", is_flag=True, help="Name the first run that fails in one line, and end.")
@click.option("--keep-going", is_flag=True, help="Count all runs that fail, in place of showing the first.")
def main(
    runs: int,
    ranks: int | None,
    faults: int | None,
    seed: int,
    transcript: bool,
    record: bool,
    first: bool,
    keep_going: bool,
) -> None:
    if record:
        scenarios.record()
        return
    if transcript:
        print(simulate(draw(seed, ranks, faults)).transcript)
        return
    figures, failed, began = Figures(), dict[str, list[int]](), time.monotonic()
    for one in range(seed, seed + runs):
        run = simulate(draw(one, ranks, faults))
        figures.add(run)
        if run.broken and first:
            print(f"seed {one}: {run.broken[0]}")
            sys.exit(1)
        if run.broken and not keep_going:
            print(first_failure(run))
            sys.exit(1)
        for found in run.broken:
            failed.setdefault(found.split(" at ")[0], []).append(one)
    seconds = time.monotonic() - began
    print(f"{runs} runs, {60 * runs / seconds:.0f} a minute; {figures}")
    for what, seeds in sorted(failed.items()):
        print(f"{what}: {len(seeds)} times, such as in seed {', '.join(map(str, seeds[:8]))}")
    sys.exit(bool(failed))


if __name__ == "__main__":
    main()
