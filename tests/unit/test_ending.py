"""How a rank ends: what runs in its event loop meanwhile."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import socket
import warnings
from unittest.mock import Mock

import pytest

from ddp_manual.agent.rank_result import Ending
from ddp_manual.agent.worker_process import Worker
from ddp_manual.protocol.how_a_worker_ended import lost
from ddp_manual.protocol.verdict_words import without_start_again
from ddp_manual.ranks_and_runs import Beat, from_last_checkpoint
from tests.runs import info


@pytest.mark.parametrize(
    ("status", "what", "why", "exit_code"),
    [
        (-9, "SIGKILL, since memory ran out", "OOM killer", 137),
        (None, "its process has ended", "one more oom_kill", 1),
    ],
    ids=["a child", "a script whose shell has taken its status"],
)
def test_a_worker_that_may_have_ended_for_want_of_memory_is_told_so(
    status: int | None, what: str, why: str, exit_code: int
) -> None:
    worker = Mock(status=status, ran_out_of_memory=True, crash_stack="", beat=Beat())
    error = lost(info(1, "a"), worker, "start all ranks again", replaced=False)
    assert error.what.endswith(f"is gone: {what}") and why in error.why and error.exit_code == exit_code


def test_what_is_cancelled_before_its_turn_warns_of_nothing() -> None:
    async def work() -> None:
        raise AssertionError("it has had its turn")

    async def end() -> None:
        ending = Ending(None)  # type: ignore[arg-type]
        ending.in_background(work())
        ending.cancel_background()
        await asyncio.sleep(0)
        await asyncio.sleep(0)

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        asyncio.run(end())
        gc.collect()
    assert [str(one.message) for one in warned] == []


@pytest.mark.parametrize(
    ("advice", "of_one_rank"),
    [
        ("look\nthen start all ranks again", "look"),
        ("repair it, then start all ranks again", "repair it"),
        (f"look\nthen {from_last_checkpoint(None, 'runs/new')}", "look"),
        ("start all ranks again", ""),
    ],
)
def test_advice_to_start_one_rank_follows_on_none_to_start_all(advice: str, of_one_rank: str) -> None:
    assert without_start_again(advice) == of_one_rank


def test_a_program_of_another_user_is_left_and_named_once_with_how_to_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.kill", Mock(side_effect=PermissionError))
    said: list[str] = []

    async def end(channel: socket.socket) -> None:
        worker = Worker(2**22 + 1, channel, os.open(os.devnull, os.O_RDONLY))
        worker.log = said.append
        for number in (signal.SIGUSR1, signal.SIGTERM):
            worker.signal(number)
        await asyncio.wait_for(worker.end(None, own=False), 5)

    asyncio.run(end(socket.socket()))
    assert said == [f"cannot end pid {2**22 + 1}, which runs as another user: sudo kill {2**22 + 1}"]
