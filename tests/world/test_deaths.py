"""FAULTS.md's rows 16 to 20, each provoked for real: one of three ranks dies, freezes, raises or never ends.

Every survivor names it with its host and its last step, leaves with 14 in time, and leaves nothing behind. A rank is
two processes, so what dies or freezes may be its worker, its agent, or both.
"""

from __future__ import annotations

import os
import random
import re
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.catalogue import record
from tests.clock import said
from tests.conftest import Start
from tests.faulty import said_at
from tests.memory import MakeGroup, memory_groups
from tests.world.deaths import (
    HOST,
    PEER_TIMEOUT,
    STALL_TIMEOUT,
    WHERE_SILENT,
    WHERE_SOCKETS_CLOSE,
    WHERE_STUCK,
    Three,
    ended,
    faults_found,
    gone_at,
    left_behind,
    start_three,
    until_heard,
    wait_until,
)
from tests.world.test_rendezvous import last_error

RankCommand = Callable[..., list[object]]

TRIALS = int(os.environ.get("DDP_MANUAL_SOAK_DEATHS", "3"))
GONE = r"is gone without a word\n"
KILLED = r"is gone: SIGKILL\n"
NO_MEMORY = r"is gone: SIGKILL, since memory ran out\n"
STOPPED = rf"has been stopped by SIGSTOP for [{PEER_TIMEOUT}-{PEER_TIMEOUT + 1}] s\n"
SILENT = rf"has been silent for {PEER_TIMEOUT + 1}(\.\d)? s\n"
RAISED = r"left with error\[training-failed\]\n"
STUCK = "is stuck while others wait"
# The last progress that errors name, in any of these runs.
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
    """Return the exit codes in rank order, as a shell shows them: 128 + the number of a signal."""
    codes = [rank.wait(10) for rank in three.ranks]
    return [code if code >= 0 else 128 - code for code in codes]


@pytest.mark.parametrize("victim", [0, 1, 2])
def test_a_rank_whose_worker_is_killed_is_named_by_all_ranks(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    three = start_three(start, rank_command, victim)
    until_heard(three)
    since = time.monotonic()
    three.signal_worker(signal.SIGKILL)
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier=three.lost, what=KILLED, why=LAST_STEP
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [137 if rank == victim else 14 for rank in range(3)], three.process.err
    for rank in three.ranks:
        error = last_error(rank.err)
        assert error.startswith(f"error[{three.lost}]: {three.name} is gone: SIGKILL\n")
        assert "SIGKILL ended its worker; its memory cgroup has not run out of memory\n" in error
        assert "since memory ran out" not in error and "OOM" not in error
    fault, row = f"SIGKILL of rank {victim} of 3", 17 if victim else 20
    named = "rank, host, pid, signal, last step and phase, on the killed rank too"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=row)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_whose_agent_is_killed_is_named_by_all_others_and_its_worker_goes_with_it(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    three = start_three(start, rank_command, victim)
    until_heard(three)
    worker = three.process.worker
    since = time.monotonic()
    three.process.process.send_signal(signal.SIGKILL)
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier=three.lost, what=GONE, why=LAST_STEP
    )
    gone_at(worker, 2)
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [137 if rank == victim else 14 for rank in range(3)]
    fault, row = f"SIGKILL of the agent of rank {victim} of 3", 17 if victim else 20
    named = "rank, host, pid, last step and phase; its worker is gone too"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=row)


@pytest.mark.parametrize("victim", [0, 2])
def test_a_rank_that_freezes_is_named_by_all_others_and_leaves_when_it_thaws(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    """Agent and worker both, as Ctrl-Z and a frozen host do it."""
    three = start_three(start, rank_command, victim)
    until_heard(three)
    since = time.monotonic()
    os.killpg(three.process.process.pid, signal.SIGSTOP)
    found, seconds = faults_found(
        *(three, since, WHERE_SILENT, tmp_path / "run"), identifier=three.lost, what=SILENT, why=LAST_STEP
    )
    os.killpg(three.process.process.pid, signal.SIGCONT)
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 14, 14], three.process.err
    fault, row = f"SIGSTOP of rank {victim} of 3, --peer_timeout {PEER_TIMEOUT}", 18 if victim else 20
    named = "rank, host, pid, last step and phase, for how long it has been silent"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SILENT, codes=codes, row=row)


