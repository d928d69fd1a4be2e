"""Scenarios: a plan in words and, below a line, what its people see."""

from __future__ import annotations

from pathlib import Path

from tests.simulation.invariants import check
from tests.simulation.plan import Plan
from tests.simulation.run import Run

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
LINE = "-" * 100 + "\n"


def play(path: Path) -> tuple[str, list[str]]:
    """Carry out the plan of a file; return the file's text with what its people see now, and the broken invariants."""
    words = path.read_text(encoding="utf-8").partition(LINE)[0]
    run = Run(Plan.from_words(words))
    run.carry_out()
    check(run)
    return f"{words}{LINE}{run.transcript}\n", run.broken


def record() -> None:
    """Write anew what the people of all scenarios see."""
    for path in SCENARIOS:
        text, broken = play(path)
        path.write_text(text, encoding="utf-8")
        for found in broken:
            print(f"{path.stem}: {found}")
