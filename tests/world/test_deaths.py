"""FAULTS.md's rows 16 to 20, each provoked for real: one of three ranks dies, freezes, raises or never ends.

Every survivor names it with its host and its last step, leaves with 14 in time, and leaves nothing behind.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.conftest import Start
from tests.faulty import said_at
from tests.memory import MakeGroup, memory_groups
from tests.world.deaths import (
    PEER_TIMEOUT,
    STALL_TIMEOUT,
    WHERE_SILENT,
    WHERE_SOCKETS_CLOSE,
    WHERE_STUCK,
    Three,
    ended,
    faults_found,
    left_behind,
    start_three,
    until_trained,
)

RankCommand = Callable[..., list[object]]

TRIALS = int(os.environ.get("DDP_MANUAL_SOAK_DEATHS", "3"))
GONE = r"is gone, without last words\n"
SILENT = rf"has been silent for {PEER_TIMEOUT + 1}(\.\d)? s\n"
RAISED = r"left with error\[training-failed\]\n"
STUCK = "is stuck while others wait"
# Where a rank was seen last, in a run that any of these tests makes.
LAST_STEP = r"step [1-9]\d* of epoch [1-9]"
# Bytes: a rank takes less than half of it.
MEMORY = 1 << 30


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[MakeGroup]:
    with memory_groups(tmp_path / "cgroup") as make:
        yield make


def check(found: list[str]) -> None:
    assert not found, "\n".join(found)


def codes_of(three: Three) -> list[int]:
    """In rank order; of a signal 128 + its number."""
    codes = [rank.wait(10) for rank in three.ranks]
    return [code if code >= 0 else 128 - code for code in codes]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_that_is_killed_is_named_by_all_others(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    three = start_three(start, rank_command, victim)
    until_trained(three)
    since = time.monotonic()
    three.process.process.send_signal(signal.SIGKILL)
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier=three.lost, what=GONE, why=LAST_STEP
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    fault, row = f"SIGKILL of rank {victim} of 3", 17 if victim else 20
    named = "rank, host, pid, last step and phase"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=row)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_freezes_is_named_by_all_others_and_leaves_when_it_thaws(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    three = start_three(start, rank_command, victim)
    until_trained(three)
    since = time.monotonic()
    three.process.process.send_signal(signal.SIGSTOP)
    found, seconds = faults_found(
        *(three, since, WHERE_SILENT, tmp_path / "run"), identifier=three.lost, what=SILENT, why=LAST_STEP
    )
    three.process.process.send_signal(signal.SIGCONT)
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 14, 14], three.process.err
    fault, row = f"SIGSTOP of rank {victim} of 3, --peer_timeout {PEER_TIMEOUT}", 18 if victim else 20
    named = "rank, host, pid, last step and phase, for how long it has been silent"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SILENT, codes=codes, row=row)


def test_a_rank_that_raises_in_the_train_step_is_named_by_all_others_with_its_traceback(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path
) -> None:
    three = start_three(start, rank_command, 1, "raise@training:120")
    three.process.wait_for("faulty: raise in training 120")
    since = said_at(three.process.err, "raise in training 120")
    traceback = r"in train_epoch.*tests/faulty\.py.*ValueError: no such digit\n"
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier="peer-failed", what=RAISED, why=traceback
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 1, 14]
    named = "rank, host, pid, exception, end of its traceback"
    fault = "an exception in the train step of rank 1 of 3"
    record(fault, "peer-failed", named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=16)


def test_a_rank_in_a_dead_loop_is_named_by_all_with_the_line_it_is_on(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path
) -> None:
    three = start_three(start, rank_command, 2, "loop@training:150", options=["--stall_timeout", STALL_TIMEOUT])
    three.process.wait_for("faulty: loop in training 150")
    since = said_at(three.process.err, "loop in training 150")
    stack = r"step 149 of epoch 1.*tests/faulty\.py\", line \d+, in loop_for_ever"
    found, seconds = faults_found(
        *(three, since, WHERE_STUCK, tmp_path / "run"), identifier="peer-stalled", what=STUCK, why=stack
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 14, 14]
    fault = f"a dead loop in the data path of rank 2 of 3, --stall_timeout {STALL_TIMEOUT}"
    named = "who waits where; rank, host, pid, step and stack of the one that is stuck"
    record(fault, "peer-stalled", named, seconds=seconds, within=WHERE_STUCK, codes=codes, row=19)


def test_a_rank_that_the_kernel_ends_for_want_of_memory_is_named_by_all_others(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, memory: MakeGroup
) -> None:
    group = memory(MEMORY)
    three = start_three(start, rank_command, 1, "eat@training:120", memory=group)
    since = ended({three.victim: three.process}, 60)[three.victim]
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier="peer-lost", what=GONE, why=LAST_STEP
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert group.killed == 1
    assert codes == [14, 137, 14]
    named = "rank, host, pid, last step and phase"
    fault = "rank 1 of 3 ended by the OOM killer"
    record(fault, "peer-lost", named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=17)


# -- at random moments ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One rank comes to grief at one moment."""

    kind: str
    victim: int
    moment: str
    """A moment of ``tests/faulty.py``; "" for one outside, so many seconds after the process group is ready."""
    seconds: float

    @classmethod
    def draw(cls, order: random.Random) -> Trial:
        kind = order.choice(("kill", "kill", "stop", "stop", "raise", "loop", "eat"))
        # A rank of the run is one that has met the others; before that its place is free for whoever comes.
        phases = {
            "kill": ("", "", "joining", "loading", "training", "evaluating", "saving"),
            "stop": ("", "", "joining", "loading", "training", "evaluating", "saving"),
            "raise": ("loading", "training", "training", "evaluating", "saving"),
            "loop": ("loading", "training", "training", "evaluating", "saving"),
            "eat": ("training",),
        }
        phase = order.choice(phases[kind])
        number = {"training": order.randint(1, 500), "evaluating": order.randint(1, 3), "saving": order.randint(1, 3)}
        moment = f"{phase}:{number.get(phase, 1)}" if phase else ""
        victim = order.randrange(3)
        if (kind, phase) == ("loop", "loading") or phase == "joining":
            # Not rank 0: it may be at a long download, for which the others wait for join_timeout, and say so; and a
            # rank that it had not answered yet waits for whoever starts it again, and says that too.
            victim = max(1, victim)
        return cls(kind, victim, moment, order.uniform(0, 4))

    def __str__(self) -> str:
        when = f"in {self.moment}" if self.moment else f"{self.seconds:.2f} s after the start"
        return f"{self.kind} of rank {self.victim} {when}"

    @property
    def options(self) -> tuple[object, ...]:
        return ("--stall_timeout", STALL_TIMEOUT) if self.kind == "loop" else ()

    def strike(self, three: Three) -> float:
        """Wait until it has happened, or do it; returns when."""
        if self.moment:
            struck = f"{self.kind} in {self.moment.replace(':', ' ')}"
            three.process.wait_for(f"faulty: {struck} at ")
            since = said_at(three.process.err, struck)
            # Eating takes its time.
            return since if self.kind != "eat" else ended({0: three.process}, 30)[0]
        three.process.wait_for("process group ready")
        time.sleep(self.seconds)
        since = time.monotonic()
        three.process.process.send_signal({"kill": signal.SIGKILL, "stop": signal.SIGSTOP}[self.kind])
        return since

    def wrong(self, three: Three, since: float, run_dir: Path) -> tuple[list[str], float]:
        identifier, what, within = {
            "kill": (three.lost, GONE, WHERE_SOCKETS_CLOSE),
            "eat": (three.lost, GONE, WHERE_SOCKETS_CLOSE),
            "stop": (three.lost, SILENT, WHERE_SILENT),
            "raise": ("peer-failed", RAISED, WHERE_SOCKETS_CLOSE),
            "loop": ("peer-stalled", STUCK, WHERE_STUCK),
        }[self.kind]
        return faults_found(three, since, within, run_dir, identifier=identifier, what=what)


