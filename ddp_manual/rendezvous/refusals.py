"""What rank 0 says to a process that it does not take: to have another token or version, to come second, to be lost."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime

from ddp_manual.errors import PeerUnreachable, RankTaken, TokenMismatch, VersionMismatch
from ddp_manual.rendezvous.address import at
from ddp_manual.rendezvous.entries import Entry, Hello


def other_token(who: str, run: Hello, reason: Exception) -> TokenMismatch:
    return TokenMismatch(
        f"{who} does not have rank 0's token",
        why=f"rank 0 on {run.host} (pid {run.pid}) says of its request: {reason}",
        next="give every rank the same DDP_MANUAL_TOKEN or --token_file",
    )


def other_version(who: str, run: Hello, reason: Exception) -> VersionMismatch:
    """For a request that cannot be read."""
    return VersionMismatch(
        f"{who} was started with another version of ddp_manual than rank 0",
        why=f"rank 0 on {run.host} cannot read its request: {reason}",
        next="install the same version on every host",
    )


def taken(entry: Entry, holder: Entry, run: Hello, missing: Sequence[int], *, frozen: bool = False) -> RankTaken:
    """For a second process of one rank.

    Args:
        missing: the ranks that nobody is yet.
        frozen: whether ``holder`` did not answer, though its port is open.
    """
    since = datetime.fromtimestamp(holder.since).strftime("%H:%M:%S")
    odd = "; it does not answer, but its port is open: it is frozen" if frozen else ""
    if frozen:
        next = f"on {holder.host}: kill -9 {holder.pid}\nthen start this rank again"
    elif missing:
        next = run.command_for(missing[0])
    else:
        next = f"all ranks are here; to replace rank {entry.rank}, end that process and start all ranks again"
    return RankTaken(
        f"rank {entry.rank} is taken by {holder.host} (pid {holder.pid})",
        why=f"that process has held it since {since}; this one is {entry.host} (pid {entry.pid}){odd}",
        next=next,
    )


def out_of_reach(entry: Entry, run: Hello) -> PeerUnreachable:
    return PeerUnreachable(
        f"{entry.who()} cannot be reached from rank 0's host",
        why=f"rank 0 on {run.host} (pid {run.pid}) could not connect to {at(entry.address, entry.probe_port)}",
        next=f"open all TCP ports of {entry.host} to {run.host}, then start this rank again",
    )


def not_heard(entry: Entry, within: float) -> RankTaken:
    """For a process that was taken for dead after ``within`` seconds, and goes on after all."""
    return RankTaken(
        f"{entry.who()} was not heard in time, and is no rank any more",
        why=f"rank 0 asked it through the store and at its port, and had no answer within {within} s",
        next="start it again if its rank is still missing",
    )
