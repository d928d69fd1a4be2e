"""The verdict that ends a run, as every rank prints it: which rank is gone, silent or stuck, where, and what next.

``Watch`` decides on rank 0, from heartbeats and last words, when there is one.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import Any

from ddp_manual.agent.handshakes import Peer
from ddp_manual.agent.health import Health, Stall
from ddp_manual.agent.roll_call import MOST_NAMED, RollCall, as_ranges, in_words
from ddp_manual.errors import (
    ConfigMismatch,
    DdpManualError,
    MasterLost,
    PeerFailed,
    PeerLost,
    PeerStalled,
    from_dict,
    signal_name,
)
from ddp_manual.messages import LONGEST_TEXT, Beat, RankInfo, RunInfo, Verdict, encode, last_words, shortened

CRASHES = (signal.SIGABRT, signal.SIGSEGV, signal.SIGBUS, signal.SIGFPE, signal.SIGILL)
STACKS_WITHIN = 2.0
# Seconds within which ranks that did the same work have all finished. Rank 0 alone waits longer for a slower rank; a
# rank that is stuck in a collective has to see the other ranks close their process groups.
FINISH_TOGETHER = 1.0
# Seconds from a collective that broke until it is known which rank is to blame.
BLAME_WITHIN = 1.5
# Seconds that ranks wait in a collective for ranks that have finished.
IN_VAIN = 2.0


def verdict_about(info: RankInfo, words: Mapping[str, Any], *, judged: bool = True) -> Verdict:
    """Make a verdict of ``last_words`` about a rank.

    Args:
        judged: whether the coordinator or the rank's agent says them, not its worker.

    Raises:
        KeyError, TypeError, ValueError: they are not an error.
    """
    about = {"rank": info.rank, "host": info.host, "pid": info.pid, "exit_code": int(words["exit_code"])}
    return {**shortened(words), **about, **({"judged": True} if judged else {})}


def error_for(rank: int, verdict: Mapping[str, Any]) -> DdpManualError:
    """Return the error that ends ``rank``: its own, the coordinator's, or that another rank has failed."""
    if verdict["rank"] == rank:
        return from_dict(shortened(verdict), int(verdict["exit_code"]))
    if verdict.get("judged") or verdict["identifier"] == ConfigMismatch.identifier:  # which all ranks find alike
        return from_dict(shortened(verdict))
    return PeerFailed(
        f"rank {verdict['rank']} ({verdict['host']}, pid {verdict['pid']}) left with error[{verdict['identifier']}]",
        why=f"{verdict['what']}\n{verdict['why']}",
        next=str(verdict["next"]),
    )


def _lost(info: RankInfo, what: str, *, why: str, next: str, exit_code: int | None = None) -> Verdict:
    error = (PeerLost if info.rank else MasterLost)(f"{info.who} {what}", why=why, next=next)
    return verdict_about(info, {**last_words(error), "exit_code": exit_code or error.exit_code})


def rank_0_lost(run: RunInfo, beat: Beat, what: str, why: str) -> MasterLost:
    """Return the error for a rank that has lost rank 0; ``beat`` is what that rank was doing."""
    return MasterLost(
        f"rank 0 ({run.host}, pid {run.pid}) {what}",
        why=f"{why}\nthis rank was {beat.at_step()}",
        next=f"look at rank 0's last lines and at {run.host}, then {run.start_again}",
    )


def lost(info: RankInfo, beat: Beat, again: str, *, status: int | None, oom: bool, stack: str) -> Verdict:
    """Make the verdict that an agent sends whose worker has ended without a word.

    Args:
        status: its exit code, or minus the signal's number; None if nobody could see that.
        oom: whether the kernel ended it because memory ran out.
        stack: the Python stack that a native crash has left.
    """
    next = "look at its last lines"
    if status is None:
        what, why = "its process has ended", "nobody could see how it ended"
    elif oom:
        what = f"{signal_name(-status)}, since memory ran out"
        why = "the kernel's OOM killer ended it: its memory cgroup counts one more oom_kill"
        next = "give it more memory, or a smaller --batch_size"
    elif -status in CRASHES:
        what = signal_name(-status)
        why = f"its worker crashed in native code: {what}"
        next = "repair the call that the stack shows; its last lines may say more"
    elif status < 0:
        what = signal_name(-status)
        why = f"{what} ended its worker; its memory cgroup has not run out of memory"
        next = f"look at its last lines, and at who sends signals on {info.host}"
    else:
        what = f"its worker exited with code {status} without a word"
        why = "the program ended itself, or its interpreter could not go on"
    where = f"it was {beat.at_step()}, when it was last heard"
    return _lost(
        info,
        f"is gone: {what}",
        why="\n".join(filter(None, (why, where, stack and f"its Python stack:\n{stack[-LONGEST_TEXT:]}"))),
        next=f"{next}\nthen {again}",
        exit_code=1 if status is None else 128 - status if status < 0 else status,
    )


