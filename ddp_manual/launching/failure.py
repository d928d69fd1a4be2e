"""What has ended an attempt at a run: in one line for a person, and whether starting all ranks again can mend it."""

from __future__ import annotations

import json
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from ddp_manual.errors import PeerGone, TrainingFailed
from ddp_manual.rundir import RunPaths

# What another attempt may escape: an exception of the training, a peer that is gone. Not so the rest: options, names,
# versions, files, data and devices are the same again. A rank that a signal has stopped was asked to.
MENDED_BY_A_RESTART = (TrainingFailed.exit_code, PeerGone.exit_code)
ASKED_TO_STOP = (signal.SIGINT, signal.SIGTERM)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """A rank that has ended otherwise than with 0.

    Args:
        status: its exit code, or minus the signal that has killed it.
    """

    rank: int
    pid: int
    status: int

    @property
    def exit_code(self) -> int:
        """As a shell has it."""
        return self.status if self.status > 0 else 128 - self.status

    @property
    def asked_to_stop(self) -> bool:
        return self.exit_code - 128 in ASKED_TO_STOP

    @property
    def may_be_mended(self) -> bool:
        """Whether to start all ranks again; also one that was killed, as by the kernel when memory is short."""
        return self.status in MENDED_BY_A_RESTART or (self.status < 0 and not self.asked_to_stop)

    def told(self, paths: RunPaths) -> str:
        """In one line, with the words of the rank itself where it has left any."""
        if self.status < 0:
            return f"rank {self.rank} was killed by {signal.Signals(-self.status).name}"
        words = _last_words(paths, self.rank)
        if words.get("pid") != self.pid:  # none, or those of an earlier rank
            return f"rank {self.rank} left with exit code {self.status}"
        return f"error[{words['identifier']}]: {words['what']}"


def root_cause(failures: Sequence[Failure]) -> Failure:
    """Of those that have failed, in the order in which they were seen to: the first that lost no peer.

    A rank that lost a peer may be reaped before the one that was lost.
    """
    return next((one for one in failures if one.status != PeerGone.exit_code), failures[0])


def _last_words(paths: RunPaths, rank: int) -> dict[str, Any]:
    try:
        words: dict[str, Any] = json.loads(paths.failure(rank).read_bytes())
    except (FileNotFoundError, ValueError):
        return {}
    return words
