from __future__ import annotations

import pytest

from ddp_manual.rendezvous.entries import Entry, Hello, as_ranges, assign_places, in_words, missing_ranks_error

RUN = Hello(run_id="r", run_dir="d", world_size=3, host="a", pid=1, command="train --rank {rank} --data '{x}'")


def entry(rank: int, host_id: str, local_rank: int | None = None) -> Entry:
    return Entry(
        rank=rank,
        world_size=4,
        host=host_id,
        host_id=host_id,
        pid=1,
        since=0.0,
        device="cpu",
        local_rank=local_rank,
        options={},
    )


def test_local_rank_is_the_position_among_the_ranks_of_the_same_host() -> None:
    places = assign_places([entry(0, "a"), entry(1, "b"), entry(2, "a"), entry(3, "b")])
    assert [place.local_rank for place in places.values()] == [0, 0, 1, 1]
    assert [place.node for place in places.values()] == [0, 1, 0, 1]
    assert [place.host_leader for place in places.values()] == [0, 1, 0, 1]
    assert {place.local_world_size for place in places.values()} == {2}


def test_a_local_rank_that_was_given_is_kept() -> None:
    assert assign_places([entry(0, "a", local_rank=3), entry(1, "a")])[0].local_rank == 3


def test_many_missing_ranks_are_named_as_ranges() -> None:
    assert in_words(as_ranges([1])) == "rank 1"
    assert in_words(as_ranges([1, 2, 3, 7])) == "ranks 1-3, 7"
    assert len(in_words(as_ranges(range(1, 4096)))) < 20


def test_the_error_for_missing_ranks_has_a_command_for_each_and_leaves_other_braces_alone() -> None:
    news = {"here": 1, "named": ["0 (a)"], "missing": [[1, 2]], "refused": [], "gone": []}
    error = missing_ranks_error(news, RUN, 15.0)
    assert error.what == "2 of 3 ranks never joined within 15 s: ranks 1-2"
    assert error.next.splitlines()[:2] == ["train --rank 1 --data '{x}'", "train --rank 2 --data '{x}'"]
    assert "start the others again" in error.next


@pytest.mark.parametrize(
    "wrong",
    [
        {"rank": "0"},
        {"rank": 4},
        {"rank": -1},
        {"rank": True},
        {"host": 5},
        {"options": []},
        {"options": {"lr": 5}},
        {"since": "noon"},
        {"since": 1e300},
        {"local_rank": "0"},
        {"unknown": 1},
    ],
)
def test_an_entry_that_cannot_be_a_ranks_is_not_believed(wrong: dict[str, object]) -> None:
    request = {**vars(entry(0, "a")), **wrong}
    with pytest.raises(TypeError):
        Entry.from_request(request)
