"""What an agent decides, told one thing after the other, with a shell that notes what is asked of it."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from ddp_manual import from_agent, from_worker, messages
from ddp_manual.errors import DdpManualError
from ddp_manual.messages import Beat, LastWords, Losses, Place, RunInfo, Verdict
from ddp_manual.on_loss import WAIT
from ddp_manual.protocol import states
from ddp_manual.protocol.agent import SAME_WITHIN, VERDICT_WITHIN, AgentProtocol
from ddp_manual.world_spec import WorldSpec
from tests.runs import run_info
from tests.unit.test_roll_call import info, ready

PLACE = Place(rank=1, world_size=3, local_rank=1, local_world_size=3, node=0, nodes=1, host_leader=0)
GONE = Verdict(
    "peer-lost", "rank 2 (b, pid 7) is gone: SIGKILL", "why", "next", 14, rank=2, host="b", pid=7, judged=True
)


class Noting:
    """A shell that does nothing, and notes what it is asked for."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.sent: list[messages.FromRank] = []
        self.told: list[from_agent.FromAgent] = []
        self.lines: list[str] = []
        self.error: DdpManualError | None = None
        self.finished = False
        self.timers: list[tuple[float, Callable[[float], None]]] = []
        self.info, self.here, self.is_connected, self.held_steps = info(1, "a"), 3, True, 0
        self.worker: Any = SimpleNamespace(
            beat=Beat(), ended=False, pid=1, said=set(), status=None, until=None, crash_stack="", is_gone=False
        )
        self.worker.hears, self.worker.has_started_its_agent = True, False
        self.worker.ran_out_of_memory, self.worker.heartbeat = False, lambda: self.worker.beat
        self.worker.send = self.told.append

    def log(self, line: str, /) -> None:
        self.lines.append(line)

    def send(self, message: messages.FromRank) -> None:
        self.sent.append(message)

    def fail(self, error: DdpManualError) -> None:
        self.error = self.error or error

    def finish(self, result: object) -> None:
        self.finished = True

    def call_at(self, when: float, call: Callable[[float], None]) -> None:
        self.timers.append((when, call))

    def as_seen_here(self, run: RunInfo) -> tuple[RunInfo, bool]:
        return run, False

    def __getattr__(self, name: str) -> Callable[..., None]:
        return lambda *_, **__: self.asked.append(name)

    def passes(self, until: float) -> None:
        """Let time pass: call what was to be called until then."""
        due, self.timers = self.timers, []
        for when, call in due:
            if when <= until:
                call(when)
            else:
                self.timers.append((when, call))


def agent(rank: int = 1) -> tuple[AgentProtocol, Noting]:
    shell = Noting()
    return AgentProtocol(WorldSpec(world_size=3, rank=rank), shell, 0.0, name="train.py", chose_folder=True), shell


def placed(**other: Any) -> messages.Placed:
    run = run_info(world_size=3, **other)
    return messages.Placed(PLACE, ("10.0.0.1", 1), 0, run.on_loss == WAIT, None, Losses(0, 0.0), run)


def working(**other: Any) -> tuple[AgentProtocol, Noting]:
    """An agent whose worker works."""
    one, shell = agent()
    one.begin()
    one.joined(run_info(world_size=3, **other), 1.0)
    one.take_from_worker(from_worker.Loaded(ready()), 2.0)
    one.take(placed(**other), 3.0)
    assert isinstance(one.state, states.Working) and shell.asked == ["have_it_load", "take_place"]
    return one, shell


def test_a_program_that_has_joined_leaves_in_order_and_its_rank_ends_with_its_process() -> None:
    one, shell = working()
    for message in (from_worker.Joins(), from_worker.Finished(), from_worker.Left(), from_worker.Result({"a": 1})):
        shell.worker.said.add(type(message))
        one.take_from_worker(message, 4.0)
    assert shell.asked[-1] == "leave_in_order"
    one.others_have_left()
    assert not shell.finished  # what it has registered to do at its exit takes its time
    shell.worker.ended = True
    one.worker_gone(5.0)
    assert shell.finished and shell.error is None


def test_a_program_that_has_joined_and_ends_without_leaving_is_lost() -> None:
    for joins in (True, False):
        one, shell = working()
        shell.worker.said.update({from_worker.Joins} if joins else ())
        shell.worker.ended, shell.worker.status = True, 0
        one.worker_gone(5.0)
        assert isinstance(shell.sent[-1], messages.Failed if joins else messages.Finished)