def stalled(
    members: Sequence[RankInfo], stall: Stall, beats: Mapping[int, Beat], stacks: Mapping[int, str], again: str
) -> Verdict:
    """Make the verdict about ranks that are alive, and do not come to the collective in which the others wait."""
    shown = stall.behind[:2] or one_per_place(stall, beats)
    ranks = [*stall.behind, *stall.waiting]
    why = [
        f"{members[rank].who}: {beats[rank].at_step()}, on {beats[rank].place or 'no line of Python'}"
        for rank in ranks[:MOST_NAMED]
    ]
    if len(ranks) > MOST_NAMED:
        why.append("...")
    if stall.fewer:
        why.append(
            f"{in_words(as_ranges(sorted(stall.fewer)))} began fewer collectives than the others: cut off in the last "
            "one, or busy inside torch before the next"
        )
    for rank in shown:
        if rank in stacks:
            why.append(f"the Python stack of {members[rank].who}:\n{stacks[rank][-LONGEST_TEXT:]}")
        else:
            why.append(f"{members[rank].who} did not send its Python stack in time")
    if stall.behind:
        first, *others = stall.behind
        info = members[first]
        also = f", and {in_words(as_ranges(others))}" if others else ""
        waiting = f"{in_words(as_ranges(sorted(stall.waiting)))} wait" + "s" * (len(stall.waiting) == 1)
        what = f"{info.who}{also} is stuck while others wait: {waiting} for {stall.seconds:.0f} s"
        next = "repair what the stack shows; work that takes this long while others wait needs a larger --stall_timeout"
    else:
        info = members[stall.waiting[0]]
        what = f"all ranks have waited in a collective for {stall.seconds:.0f} s, and none is behind"
        next = (
            "a connection between two of them may be cut: ddp-manual check tries them all\n"
            "or a step takes longer than that, and needs a larger --stall_timeout"
        )
        if len(shown) > 1:
            next = (
                "look at their lines: a collective is for all ranks, so no collective, and no call that contains one "
                f"(a step, train()), may be below a line such as `if rank == 0`\nor {next}"
            )
    return verdict_about(info, last_words(PeerStalled(what, why="\n".join(why), next=f"{next}\nthen {again}")))


def one_per_place(stall: Stall, beats: Mapping[int, Beat]) -> list[int]:
    """Return the ranks whose stacks to show: one for each line of the program on which ranks wait, two at most."""
    first: dict[str, int] = {}
    for rank in (*stall.fewer, *stall.waiting):
        first.setdefault(beats[rank].place, rank)
    return sorted([*first.values()][:2])


