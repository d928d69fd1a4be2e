"""The table of ``status``."""

from __future__ import annotations

from ddp_manual.tools.status import roster

RANK = {"host": "a", "pid": 1, "address": "10.0.0.1", "since": 0.0, "device": "cpu"}
BUSY = {
    **{"phase": "running", "epoch": 0, "step": 0, "steps": 0, "samples_per_second": 0, "slow": False},
    **{"silent_seconds": 0.1, "waits_seconds": 0.0, "place": ""},
}


def test_a_column_that_is_empty_for_all_is_left_out_and_torch_has_the_same_name_on_all_ranks() -> None:
    versions = ("torch 2.14.1+cu130 python 3.11", "torch 2.14.1 python 3.11")
    ranks = [{**RANK, "rank": rank, "versions": said} for rank, said in enumerate(versions)]
    silent = roster(ranks, [{**BUSY, "loss": None}, {**BUSY, "loss": None}])
    assert silent[0].split() == ["rank", "host", "pid", "device", "address", "since", "phase", "heard", "versions"]
    assert [line.count("torch 2.14.1 python 3.11") for line in silent] == [0, 1, 1]
    said = roster(ranks, [{**BUSY, "loss": 0.25, "step": 3}, {**BUSY, "loss": None}])
    assert "loss" in said[0].split() and "step" in said[0].split() and " 0.25 " in said[1]
    counted = roster(ranks, [{**BUSY, "loss": None, "step": 3, "steps": 60}, {**BUSY, "loss": None}])
    assert " 3/60 " in counted[1]
    waited = {**BUSY, "loss": None, "silent_seconds": 12.0, "waits_seconds": 40.0}
    stopped = roster(ranks, [{**BUSY, "loss": None}, waited])
    assert " silent, was running  12 s ago" in stopped[2] and "silent" not in stopped[1]


def test_a_rank_that_has_loaded_torch_is_called_ready() -> None:
    ranks = [{**RANK, "rank": 0, "versions": ""}, {**RANK, "rank": 1, "versions": "", "device": None}]
    _, first, second = roster(ranks, [])
    assert " ready" in first and " loading torch" in second
