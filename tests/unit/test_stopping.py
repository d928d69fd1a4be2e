"""All ranks stop after the same step, whatever each has done when it is asked."""

from __future__ import annotations

import signal
import time
from typing import Any
from unittest import mock

import pytest

from ddp_manual import messages
from ddp_manual.from_worker import HandlesSignals, Handling
from ddp_manual.protocol import states
from ddp_manual.protocol.agent import AgentProtocol
from ddp_manual.protocol.stop_step import StopStep
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.rank_options import WorldSpec
from ddp_manual.worker.steps_done import Stops
from tests.alone import alone


@pytest.mark.parametrize("done", [(0, 0, 0), (7, 7, 7), (7, 6, 7), (0, 3, 1)])
def test_all_stop_after_the_first_step_that_no_rank_has_passed(done: tuple[int, ...]) -> None:
    sent: list[Any] = []
    stop_step = StopStep(mock.Mock(send_to_all=sent.append))
    ranks = [
        Stops(
            tell=lambda said, rank=rank: stop_step.take(rank, said.steps),  # type: ignore[misc]
            wait=lambda: sent[-1],
        )
        for rank in range(len(done))
    ]
    assert not any(stops.after_a_step() for stops, steps in zip(ranks, done, strict=True) for _ in range(steps))
    stop_step.ask(1, 15)
    stop_step.ask(2, 2)
    for stops in ranks:
        stop_step.name(lambda: range(3))
        assert sent == [messages.AskStep()], "not all have replied"
        stops.ask()
    stop_step.name(lambda: range(3))
    assert sent[1:] == [messages.StopAfter(max(done) + 1, 15, [1, 2])]
    for stops, steps in zip(ranks, done, strict=True):
        stopped = [stops.after_a_step() for _ in range(steps, max(done) + 1)]
        assert stopped == [False] * (max(done) - steps) + [True]
        assert stops.stopped is not None and stops.stopped.ranks == [1, 2]


def test_where_nothing_was_asked_a_step_costs_a_microsecond_and_says_nothing() -> None:
    with alone() as world:
        said = world._reporter.said  # type: ignore[attr-defined]
        assert not world.stop_after_this_step()
        before = len(said)
        started = time.thread_time()  # the machine has other work too
        for _ in range(1000):
            world.stop_after_this_step()
        assert (time.thread_time() - started) / 1000 < 5e-6
        assert len(said) == before


def test_a_program_that_has_left_gets_its_signals_again() -> None:
    with alone() as world:
        said = world._reporter.said  # type: ignore[attr-defined]
        world.stop_after_this_step()
        world.stop_heeding_signals()
        assert said == [HandlesSignals(Handling.WITH_ALL), HandlesSignals(Handling.DONE)]
    assert said[2:] == [HandlesSignals(Handling.BY_ITSELF)]


def test_a_rank_that_rank_0_has_left_alone_stops_after_its_own_next_step() -> None:
    shell = mock.MagicMock()
    rank = ThisRank(WorldSpec(world_size=2, rank=1), shell, 0.0, chose_folder=True)
    rank.enter(states.Alone())
    agent = AgentProtocol(rank, name="train.py", in_one_terminal=False)
    agent.take_from_worker(HandlesSignals(Handling.WITH_ALL), 4.0)
    agent.take_signal(signal.SIGTERM, 6.0)
    asked = [messages.AskStep(), messages.StopAfter(0, signal.SIGTERM, [1])]
    assert [call.args[0] for call in shell.worker.send.call_args_list] == asked
