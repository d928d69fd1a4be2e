"""Who is judged silent, stuck or slow, from heartbeats and a clock that the test turns."""

from __future__ import annotations

import json
from collections.abc import Sequence

import pytest

from ddp_manual.rendezvous import judging, verdicts
from ddp_manual.rendezvous.judging import Judge, Limits, Stall
from ddp_manual.rendezvous.progress import Beat, Progress
from ddp_manual.rendezvous.verdicts import Member

LIMITS = Limits.of_a_world(3, peer_timeout=10.0, stall_timeout=300.0)


def training(
    step: int, collectives: int, *, inside: bool = False, place: str = "train.py:1 in f", own: float = 0
) -> Beat:
    return Beat(
        phase="training",
        epoch=1,
        step=step,
        collectives={"0": collectives},
        inside=inside,
        place=place,
        step_seconds=own,
    )


def judge_of(*beats: Beat, async_collectives: bool = False) -> Judge:
    judge = Judge(len(beats), LIMITS, now=0.0, async_collectives=async_collectives)
    for rank, beat in enumerate(beats):
        judge.hear(rank, beat, 0.0)
    return judge


def beat_until(judge: Judge, seconds: float, beats: dict[int, Beat], since: float = 0.0) -> None:
    for number in range(1, int((seconds - since) * 2) + 1):
        for rank, beat in beats.items():
            judge.hear(rank, beat, since + number / 2)


def test_a_rank_is_silent_after_peer_timeout_and_a_heartbeat() -> None:
    judge = judge_of(training(1, 1), training(1, 1), training(1, 1))
    beat_until(judge, 12, {0: training(1, 1), 1: training(1, 1)})
    assert judge.silent(10.9) == []
    assert judge.silent(11.1) == [2]
    assert judge.silence(2, 11.1) == 11.1


def test_those_who_are_nearly_as_silent_are_named_with_it_and_the_most_silent_comes_first() -> None:
    judge = judge_of(training(1, 1), training(1, 1), training(1, 1))
    beat_until(judge, 12, {0: training(1, 1)})
    judge.hear(1, training(1, 1), 0.5)
    assert judge.silent(11.1) == [2, 1]


def test_a_rank_that_has_left_in_order_is_not_missed() -> None:
    judge = judge_of(training(1, 1), training(1, 1))
    judge.part_with(1)
    beat_until(judge, 400, {0: training(1, 1)})
    assert judge.silent(400) == []
    assert judge.stall(400) is None


def test_a_judge_that_was_stopped_itself_gives_everybody_the_full_time_again() -> None:
    judge = judge_of(training(1, 1), training(1, 1))
    judge.restart(60.0)
    assert judge.silent(70.9) == []
    assert judge.silent(71.1) == [0, 1]


def test_the_rank_with_fewer_collectives_is_behind_the_others_wait() -> None:
    waits, stuck = training(7, 8, inside=True), training(7, 7)
    judge = judge_of(waits, waits, stuck)
    beat_until(judge, 301, {0: waits, 1: waits, 2: stuck})
    assert judge.stall(300.0) is None
    stall = judge.stall(300.1)
    assert stall is not None
    assert (stall.waiting, stall.behind) == ([0, 1], [2])


def test_a_rank_that_works_while_the_others_wait_for_it_is_behind_too() -> None:
    waits = training(7, 8, inside=True)
    judge = judge_of(waits, waits)
    for second in range(1, 302):
        judge.hear(0, waits, second)
        judge.hear(1, training(7 + second, 7), second)
    stall = judge.stall(301)
    assert stall is not None
    assert (stall.waiting, stall.behind) == ([0], [1])


def test_nobody_is_behind_where_all_wait_in_the_same_collective() -> None:
    waits = training(7, 8, inside=True)
    judge = judge_of(waits, waits, waits)
    beat_until(judge, 301, {0: waits, 1: waits, 2: waits})
    stall = judge.stall(301)
    assert stall is not None
    assert (stall.waiting, stall.behind) == ([0, 1, 2], [])


def test_a_rank_that_waits_for_the_rest_of_a_collective_which_another_has_ended_is_not_behind() -> None:
    """Where the connection of two followers is cut, rank 0 may have had its part before."""
    ahead, waits = training(8, 9, inside=True), training(7, 8, inside=True)
    judge = judge_of(ahead, waits, waits)
    beat_until(judge, 301, {0: ahead, 1: waits, 2: waits})
    stall = judge.stall(301)
    assert stall is not None
    assert (stall.waiting, stall.behind, stall.fewer) == ([0, 1, 2], [], [1, 2])


def test_ranks_that_wait_on_different_lines_are_shown_with_one_stack_for_each_and_told_what_that_means() -> None:
    def named(*places: str, fewer: Sequence[int] = ()) -> str:
        beats = {rank: training(7, 8, inside=True, place=place) for rank, place in enumerate(places)}
        members = [
            Member(rank=rank, host="vm", pid=10 + rank, nonce="", address="", probe_port=0)
            for rank in range(len(places))
        ]
        stall = Stall(waiting=list(beats), behind=[], seconds=300.0, fewer=fewer)
        stacks = {rank: f"stack {rank}" for rank in verdicts.one_per_place(stall, beats)}
        return verdicts.as_error(verdicts.stalled(members, stall, beats, stacks, "again")).render()

    same = named("train.py:1 in f", "train.py:1 in f", "train.py:1 in f")
    assert "stack 0" in same and "stack 2" not in same and "if rank == 0" not in same
    differ = named("train.py:1 in f", "train.py:1 in f", "train.py:9 in save")
    assert "stack 0" in differ and "stack 2" in differ and "if rank == 0" in differ and "may be cut" in differ
    busy = named("train.py:1 in f", "train.py:1 in f", "train.py:1 in f", fewer=[1])
    assert "rank 1 began fewer collectives" in busy and "stack 1" in busy and "stack 0" not in busy


