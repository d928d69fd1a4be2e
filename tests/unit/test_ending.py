"""How a rank ends: what runs in its event loop meanwhile."""

from __future__ import annotations

import asyncio
import gc
import warnings
from unittest.mock import Mock

import pytest

from ddp_manual.agent.rank_result import Ending
from ddp_manual.protocol.how_a_worker_ended import lost
from ddp_manual.ranks_and_runs import Beat
from tests.runs import info


@pytest.mark.parametrize("status", [-9, None], ids=["a child", "a script whose shell has taken its status"])
def test_a_worker_that_ended_for_want_of_memory_is_told_so(status: int | None) -> None:
    error = lost(
        info(1, "a"),
        Mock(status=status, ran_out_of_memory=True, crash_stack="", beat=Beat()),
        "start all ranks again",
        replaced=False,
    )
    assert error.what.endswith("is gone: SIGKILL, since memory ran out") and error.exit_code == 137


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
