from __future__ import annotations

import contextlib
import re
from pathlib import Path

import pytest

from ddp_manual import errors


def test_the_document_has_a_section_for_every_identifier_and_a_row_with_its_exit_code() -> None:
    document = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    assert sorted(re.findall(r"^## (.+)$", document, re.MULTILINE)) == sorted(errors.EVERY_ERROR)
    rows = re.findall(r"^\| (\d+) \|[^|]*\| *([^| ][^|]*)\|$", document, re.MULTILINE)
    codes = {name.strip(): int(code) for code, names in rows for name in names.split(",")}
    assert codes == {name: kind.exit_code for name, kind in errors.EVERY_ERROR.items() if name != "stopped"}


def test_every_error_is_raised_somewhere() -> None:
    package = Path(errors.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    names = [kind.__name__ for kind in errors.EVERY_ERROR.values()]
    assert [name for name in names if not re.search(rf"(?<!class )\b{name}\(", code)] == []


def test_a_signal_on_its_way_up_is_not_lost_in_a_library_that_catches_every_exception() -> None:
    with pytest.raises(errors.StopSignal) as caught, contextlib.suppress(Exception):
        raise errors.StopSignal(15)
    assert errors.stopped_by(caught.value).exit_code == 143
    assert errors.stopped_by(KeyboardInterrupt()).exit_code == 130
