"""Each fault as its people see it: the files here have a plan in words, and what each rank prints at which second.

``python -m tests.simulation --record`` writes what they print anew; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.scenarios import DOCUMENTS, LINE, QUOTE, SCENARIOS, play, quoted_anew


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_fault_is_told_as_it_was_recorded(path: Path) -> None:
    text, broken = play(path)
    assert not broken
    plan, _, seen = text.partition(LINE)
    assert seen.count("*** at ") >= plan.count("\nat "), "what the plan says has not happened"
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_quote_what_is_printed(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert QUOTE.search(text)
    assert quoted_anew(text) == text
