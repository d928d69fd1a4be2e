"""What signals do to one rank: they stop all ranks after the same step, or this one at once, or go to its program."""

from __future__ import annotations

import signal
from collections.abc import Mapping
from dataclasses import dataclass

from ddp_manual import from_agent, messages
from ddp_manual.errors import DdpManualError, Stopped, asked_by
from ddp_manual.from_worker import Handling
from ddp_manual.protocol import states
from ddp_manual.protocol.this_rank import ThisRank
from ddp_manual.signal_handlers import NOTHING_TO_SAVE, ONCE_WITHIN, SAVE
from ddp_manual.wording import as_ranges, in_words

# Seconds after which Ctrl-C ends a program that stays in a collective, where Python cannot react to it; and after which
# a line announces that.
OUT_WITHIN = 5.0
SAID_AFTER = 1.2
# Seconds after Ctrl-C: by then the worker, which says every 0.25 s where it is, has said so once more.
KNOWN_AFTER = 0.6
# Seconds that a worker has, when the run ends, to finish its checkpoint, or to do what its program does about a signal
# that has asked it to stop, on this host or another one. torchrun gives as long.
SAVE_WITHIN = 30.0
# What becomes of the others as rank 0 is stopped: in a run that has begun they look for another one.
LEAVING_OTHERS = ": the others leave too, unless they hold a state"


@dataclass
class Unreached:
    """A program that has got Ctrl-C and has not gone on since: it stays in a collective."""

    begun: tuple[int, Mapping[str, int]] | None = None
    """How many operations and collectives it had begun, by the first message of the worker that is from after Ctrl-C.
    """
    is_said: bool = False


