"""Whether a process that wants to be a rank is admitted, is refused, or waits until that rank's holder is heard."""

from __future__ import annotations

from datetime import datetime
from typing import TYPE_CHECKING

from ddp_manual.errors import DdpManualError, RankTaken, WorldSizeMismatch
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol.compatibility import mismatch
from ddp_manual.ranks_and_runs import RankInfo
from ddp_manual.text_wrapping import whole

if TYPE_CHECKING:
    from ddp_manual.protocol.roll_call import RollCall

# A process that has sent nothing for as long as this many heartbeats is frozen.
FROZEN_AFTER_BEATS = 2.4


def decide(
    roll_call: RollCall, info: RankInfo, now: float, since: float, wall_clock: float, *, false_rank_0: bool
) -> tuple[DdpManualError | bool, list[str]]:
    """Return the decision for ``RollCall.admit``, which explains the arguments, and warnings about the process."""
    refusal, warnings = mismatch(info, roll_call.rank_0, roll_call.run, wall_clock)
    holder = roll_call.members.get(info.rank)
    if false_rank_0:
        refusal = _taken(roll_call, info, roll_call.rank_0, frozen=False)
    elif refusal is None and holder is not None:
        frozen = now - holder.heard > FROZEN_AFTER_BEATS * roll_call.run.heartbeat_period
        if not frozen and holder.heard <= since:
            return False, warnings
        refusal = _taken(roll_call, info, holder.info, frozen=frozen)
    if isinstance(refusal, WorldSizeMismatch) and info.rank not in (missing := roll_call.missing):
        refusal.next = roll_call.run.command_for(missing[0]) if missing else refusal.next
    return refusal or True, warnings


def _taken(roll_call: RollCall, info: RankInfo, holder: RankInfo, *, frozen: bool) -> RankTaken:
    since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
    then = "start all ranks again" if roll_call.works and roll_call.run.on_loss == LEAVE else "start this rank again"
    odd = "; the process that holds it is frozen: its connection is open, and it does not answer" if frozen else ""
    if info.goes_on:
        odd += "\nit was given to that process while this one was cut off or frozen"
        next = "nothing: the run goes on without this process"
    elif frozen:
        next = f"on {holder.host}:\n{whole(f'kill -9 {holder.agent}')}\nthen {then}"
    elif not roll_call.all_here:
        next = roll_call.run.command_for(roll_call.missing[0])
    else:
        next = f"all ranks are here; to replace rank {info.rank}, end that process and {then}"
    return RankTaken(
        f"rank {info.rank} is taken by {holder.host} (pid {holder.pid})",
        why=f"that process has held it since {since}; this one is {info.host} (pid {info.pid}){odd}",
        next=next,
    )