@pytest.mark.soak
@pytest.mark.alone
@pytest.mark.timeout(60 + 30 * TRIALS)
def test_deaths_at_random_moments(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, memory: MakeGroup
) -> None:
    """Each trial is drawn from its number, so it can be had again."""
    failed = []
    for number in range(TRIALS):
        trial = Trial.draw(random.Random(number))
        run_dir = tmp_path / f"run{number}"
        fault = [f"{trial.kind}@{trial.moment}"] if trial.moment else []
        three = start_three(
            *(start, rank_command, trial.victim, *fault),
            options=[*trial.options, "--run_dir", run_dir],
            memory=memory(MEMORY) if trial.kind == "eat" else None,
        )
        since = trial.strike(three)
        found, seconds = trial.wrong(three, since, run_dir)
        three.process.process.send_signal(signal.SIGCONT)
        if not ended({0: three.process}, 10):
            found.append(f"{three.name} itself still runs after 10 s more")
        found += left_behind(three.ranks, port)
        print(f"trial {number}: {trial}: {seconds:.1f} s{''.join(f'; WRONG: {one}' for one in found)}", flush=True)
        if found:
            failed.append(f"{number} ({trial}): {'; '.join(found)}")
        for rank in three.ranks:
            rank.kill()
    check(failed)
