"""Each fault as its people see it: the files here have a plan in words, and what each rank prints at which second.

``python -m tests.simulation --record`` writes what they print anew; read the difference before you commit it.
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.simulation.people import COLUMNS
from tests.simulation.scenarios import DOCUMENTS, LINE, QUOTE, SCENARIOS, play, quoted_anew

# What people are told to type.
COMMAND = re.compile(
    r"  (next: |  *)?(train\.py --world_size \d+ --rank \d+|ddp-manual "
    r"(run --world_size \d+ --rank \d+ train\.py|status .*--shrink))"
)


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_fault_is_told_as_it_was_recorded(path: Path) -> None:
    text, broken = play(path)
    assert not broken
    plan, _, seen = text.partition(LINE)
    assert seen.count("*** at ") >= plan.count("\nat "), "what the plan says has not happened"
    assert text == path.read_text(encoding="utf-8")


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_screen_80_columns_wide_breaks_prose_between_words_and_no_command(path: Path) -> None:
    """In front of each line the recorded one has the time and who says it, in place of the rank."""
    recorded = path.read_text(encoding="utf-8").partition(LINE)[2]
    for rank, first, rest in re.findall(r"^ *[\d.]+ (rank \d+) on \S+: (.*)\n((?: {9}.*\n)*)", recorded, re.MULTILINE):
        if first.startswith("*** "):
            continue
        tag = "" if first.startswith(("error[", "stopped by")) else f"[{rank}] "
        for line in [tag + first, *(line[9:] for line in rest.splitlines())]:
            assert len(line) <= COLUMNS, line
            if "train.py --" in line or "ddp-manual " in line:
                assert COMMAND.fullmatch(line), line


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.stem)
def test_documents_quote_what_is_printed(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert QUOTE.search(text)
    assert quoted_anew(text) == text
