"""What the decisions of an agent need of it: what it is asked, and what it is told to do.

``agent/main.py`` is the ``Shell``, ``agent/worker_process.py`` has the ``WorkerSeen``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from ddp_manual import from_agent, from_worker, messages
from ddp_manual.errors import DdpManualError
from ddp_manual.ranks_and_runs import Beat, RankInfo, RunInfo

Answered = messages.AskStacks | messages.AskRecords | messages.Probe | messages.News | messages.Refused | messages.Line


class WorkerSeen(Protocol):
    """What the agent knows and asks of its worker: see ``agent/worker_process.py``. ``until`` is set here too."""

    beat: Beat
    ended: bool
    has_started_its_agent: bool
    hears: bool
    pid: int
    said: set[type[from_worker.FromWorker]]
    status: int | None
    """Its exit code, or minus the signal's number, once it has ended; None if nobody could see that."""
    until: float | None

    @property
    def crash_stack(self) -> str: ...
    @property
    def is_gone(self) -> bool: ...
    @property
    def ran_out_of_memory(self) -> bool: ...
    def heartbeat(self) -> Beat: ...
    def send(self, message: from_agent.FromAgent) -> None: ...


class Shell(Protocol):
    """What the decisions about a rank have its agent do. No method waits: work that takes time is done in the
    background."""

    @property
    def worker(self) -> WorkerSeen: ...
    @property
    def info(self) -> RankInfo: ...
    @property
    def here(self) -> int:
        """How many ranks are here, as far as this rank knows."""

    @property
    def is_connected(self) -> bool: ...
    @property
    def held_steps(self) -> int:
        """How many steps the worker has done, as it has noted in the memory that holds its state."""

    def log(self, line: str, /) -> None: ...
    def send(self, message: messages.FromRank) -> None: ...
    def fail(self, error: DdpManualError) -> None: ...
    def finish(self, result: object) -> None: ...
    def call_at(self, when: float, call: Callable[[float], None]) -> None:
        """Call ``call`` with the time once it is ``when``; the call cannot be cancelled."""

    def as_seen_here(self, run: RunInfo) -> tuple[RunInfo, bool]:
        """Return the run, with the path of its folder on this rank, and whether this rank writes into that folder."""

    def stopped_rank_0(self, run: RunInfo) -> str:
        """Return which signal has stopped rank 0's agent, as Ctrl-Z does, if it is on this host; "" if none has."""

    def have_it_load(self) -> None:
        """Tell the worker what to load."""

    def take_place(self, placed: messages.Placed) -> None:
        """Have the worker begin, at its place among all ranks."""

    def answer(self, message: Answered) -> None:
        """Do what a message asks for, where there is nothing to decide."""

    def look_around(self, *, waits: bool) -> None:
        """Read the worker's records of collectives; say which ranks are missing, if this rank ``waits`` for others."""

    def forget_news(self) -> None:
        """Forget which ranks rank 0 has called missing: the ranks begin anew."""

    def pass_on(self, number: int) -> None:
        """Send a signal to the program, unless its sender has sent it to the program too."""

    def replace_worker(self, number: int) -> None:
        """End the worker, call ``worker_ended``, and start another one; then call ``worker_replaced``, or
        ``cannot_start_worker``."""

    def end_worker(self) -> None:
        """End the worker, and start no other one yet."""

    def search_again(self, lost_at: float, within: float) -> None:
        """Close the connection; look for rank 0 once the worker is replaced, and call ``joined`` if it is found within
        so many seconds. ``lost_at`` says when rank 0 was lost."""

    def leave_in_order(self, within: float) -> None:
        """Call ``others_have_left``; on rank 0 only when the other ranks have left, or after ``within`` seconds."""

    def stop_leaving(self) -> None: ...
