"""When rank 0 looks whether ranks called different collectives, at the records of which ranks, and what follows.

A loss waits for what a look finds: a mismatch explains more than a rank that has crashed, or waits, because of it.
``collective_comparison.py`` compares; ``agent/collective_records.py`` replies.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from functools import partial

from ddp_manual import messages
from ddp_manual.protocol.collective_comparison import Comparison, Look, Seen
from ddp_manual.protocol.end_or_begin_anew import EndOfWork, Loss
from ddp_manual.protocol.inquiries import STACKS, Inquiries, Inquiry
from ddp_manual.protocol.roll_call import RollCall
from ddp_manual.protocol.verdict_words import verdict_about, with_last_collectives
from ddp_manual.ranks_and_runs import LastWords, more_seconds

# An agent whose worker has failed waits longer than this for a verdict, even if rank 0 has to ask twice.
RECORDS_WITHIN = 0.8
# A question that rank 0 has; there is at most one inquiry at a time for it.
DO_CALLS_DIFFER = "do calls differ"


class MismatchSearch:
    """Looks at the records of ranks, one look at a time; it ends the run because of a mismatch.

    Args:
        inquiries: what rank 0 asks agents.
        end_of_work: takes the mismatch, or the losses that none explains.
    """

    def __init__(self, roll_call: RollCall, inquiries: Inquiries, end_of_work: EndOfWork) -> None:
        self._roll_call, self._inquiries, self._end_of_work = roll_call, inquiries, end_of_work
        self._numbers = itertools.count(STACKS + 1)
        self._comparison = Comparison()
        self.waiting: dict[int, Loss] = {}
        """The ranks that are lost, unless ranks are found to have called different collectives: that ends the run."""

    def hear(self, rank: int, calls: Mapping[str, Sequence[int]], now: float) -> None:
        """Note the chains of a heartbeat; look at all ranks if any two are known to have made different calls."""
        if self._comparison.hear(rank, calls, now):
            self._look_at_records(now)

    def look_at_lagging(self, now: float) -> None:
        """Look at a rank that waits far behind another one, if there is one and it is time."""
        if DO_CALLS_DIFFER not in self._inquiries and (lagging := self._comparison.lagging(now)) is not None:
            self._look_at_records(now, lagging)

    def lose_unless_mismatch(self, loss: Loss, now: float) -> None:
        """Count a rank as lost, unless ranks called different collectives: that explains more, and ends the run."""
        self.waiting.setdefault(loss.verdict.rank, loss)
        if self._comparison:
            self._look_at_records(now)
        if DO_CALLS_DIFFER not in self._inquiries:
            self.lose_waiting()

    def lose_waiting(self, last: Mapping[int, str] | None = None) -> None:
        """Count the ranks ``waiting`` as lost; ``last`` has for each rank the collective that it has begun last."""
        waiting, self.waiting = self.waiting, {}
        for loss in waiting.values():
            verdict = with_last_collectives(loss.verdict, last or {})
            self._end_of_work.lose(dataclasses.replace(loss, verdict=verdict))

    def _look_at_records(self, now: float, some: Sequence[int] = ()) -> None:
        """Look at the records of all ranks; first only at those of ``some`` ranks, if they are the reason."""
        if DO_CALLS_DIFFER not in self._inquiries and self._end_of_work.failure is None:
            self._look_on(self._comparison.look(some or self._all_ranks), None, now)

    def _look_on(self, look: Look, replies: Mapping[int, messages.RecordsReply] | None, now: float) -> None:
        """Go on with a look: give it the replies to its last question, None at its begin, and ask its next question."""
        try:
            ranks, wanted = next(look) if replies is None else look.send(replies)
        except StopIteration as end:
            self._take_seen(end.value, now)
            return
        within = RECORDS_WITHIN + more_seconds(self._roll_call.run.world_size) / 2
        request = messages.AskRecords(next(self._numbers), **wanted)
        inquiry = Inquiry(request.number, {*ranks}, now + within, partial(self._go_on_looking, look))
        self._inquiries.ask(DO_CALLS_DIFFER, inquiry, request, now)

    def _go_on_looking(self, look: Look, replies: Mapping[int, messages.RecordsReply], now: float) -> None:
        """Go on with a look; once it is over no loss waits for it, whatever the replies say."""
        try:
            self._look_on(look, replies, now)
        finally:
            if DO_CALLS_DIFFER not in self._inquiries:
                self.lose_waiting()

    def _take_seen(self, seen: Seen, now: float) -> None:
        """End the run because of what a look has seen; otherwise count the ranks ``waiting`` as lost."""
        if self._wants_all(seen):
            self._look_on(self._comparison.look(self._all_ranks, seen.difference), None, now)
        elif (mismatch := seen.difference) is not None:
            mismatch.error.next += f"\nthen {self._roll_call.run.start_again}"
            info = self._roll_call.info(mismatch.rank)
            self._end_of_work.end_the_run(verdict_about(info, LastWords.of(mismatch.error)))
        else:
            self.lose_waiting(seen.last)

    def _wants_all(self, look: Seen) -> bool:
        """Return whether a look at some ranks gives reason to look at all of them."""
        matters = look.difference is not None or bool(self.waiting)
        return matters and len(look.ranks) < len(self._all_ranks)

    @property
    def _all_ranks(self) -> list[int]:
        return [info.rank for info in self._roll_call.infos()]