def test_the_words_of_another_rank_end_this_one_unless_its_own_worker_says_the_same_in_time() -> None:
    failed = Verdict("peer-failed", "rank 2 left", "why", "next", 14, rank=2, host="b", pid=7, judged=False)
    for says_so in (False, True):
        one, shell = working()
        one.take(messages.RunEnds(failed), 10.0)
        assert shell.error is None
        if says_so:
            one.take_from_worker(from_worker.Failed(LastWords("peer-failed", "my own words", "", "", 14)), 10.1)
        shell.passes(10.0 + SAME_WITHIN)
        assert shell.error is not None
        assert shell.error.what.startswith("my own words" if says_so else "rank 2 (b, pid 7) left with ")


@pytest.mark.parametrize("ticks_first", [False, True])
def test_a_rank_that_was_given_up_while_it_was_stopped_is_told_so_and_not_to_look_at_itself(ticks_first: bool) -> None:
    next = "look whether a can be reached, and whether its process runs: ps -o stat= -p 7\nthen start all ranks again"
    silent = Verdict(
        "peer-lost", "rank 1 has been silent for 60 s", "why", next, 14, rank=1, host="a", pid=7, judged=True
    )
    one, shell = working()
    for tick in range(40):
        one.tick(3.0 + tick / 10)
    if ticks_first:
        one.tick(90.0)
    one.take(messages.RunEnds(silent), 90.0)
    assert shell.error is not None and shell.error.next == "start all ranks again"
    assert "this rank was itself stopped for 83 s, as by Ctrl-Z" in shell.error.why


def test_a_timer_of_a_replaced_worker_does_nothing() -> None:
    one, shell = working(on_loss=WAIT)
    one.take_from_worker(from_worker.Failed(LastWords("training-failed", "it failed", "", "", 1)), 10.0)
    one.take(messages.Replace(1), 10.5)
    shell.passes(10.0 + VERDICT_WITHIN)
    assert shell.error is None and isinstance(one.state, states.Replacing)
    one.worker_ended(1, (0, 5))
    assert shell.sent[-1] == messages.Held((0, 5), 0, worker=1)
    one.worker_replaced()
    assert isinstance(one.state, states.Waiting) and not isinstance(one.state, states.Replacing)


def test_a_silent_rank_0_is_looked_for_where_seats_are_kept_and_given_up_otherwise() -> None:
    for on_loss, asked in ((WAIT, ["replace_worker", "search_again"]), ("leave", [])):
        one, shell = working(on_loss=on_loss)
        for tick in range(200):
            one.tick(3.0 + tick / 10)
        assert shell.asked[2:] == [*["look_around"] * shell.asked.count("look_around"), *asked]
        assert isinstance(one.state, states.Looking) is bool(asked)
        assert (shell.error is not None and shell.error.identifier == "master-lost") is not bool(asked)


def test_ctrl_c_stops_all_in_order_and_twice_this_rank() -> None:
    one, shell = working()
    one.take_from_worker(from_worker.TakesStops(), 4.0)
    one.take_signal(signal.SIGINT, 5.0)
    assert shell.sent[-1] == messages.Stopping(signal.SIGINT)
    one.take_signal(signal.SIGINT, 5.1)  # the same, from the terminal and from a program in between
    assert shell.error is None
    one.take(messages.AskStep(), 5.1)
    assert shell.told[-1] == from_agent.AskStep()
    one.take_from_worker(from_worker.StepsDone(7), 5.2)
    assert shell.sent[-1] == messages.StepsDone(7)
    one.take(messages.StopAfter(8, signal.SIGINT, [1]), 5.3)
    assert shell.told[-1] == from_agent.StopAfter(8, signal.SIGINT, [1])
    one.take_signal(signal.SIGINT, 8.0)
    assert shell.error is not None and shell.error.exit_code == 130 and shell.worker.until == 0


def test_a_program_that_takes_no_stops_gets_its_signals_itself() -> None:
    one, shell = working()
    one.take_signal(signal.SIGTERM, 4.0)
    assert shell.error is not None  # it has not begun
    one, shell = working()
    one.take_from_worker(from_worker.ProgramBegins(), 4.0)
    one.take_signal(signal.SIGTERM, 5.0)
    assert shell.asked[-1] == "pass_on" and shell.error is None
    one.take_signal(signal.SIGTERM, 8.0)
    assert shell.error is not None and shell.error.why == "the program had not ended by itself"


def test_a_program_that_hears_nothing_has_done_no_steps() -> None:
    one, shell = working()
    shell.worker.hears = False
    one.take(messages.AskStep(), 5.0)
    assert shell.sent[-1] == messages.StepsDone(0) and shell.told == []


def test_a_rank_that_has_lost_another_says_which() -> None:
    one, shell = working()
    one.take(messages.RunEnds(GONE), 10.0)
    assert shell.error is not None and shell.error.what == GONE.what
