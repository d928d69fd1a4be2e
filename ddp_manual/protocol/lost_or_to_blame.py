"""Rank 0 watches the ranks that have joined: from heartbeats and last words it decides when a rank is lost or to blame.

Nothing here waits: messages, ticks and the time are passed in, and an ``Inquiry`` calls what the replies of agents
decide. ``end_or_begin_anew.py`` decides what a loss leads to, ``verdict_words.py`` has most of the words.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from functools import partial

from ddp_manual import messages
from ddp_manual.errors import PeerLost
from ddp_manual.protocol.end_or_begin_anew import AWAITED, BROKEN, GONE, OWN_CODE, SILENT, EndOfWork, Loss
from ddp_manual.protocol.handshakes import Peers
from ddp_manual.protocol.health import Health
from ddp_manual.protocol.inquiries import STACKS, Inquiries, Inquiry, Then
from ddp_manual.protocol.reachability import Pair, Probes, unreachable
from ddp_manual.protocol.roll_call import MOST_NAMED, RollCall
from ddp_manual.protocol.search_for_mismatch import DO_CALLS_DIFFER, MismatchSearch
from ddp_manual.protocol.stalls import Stall
from ddp_manual.protocol.verdict_words import closed_because, lost_rank, one_per_place, stalled, verdict_about
from ddp_manual.protocol.watched_rank import began_fewer
from ddp_manual.ranks_and_runs import Beat, LastWords, RankInfo, Verdict
from ddp_manual.text_wrapping import whole
from ddp_manual.wording import as_ranges, in_words

STACKS_WITHIN = 2.0
# Seconds from a collective that broke until it is known which rank is to blame.
BLAME_WITHIN = 1.5
# Seconds until a line says that ranks wait for others, long before that ends the run.
STALL_LINE = 30.0
WAIT_SHOWN = 5.0  # seconds after which ``status`` shows that ranks wait
# Seconds after which the network is probed anew.
PROBES_HOLD = 60.0
# How many ranks have a line each if more of them are stopped, slow or in a debugger at the same moment.
MOST_LINES = 8
# Seconds that ranks may wait in a collective for ranks that have finished.
IN_VAIN = 2.0
OPENS_EACH = "have every rank call init_process_group() and new_group(), also for groups that it is not in"
SAME_STEPS = (
    "give every rank the same number of steps: DistributedSampler does, and DDP's join() allows for less\n"
    "and call no collective, nor what contains one (a step, train()), on one rank alone, as below `if rank == 0`"
)
LET_IT_RUN = "let nobody stop it (Ctrl-Z, a batch system), or give a larger --peer_timeout"
# A question that rank 0 has; there is at most one inquiry at a time for it.
WHERE_ARE_THEY_STUCK = "where are they stuck"


@dataclasses.dataclass(frozen=True)
class Broken:
    """A collective that has broken in the rank of ``verdict``. Which rank is to blame is judged at ``judged_at``."""

    judged_at: float
    verdict: Verdict
    place: str


class Watch:
    """Watches the ranks that have joined. ``now`` is the time on rank 0's monotonic clock."""

    def __init__(self, roll_call: RollCall, peers: Peers, now: float) -> None:
        self.health = Health(roll_call.run, now)
        self._roll_call = roll_call
        self._info = roll_call.info
        self._peers = peers
        self._broken: list[Broken] = []
        self.inquiries = Inquiries(peers)
        self.end_of_work = EndOfWork(roll_call, peers, self.health)
        self.mismatch_search = MismatchSearch(roll_call, self.inquiries, self.end_of_work)
        self._said_stall: Stall | None = None
        self.probes: Probes | None = None
        """The probes of the network, while all ranks wait in a collective for longer than most steps take."""

    def hear(self, rank: int, beat: Beat | None, now: float) -> None:
        self._roll_call.hear(rank, now)
        self.health.hear(rank, beat, now)
        if beat is not None:
            self.mismatch_search.hear(rank, beat.calls, now)

    def heard(self) -> dict[int, float]:
        """Return when each rank was heard last, without those that leave."""
        members = self._roll_call.members.items()
        return {rank: member.heard for rank, member in members if rank in self._peers and not self._peers[rank].left}

    def check(self, now: float) -> None:
        """Decide what is due: inquiries whose time is up, who broke a collective, who closes process groups."""
        self.inquiries.check(now)
        if self.end_of_work.failure is None and self._roll_call.works:
            if self._broken and now >= self._broken[0].judged_at:
                broken, self._broken = self._broken, []  # one collective that broke on several ranks is one loss
                self._judge(broken, now)
            self.end_of_work.close_process_groups(now)

    def _judge(self, broken: Sequence[Broken], now: float) -> None:
        """Blame ranks that finished early, a stopped or a silent rank, or the first rank whose collective broke."""
        ranks = {one.verdict.rank for one in broken}  # they may have closed their groups because it broke
        over, late = self.health.fewest_over(without=ranks), self.health.late(now)
        first = next((one for one in broken if began_fewer(over, self.health.beat(one.verdict.rank).begun)), broken[0])
        rank, early = first.verdict.rank, self.health.finished_before(first.verdict.rank, without=ranks)
        # A rank that is silent since before explains it: others may have closed their groups, and save what they have.
        silent = {late[0]} if late is not None and late[1] > BLAME_WITHIN else set()
        if early and silent <= {*early}:
            self._end_because_of_finished(rank, early, first.place, now)
        elif self._end_because_of_stopped(now, 0):
            pass
        elif late is not None:
            self._lose_silent(*late, why=[f"a collective of rank {rank} has broken meanwhile"])
        else:
            self.mismatch_search.lose_unless_mismatch(Loss(first.verdict, BROKEN), now)

    def check_health(self, now: float) -> None:
        """Log what is odd about ranks, and end the run because of a rank that is silent, stopped, or stuck."""
        health = self.health
        stopped = [rank for rank in health.newly("stopped") if rank in self._peers]
        for rank in self._first_of(stopped, "stopped"):
            info = self._info(rank)
            go_on = f"on {info.host}, kill -CONT {info.pid} lets it go on"
            self._peers.send_to_all(messages.Line(f"{info.who} is stopped: {health.beat(rank).stopped}; {go_on}"))
        if not self._roll_call.works:
            return
        if self._end_because_of_silent(now) or self._end_because_of_stopped(now, self._roll_call.run.peer_timeout):
            return
        for rank in self._first_of(health.newly("debugging"), "in a debugger"):
            where = health.beat(rank).place or "a line of its own"
            line = f"{self._info(rank).who} is in a debugger, on {where}: the other ranks wait for it"
            self._peers.send_to_all(messages.Line(line), without=[rank])
        slow = {rank: (seconds, median) for rank, seconds, median in health.newly_slow(now)}
        for rank in self._first_of([*slow], "slow", only=0):
            seconds, median = slow[rank]
            takes = f"its own part of a step takes {1e3 * seconds:.1f} ms, {seconds / median:.1f} times the median"
            line = f"{self._info(rank).who} is slow: {takes} of all ranks, and all wait for it (named once)"
            self._peers[0].connection.send(messages.Line(line))
        self.mismatch_search.look_at_lagging(now)
        if health.late(now) is None and (vain := health.waiting_in_vain(now, IN_VAIN)):
            early = health.finished_before(vain[0]) or health.finished
            self._end_because_of_finished(vain[0], early, health.beat(vain[0]).place, now)
        elif WHERE_ARE_THEY_STUCK not in self.inquiries and (stall := self._find_stall(now)) is not None:
            ranks = stall.behind[:MOST_NAMED] or one_per_place(stall, health)
            self.ask_for_stacks(WHERE_ARE_THEY_STUCK, ranks, partial(self._end_because_of_stall, stall), now)
        else:
            stall = self._find_stall(now, STALL_LINE)
            self._say_that_ranks_wait(stall, now)
            if stall is None and WHERE_ARE_THEY_STUCK not in self.inquiries:
                self.probes = None

    def _find_stall(self, now: float, longer_than: float | None = None) -> Stall | None:
        """Find ranks that wait for others, unless a rank is late: what rank 0 knows of that rank is old."""
        return self.health.find_stall(now, longer_than) if self.health.late(now) is None else None

    def _first_of(self, ranks: Sequence[int], state: str, only: int | None = None) -> Sequence[int]:
        """Return the ranks that have a line each, after one line for the others: a line about each of N ranks, sent to
        N ranks, would be a million for 1,024.

        Args:
            only: the rank that prints the line for the others; None: all ranks print it.
        """
        if others := ranks[MOST_LINES:]:
            line = messages.Line(f"{in_words(as_ranges(others))} are {state}, as are others")
            self._peers.send_to_all(line, without=() if only is None else {*self._peers} - {only})
        return ranks[:MOST_LINES]

    def _say_that_ranks_wait(self, stall: Stall | None, now: float) -> None:
        """Log once that ranks wait for others, which may be what a program means them to do."""
        if stall is not None and self._said_stall is None:
            if (cut := self._cut(stall, now)) is None:
                return
            apart = f"; {unreachable(cut).what}" if cut else ""
            self._peers.send_to_all(messages.Line(self._who_waits(stall) + apart))
        self._said_stall = stall

    def _cut(self, stall: Stall, now: float) -> Sequence[Pair] | None:
        """Return which hosts cannot connect to each other, if all ranks are here and wait; None while hosts try."""
        if stall.behind or len(self.heard()) < len(self._roll_call.infos()):  # nobody answers for a rank that has left
            return ()
        if self.probes is None or now - self.probes.since > PROBES_HOLD:
            self.probes = self.probe_network(now)
        return self.probes.failing(now)

    def _who_waits(self, stall: Stall) -> str:
        verb = "waits" if len(stall.waiting) == 1 else "wait"
        busy = in_words(as_ranges(sorted(stall.behind))) if stall.behind else "each other"
        places = {self.health.beat(rank).place for rank in stall.behind}
        at = f" (on {places.pop()})" if len(places) == 1 and all(places) else ""
        line = f"{in_words(as_ranges(sorted(stall.waiting)))} {verb} for {busy}{at}, for {stall.seconds:.0f} s so far"
        return f"{line}; the run ends after {stall.longest.seconds:.0f} s ({stall.longest.reason})"

    def waiting_line(self, now: float) -> str | None:
        """Return which ranks wait for which others, once that takes longer than most steps; otherwise None."""
        stall = self._find_stall(now, WAIT_SHOWN) if self._roll_call.works else None
        return self._who_waits(stall) if stall is not None else None

    def take_failure(self, verdict: Verdict, broken_at: str | None, now: float, *, in_a_collective: bool) -> None:
        """End the run because of a rank's last words.

        Args:
            broken_at: the line of the collective if that broke; then it is decided later which rank is to blame.
            in_a_collective: whether torch itself failed, maybe because other ranks called something else.
        """
        loss = Loss(verdict, GONE if verdict.judged else OWN_CODE)
        if broken_at is not None:
            self._broken.append(Broken(now + BLAME_WITHIN, verdict, broken_at))
        elif in_a_collective:
            self.mismatch_search.lose_unless_mismatch(loss, now)
        else:
            rank = verdict.rank
            early = () if verdict.judged else self.health.finished_before(rank)
            self.end_of_work.lose(self._raised_before(rank, early, f"\n{verdict.what}") or loss)

    def _raised_before(self, rank: int, early: Sequence[int], then: str = "") -> Loss | None:
        """Return the loss of a rank that has closed its process group ``early`` because of its own exception, and has
        not ended yet, such as while it saves: then that is why ``rank`` cannot go on.

        Args:
            then: a line about what became of ``rank``.
        """
        first = next((one for one in early if self.health.beat(one).raised and one not in self.health.finished), None)
        if first is None:
            return None
        return Loss(closed_because(self._info(first), self.health.beat(first), rank, then), OWN_CODE)

    @property
    def is_undecided(self) -> bool:
        """Whether a rank may be lost already."""
        return any((self.end_of_work.lost, self.mismatch_search.waiting, self._broken))

    def take_lost(self) -> Mapping[int, Loss]:
        """Return rank -> its loss, for all ranks without which the others begin anew, also those still ``waiting``."""
        if self.end_of_work.lost:
            self.mismatch_search.lose_waiting()
        return self.end_of_work.take_lost()

    def stop(self, now: float) -> None:
        """Decide nothing any more: the ranks begin anew, with another watch. Observers get the stacks that are here."""
        self.inquiries.end(now, without=(DO_CALLS_DIFFER, WHERE_ARE_THEY_STUCK))

    def end_because_of_gone(self, rank: int, how: str, reason: str) -> None:
        """End the run because a rank's agent has said ``how`` it leaves; or because its connection has ended, for this
        ``reason``: so has the agent, or its host."""
        info, last_seen = self._info(rank), f"it was {self.health.beat(rank).last_seen()}, when it was last heard"
        if how:
            self._end_because_of(info, how, why=last_seen, next="look whether rank 0 was stopped, or cut off")
            return
        is_beside_rank_0 = info.host_id == self._roll_call.rank_0.host_id
        or_its_host, or_is_down = ("", "") if is_beside_rank_0 else (", or its host has", f", or {info.host} is down")
        self._end_because_of(
            info,
            "is gone without a word",
            why=f"its connection to rank 0 ended: {reason}; agent and worker of that rank have both ended{or_its_host}"
            f"\n{last_seen}",
            next=f"look at its last lines; if there are none its agent was killed{or_is_down}",
        )

    def end_because_of_left(self, rank: int, why: str) -> None:
        """End the run because a rank has left at the moment when all had joined."""
        beat = f"it was {self.health.beat(rank).last_seen()}, and had not heard yet that all ranks are here"
        self._end_because_of(self._info(rank), f"left: {why}", why=beat, next="look at its last lines")

    def _end_because_of_silent(self, now: float) -> bool:
        """End the run because of the rank that was silent for longest, if that is too long; return whether it is."""
        found, world_size = self.health.silent(now), self._roll_call.run.world_size
        if not found:
            return False
        (rank, seconds), infos = next(iter(found.items())), [self._info(rank) for rank in found]
        why = []
        if len(found) > 1:
            others = ", ".join(other.who for other in infos[1:MOST_NAMED]) + ", ..." * (len(found) > MOST_NAMED)
            why.append(f"as silent: {others}")
        if world_size > 2 and len(found) == world_size - 1:
            why.append("rank 0 hears nobody any more: it may be rank 0's own host that is cut off")
        else:
            why.append("its process is stopped or frozen, its host is down, or the network between the hosts is cut")
        self._lose_silent(rank, seconds, why)
        return True

    def _lose_silent(self, rank: int, seconds: float, why: Sequence[str]) -> None:
        """End the run because of a rank that has said nothing for these seconds."""
        info = self._info(rank)
        process = f"whether its process runs:\n{whole(f'ps -o stat= -p {info.agent}')}"
        last_seen = f"it was {self.health.beat(rank).last_seen()}, when it was last heard"
        next = f"look whether {info.host} can be reached, and {process}"
        if stopped := self._roll_call.stopped(rank):
            why, next = [stopped], LET_IT_RUN
        self._end_because_of(
            info,
            f"has been silent for {seconds:.0f} s",
            why="\n".join([last_seen, *why]),
            next=next,
            kind=SILENT,
        )

    def _end_because_of_stopped(self, now: float, longer_than: float) -> bool:
        """End the run if a signal has stopped a worker for longer than these seconds."""
        found = self.health.stopped(now, longer_than)
        if found is not None:
            rank, seconds = found
            beat = self.health.beat(rank)
            self._end_because_of(
                self._info(rank),
                f"has been stopped by {beat.stopped} for {seconds:.0f} s",
                why=f"it was {beat.last_seen()}; its agent runs, and sees its worker stopped",
                next=LET_IT_RUN,
            )
        return found is not None

    def _end_because_of(self, info: RankInfo, what: str, *, why: str, next: str, kind: str = GONE) -> None:
        error = lost_rank(info, what, why=why, next=f"{next}\nthen {self._roll_call.run.start_again}")
        self.end_of_work.lose(Loss(verdict_about(info, LastWords.of(error), is_loss=True), kind))

    def _end_because_of_finished(self, rank: int, early: Sequence[int], place: str, now: float) -> None:
        """End the run: ``rank`` is in a call of torch, at ``place``, in which the ranks ``early`` take part no more; or
        lose one of these whose own exception is the reason, as its last words will say."""
        if (first := self._raised_before(rank, early)) is not None:
            self.end_of_work.lose(first)
            return
        done = "finished" if {*early} <= {*self.health.finished} else "closed the process group"
        call, next = "a collective", SAME_STEPS
        if self.health.beat(rank).opening:
            call, next = "the call that opens a process group", OPENS_EACH
        uneven = f"{call} needs every rank, and they did not make the same number of calls"
        raised = (f"rank {one}: {beat.raised}" for one in early if (beat := self.health.beat(one)).raised)
        error = PeerLost(
            f"{in_words(as_ranges(early))} had {done} while rank {rank} was still in {call}",
            why="\n".join([uneven, f"rank {rank} was on {place or 'no line of Python'}", *raised]),
            next=next,
        )
        verdict = verdict_about(self._info(rank), LastWords.of(error))
        self.mismatch_search.lose_unless_mismatch(Loss(verdict, AWAITED, spared=self.health.finished), now)

    def _end_because_of_stall(self, stall: Stall, stacks: Mapping[int, str], now: float) -> None:
        """End the run with the stacks of the ranks that are stuck, unless they have gone on in the meantime."""
        now_stalled = self._find_stall(now)
        # The last heartbeats may be from before the ranks went on.
        if now_stalled is None or set(now_stalled.behind) - set(stall.behind):
            return
        cut = self._cut(now_stalled, now)
        if cut is not None and not self._end_because_of_stopped(now, 0):
            verdict = stalled(self._roll_call, self.health, now_stalled, stacks, cut)
            self.mismatch_search.lose_unless_mismatch(Loss(verdict, AWAITED), now)

    # -- what is asked, and what agents reply ----------------------------------------------------------------------

    def probe_network(self, now: float) -> Probes:
        """Ask the first rank of each host which others it reaches."""
        probes = Probes(self._roll_call.infos(), self._roll_call.places(), now)
        for rank, request in probes.requests():
            self._peers[rank].connection.send(request)
        return probes

    def ask_for_stacks(self, answers: object, ranks: Iterable[int], then: Then, now: float) -> None:
        """Ask for the stacks of those of these ranks whose agents reply in time."""
        inquiry = Inquiry(STACKS, {*ranks}, now + STACKS_WITHIN, then)
        self.inquiries.ask(answers, inquiry, messages.AskStacks(), now)