def test_where_the_program_waits_for_nccl_in_a_line_of_its_own_the_odd_line_is_behind() -> None:
    waits, stuck = training(7, 9, place="train.py:9 in loss"), training(7, 8, place="train.py:3 in load")
    judge = judge_of(waits, waits, stuck, async_collectives=True)
    beat_until(judge, 301, {0: waits, 1: waits, 2: stuck})
    stall = judge.stall(301)
    assert stall is not None
    assert stall.behind == [2]


def test_ranks_that_compute_wait_for_nobody_however_many_messages_they_have_exchanged() -> None:
    talked, silent = training(7, 9), training(7, 3)
    judge = judge_of(talked, talked, silent)
    beat_until(judge, 301, {0: talked, 1: talked, 2: silent})
    assert judge.stall(301) is None


@pytest.mark.parametrize("phase", ["loading", "evaluating", "saving"])
def test_a_long_phase_in_which_nobody_waits_is_no_stall(phase: str) -> None:
    busy = Beat(phase=phase, epoch=1, step=5, collectives={"0": 4})
    judge = judge_of(busy, busy)
    beat_until(judge, 1000, {0: busy, 1: busy})
    assert judge.stall(1000) is None


def test_ranks_that_leave_wait_for_one_another_as_long_as_it_takes() -> None:
    leaves, works = Beat(phase="leaving", collectives={"0": 5}, inside=True), training(7, 4)
    judge = judge_of(leaves, works)
    beat_until(judge, 400, {0: leaves, 1: works})
    assert judge.stall(400) is None


def test_groups_are_compared_among_their_members_only() -> None:
    first = Beat(phase="training", step=3, collectives={"0": 5, "1": 90})
    second = Beat(phase="training", step=3, collectives={"0": 5})
    judge = judge_of(first, second)
    beat_until(judge, 400, {0: first, 1: second})
    assert judge.stall(400) is None


def look_until(judge: Judge, seconds: float, since: float = 0.0) -> list[tuple[int, float, float]]:
    """Whom the judge has named as slow until then."""
    return [named for half in range(int(2 * since), int(2 * seconds) + 1) for named in judge.newly_slow(half / 2)]


def test_a_slow_rank_is_named_once_after_it_was_slow_for_long() -> None:
    judge = judge_of(training(1, 1, own=0.02), training(1, 1, own=0.02), training(1, 1, own=0.05))
    assert look_until(judge, judging.SLOW_FOR - 0.5) == []
    assert look_until(judge, 2 * judging.SLOW_FOR, since=judging.SLOW_FOR) == [(2, 0.05, 0.02)]
    assert [line["slow"] for line in judge.progress(0)] == [False, False, True]


def test_of_two_ranks_the_slower_one_is_held_against_the_faster() -> None:
    judge = judge_of(training(1, 1, own=0.08), training(1, 1, own=0.05))
    assert look_until(judge, judging.SLOW_FOR) == [(0, 0.08, 0.05)]


def test_a_rank_that_was_slow_for_a_moment_is_not_named() -> None:
    judge = judge_of(training(1, 1, own=0.02), training(1, 1, own=0.05))
    assert look_until(judge, 10) == []
    judge.hear(1, training(2, 2, own=0.02), 10.0)
    assert look_until(judge, 20, since=10.5) == []
    judge.hear(1, training(3, 3, own=0.05), 20.0)
    assert look_until(judge, judging.SLOW_FOR + 15, since=20.5) == []


def test_what_passes_between_two_epochs_is_no_slowness() -> None:
    judge = judge_of(training(1, 1, own=0.02), training(1, 1, own=0.05))
    assert look_until(judge, 1) == []
    judge.hear(1, Beat(phase="evaluating", step=1, step_seconds=0.05), 1.0)
    assert look_until(judge, 100, since=1.5) == []
    judge.hear(1, training(2, 2, own=0.05), 100.0)
    assert look_until(judge, 101, since=100.5) == []


class Odd:
    """What a user's program may put where a number belongs."""


@pytest.mark.parametrize("value", [None, float("nan"), "3", Odd()])
def test_a_heartbeat_is_one_whatever_a_program_has_put_there(value: object) -> None:
    progress = Progress(phase="a\nb")
    for name in ("epoch", "step", "samples_per_second", "step_seconds"):
        setattr(progress, name, value)
    beat = Beat.of(progress, {}, inside=False, place="\x1b[2J")
    assert Beat.from_message(json.loads(json.dumps(vars(beat)))) == Beat(phase="a?b", place="?[2J")


@pytest.mark.parametrize(
    "message",
    [
        {"phase": 3},
        {"step": "many"},
        {"collectives": {"0": None}},
        {"place": "x" * 300},
        {"place": "\x1b[2J"},
        {"no": 1},
    ],
)
def test_a_beat_that_is_none_is_refused(message: dict[str, object]) -> None:
    with pytest.raises((TypeError, ValueError)):
        Beat.from_message(message)
