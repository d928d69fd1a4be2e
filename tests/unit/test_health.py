"""Who is silent, stopped, stuck or slow, from heartbeats and a clock that the test turns."""

from __future__ import annotations

import json
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from msgspec.structs import replace

from ddp_manual.from_worker import Progress
from ddp_manual.protocol import verdict_words
from ddp_manual.protocol.handshakes import Peers
from ddp_manual.protocol.health import SLOW_FOR, Health
from ddp_manual.protocol.lost_or_to_blame import Watch
from ddp_manual.protocol.stalls import Stall
from ddp_manual.ranks_and_runs import OPENING, Beat, RankInfo
from ddp_manual.wire import as_json, reader_of
from tests.runs import run_info

RUN = run_info()


def training(step: int, collectives: int, *, own: float = 0.0, nccl: bool = False, **other: Any) -> Beat:
    usual = {"phase": "training", "epoch": 1, "place": "train.py:1 in f", **other}
    return Beat(step=step, collectives={"0": collectives}, step_seconds=own, return_at_once=nccl, **usual)


def health_of(*beats: Beat) -> Health:
    health = Health(replace(RUN, world_size=len(beats)), now=0.0)
    for rank, beat in enumerate(beats):
        health.hear(rank, beat, 0.0)
    return health


def waits(collectives: int, *, step: int = 7, **other: Any) -> Beat:
    return training(step, collectives, inside=True, **other)


LEAVES = Beat(phase="leaving", collectives={"0": 5}, inside=True)
IN_A_SECOND_GROUP = replace(training(3, 5), collectives={"0": 5, "1": 90})


@pytest.mark.parametrize(
    ("beats", "with_nccl", "waiting", "behind", "fewer"),
    [
        # In a collective that another rank has completed nobody is behind: rank 0 may have had its part before the
        # connection of two followers was cut.
        ([waits(9, step=8), waits(8), waits(8)], False, [0, 1, 2], [], [1, 2]),
        # With NCCL a rank that waits itself is not to blame for having begun fewer.
        ([waits(10, step=8), waits(9)], True, [0, 1], [], [1]),
        # With NCCL who is on another line than the others is behind.
        ([*[training(7, 9, place="train.py:9 in loss")] * 2, training(7, 8, place="a.py:3")], True, [0, 1], [2], []),
        # They sit in a copy to the host, and have all begun the same number.
        ([waits(9, unfinished=2)] * 2, True, [0, 1], [], []),
        # These compute, whatever their numbers; a person may look at one; a group is compared among its members only.
        ([training(7, 9), training(7, 3)], False, [], [], []),
        ([waits(8), training(7, 7, debugging=True)], False, [], [], []),
        ([IN_A_SECOND_GROUP, training(3, 5)], False, [], [], []),
        ([LEAVES, training(7, 4)], False, [], [], []),
        *(([training(5, 4, phase=phase)] * 2, False, [], [], []) for phase in ("loading", "saving")),
    ],
)
def test_who_waits_and_who_is_behind_after_stall_timeout(
    beats: list[Beat], with_nccl: bool, waiting: list[int], behind: list[int], fewer: list[int]
) -> None:
    """With gloo, one rank behind or all in the same collective: tests/simulation."""
    beats = [replace(beat, return_at_once=with_nccl) for beat in beats]
    health = health_of(*beats)
    stall = health.find_stall(0.5) or health.find_stall(301)
    found = ([], [], []) if stall is None else ([*stall.waiting], [*stall.behind], [*stall.fewer])
    assert found == (waiting, behind, fewer)


def test_a_rank_that_works_while_the_others_wait_for_it_is_behind_too() -> None:
    health = health_of(waits(8), waits(8))
    for second in range(1, 302):
        health.hear(0, waits(8), second)
        health.hear(1, training(7 + second, 7), second)
    stall = health.find_stall(301)
    assert stall is not None
    assert (stall.waiting, stall.behind) == ([0], [1])


def test_all_ranks_wait_whose_heartbeats_said_so_within_one_period() -> None:
    health = health_of(training(7, 7), training(7, 7), training(7, 7))
    for rank, second in ((1, 0.5), (0, 0.9)):
        health.hear(rank, waits(8), second)
    stall = health.find_stall(300.6)
    assert stall is not None
    assert (stall.waiting, stall.behind) == ([0, 1], [2])