class Watch:
    """Watches the ranks that have joined.

    Args:
        peers: the connections of the ranks, as the coordinator keeps them.
        now: rank 0's monotonic clock.
    """

    def __init__(self, roll_call: RollCall, peers: Mapping[int, Peer], now: float) -> None:
        self.health = Health(roll_call.run, now)
        self.failure: Verdict | None = None
        """What ends the run."""
        self._roll_call = roll_call
        self._info = roll_call.info
        self._peers = peers
        self._close_together: bool | None = None
        self._first_finished: float | None = None
        self._broken: list[tuple[float, int, Verdict, str]] = []
        # Of ranks that were asked for their stacks and have not replied yet.
        self._stacks: dict[int, asyncio.Future[str]] = {}
        self._naming_stalled = False
        self._working: set[asyncio.Task[None]] = set()

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        self._roll_call.hear(rank, now)
        self.health.hear(rank, beat, now)

    def check(self, now: float) -> None:
        """Decide what only time shows, once all ranks have joined."""
        for until, rank, verdict, place in self._broken:
            # To blame for a collective that broke are ranks that finished early, a stopped rank, or this rank itself.
            if now < until or self._end_because_of_finished(rank, place) or self._end_because_of_stopped(now, 0):
                continue
            self.end_the_run(verdict)
        waiting_since = self._first_finished if self._close_together is None else None
        if waiting_since is not None and now - waiting_since > FINISH_TOGETHER:
            self._close_process_groups(together=False)

    def check_health(self, now: float) -> None:
        """Log what is odd about ranks, and end the run because of a rank that is silent, stopped, or stuck."""
        health = self.health
        for rank in health.newly("stopped"):
            if rank in self._peers:
                info = self._info(rank)
                go_on = f"on {info.host}, kill -CONT {info.pid} lets it go on"
                self.send_to_all({"line": f"{info.who} is stopped: {health.beat(rank).stopped}; {go_on}"})
        if not self._roll_call.complete:
            return
        if self._end_because_of_silent(now) or self._end_because_of_stopped(now, self._roll_call.run.peer_timeout):
            return
        for rank in health.newly("debugging"):
            where = health.beat(rank).place or "a line of its own"
            line = f"{self._info(rank).who} is in a debugger, on {where}: the other ranks wait for it"
            self.send_to_all({"line": line}, without=rank)
        for rank, seconds, median in health.newly_slow(now):
            takes = f"its own part of a step takes {1e3 * seconds:.1f} ms, {seconds / median:.1f} times the median"
            line = f"{self._info(rank).who} is slow: {takes} of all ranks, and all wait for it (named once)"
            self._peers[0].connection.send({"line": line})
        if vain := health.waiting_in_vain(now, IN_VAIN):
            self._end_because_of_finished(vain[0], health.beat(vain[0]).place)
        elif not self._naming_stalled and (stall := health.find_stall(now)) is not None:
            self.in_background(self._name_stalled(stall))

    def take_failure(self, rank: int, verdict: Verdict, broken_at: str | None) -> None:
        """End the run because of a rank's last words.

        Args:
            broken_at: the line of the collective if that broke; which rank is to blame will be known in a moment.
        """
        if broken_at is None:
            self.end_the_run(verdict)
        else:
            self._broken.append((time.monotonic() + BLAME_WITHIN, rank, verdict, broken_at))

    def end_because_of_gone(self, rank: int, reason: str) -> None:
        """End the run because the connection to a rank's agent has ended: so has the agent, or its host."""
        info = self._info(rank)
        self._end_because_of(
            info,
            "is gone without a word",
            why=f"its connection to rank 0 ended: {reason}; agent and worker of that rank have both ended, or its host "
            f"has\nit was {self.health.beat(rank).at_step()}, when it was last heard",
            next=f"look at its last lines; if there are none its agent was killed, or {info.host} is down",
        )

    def _end_because_of_silent(self, now: float) -> bool:
        """End the run because of the rank that has been silent for too long; the others soon will be."""
        found, world_size = self.health.silent(now), self._roll_call.run.world_size
        if not found:
            return False
        (rank, seconds), infos = next(iter(found.items())), [self._info(rank) for rank in found]
        why = [f"it was {self.health.beat(rank).at_step()}, when it was last heard"]
        if len(found) > 1:
            others = ", ".join(other.who for other in infos[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
            why.append(f"as silent: {others}")
        if world_size > 2 and len(found) == world_size - 1:
            why.append("rank 0 hears nobody any more: it may be rank 0's own host that is cut off")
        else:
            why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
        process = f"whether its process runs: ps -o stat= -p {infos[0].pid}"
        look = f"look whether {infos[0].host} can be reached, and {process}"
        self._end_because_of(infos[0], f"has been silent for {seconds:.0f} s", why="\n".join(why), next=look)
        return True

    def _end_because_of_stopped(self, now: float, longer_than: float) -> bool:
        """End the run if a signal has stopped a worker for longer than these seconds."""
        found = self.health.stopped(now, longer_than)
        if found is not None:
            rank, seconds = found
            beat = self.health.beat(rank)
            self._end_because_of(
                self._info(rank),
                f"has been stopped by {beat.stopped} for {seconds:.0f} s",
                why=f"it was {beat.at_step()}; its agent runs, and sees its worker stopped",
                next="let nobody stop it (Ctrl-Z, a batch system), or give a larger --peer_timeout",
            )
        return found is not None

    def _end_because_of(self, info: RankInfo, what: str, *, why: str, next: str) -> None:
        self.end_the_run(_lost(info, what, why=why, next=f"{next}\nthen {self._roll_call.run.start_again}"))

    def _end_because_of_finished(self, rank: int, place: str) -> bool:
        """End the run if ``rank`` is in a collective, at this place, which other ranks do not take part in any more."""
        if early := self.health.finished_before(rank):
            error = PeerLost(
                f"{in_words(as_ranges(early))} had finished while rank {rank} was still in a collective",
                why="a collective needs every rank, and they did not make the same number of calls\n"
                f"this one was on {place or 'no line of Python'}",
                next="give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for "
                "less\nand call no collective, nor what contains one (a step, train()), on one rank alone, as below "
                "`if rank == 0`",
            )
            self.end_the_run(verdict_about(self._info(rank), last_words(error)), spared=self.health.finished)
        return bool(early)

    async def _name_stalled(self, stall: Stall) -> None:
        """End the run with the stacks of the ranks that are stuck, unless they have gone on in the meantime."""
        self._naming_stalled = True
        beats = {rank: self.health.beat(rank) for rank in stall.waiting}
        stacks = await self.stacks_of(stall.behind or one_per_place(stall, beats))
        self._naming_stalled, now_stalled = False, self.health.find_stall(time.monotonic())
        if now_stalled is not None:
            beats = {rank: self.health.beat(rank) for rank in (*now_stalled.waiting, *now_stalled.behind)}
            infos, again = self._roll_call.infos(), self._roll_call.run.start_again
            self.end_the_run(stalled(infos, now_stalled, beats, stacks, again))

    def end_the_run(self, verdict: Verdict, spared: Sequence[int] = ()) -> None:
        """Tell all ranks why, except those ``spared``, which have done their work and leave in order."""
        if self.failure is None:
            self.failure = verdict
            for rank, peer in self._peers.items():
                if rank not in spared:
                    peer.connection.send({"verdict": verdict})
            if spared and self._close_together is None:
                self._close_process_groups(together=False)

    def send_to_all(self, message: Mapping[str, Any], without: int | None = None) -> None:
        line = encode(message)
        for rank, peer in self._peers.items():
            if rank != without:
                peer.connection.write(line)

    # -- the end of the work -------------------------------------------------------------------------------------

    def finish(self, rank: int) -> None:
        self.health.finish(rank)
        if self._first_finished is None:
            self._first_finished = time.monotonic()
        if self._close_together is not None:
            self._peers[rank].connection.send({"close": self._close_together})
        elif len(self.health.finished) == self._roll_call.run.world_size:
            self._close_process_groups(together=True)

    def _close_process_groups(self, *, together: bool) -> None:
        """Tell the ranks that have finished to close their process groups: all at once, or each by itself."""
        self._close_together = together
        for rank in self.health.finished:
            if rank in self._peers:
                self._peers[rank].connection.send({"close": together})

    # -- stacks ----------------------------------------------------------------------------------------------------

    async def stacks_of(self, ranks: Iterable[int]) -> dict[int, str]:
        """Return the stacks of those of these ranks whose agents reply in time."""
        asked = [rank for rank in ranks if rank in self._peers]
        for rank in asked:
            if rank not in self._stacks:
                self._stacks[rank] = asyncio.get_running_loop().create_future()
                self._peers[rank].connection.send({"stacks": True})
        replies = {rank: self._stacks[rank] for rank in asked}
        if replies:
            await asyncio.wait(replies.values(), timeout=STACKS_WITHIN)
        return {rank: reply.result() for rank, reply in replies.items() if reply.done()}

    def take_stacks(self, rank: int, text: str) -> None:
        if asked := self._stacks.pop(rank, None):
            asked.set_result(text)

    def in_background(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(work)
        self._working.add(task)
        task.add_done_callback(self._working.discard)
