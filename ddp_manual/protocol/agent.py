"""The decisions of one rank's agent: what follows from each message, from the worker's end and as time goes by.

This module has no connections, no processes and no clock. ``agent/main.py`` reads and writes, starts and ends the
worker, and prints. ``stop_signals.py`` decides what signals do, ``why_this_rank_ends.py`` with which error the rank
ends; ``this_rank.py`` has what they share.
"""

from __future__ import annotations

import math

from msgspec.structs import replace

from ddp_manual import from_agent, from_worker, messages
from ddp_manual.errors import DdpManualError
from ddp_manual.on_rank_loss import LEAVE
from ddp_manual.protocol import how_a_worker_ended, states, verdict_words
from ddp_manual.protocol.health import Silence
from ddp_manual.protocol.stop_signals import StopSignals
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.protocol.why_this_rank_ends import Explanation
from ddp_manual.ranks_and_runs import LastWords, Moment, RunInfo, RunSoFar
from ddp_manual.wire import printable

# Seconds that rank 0 keeps torch's store for ranks that are still working.
LEAVE_TIMEOUT = 60.0
# Seconds. A process that has not run for this long was stopped, and was not just slow.
A_PAUSE = 5.0
# Seconds to look for rank 0 once more, if the time for that is up and a rank 0 that was found is lost again.
A_LAST_LOOK = 1.0
# Before this many collectives, a program that holds its state has held it once, or has asked for the held state.
HOLDS_BEFORE = 20