@pytest.mark.parametrize(
    ("counts", "last", "behind", "fewer"),
    [
        ({"0": 8, "1": 1}, training(7, 8), [2], []),  # it waits for rank 2 in a group of the two
        ({"0": 8}, waits(8), [], [1, 2]),  # rank 0 had all it needs before the connection of the others was cut
        ({"0": 8}, waits(9), [], [1]),  # or it is busy inside torch, which the verdict says too
    ],
)
def test_a_rank_whose_own_wait_is_a_heartbeat_shorter_than_that_of_who_waits_for_it_is_not_to_blame(
    counts: dict[str, int], last: Beat, behind: list[int], fewer: list[int]
) -> None:
    health = health_of(waits(9), training(7, 8), last)
    health.hear(1, replace(waits(8), collectives=counts), 0.5)
    assert health.find_stall(300.3) is None
    stall = health.find_stall(300.6)
    assert stall is not None
    assert (stall.behind, stall.fewer) == (behind, fewer)
    health = health_of(waits(9), training(7, 8), last)
    health.hear(1, replace(waits(8), collectives=counts), 6 * RUN.heartbeat_period)
    assert health.find_stall(300 + 5 * RUN.heartbeat_period) is not None  # two heartbeats are enough


def test_ranks_that_wait_on_different_lines_are_shown_with_one_stack_per_line_and_an_explanation() -> None:
    def named(*places: str, fewer: Sequence[int] = ()) -> str:
        health = health_of(*(training(7, 8, inside=True, place=place) for place in places))
        size = len(places)
        infos = [RankInfo(rank=rank, world_size=size, host="vm", pid=10 + rank, agent=0) for rank in range(size)]
        stall = Stall(waiting=[*range(len(places))], behind=[], seconds=300.0, fewer=fewer)
        stacks = {rank: f"stack {rank}" for rank in verdict_words.one_per_place(stall, health)}
        roll_call: Any = SimpleNamespace(run=RUN, info=infos.__getitem__)
        return verdict_words.error_for(0, verdict_words.stalled(roll_call, health, stall, stacks, ())).render()

    same = named("train.py:1 in f", "train.py:1 in f", "train.py:1 in f")
    assert "stack 0" in same and "stack 2" not in same and "if rank == 0" not in same
    differ = named("train.py:1 in f", "train.py:1 in f", "train.py:9 in save")
    assert "stack 0" in differ and "stack 2" in differ and "if rank == 0" in differ and "may be cut" in differ
    busy = named("train.py:1 in f", "train.py:1 in f", "train.py:1 in f", fewer=[1])
    assert "rank 1 began fewer collectives" in busy and "stack 1" in busy and "stack 0" not in busy


def test_a_rank_that_says_how_many_steps_there_are_has_the_time_left_at_its_pace_since_then() -> None:
    """Anew in each epoch where steps count anew there; a step 0 may be one that a resumed run has not reached yet."""
    health = health_of(training(1, 1), replace(training(0, 1), steps=60))
    for step, now in ((20, 5.0), (30, 55.0)):
        health.hear(1, replace(training(step, step), steps=60), now)
    assert [line["seconds_left"] for line in health.progress(55.0)] == [None, 150.0]
    for step, now in ((1, 60.0), (2, 61.0)):
        health.hear(1, replace(training(step, step), steps=60), now)
    assert health.progress(61.0)[1]["seconds_left"] == 58.0
    health.hear(1, replace(training(60, 60), steps=60), 119.0)
    assert health.progress(119.0)[1]["seconds_left"] is None


def test_a_gpu_that_completes_collectives_makes_progress_while_its_rank_waits_for_it() -> None:
    health = health_of(training(7, 900), training(7, 900))
    for second in range(1, 1000):
        beat = waits(900, nccl=True, unfinished=1000 - second)
        for rank in range(2):
            health.hear(rank, beat, second)
        assert health.find_stall(second) is None


def look_until(health: Health, seconds: float, since: float = 0.0) -> list[tuple[int, float, float]]:
    """Whom the health has named as slow until then."""
    return [named for half in range(int(2 * since), int(2 * seconds) + 1) for named in health.newly_slow(half / 2)]


def test_a_slow_rank_is_named_once_after_it_was_slow_for_long() -> None:
    health = health_of(training(1, 1, own=0.02), training(1, 1, own=0.02), training(1, 1, own=0.05))
    assert look_until(health, SLOW_FOR - 0.5) == []
    assert look_until(health, 2 * SLOW_FOR, since=SLOW_FOR) == [(2, 0.05, 0.02)]
    assert [line["slow"] for line in health.progress(0)] == [False, False, True]


@pytest.mark.parametrize(
    "meanwhile",
    [training(2, 2, own=0.02), Beat(phase="evaluating", step=1, step_seconds=0.05)],
    ids=["as fast as the other", "between two epochs"],
)
def test_a_rank_that_was_slow_for_moments_is_not_named(meanwhile: Beat) -> None:
    health = health_of(training(1, 1, own=0.02), training(1, 1, own=0.05))
    assert look_until(health, 10) == []
    health.hear(1, meanwhile, 10.0)
    assert look_until(health, 100, since=10.5) == []
    health.hear(1, training(3, 3, own=0.05), 100.0)
    assert look_until(health, SLOW_FOR + 85, since=100.5) == []


