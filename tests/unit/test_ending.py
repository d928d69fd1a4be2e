"""How a rank ends: what runs in its event loop meanwhile."""

from __future__ import annotations

import asyncio
import gc
import warnings

from ddp_manual.agent.rank_result import Ending


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