class AgentProtocol:
    """What the agent of one rank decides. ``now`` is the time on its monotonic clock, in seconds.

    Args:
        name: the name of what the worker runs, for lines that are printed.
        in_one_terminal: whether all ranks share one terminal.
    """

    def __init__(self, rank: ThisRank, *, name: str, in_one_terminal: bool) -> None:
        self._rank, self._shell, self._name = rank, rank.shell, name
        self.signals = StopSignals(rank, in_one_terminal=in_one_terminal)
        self._explanation = Explanation(rank, self.signals)
        self.has_trained = False
        """Whether any worker of this rank has taken a step."""
        self._has_warned = False
        """Whether a line has said that the program does not hold its state."""
        self._heard = self._ticked = rank.now
        self._paused = 0.0
        """Seconds for which this process did not run when it was last stopped, less the seconds that it has run since:
        once these are as many, that stop is no reason for a verdict any more."""
        self._silence = Silence(lambda _: "rank 0")
        self._next_beat = 0.0

    # -- join and start the worker ------------------------------------------------------------------------------------

    def begin(self) -> None:
        """Have the worker load torch, once, while this rank looks for rank 0 or waits for the other ranks."""
        if not self._rank.work.is_begun:
            self._rank.work.is_begun = True
            self._shell.have_it_load()

    def joined(self, run: RunInfo, now: float) -> None:
        """Note that rank 0 has admitted this rank."""
        rank = self._rank
        rank.now = self._heard = now
        rank.worker_number = 0
        rank.enter(states.Waiting(lost=rank.without_rank_0))
        rank.take_run(run)
        self.begin()
        if rank.without_rank_0 is not None and self._shell.worker.is_gone:
            self._begin_anew()
        if rank.work.ready is not None:
            rank.send(messages.WorkerReady(rank.work.ready))
        if rank.so_far is not None:
            self.signals.ask_again()

    # -- messages of the coordinator ----------------------------------------------------------------------------------

    def take(self, message: messages.FromRank0, now: float) -> None:
        """Handle a message of the coordinator."""
        rank = self._rank
        rank.now = self._heard = now
        match message:
            case messages.AskStacks() | messages.AskRecords():
                self._shell.answer(message)
            case _ if isinstance(rank.state, states.Ended):
                pass  # this rank has told the others why it ends, or has learnt that from them
            case messages.News():
                if isinstance(rank.state, states.Waiting):
                    self._shell.answer(message)
            case messages.Probe() | messages.Refused() | messages.Line():
                self._shell.answer(message)
            case messages.Placed():
                self._take_place(message)
            case messages.RunEnds():
                stopped = max(self._paused, now - self._ticked)
                self._explanation.take_verdict(message.verdict, stopped if stopped >= A_PAUSE else 0)
            case messages.Replace() if not isinstance(rank.state, states.Left):
                self._shell.forget_news()
                self._begin_anew(message.worker)
            case messages.SeatLost(why) if not isinstance(rank.state, states.Looking):
                self._look_for_rank_0(why)
            case messages.Expired():
                self._explanation.run_expires(message.verdict)
            case messages.AskStep() if isinstance(rank.state, states.Placed):
                self._ask_step()
            case messages.StopAfter() if isinstance(rank.state, states.Placed):
                self.signals.all_stop(message)
            case messages.Close():
                if isinstance(rank.state, states.Working):
                    rank.enter(states.Closing())
                rank.tell(message)
            case messages.Rank0Leaves() if isinstance(rank.state, (states.Working, states.Closing)):
                rank.enter(states.Alone())
                self._shell.log("rank 0 has finished and left; this rank goes on alone, and nobody watches over it")
                rank.tell(messages.Close())

    def _take_place(self, placed: messages.Placed) -> None:
        """Tell the worker its place, with which it begins to work: all ranks have joined."""
        rank = self._rank
        rank.enter(states.Working())
        run = rank.take_run(placed.run)
        if run.on_loss != LEAVE:  # a new rank 0 needs this
            rank.so_far = RunSoFar(
                run_id=run.run_id,
                run_dir=run.run_dir,
                generation=placed.generation,
                losses=placed.losses.count,
                lost_seconds=placed.losses.seconds,
                host=run.host,
                pid=run.pid,
                address=run.address,
            )
        self._shell.take_place(replace(placed, run=run))

    def coordinator_gone(self, reason: str, now: float) -> None:
        """Note that the connection to the coordinator has ended."""
        rank = self._rank
        rank.now = now
        if isinstance(rank.state, states.Closing):  # its work is done, and it needs nobody any more
            rank.enter(states.Alone())
        if not isinstance(rank.state, (states.Waiting, states.Working)) or rank.work.words_of_another is not None:
            return
        if rank.may_look_for_rank_0 and rank.run is not None:
            self._look_for_rank_0(f"rank 0 ({rank.run.host}, pid {rank.run.pid}) is gone without a word: {reason}")
        else:
            self._explanation.rank_0_is_gone(reason)

    # -- messages of the worker, and its end --------------------------------------------------------------------------

    def take_from_worker(self, message: from_worker.FromWorker, now: float) -> None:
        """Handle a message of the worker, unless the worker was replaced since."""
        rank = self._rank
        rank.now = now
        match message:
            case from_worker.Doing():
                if self._shell.worker.beat.phase != rank.work.sent_beat.phase:
                    rank.send_beat()
                self.has_trained |= self._shell.worker.beat.step > 0
                self._say_what_a_loss_repeats()
            case from_worker.Loaded():
                rank.work.ready = message.ready
                rank.send(messages.WorkerReady(message.ready))
            case from_worker.NotCompared():
                why = f"the collectives of this rank are not compared with those of others: {message.why}"
                self._shell.log(why)
            case from_worker.StartsProcesses(count):
                how = f"starts processes of its own ({count}, torch.multiprocessing): they are no ranks"
                self._shell.log(f"{self._name} {how}, and nothing watches over them; ddp_manual.spawn starts ranks")
            case from_worker.Replaced() if rank.number == 0 and rank.spec.world_size > 1:
                rank.work.is_replaced = True
                self._shell.log(f"{how_a_worker_ended.STORE_REPLACED}; {how_a_worker_ended.WITHOUT_PYTHON}")
            case from_worker.ProgramBegins():
                self.signals.program_begins()
            case from_worker.HandlesSignals(handling):
                self.signals.worker_handles(handling)
            case messages.StepsDone():
                rank.send(message)
            case from_worker.Signalled() if not isinstance(rank.state, states.Ended):
                self.take_signal(message.number, now, seen_by="script")
            case from_worker.RunFolder():
                rank.run_dir, rank.is_own_folder, rank.chose_folder = message.run_dir, message.own, message.chosen
            case from_worker.Left() if isinstance(rank.state, states.Ended):
                self._shell.leave_in_order(math.inf)  # rank 0's worker has torch's store, which others may need
            case _ if isinstance(rank.state, states.Ended):
                pass  # the end of this rank is explained already
            case messages.Finished():
                if isinstance(rank.state, states.Alone):
                    rank.tell(messages.Close())
                else:
                    rank.send_beat()
                    rank.send(message)
            case from_worker.Failed():
                if isinstance(rank.state, states.Looking):  # another worker is started once rank 0 is found
                    self._shell.end_worker()
                else:
                    self._explanation.take_failure(message)
            case from_worker.Left():
                self._begin_leaving()
            case from_worker.Result():
                self._take_result(message)

    def _take_result(self, message: from_worker.Result) -> None:
        rank = self._rank
        rank.work.result = {} if message.result is None else message.result
        if message.stopped is not None:
            rank.work.result = self._explanation.stopped_with_all(message.stopped)
        rank.work.process_continues = message.process_continues
        if message.process_continues and isinstance(rank.state, (states.Left, states.Alone)):
            self._shell.finish(rank.work.result)

    def _say_what_a_loss_repeats(self) -> None:
        """Say once on rank 0, before any loss, if the program does not hold its state, and so begins anew after one."""
        worker = self._shell.worker
        if self._has_warned or self._rank.number:
            return
        if self._rank.so_far is None or not self._name:
            return
        holds = from_worker.Holds in worker.said or self._shell.held_steps > 0
        if not holds and sum(worker.beat.collectives.values()) >= HOLDS_BEFORE:
            self._has_warned, again = True, "after a loss all ranks start it again from its beginning"
            self._shell.log(f"{self._name} does not call hold(): {again}")

    def worker_gone(self, now: float) -> None:
        """Note that the worker's process has ended, unless it was replaced since."""
        rank, worker = self._rank, self._shell.worker
        rank.now = now
        if rank.work.own_words is not None:
            return  # its last words were read
        if isinstance(rank.state, (states.Looking, states.Ended)):
            return  # Looking: another worker is started once rank 0 is found. Ended: no other one is started
        is_done = rank.work.result is not None or not worker.status
        if isinstance(rank.state, states.Left) and is_done:
            self._shell.finish(rank.work.result)
            return
        if isinstance(rank.state, states.Placed) and self._program_ended(worker.status):
            return
        self._explanation.worker_is_lost()

    def _program_ended(self, status: int | None) -> bool:
        """Handle the end of a program that has not failed by itself: it is done, or a signal has stopped it."""
        rank, said = self._rank, self._shell.worker.said
        has_no_result = from_worker.Joins in said and rank.work.result is None  # a program that joins leaves in order
        is_done = status == 0 and not has_no_result
        if is_done or rank.work.result is not None:
            if messages.Finished not in said:  # its process has ended without Python's exit, as by os._exit
                rank.send_beat()
                rank.send(messages.Finished())
                if rank.number == 0 and rank.spec.world_size > 1:
                    ended = "rank 0's process has ended, and torch's store with it: other ranks may still need that"
                    self._shell.log(ended)
            rank.work.result = {} if rank.work.result is None else rank.work.result
            self._begin_leaving()
            return True
        return self._explanation.is_stopped_by_signal(status)

    # -- another worker, or another rank 0 ----------------------------------------------------------------------------

    def _begin_anew(self, number: int = 0) -> None:
        """Replace the worker by the one with this number; rank 0 waits for it."""
        self._forget_worker(number)
        self._rank.enter(states.Replacing(lost=self._rank.without_rank_0))

    def _forget_worker(self, number: int = 0) -> None:
        """End the worker and start another one. What the old worker has said counts no longer."""
        rank = self._rank
        if isinstance(rank.state, states.Leaving):  # its work was done, and is begun anew
            self._shell.stop_leaving()
        rank.work = states.Work(started=rank.now)
        self.signals.worker_handles(from_worker.Handling.LOADING)
        self._shell.replace_worker(number)

    def worker_ended(self, number: int, held: Moment | None) -> None:
        """Tell rank 0 that the old worker has ended, and which state is held; the next worker has this number."""
        self._rank.worker_number = number
        self._rank.send(messages.Held(held, self._shell.held_steps))

    def worker_replaced(self, now: float) -> None:
        """Note that another worker runs."""
        rank = self._rank
        rank.now = now
        self.begin()
        if isinstance(rank.state, states.Replacing):
            rank.enter(states.Waiting(lost=rank.without_rank_0))
        elif isinstance(rank.state, states.Looking):
            rank.enter(states.Looking(lost=rank.state.lost, began=now))

    def cannot_start_worker(self, error: OSError, now: float) -> None:
        """Note that no worker can be started, such as because of EMFILE."""
        self._rank.now = now
        self._explanation.no_worker(error)

    def _look_for_rank_0(self, why: str, stopped: str = "") -> None:
        """Keep the state, and say hello again where rank 0 is expected; ``stopped`` says what has stopped it."""
        rank = self._rank
        assert rank.run is not None and rank.so_far is not None
        lost = rank.without_rank_0
        losses = rank.so_far.losses + (lost is not None)  # + 1: lost again before the ranks could go on
        lost = lost or states.WithoutRank0(rank.now)
        within = max(rank.run.rejoin_timeout - lost.looked, A_LAST_LOOK)
        rank.so_far = replace(rank.so_far, lost=printable(why), losses=losses)
        looks = f"this rank keeps its state, and looks for rank 0 for {within:.0f} s"
        self._shell.log("; ".join(filter(None, (why, stopped, looks))))
        if not isinstance(rank.state, states.Replacing):
            self._forget_worker()
        rank.enter(states.Looking(lost=lost, began=rank.now))
        self._shell.search_again(lost.since, within)

    def _begin_leaving(self) -> None:
        """Leave, because the worker has done its work and has left."""
        rank = self._rank
        if isinstance(rank.state, states.Leaving):
            return  # it leaves already: this is the end of its process
        # Another rank may work for as long as it likes after the last collective, unless all leave join() together.
        together = from_worker.Joins in self._shell.worker.said
        works_on = not together and not isinstance(rank.state, states.Alone)
        rank.enter(states.Leaving())
        self._shell.leave_in_order(math.inf if works_on else LEAVE_TIMEOUT)

    def others_have_left(self) -> None:
        """Say goodbye: nobody needs this rank any more, nor, if it is rank 0, torch's store."""
        rank = self._rank
        rank.enter(states.Left())
        rank.send(messages.Goodbye())
        rank.tell(from_agent.Over())
        needs_nothing = rank.work.process_continues or self._shell.worker.ended
        if needs_nothing and rank.work.result is not None:
            self._shell.finish(rank.work.result)

    # -- signals and the clock ----------------------------------------------------------------------------------------

    def take_signal(self, number: int, now: float, seen_by: str = "agent") -> None:
        """Handle a signal that the agent has received, or that its script reports: see ``StopSignals.take``."""
        self._rank.now = now
        self.signals.take(number, seen_by)

    def _ask_step(self) -> None:
        """Ask the worker how many steps it has done; reply 0 for one that hears nothing, and handles signals itself."""
        if self._shell.worker.hears:
            self._rank.tell(messages.AskStep())
        else:
            self._rank.send(messages.StepsDone(0))

    def tick(self, now: float) -> None:
        """Do what is due: handle Ctrl-C that does not reach the program, send a heartbeat, see if rank 0 is silent."""
        rank = self._rank
        rank.now = now
        passed, self._ticked = now - self._ticked, now
        self._paused = passed if passed >= A_PAUSE else max(0.0, self._paused - passed)
        self.signals.tick()
        if rank.run is None or isinstance(rank.state, (states.Looking, states.Alone, states.Left, states.Ended)):
            return  # there is no rank 0 to send heartbeats to, or to hear
        self._shell.look_around(waits=isinstance(rank.state, states.Waiting))
        if passed > rank.run.peer_timeout:  # this process was stopped, perhaps with its whole host
            self._heard = now
        if now >= self._next_beat:
            self._next_beat = max(self._next_beat + rank.run.heartbeat_period, now)
            rank.send_beat()
            line = self._silence.look({0: self._heard}, rank.run, now) if passed < 1 else None
            if line is not None:
                self._shell.log("; ".join(filter(None, (line, self._shell.stopped_rank_0(rank.run)))))
        if now - self._heard > rank.run.silent_after and passed < 1:
            if isinstance(rank.state, states.Closing):  # its work is done, and it needs nobody any more
                rank.enter(states.Alone())
                self._shell.log("rank 0 is silent; this rank has done its work, and leaves")
                return
            what = f"has been silent for {now - self._heard:.0f} s"
            stopped = self._shell.stopped_rank_0(rank.run)
            why = stopped or "its agent is stopped or frozen, its host is down, or the network between the hosts is cut"
            lost = verdict_words.rank_0_lost(rank.run, self._shell.worker.beat, what, why)
            if rank.may_look_for_rank_0:
                rank.send(messages.LostRank0(LastWords.of(lost)))
                self._look_for_rank_0(lost.what, stopped)
            else:
                self._explanation.give_rank_0_up(lost)

    def give_up(self, error: DdpManualError) -> None:
        """End this rank with ``error``, unless all ranks have joined: then the others say why, or wait for a rank."""
        if not isinstance(self._rank.state, states.Placed) and self._rank.so_far is None:
            self._shell.fail(error)