class StopSignals:
    """What signals do to one rank.

    Where the program takes stops, SIGUSR1 saves a checkpoint, and Ctrl-C, SIGTERM and SIGHUP stop all ranks after the
    same step. Any other program gets its signals. A second signal that asks to stop ends this rank at once, and so does
    the first Ctrl-C if such a program stays in a collective for OUT_WITHIN seconds.

    Args:
        in_one_terminal: whether all ranks share one terminal.
    """

    def __init__(self, rank: ThisRank, *, in_one_terminal: bool) -> None:
        self._rank, self._shell, self._in_one_terminal = rank, rank.shell, in_one_terminal
        self._handling = Handling.LOADING
        self._takes_stops = False
        """Whether any worker of this rank has taken requests to stop with all ranks; its next worker will too."""
        self.asked = 0
        """The first signal that has asked all ranks to stop, or 0."""
        self.passed_on = 0
        """The first signal that has asked the program to stop, which handles it, or 0."""
        self._passed_on_at = 0.0
        self._stop_signal_at: float | None = None
        """When the signal came for which the program stopped with all ranks, or that came while it was leaving."""
        self._first_at: dict[str, float] = {}
        """Process -> when it saw its first signal: the agent sees it at once, a program only once Python reacts."""
        self._unreached: Unreached | None = None
        """What is known of a program that has got Ctrl-C; None once the program has reacted, and for other signals."""

    @property
    def has_begun(self) -> bool:
        """Whether the program has begun."""
        return self._handling is not Handling.LOADING

    @property
    def are_taken(self) -> bool:
        """Whether signals do not go to the program: it stops and saves with all ranks, or it is leaving."""
        return self._handling in (Handling.WITH_ALL, Handling.DONE)

    def worker_handles(self, handling: Handling) -> None:
        """Note what the worker does about signals from now on; if all were asked to stop before, ask again."""
        if self.are_taken and handling is Handling.BY_ITSELF:
            self._stop_signal_at = min(self._first_at.values(), default=self._stop_signal_at)
            self._first_at.clear()  # the program has stopped because of these signals
        self._handling = handling
        self._takes_stops |= handling is Handling.WITH_ALL
        if handling is Handling.WITH_ALL:  # perhaps all were asked to stop while an earlier worker ran
            self.ask_again()

    def ask_again(self) -> None:
        """Have all ranks stop after the same step, if they were asked to: rank 0 may not know of it any more."""
        if self.asked:
            self._ask_all(self.asked)

    def program_begins(self) -> None:
        """Note that the program has begun: it gets the signal that has asked for a stop before."""
        self.worker_handles(Handling.BY_ITSELF)
        if self.passed_on:
            self._pass_on(self.passed_on)

    def take(self, number: int, seen_by: str) -> None:
        """Handle a signal that the agent has received, or that its script reports.

        Args:
            seen_by: ``agent`` or ``script``. A terminal sends Ctrl-C to both; that counts once.
        """
        rank, worker = self._rank, self._shell.worker
        needs_no_signal = any((worker.ended, worker.has_started_its_agent, self.are_taken))
        if needs_no_signal and isinstance(rank.state, states.Ended):
            return
        if number == signal.SIGINT and worker.beat.debugging:
            return  # Ctrl-C is for the debugger
        # If rank 0 stops, the run is over; if any other rank stops, the others wait for it.
        leads = rank.so_far is not None and rank.number == 0
        again = rank.again if leads or isinstance(rank.state, states.Placed) else ""
        restarts = rank.so_far is not None and isinstance(rank.state, (states.Waiting, states.Working))
        if worker.has_started_its_agent and not self.are_taken:  # the script gets each signal itself
            if number == signal.SIGTERM:
                self.passed_on = self.passed_on or number
                worker.until = rank.now + SAVE_WITHIN if worker.until is None else worker.until
        elif error := self._handle(number, seen_by, again, rank.now, restarts=restarts):
            self._end_at_once(error)

    def _end_at_once(self, error: Stopped) -> None:
        """End this rank, and give its worker no time."""
        self._shell.worker.until = 0
        self._shell.fail(error)

    def all_stop(self, after: messages.StopAfter) -> None:
        """Tell the program after which step all ranks stop; say why, if no signal has come to this rank."""
        self._rank.tell(after)
        is_news = not (self.asked or self._in_one_terminal)
        if is_news and self._handling is Handling.WITH_ALL:
            who = in_words(as_ranges(after.ranks))
            self._shell.log(f"{asked_by(after.number)} on {who}: stopping after the same step as all ranks")

    def _ask_all(self, number: int) -> None:
        """Have all ranks stop after the same step; for SIGUSR1, have the worker save a checkpoint."""
        rank = self._rank
        if number == SAVE:
            if isinstance(rank.state, states.Placed):
                rank.tell(from_agent.Save())
        elif isinstance(rank.state, states.Alone):  # nobody else names a step
            rank.tell(messages.AskStep())
            rank.tell(messages.StopAfter(0, number, [rank.number]))
        else:
            rank.send(messages.Stopping(number))

    def _pass_on(self, number: int) -> None:
        """Let the program handle a signal; one that asks it to stop only if nothing has asked it to stop before."""
        worker = self._shell.worker
        has_been_asked = worker.until is not None
        if number != SAVE:
            worker.until = self._rank.now + SAVE_WITHIN
        if number == SAVE or not has_been_asked:
            self._shell.pass_on(number)

    def _handle(self, number: int, seen_by: str, again: str, now: float, *, restarts: bool) -> Stopped | None:
        """Handle a signal; return the error that ends the rank at once, if the signal does.

        Args:
            again: what to do after the run has ended; "" before all ranks have joined.
            restarts: whether all ranks begin anew after a loss, perhaps once another worker has loaded torch.
        """
        if number == SAVE:
            self._save(seen_by)
            return None
        if self._handling is Handling.BY_ITSELF and not self._first_at:  # otherwise one came before the program began
            return self._stop_program(number, again, now)
        is_early = self._handling is Handling.LOADING
        will_take_it = restarts and self._takes_stops
        if is_early and not will_take_it:
            return self._stopped_early(number, again)
        if seen_by == "agent":  # the program may have got the first one before it could say that it takes stops
            first_at = min(self._first_at.values(), default=self._passed_on_at if self.passed_on else now)
        else:
            first_at = self._first_at.get(seen_by, now)
        if now - first_at > ONCE_WITHIN:
            return self._stopped_at_once(number, again)
        if not self._first_at:
            if is_early:
                what = "all that are here go on for a step, save a checkpoint, and stop"
            elif self._handling is Handling.DONE:
                what = "this rank is done, and is leaving"
            else:
                what = "stopping after the next step all ranks agree on"
            self._shell.log(f"{asked_by(number)}: {what}; a second one ends this rank")
            if self._handling is not Handling.DONE:
                self._ask_all(number)
        # A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
        self.asked = self.asked or number
        self._first_at.setdefault(seen_by, now)
        return None

    def _save(self, seen_by: str) -> None:
        if self._handling is Handling.BY_ITSELF:
            self._pass_on(SAVE)
            return
        saves = self._handling is Handling.WITH_ALL
        if saves and seen_by == "agent":
            self._ask_all(SAVE)
        self._shell.log(f"SIGUSR1: {'a checkpoint at the next step all ranks agree on' if saves else NOTHING_TO_SAVE}")

    def _stop_program(self, number: int, again: str, now: float) -> Stopped | None:
        """Let the program handle a signal that asks it to stop; the second one ends the rank."""
        before = self._passed_on_at if self.passed_on else self._stop_signal_at
        if before is None:
            self.passed_on, self._passed_on_at = number, now
            if number == signal.SIGINT and self._rank.spec.world_size > 1:
                self._unreached = Unreached()
            self._pass_on(number)
            self._shell.log(f"{asked_by(number)}: the program gets it; a second one ends this rank")
        elif now - before > ONCE_WITHIN:
            return Stopped(number, "at once, by a second signal", why="the program had not ended by itself", next=again)
        return None

    def tick(self) -> None:
        """If Ctrl-C does not reach the program, say so to all ranks, and end this rank OUT_WITHIN seconds after it."""
        rank, wait, beat = self._rank, self._unreached, self._shell.worker.beat
        if wait is None:
            return
        waited, begun = rank.now - self._passed_on_at, (beat.operations, beat.collectives)
        if wait.begun is None and waited >= KNOWN_AFTER:
            wait.begun = begun
        if waited < SAID_AFTER:
            return
        if not beat.inside or begun != wait.begun:
            self._unreached = None  # Python has reacted, in the way that the program chose
            return
        where = f"in a collective, on {beat.place or 'no line of Python'}"
        if waited >= OUT_WITHIN:
            why = f"the program was {where}, and Python does not react to Ctrl-C there"
            self._end_at_once(Stopped(signal.SIGINT, f"after {OUT_WITHIN:.0f} s", why=why, next=rank.again))
        elif not wait.is_said:
            wait.is_said = True
            line = f"Ctrl-C cannot reach the program, which is {where}; it is ended in {OUT_WITHIN - waited:.0f} s"
            self._shell.log(line)
            if rank.run is not None and not self._in_one_terminal:  # in one terminal the line of each rank is seen
                rank.send(messages.Tell(line))

    def stopped_by(self, exit_code: int | None, because_of: DdpManualError | None = None) -> Stopped | None:
        """Return the error for a program that ended with this exit code after a signal; None if it has got no signal.

        Args:
            exit_code: None if it has not ended within the time that it has.
            because_of: what it has raised, such as that a collective broke when another rank had ended.
        """
        if not self.passed_on:
            return None
        ended = "did not end within its time" if exit_code is None else f"ended with exit code {exit_code}"
        why = [f"the program has it, and {ended}"] if exit_code != 128 + self.passed_on else []
        why += [because_of.what, because_of.why] if because_of is not None else []
        return Stopped(self.passed_on, why="\n".join(why), next=self._rank.again)

    def _stopped_at_once(self, number: int, again: str) -> Stopped:
        if self._handling is not Handling.DONE:
            why = "the ranks had not yet agreed on a step to stop after: what was trained since the last save is lost"
        elif self._rank.number == 0:
            why = "rank 0 left early; ranks that were still working lost their store"
        else:
            why = "this rank had done its part, and was leaving"
        return Stopped(number, "at once, by a second signal", why=why, next=again)

    def _stopped_early(self, number: int, again: str) -> Stopped:
        if self._rank.spec.world_size == 1:
            return Stopped(number)
        if not again and self._shell.here == 1:
            return Stopped(number, "while it waited for the other ranks")
        if self._rank.number == 0:
            again = again or f"start all ranks again{LEAVING_OTHERS}"
        return Stopped(number, next=again or "start this rank again: the others wait for it")
