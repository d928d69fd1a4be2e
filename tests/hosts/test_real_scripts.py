"""Scripts of every kind, unmodified, on two hosts."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.conftest import Start
from tests.hosts.conftest import Hosts
from tests.real_scripts import SCRIPTS, Script, Starts, completed, under_torchrun

pytestmark = pytest.mark.soak(only=True)


@pytest.mark.parametrize(
    ("how", "script"),
    [pytest.param(how, SCRIPTS[name], id=f"{name}-{how}") for how in ("by_hand", "launch") for name in SCRIPTS],
)
def test_a_script_prints_on_two_hosts_what_it_prints_under_torchrun(
    hosts: Hosts, start: Start, script: Script, how: str, port: int, shared_folder: Path, tmp_path: Path
) -> None:
    """What each host prints once is printed twice; which rank of its host a rank is differs from one host."""
    (tmp_path / "here").mkdir()
    starts = Starts(start=start, script=script, port=port, folder=tmp_path / "here", hosts=hosts(2))
    lines, expected = completed(getattr(starts, how), script), under_torchrun(starts, shared_folder)
    assert without_index(lines) == without_index(expected)


def without_index(lines: list[str]) -> set[str]:
    return {line for line in lines if "rocess index: " not in line}
