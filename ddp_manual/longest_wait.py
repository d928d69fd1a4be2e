"""How long ranks may wait in a collective for one that lives but does not come, before the run ends."""

from __future__ import annotations

from dataclasses import dataclass

from ddp_manual.ranks_and_runs import RunInfo

# Ranks may wait in a collective for this share of their process group's time-out. After the whole time-out torch ends
# the ranks that wait, and nobody would name the rank that they wait for.
SHARE_OF_TIMEOUT = 0.8


@dataclass(frozen=True)
class LongestWait:
    """How long ranks may wait in a collective for one that lives but does not come."""

    seconds: float
    timeout: float | None = None
    """The time-out of their process group, if ``seconds`` follows from that; None if they are ``stall_timeout``."""

    @property
    def reason(self) -> str:
        if self.timeout is None:
            return "--stall_timeout"
        return f"{SHARE_OF_TIMEOUT:.0%} of their process group's time-out of {self.timeout:g} s"

    @property
    def larger(self) -> str:
        """What a person can set for a longer wait, as the object of a sentence."""
        if self.timeout is None:
            return "a larger --stall_timeout"
        return (
            f"a larger timeout in\ninit_process_group or new_group: it is {self.timeout:g} s, and the run ends before "
            "torch ends the ranks that wait\n(for the group that join() opens, a larger stall_timeout)"
        )


def timeout_for(stall_timeout: float) -> float:
    """Return the seconds of a time-out with which torch ends no collective before ``stall_timeout`` ends the run."""
    return stall_timeout / SHARE_OF_TIMEOUT + 10


def longest_wait(run: RunInfo, timeout: float | None, until_known: float) -> LongestWait:
    """Return how long ranks may wait in a collective of a process group.

    Args:
        timeout: the seconds of the group's own time-out; None if that is not known.
        until_known: the most seconds from the beginning of a wait until rank 0 knows of it.
    """
    own = LongestWait(run.stall_timeout)
    if timeout is None:
        return own
    of_group = LongestWait(max(timeout / 2, SHARE_OF_TIMEOUT * timeout - until_known), timeout)
    return of_group if run.stall_timeout_is_default or of_group.seconds < own.seconds else own
