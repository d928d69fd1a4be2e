from __future__ import annotations

import contextlib
import errno
import re
from pathlib import Path

import pytest

from ddp_manual import errors


def test_every_identifier_belongs_to_its_family_exit_code() -> None:
    codes = {name: kind.exit_code for name, kind in errors.EVERY_ERROR.items() if name != "stopped"}
    assert codes == {
        "training-failed": 1,
        "bad-option": 2,
        "rank-missing": 10,
        "host-not-ready": 10,
        "master-unresolvable": 11,
        "master-refused": 11,
        "master-unreachable": 11,
        "master-not-a-store": 11,
        "port-in-use": 11,
        "address-not-local": 11,
        "loopback-master": 11,
        "world-size-mismatch": 12,
        "config-mismatch": 12,
        "version-mismatch": 12,
        "token-mismatch": 12,
        "rank-taken": 13,
        "peer-failed": 14,
        "peer-lost": 14,
        "peer-stalled": 14,
        "collective-mismatch": 14,
        "master-lost": 14,
        "replicas-differ": 14,
        "disk-full": 15,
        "checkpoint-missing": 15,
        "checkpoint-corrupt": 15,
        "checkpoint-mismatch": 15,
        "data-missing": 16,
        "data-corrupt": 16,
        "data-differs": 16,
        "device-missing": 17,
        "device-taken": 17,
        "backend-unavailable": 17,
        "out-of-memory": 17,
        "peer-unreachable": 18,
    }


def test_the_document_has_a_section_and_a_row_for_every_identifier_and_no_other() -> None:
    document = (Path(__file__).parents[2] / "docs" / "faults.md").read_text()
    sections = re.findall(r"^## (.+)$", document, re.MULTILINE)
    in_table = {
        name.strip()
        for row in re.findall(r"^\| [\d+n]+ \|[^|]*\|([^|]*)\|$", document, re.MULTILINE)
        for name in row.split(",")
        if name.strip()
    }
    assert sorted(sections) == sorted(errors.EVERY_ERROR)
    assert in_table == set(errors.EVERY_ERROR)


def test_every_error_is_raised_somewhere() -> None:
    package = Path(errors.__file__).parent
    code = "".join(path.read_text() for path in package.rglob("*.py"))
    names = [kind.__name__ for kind in errors.EVERY_ERROR.values()]
    assert [name for name in names if not re.search(rf"(?<!class )\b{name}\(", code)] == []


def test_an_error_reads_what_why_next_and_hangs_its_further_lines() -> None:
    error = errors.RankMissing("1 of 3 ranks never joined", why="line one\nline two", next="start it")
    assert error.render() == (
        "error[rank-missing]: 1 of 3 ranks never joined\n  why:  line one\n        line two\n  next: start it"
    )


def test_an_error_keeps_its_kind_on_its_way_to_another_rank() -> None:
    sent = errors.ConfigMismatch("a", why="b", next="c")
    received = errors.from_dict(sent.as_dict())
    assert type(received) is errors.ConfigMismatch
    assert received.render() == sent.render()


def test_a_signal_becomes_128_and_its_number() -> None:
    assert errors.Stopped(15).exit_code == 143


def test_a_full_disk_is_told_from_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    with pytest.raises(errors.DiskFull), errors.writing(tmp_path, "--run_dir"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(errors.BadOption, match="--run_dir"), errors.writing(tmp_path, "--run_dir"):
        raise PermissionError(errno.EACCES, "Permission denied")


def test_a_signal_on_its_way_up_is_not_lost_in_a_library_that_catches_every_exception() -> None:
    with pytest.raises(errors.StopSignal) as caught, contextlib.suppress(Exception):
        raise errors.StopSignal(15)
    assert errors.stopped_by(caught.value).exit_code == 143
    assert errors.stopped_by(KeyboardInterrupt()).exit_code == 130