@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_stopped_is_named_at_once_and_lost_if_it_is_not_continued(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, victim: int
) -> None:
    three = start_three(start, rank_command, victim)
    until_heard(three)
    line = f"{three.name} is stopped: SIGSTOP; on {HOST}, kill -CONT {three.process.worker} lets it go on\n"
    since = time.monotonic()
    three.signal_worker(signal.SIGSTOP)
    told = max(said(rank, line, 5) for rank in three.ranks) - since
    three.signal_worker(signal.SIGCONT)
    steps = three.ranks[0].err.count("[rank 0] step ")
    wait_until(lambda: three.ranks[0].err.count("[rank 0] step ") > steps + 1)
    assert [rank.process.poll() for rank in three.ranks] == [None] * 3
    named = "rank, host, pid, SIGSTOP, how to let it go on; the run goes on"
    fault = f"SIGSTOP of the worker of rank {victim} of 3, then SIGCONT"
    record(fault, "a line on every rank", named, seconds=told, within=2, codes=[], row=18)

    since = time.monotonic()
    three.signal_worker(signal.SIGSTOP)
    found, seconds = faults_found(
        *(three, since, WHERE_SILENT, tmp_path / "run"), identifier=three.lost, what=STOPPED, why=LAST_STEP
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 14, 14], three.process.err
    assert "that is this rank; the others have not waited for it" in last_error(three.process.err)
    assert all(rank.err.count(line) == 2 for rank in three.ranks)
    fault = f"SIGSTOP of the worker of rank {victim} of 3, --peer_timeout {PEER_TIMEOUT}"
    named = "rank, host, pid, SIGSTOP and for how long, last step and phase, on every rank"
    record(fault, three.lost, named, seconds=seconds, within=WHERE_SILENT, codes=codes, row=18)


