"""How a rank leaves, with a result or an error: what it tells the others, when its worker ends, where its error goes.

Rank 0 leaves in order once the others have left, because its worker has torch's store.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path
from typing import TYPE_CHECKING

from ddp_manual import messages, run_folder
from ddp_manual.agent.rank_result import Ending, add_own_command, how_it_ended, leave_failure
from ddp_manual.agent.worker_process import TERM_GRACE
from ddp_manual.deadline import wait_until
from ddp_manual.errors import DdpManualError, PeerGone, RanksDoNotBelongTogether, RankTaken, Stopped
from ddp_manual.protocol import states
from ddp_manual.protocol.stop_signals import SAVE_WITHIN
from ddp_manual.ranks_and_runs import LastWords

if TYPE_CHECKING:
    from ddp_manual.agent.main import Agent

# Seconds that the other ranks have to read what was sent to them last.
LAST_WORD_WITHIN = 1.5
# Seconds after which a line says that a program is still ending.
ENDING_SAID_AFTER = 3.0
# Seconds that ``check`` gives a worker to load torch after its rank has failed, such as because ranks are missing.
READY_WITHIN = 20.0


class Leave:
    """The way out of the rank of ``agent``.

    Args:
        ending: knows how the rank ends, and runs what takes time.
    """

    def __init__(self, agent: Agent, ending: Ending) -> None:
        self._agent, self._rank, self._ending = agent, agent.rank, ending
        self._waiting: asyncio.Task[None] | None = None
        """Waits for the other ranks to leave."""
        self.orphaned = ""
        """Words that say that the launcher of this rank is gone; "" if it is not."""
        self.hurries = False
        """Whether a signal has come while this rank leaves."""

    # -- in order -----------------------------------------------------------------------------------------------------

    def in_order(self, within: float) -> None:
        """Tell the protocol once the others have left, or after ``within`` seconds; at once if this is not rank 0."""
        self._waiting = self._ending.in_background(self._wait_for_others(within))

    async def _wait_for_others(self, within: float) -> None:
        """On rank 0, wait for the other ranks' goodbyes."""
        if (coordinator := self._agent.join.coordinator) is not None:
            await coordinator.wait_for_goodbyes(self._agent.log, within)
            coordinator.end()
        self._agent.protocol.others_have_left()

    def stop(self) -> None:
        """Leave no longer: the work is begun anew."""
        if self._waiting is not None:
            self._waiting.cancel()

    # -- the end ------------------------------------------------------------------------------------------------------

    @property
    def _last(self) -> states.State:
        """The state in which the rank was before it ended."""
        assert isinstance(self._rank.state, states.Ended)
        return self._rank.state.was

    async def say_goodbye(self, error: DdpManualError) -> None:
        """Tell the other ranks why this rank ends, unless they know; in ``check``, wait until the worker is ready."""
        agent, rank, work = self._agent, self._rank, self._rank.work
        has_left = isinstance(self._last, states.Left)
        if agent.join.coordinator is not None and not has_left:
            agent.join.coordinator.end(error)
        if not isinstance(self._last, states.Placed):
            rank.send(messages.Leaves(LastWords.of(error)))
        elif not isinstance(error, PeerGone) and work.own_words is None and not has_left:
            rank.send(messages.Leaves(LastWords.of(error), at_work=True))
        failed = work.own_words is not None or agent.worker.ended
        if agent.task.wait_until_ready and not failed and not isinstance(error, Stopped):
            agent.protocol.begin()
            await wait_until(lambda: work.ready is not None or self.hurries, READY_WITHIN)

    async def end(self, error: DdpManualError | None) -> None:
        """Say why this rank ends, then end the worker; give the other ranks time to read why."""
        agent, rank, join, worker = self._agent, self._rank, self._agent.join, self._agent.worker
        is_default = not rank.chose_folder and run_folder.is_default_name(str(rank.run_dir), rank.run_id)
        leaves_no_folder = is_default and not agent.protocol.has_trained
        self._ending.cancel_background()
        if isinstance(self._last, states.Leaving):  # the worker waits for Over before it ends
            self.in_order(math.inf)
        if error is not None:
            await self._explain(error, in_folder=not leaves_no_folder)
        own = error is not None and error is rank.work.own_words
        await worker.end(error, own=own)
        if error is None and (left := worker.children.ended):
            agent.log(f"ended what was left running: {', '.join(left)}")
        await self._let_others_read()
        if error is not None and join.info.rank == 0 and leaves_no_folder:
            run_folder.RunPaths(Path(str(rank.run_dir))).remove_start()
        join.close(how_it_ended(error, rank.work.result))
        await asyncio.sleep(0)

    async def _explain(self, error: DdpManualError, *, in_folder: bool) -> None:
        """Print the error after the worker's last line; if ``in_folder``, write it into the run's folder too."""
        agent, rank, had_a_place = self._agent, self._rank, isinstance(self._last, states.Placed)
        if isinstance(error, Stopped):
            error.why = error.why or self.orphaned
        add_own_command(error, agent.task.go_on, rank.run_dir, agent.info.world_size)
        if not had_a_place:
            agent.join.fail(error)
        causes = (error.identifier, (error.on_its_rank or ("",))[0])
        stops = Stopped.identifier in causes
        silenced = asyncio.ensure_future(agent.worker.silence(grace=SAVE_WITHIN if stops else TERM_GRACE))
        if agent.task.name and agent.protocol.signals.has_begun:
            await asyncio.wait([silenced], timeout=ENDING_SAID_AFTER)
            if not silenced.done():
                agent.log(f"{agent.task.name} is ending: {error.what}")
        await silenced
        never_a_rank = isinstance(error, (RankTaken, RanksDoNotBelongTogether)) and not had_a_place
        run, run_dir = rank.run, rank.run_dir
        if run and run_dir and rank.is_own_folder and not never_a_rank and in_folder:
            kept = leave_failure(run_dir, agent.info.rank, agent.worker.pid, error, run)
            if kept is not None:
                agent.log(f"why this rank ends is in no file: {kept}")
        self._ending.cancel_background()  # it might print something after the error
        agent.print_error(error)

    async def _let_others_read(self) -> None:
        """Wait until the other ranks have read what this rank has sent last, LAST_WORD_WITHIN seconds at most."""
        coordinator, connection = self._agent.join.coordinator, self._agent.join.connection
        await wait_until(
            lambda: not (coordinator and coordinator.is_being_read) and not (connection and connection.unsent),
            LAST_WORD_WITHIN,
        )