def test_a_rank_that_is_stopped_again_has_the_full_time_again() -> None:
    stopped = training(1, 1, stopped="SIGTSTP")
    health = health_of(training(1, 1), stopped)
    assert health.newly("stopped") == [1]
    health.hear(1, training(1, 1), 9.0)
    health.hear(1, stopped, 9.5)
    assert health.newly("stopped") == [1]
    assert health.stopped(19.4, 10.0) is None
    assert health.stopped(20.0, 10.0) == (1, 10.5)


def test_a_rank_that_works_on_alone_does_not_wait_in_vain() -> None:
    """A backward pass counts as a place where it may wait: only a collective that the others never begin is in vain."""
    health = health_of(training(7, 7, inside=True), training(7, 7))
    closed = replace(training(7, 0), collectives={}, closed={"0": 9})  # since the heartbeat before
    health.hear(1, closed, 0.2)
    health.finish(1)
    health.hear(0, training(7, 9, inside=True), 1.0)
    assert health.waiting_in_vain(100.0, 2.0) == health.finished_before(0) == []
    health.hear(0, training(7, 10, inside=True), 100.0)
    assert health.waiting_in_vain(102.1, 2.0) == [0]
    assert health.finished_before(0) == [1]
    # Nor can it wait in a group that it has closed, as where its collective has broken.
    health.hear(0, replace(closed, closed={"0": 10}, inside=True), 103.0)
    assert health.waiting_in_vain(200.0, 2.0) == []
    assert health.finished_before(0) == [1]


def stall_after(beats: Sequence[Beat], **of_run: object) -> Stall:
    """What rank 0 finds first where the ranks stay as they are: it looks twice a second."""
    health = Health(replace(RUN, world_size=len(beats), **of_run), now=0.0)
    for rank, beat in enumerate(beats):
        health.hear(rank, beat, 0.0)
    for half_second in range(2 * 20_000):
        if (stall := health.find_stall(half_second / 2)) is not None:
            return stall
    raise AssertionError("no stall")


OF_SCRIPT = {"stall_timeout": 1800.0, "stall_timeout_is_default": True}
TYPED = {"stall_timeout_is_default": False}


@pytest.mark.parametrize(
    ("timeout", "of_run", "judged", "reason"),
    [
        (10.0, OF_SCRIPT, (7, 8), "80% of their process group's time-out of 10 s"),
        (600.0, OF_SCRIPT, (478, 480), "80% of their process group's time-out of 600 s"),  # NCCL's default
        (2.0, OF_SCRIPT, (1, 2), "80% of their process group's time-out of 2 s"),
        (None, OF_SCRIPT, (1800, 1801), "--stall_timeout"),
        (10.0, {**TYPED, "stall_timeout": 10.0}, (7, 8), "80% of their process group's time-out of 10 s"),
        (10.0, {**TYPED, "stall_timeout": 5.0}, (5, 6), "--stall_timeout"),
        (14400.0, {**TYPED, "stall_timeout": 600.0}, (600, 601), "--stall_timeout"),
        (1800.0, {"stall_timeout": 300.0}, (300, 301), "--stall_timeout"),
    ],
)
def test_a_stall_is_judged_before_torchs_time_out_or_after_a_shorter_stall_timeout(
    timeout: float | None, of_run: dict[str, object], judged: tuple[float, float], reason: str
) -> None:
    timeouts = {} if timeout is None else {"": timeout}
    waits, stuck = (
        replace(training(7, count, inside=inside), timeouts=timeouts) for count, inside in ((8, True), (7, False))
    )
    stall = stall_after([waits, stuck], **of_run)
    assert judged[0] <= stall.seconds <= judged[1]
    assert (stall.waiting, stall.behind, stall.longest.reason) == ([0], [1], reason)


@pytest.mark.parametrize(
    ("begun", "timeout"),
    [
        ({"0": 50, "1": 5}, 14400),  # rank 1 is behind in the second group
        ({"0": 51, "1": 4}, 600),  # in the default group
        ({"0": 51, "1": 5}, 600),  # in both
        ({"0": 50, "1": 4}, 14400),  # nobody knows in which, or whether it waits for what another rank sends
        ({}, 14400),  # nor how many it has begun
    ],
)
def test_the_time_out_counts_of_the_group_that_ranks_wait_in_otherwise_the_longest(
    begun: dict[str, int], timeout: float
) -> None:
    timeouts = {"": 600.0, "1": 14400.0}
    waits = Beat(phase="running", collectives=begun, inside=True, timeouts=timeouts)
    stuck = Beat(phase="running", collectives={"0": 50, "1": 4}, timeouts=timeouts)
    stall = stall_after([waits, stuck], **OF_SCRIPT)
    assert stall.longest.timeout == timeout
    assert (stall.waiting, stall.behind) == ([0], [1])


