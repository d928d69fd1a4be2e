"""Each fault as its people see it: the files here have a plan in words, and what each rank prints at which second.

``python -m tests.simulation --record`` writes what they print anew; read the difference before you commit it.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.simulation.scenarios import SCENARIOS, play


@pytest.mark.parametrize("path", SCENARIOS, ids=lambda path: path.stem)
def test_a_fault_is_told_as_it_was_recorded(path: Path) -> None:
    text, broken = play(path)
    assert not broken
    assert text == path.read_text(encoding="utf-8")
