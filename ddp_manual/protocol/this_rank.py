"""One rank, as its own agent knows it: its state, its run and its worker, and what is said to rank 0 and the worker.

``agent.py`` decides what follows from each message, ``stop_signals.py`` what signals do, and ``why_this_rank_ends.py``
with which error the rank ends. They share one ``ThisRank``.
"""

from __future__ import annotations

from collections.abc import Callable

from msgspec.structs import replace

from ddp_manual import from_agent, messages
from ddp_manual.protocol import states
from ddp_manual.protocol.agent_shell import Shell
from ddp_manual.rank_options import WorldSpec
from ddp_manual.ranks_and_runs import RunInfo, RunSoFar


class ThisRank:
    """The rank of one agent.

    Args:
        now: the time on the agent's monotonic clock, in seconds.
        chose_folder: whether somebody has named the run's folder.
    """

    def __init__(self, spec: WorldSpec, shell: Shell, now: float, *, chose_folder: bool) -> None:
        self.spec, self.shell, self.number = spec, shell, spec.rank
        self.now = now
        """The time of what is handled at present."""
        self.state: states.State = states.Searching()
        self.work = states.Work(started=now)
        self.worker_number = 0
        """The number of the worker that messages are about: how many others rank 0 has asked for on this connection."""
        self.run: RunInfo | None = None
        self.run_dir: str | None = None
        self.run_id = ""
        self.is_own_folder = False
        """Whether this rank writes into ``run_dir``: see ``run_folder.own_run_dir``."""
        self.chose_folder = chose_folder
        self.so_far: RunSoFar | None = None
        """What this rank tells a new rank 0, once it has been in the run."""

    def enter(self, state: states.State) -> None:
        """Be in this state from now on, unless the rank has ended."""
        if not isinstance(self.state, states.Ended):
            self.state = state

    def take_run(self, run: RunInfo) -> RunInfo:
        """Note which run this is, and where its files go; return the run with that."""
        self.run, self.is_own_folder = self.shell.as_seen_here(run)
        self.run_dir, self.run_id = self.run.run_dir, self.run.run_id
        return self.run

    @property
    def again(self) -> str:
        """What to do after the run has ended."""
        return self.run.start_again if self.run else "start this rank again"

    @property
    def may_look_for_rank_0(self) -> bool:
        """Whether this rank, when it loses rank 0, keeps its state and looks for another rank 0."""
        return self.so_far is not None and self.number != 0

    @property
    def without_rank_0(self) -> states.WithoutRank0 | None:
        """The loss of rank 0, if the ranks have not gone on since; its search counts that has just ended."""
        if isinstance(self.state, states.Looking):
            lost = self.state.lost
            return states.WithoutRank0(lost.since, lost.looked + self.now - self.state.began)
        return self.state.lost if isinstance(self.state, states.Waiting) else None

    def send(self, message: messages.FromRank) -> None:
        """Send a message to rank 0; a message about the worker carries the worker's number."""
        if isinstance(message, messages.OfWorker) and message.worker != self.worker_number:
            message = replace(message, worker=self.worker_number)
        self.shell.send(message)

    def send_beat(self) -> None:
        """Send rank 0 a heartbeat, with what the worker does if that has changed."""
        beat = self.shell.worker.heartbeat()
        self.send(messages.Heartbeat(beat if beat != self.work.sent_beat else None))
        self.work.sent_beat = beat

    def tell(self, message: from_agent.FromAgent) -> None:
        """Send a message to the worker."""
        self.shell.worker.send(message)

    def later(self, seconds: float, call: Callable[[], None]) -> None:
        """Call ``call`` after so many seconds, unless the worker was replaced by then."""
        work = self.work

        def due(now: float) -> None:
            self.now = now
            if work is self.work:
                call()

        self.shell.call_at(self.now + seconds, due)
