"""Scenarios: a plan in words and, below a line, what its people see. The documents quote errors from them."""

from __future__ import annotations

import re
from pathlib import Path

from tests.simulation.invariants import check
from tests.simulation.plan import Plan
from tests.simulation.run import Run

FOLDER = Path(__file__).resolve().parent.parent / "scenarios"
SCENARIOS = sorted(FOLDER.glob("*.txt"))
LINE = "-" * 100 + "\n"
DOCUMENTS = [FOLDER.parents[1] / "docs" / name for name in ("faults.md", "how-ranks-meet.md")]
QUOTE = re.compile(
    r"(Rank (\d+) prints(, by the second)?[^`]*?\(\.\./tests/scenarios/([\w-]+\.txt)\)+:\n\n```text\n)(.*?)(```\n)",
    re.DOTALL,
)


def play(path: Path) -> tuple[str, list[str]]:
    """Carry out the plan of a file; return the file's text with what its people see now, and the broken invariants."""
    words = path.read_text(encoding="utf-8").partition(LINE)[0]
    run = Run(Plan.from_words(words))
    run.carry_out()
    check(run)
    return f"{words}{LINE}{run.transcript}\n", run.broken


def quoted_anew(document: str) -> str:
    """Return the text of a document in which each quote says what the rank prints now: its error, or all its lines."""

    def anew(quote: re.Match[str]) -> str:
        text = (FOLDER / quote[4]).read_text(encoding="utf-8").partition(LINE)[2]
        if quote[3]:
            said = "".join(re.findall(rf"^ *[\d.]+ rank {quote[2]} on .*\n(?: {{7}}.*\n)*", text, re.MULTILINE))
            return quote[1] + said + quote[6]
        error = re.search(rf" rank {quote[2]} on \S+: (error\[.*\n(?: {{11}}.*\n)*)", text)
        assert error is not None, quote[0]
        return quote[1] + re.sub(r"^ {11}", "", error[1], flags=re.MULTILINE) + quote[6]

    return QUOTE.sub(anew, document)


def record() -> None:
    """Write anew what the people of all scenarios see, and the documents that quote it."""
    for path in SCENARIOS:
        text, broken = play(path)
        path.write_text(text, encoding="utf-8")
        for found in broken:
            print(f"{path.stem}: {found}")
    for document in DOCUMENTS:
        document.write_text(quoted_anew(document.read_text(encoding="utf-8")), encoding="utf-8")
