"""What a rank's agent knows of the worker that it has at present."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from ddp_manual.errors import DdpManualError
from ddp_manual.messages import Beat


@dataclass(eq=False, kw_only=True)
class Work:
    """What one worker was told and has said: another worker has a record of its own, and this one counts no more."""

    started: float
    is_begun: bool = False
    """Whether the worker was told what to load."""
    ready: asyncio.Future[Mapping[str, Any]] = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    sent_beat: Beat = field(default_factory=Beat)
    """What rank 0 was told last that it does."""
    result: Any = None
    """What it has said of its work, if that is complete."""
    own_words: DdpManualError | None = None
    """What it has failed with."""
    has_broken: bool = False
    """Whether a broken collective is what it has failed with."""
    words_of_another: str | None = None
    """The identifier of what another rank has failed with, for a moment in which this worker may say the same."""
    _timers: list[asyncio.TimerHandle] = field(default_factory=list)

    def call_later(self, seconds: float, fail: Callable[[DdpManualError], None], error: DdpManualError) -> None:
        """Fail, unless the rank has ended by then, or begins anew."""
        self._timers.append(asyncio.get_running_loop().call_later(seconds, fail, error))

    def drop(self) -> None:
        """Let nothing happen because of this worker any more."""
        for timer in self._timers:
            timer.cancel()
