"""How all ranks stop after the same step, without a collective.

Once a signal has come to any rank, rank 0 asks each how many steps it has done. A rank that is asked goes no further
than its next step, so that none passes the step which rank 0 then names.
"""

from __future__ import annotations

from collections.abc import Callable

from ddp_manual.from_worker import FromWorker
from ddp_manual.messages import StepsDone, StopAfter


class Stops:
    """The steps of this rank, and after which one it stops.

    Args:
        tell: sends a message to the agent.
        wait: waits until the agent has named the step.
    """

    def __init__(self, tell: Callable[[FromWorker], None], wait: Callable[[], StopAfter]) -> None:
        self._tell, self._wait = tell, wait
        self._done = 0
        self._is_asked = False
        self.named: StopAfter | None = None
        """After which step to stop, and why."""
        self.stopped: StopAfter | None = None
        """The same, once that step is done."""

    def ask(self) -> None:
        """Tell the agent, in the reporter's thread, how many steps are done; one more may be done before the answer."""
        # In this order: a step that ends after the count in the reply was read sees that this rank was asked.
        self._is_asked = True
        self._tell(StepsDone(self._done))

    def after_a_step(self) -> bool:
        """Count a step, and return whether to stop after it."""
        self._done += 1
        if not self._is_asked:
            return False
        self.named = self.named or self._wait()
        self.stopped = self.named if self._done >= self.named.step else None
        return self.stopped is not None