def test_a_worker_that_aborts_in_cpp_is_named_by_all_ranks_with_its_python_stack(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path
) -> None:
    three = start_three(start, rank_command, 1, "abort@training:120")
    three.process.wait_for("faulty: abort in training 120")
    since = said_at(three.process.err, "abort in training 120")
    stack = rf"{LAST_STEP}.*its Python stack:.*tests/faulty\.py\", line \d+ in abort.*in _?train_"
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"),
        identifier="peer-lost",
        what=r"is gone: SIGABRT\n",
        why=stack,
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 134, 14]
    error = last_error(three.process.err)
    assert error.startswith(f"error[peer-lost]: {three.name} is gone: SIGABRT\n") and re.search(stack, error, re.DOTALL)
    assert "its worker crashed in native code: SIGABRT" in error
    named = "rank, host, pid, SIGABRT, the Python stack that called it, on every rank"
    fault = "std::terminate in the train step of rank 1 of 3"
    record(fault, "peer-lost", named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=17)


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
    stack = r"step 149 of epoch 1.*tests/faulty\.py\", line \d+ in loop_for_ever"
    found, seconds = faults_found(
        *(three, since, WHERE_STUCK, tmp_path / "run"), identifier="peer-stalled", what=STUCK, why=stack
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert codes == [14, 14, 14]
    fault = f"a dead loop in the data path of rank 2 of 3, --stall_timeout {STALL_TIMEOUT}"
    named = "who waits where; rank, host, pid, step and stack of the one that is stuck"
    record(fault, "peer-stalled", named, seconds=seconds, within=WHERE_STUCK, codes=codes, row=19)


def test_a_rank_that_the_oom_killer_ends_is_named_by_all_others(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, memory: MakeGroup
) -> None:
    group = memory(MEMORY)
    three = start_three(start, rank_command, 1, "eat@training:120", memory=group)
    since = gone_at(three.process.worker)
    found, seconds = faults_found(
        *(three, since, WHERE_SOCKETS_CLOSE, tmp_path / "run"), identifier="peer-lost", what=NO_MEMORY, why=LAST_STEP
    )
    codes = codes_of(three)
    check(found + left_behind(three.ranks, port))
    assert group.killed == 1
    assert codes == [14, 137, 14]
    for rank in three.ranks:
        assert "the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill\n" in last_error(rank.err)
    named = "rank, host, pid, that memory ran out, last step and phase, on every rank"
    fault = "rank 1 of 3 ended by the OOM killer"
    record(fault, "peer-lost", named, seconds=seconds, within=WHERE_SOCKETS_CLOSE, codes=codes, row=17)


# -- at random moments ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Trial:
    """One fault of one rank at one moment."""

    kind: str
    victim: int
    moment: str
    """A moment of ``tests/faulty.py``; "" for one outside, so many seconds after the process group is ready."""
    seconds: float

    @classmethod
    def draw(cls, order: random.Random) -> Trial:
        kind = order.choice(("kill", "kill", "stop", "agent", "freeze", "abort", "raise", "loop", "eat"))
        # A rank of the run is one that has met the others; before that its place is free for whoever comes.
        phases = {
            "kill": ("", "", "loading", "training", "evaluating", "saving"),
            "stop": ("", "", "loading", "training", "evaluating", "saving"),
            "agent": ("",),
            "freeze": ("",),
            "abort": ("training",),
            "raise": ("loading", "training", "training", "evaluating", "saving"),
            "loop": ("loading", "training", "training", "evaluating", "saving"),
            "eat": ("training",),
        }
        phase = order.choice(phases[kind])
        number = {"training": order.randint(1, 500), "evaluating": order.randint(1, 3), "saving": order.randint(1, 3)}
        moment = f"{phase}:{number.get(phase, 1)}" if phase else ""
        victim = order.randrange(3)
        if (kind, phase) == ("loop", "loading"):
            # Not rank 0: it may be at a long download, for which the others wait for join_timeout, and say so.
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
            # Filling the memory takes some time.
            return since if self.kind != "eat" else gone_at(three.process.worker, 30)
        three.process.wait_for("process group ready")
        time.sleep(self.seconds)
        since = time.monotonic()
        agent, worker = three.process.process.pid, three.process.worker
        {
            "kill": lambda: os.kill(worker, signal.SIGKILL),
            "stop": lambda: os.kill(worker, signal.SIGSTOP),
            "agent": lambda: os.kill(agent, signal.SIGKILL),
            "freeze": lambda: os.killpg(agent, signal.SIGSTOP),
        }[self.kind]()
        return since

    def wrong(self, three: Three, since: float, run_dir: Path) -> tuple[list[str], float]:
        identifier, what, within = {
            "kill": (three.lost, KILLED, WHERE_SOCKETS_CLOSE),
            "eat": (three.lost, NO_MEMORY, WHERE_SOCKETS_CLOSE),
            "stop": (three.lost, STOPPED, WHERE_SILENT),
            "agent": (three.lost, GONE, WHERE_SOCKETS_CLOSE),
            "freeze": (three.lost, SILENT, WHERE_SILENT),
            "abort": (three.lost, r"is gone: SIGABRT\n", WHERE_SOCKETS_CLOSE),
            "raise": ("peer-failed", RAISED, WHERE_SOCKETS_CLOSE),
            "loop": ("peer-stalled", STUCK, WHERE_STUCK),
        }[self.kind]
        return faults_found(three, since, within, run_dir, identifier=identifier, what=what)


@pytest.mark.soak
@pytest.mark.timeout(60 + 30 * TRIALS)
def test_deaths_at_random_moments(
    start: Start, rank_command: RankCommand, port: int, tmp_path: Path, memory: MakeGroup
) -> None:
    """The number of a trial is its seed, so every trial can be repeated."""
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
        with suppress(ProcessLookupError):
            os.killpg(three.process.process.pid, signal.SIGCONT)
        if not ended({0: three.process}, 10):
            found.append(f"{three.name} itself still runs after 10 s more")
        found += left_behind(three.ranks, port)
        print(f"trial {number}: {trial}: {seconds:.1f} s{''.join(f'; WRONG: {one}' for one in found)}", flush=True)
        if found:
            failed.append(f"{number} ({trial}): {'; '.join(found)}")
        for rank in three.ranks:
            rank.kill()
    check(failed)