@pytest.mark.parametrize(("chosen", "timeout"), [({OPENING: 14400.0}, 14400.0), ({OPENING: 10.0}, 10.0), ({}, None)])
def test_the_time_out_of_a_group_that_is_being_opened_counts_and_not_that_of_an_open_one(
    chosen: dict[str, float], timeout: float | None
) -> None:
    timeouts = {"0": 20.0, **chosen}
    opens = Progress().beat(place="a.py:1", collectives={"0": 5}, inside=True, opening=True, timeouts=timeouts)
    stall = stall_after([opens, replace(opens, inside=False, opening=False)], **OF_SCRIPT)
    assert stall.longest.timeout == timeout


def test_a_rank_that_waits_for_longer_in_another_group_is_not_behind() -> None:
    timeouts = {"0": 25.0, "1": 120.0}
    begun = ({"0": 2, "1": 1}, {"0": 1, "1": 1}, {"0": 1, "1": 1})
    beats = [Beat(phase="running", collectives=counts, timeouts=timeouts, inside=True) for counts in begun]
    beats[2] = replace(beats[2], inside=False)  # rank 1 waits for what it sends
    stall = stall_after(beats, **OF_SCRIPT)
    assert (stall.waiting, stall.behind, stall.longest.timeout) == ([0, 1], [2], 25.0)


@pytest.mark.parametrize(
    ("counts", "says"),
    [
        ({0: 8, 1: 7}, "rank 0 waits for rank 1 (on train.py:1 in f), for 30 s so far; the run ends after 11519 s"),
        # Rank 1 has done its work and left: nobody probes the network for it.
        ({0: 8, 2: 8}, "ranks 0, 2 wait for each other, for 30 s so far; the run ends after 11519 s"),
    ],
)
def test_a_line_says_that_ranks_wait_and_for_how_long_they_still_may(counts: dict[int, int], says: str) -> None:
    """The roll call and the connections are stand-ins: only what is sent matters here."""
    sent: list[Any] = []
    run = replace(RUN, world_size=1 + max(counts), **OF_SCRIPT)
    infos = [RankInfo(rank=rank, world_size=3, host="vm", pid=rank, agent=0) for rank in range(run.world_size)]
    roll_call = SimpleNamespace(run=run, works=True, info=None, infos=lambda: infos, hear=lambda *_: None)
    roll_call.members = {rank: SimpleNamespace(heard=0.0) for rank in counts}
    write = lambda line: sent.append(json.loads(line)["text"])  # noqa: E731
    peers = {rank: SimpleNamespace(left=False, connection=SimpleNamespace(write=write)) for rank in counts}
    watch = Watch(roll_call, Peers(peers), 0.0)  # type: ignore[arg-type]
    for rank in {*range(run.world_size)} - counts.keys():
        watch.health.finish(rank)
        watch.health.leave(rank)
    for rank, count in counts.items():
        watch.hear(rank, replace(training(7, count, inside=count == 8), timeouts={"": 14400.0}), 0.0)
        for at in (8.0, 16.0, 24.0, 30.0):
            watch.hear(rank, None, at)
    for now in (30.0, 30.5, 31.0):
        watch.check_health(now)
    assert sent == [f"{says} (80% of their process group's time-out of 14400 s)"] * len(counts)


class Odd:
    """What a user's program may put where a number belongs."""


@pytest.mark.parametrize("value", [None, float("nan"), 10**400, "3", Odd()])
def test_a_heartbeat_is_valid_whatever_a_script_has_written_into_it(value: object) -> None:
    progress = Progress(phase="a\nb")
    for name in ("epoch", "step", "samples_per_second", "step_seconds", "loss"):
        setattr(progress, name, value)
    beat = progress.beat(timeouts={}, inside=False, place="\x1b[2J", debugging=False)
    assert reader_of(Beat)(as_json(beat).decode()) == Beat(phase="a\\nb", place="\\x1b[2J")


def test_a_heartbeat_says_the_shortest_time_out_once_however_many_groups_a_program_opens() -> None:
    timeouts = {**{str(group): 1800.0 for group in range(20_000)}, "long": 14400.0}
    beat = Progress().beat(timeouts=timeouts, inside=False, place="", debugging=False)
    assert beat.timeouts == {"": 1800.0, "long": 14400.0} == reader_of(Beat)(as_json(beat).decode()).timeouts
