"""One rank's life seen from outside: join -> start the worker -> watch -> explain -> end.

Everything happens in one event loop: what the coordinator says, what the worker says, that the worker has ended, a
signal, a clock. What explains a failure is never what broke: this process has no lock, no CUDA context and no torch of
the worker's.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import sys
import time
import traceback
from collections.abc import Callable, Coroutine, Mapping
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ddp_manual import launchers, run_folder, signals
from ddp_manual.agent import host, reachability, verdicts
from ddp_manual.agent.connection import Connection
from ddp_manual.agent.joining import Joining, Task
from ddp_manual.agent.roll_call import advice_for, missing_ranks_error, situation, wait_within
from ddp_manual.agent.worker_process import Worker
from ddp_manual.errors import (
    BackendUnavailable,
    DdpManualError,
    MasterLost,
    PeerGone,
    RanksDoNotBelongTogether,
    RankTaken,
    Stopped,
    asked_by,
    from_dict,
)
from ddp_manual.messages import Beat, Place, RunInfo, Steps, Verdict, as_error, last_words
from ddp_manual.signals import NOTHING_TO_SAVE, ONCE_WITHIN, SAVE
from ddp_manual.terminal import Say, Waiting
from ddp_manual.world_spec import WorldSpec

TICK = 0.1
# Seconds until the coordinator has told everybody what ends the run.
VERDICT_WITHIN = 2.5
# Seconds in which a worker may come upon what another rank has failed with, and say so itself.
SAME_WITHIN = 0.5
# Seconds that a rank waits longer for the others than rank 0, which tells all of them that one is missing.
RANK_0_FIRST = 1.0
# Seconds that rank 0 keeps torch's store for ranks that still work by themselves.
LEAVE_TIMEOUT = 60.0
# Seconds for what is told last, to those who still read.
LAST_WORD_WITHIN = 1.5
# A worker that has not spoken for so long is in a C call that keeps the interpreter's lock, not in a collective.
WORKER_SILENT = 2.0
LOOK_AT_WORKER = 0.5
# Seconds for a worker to load torch, where its rank is only checked and the others are not there.
READY_WITHIN = 20.0


@dataclass(kw_only=True)
class Ended:
    """How a rank has ended."""

    error: DdpManualError | None = None
    result: Any = None
    """What the worker has said of its work, if that is complete."""

    @property
    def exit_code(self) -> int:
        return self.error.exit_code if self.error is not None else 0


class Agent:
    """The agent of one rank.

    Args:
        start_worker: starts its process, or knows the one that runs already.
        say: says a line to whoever sits before this rank.
        tell: says why this rank ends, as the last thing.
    """

    def __init__(
        self,
        spec: WorldSpec,
        task: Task,
        *,
        start_worker: Callable[[], Worker],
        say: Say,
        tell: Callable[[DdpManualError], None],
    ) -> None:
        self.spec = spec
        self.task = task
        self.steps = Steps()
        self.say = say
        self._tell = tell
        self._alone = bool(task.start.get("alone"))
        # Ranks that ``launch`` has started have one terminal, where rank 0 says who is missing.
        self._say_waiting: Say = say if task.launched is None or spec.rank == 0 else (lambda line: None)
        self._start_worker = start_worker
        self._worker: Worker | None = None
        self._started = self._heard = self._worker_heard = self._ticked = time.monotonic()
        self._joining = Joining(spec, task, steps=self.steps, say=say)
        self._waiting = Waiting(spec.join_timeout, self._say_waiting)
        self._connection: Connection | None = None
        self._run: RunInfo | None = None
        self._run_dir: Path | None = None
        self._news: Mapping[str, Any] | None = None
        self._told: set[str] = set()
        self._all_here = False
        self._ready: Mapping[str, Any] | None = None
        self._ready_came = asyncio.Event()
        self._begun = self._placed = self._left = self._over = False
        self._notes, self._heeds = False, True
        self._stopped_at: dict[str, float] = {}
        self._beat, self._sent_beat = Beat(), Beat()
        self._next_look = self._next_beat = 0.0
        self._own_words: DdpManualError | None = None
        self._words_of_another: str | None = None
        self._result: Any = None
        self._working: set[asyncio.Task[Any]] = set()

    async def run(self) -> Ended:
        """From the first line to the exit code. Raises nothing: what ends the rank is told, and is in the result."""
        self._done: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        with signals.handle_in_event_loop(self.take_signal) if self.task.launched is None else nullcontext():
            try:
                self._check_host()
                self._worker = self._start_worker()
                await self._worker.attach(self._guarded(self._take_from_worker), self._worker_gone)
                self._joining.who = dataclasses.replace(self._joining.who, pid=self._worker.pid)
                self._do(self._work_alone() if self._alone else self._join())
                self._tick()
                ended = Ended(result=await self._done)
                if isinstance(ended.result, DdpManualError):  # stopped by a signal, like all ranks
                    ended = Ended(error=ended.result)
            except Exception as error:
                ended = Ended(error=self._as_ours(error))
            await self._leave(ended.error)
        return ended

    # -- join -------------------------------------------------------------------------------------------------------

    def _check_host(self) -> None:
        if self.spec.from_variables:
            self.say(", ".join(self.spec.from_variables))
        if not self.task.is_script and find_spec("torch") is None:
            raise BackendUnavailable(
                "torch is not installed in this Python",
                why="it is looked for where this Python keeps its packages",
                next="install this package with what it needs: pip install .\n"
                "or, after ./scripts/demo, use its environment: . .venv/bin/activate",
            )
        with self.steps.step("open files") as step:
            step.detail = f"up to {host.raise_descriptor_limit(self.spec)}"

    def _begin(self, store_address: str | None) -> None:
        """Have the worker begin: it loads torch while this rank looks for the others, or waits for them.

        Args:
            store_address: where rank 0's worker is to host torch's store.
        """
        if not self._begun:
            self._begun = True
            spec = {"spec": self.spec.values(), "sources": dict(self.spec.sources), "path": sys.path[0]}
            here = {"store_address": store_address, "started": self._started}
            self._to_worker({"start": {**self.task.start, **spec, **here}})

    async def _work_alone(self) -> None:
        run_id = self.spec.run_id or run_folder.new_run_id()
        self._set_run_dir(self.task.run_dir and self.task.run_dir.replace("{run_id}", run_id))
        self._begin(None)
        await self._ready_came.wait()
        place = Place(local_rank=self.spec.local_rank or 0, local_world_size=1, node=0, nodes=1, host_leader=0)
        self._placed = True
        run = {"run_id": run_id, "run_dir": self._run_dir and str(self._run_dir)}
        self._to_worker({"place": dataclasses.asdict(place), "run": run, "roster": []})

    async def _join(self) -> None:
        if self.spec.rank != 0:
            self._begin(None)
        self._run, self._connection = run, connection = await self._joining.join(self._waiting)
        self._begin(run.address)
        self._heard = time.monotonic()
        self._set_run_dir(run.run_dir)
        self._roll_call = self.steps.begin("roll call")
        if self.spec.rank != 0:
            # Rank 0's own time counts from when it began to listen, so it ends first and for everybody.
            self._waiting = Waiting(self.spec.join_timeout, self._say_waiting)
        if self._ready is not None:
            self._send({"ready": self._ready})
        connection.handle(self._guarded(self._take), self._coordinator_gone)

    def _set_run_dir(self, run_dir: str | None) -> None:
        self._run_dir = Path(run_dir) if run_dir else None

    # -- what the coordinator says ----------------------------------------------------------------------------------

    def _take(self, message: dict[str, Any]) -> None:
        self._heard = time.monotonic()
        if "news" in message:
            self._take_news(message["news"])
        elif "probe" in message:
            self._do(self._probe(message["probe"], message["for"]))
        elif "refused" in message:
            raise from_dict(self._joining.seal.open(f"refused {self._joining.nonce}", message["refused"]))
        elif "place" in message:
            self._take_place(message)
        elif "line" in message:
            self.say(str(message["line"]))
        elif "verdict" in message:
            self._take_verdict(message["verdict"])
        elif "stacks" in message:
            self._do(self._answer_stacks())
        elif "close" in message:
            self._to_worker({"close": message["close"]})
        elif "over" in message and self._placed:
            self._over = True
            self.say("rank 0 has finished and left; this rank goes on alone, and nobody watches over it")
            self._to_worker({"close": False})

    def _take_news(self, news: Mapping[str, Any]) -> None:
        self._news = news
        for warning in news["warnings"]:
            if warning not in self._told:
                self._told.add(warning)
                self.say(warning)
        self._say_news()

    def _say_news(self) -> None:
        """Who is missing and, once, who left or was refused."""
        if self._news is None or self._run is None or self._placed:
            return
        news = self._news
        untold = [words for words in (*news["gone"], *news["refused"]) if words not in self._told]
        missing = bool(news["missing"])
        if missing == self._all_here:
            self._all_here = not missing
            self._waiting = Waiting(wait_within(self.spec.join_timeout, all_here=self._all_here), self._say_waiting)
        if self._waiting.about(situation(news, self._run.world_size), untold, each_change=missing):
            self._told.update(untold)
        if missing:
            self._waiting.advise(advice_for(news["missing"], self._run))
            patience = self.spec.join_timeout + RANK_0_FIRST
            if self.spec.rank != 0 and self._waiting.waited > patience:  # rank 0 may have more
                self._fail(missing_ranks_error(news, self._run, self.spec.join_timeout))

    async def _probe(self, wanted: list[tuple[int, str, int]], key: list[int]) -> None:
        with self.steps.step("reachability") as step:
            failures = await reachability.try_all(wanted)
            step.detail = f"{len(wanted)} other host(s) tried, {len(failures)} cannot be reached"
            if failures:
                step.outcome = "failed"
        self._send({"probed": failures, "for": key})

    def _take_place(self, message: Mapping[str, Any]) -> None:
        assert self._run is not None
        self._placed = True
        place = Place(**message["place"])
        self._run = dataclasses.replace(self._run, pid=message["rank_0_pid"])
        self.steps.end(self._roll_call, f"all {self._run.world_size} ranks are here, on {place.nodes} host(s)")
        if "reachability" not in [step.name for step in self.steps]:
            with self.steps.step("reachability") as step:
                step.detail = "one host" if place.nodes == 1 else f"{place.nodes} hosts, tried by others"
        if self._joining.answering is not None:
            self._joining.answering.close()
        run = {"run_id": self._run.run_id, "run_dir": self._run.run_dir}
        self._to_worker({"roster": [], **message, "run": run, "interface": self._joining.own.interface})

    def _take_verdict(self, verdict: Verdict) -> None:
        error = as_error(verdict, self.spec.rank)
        ours, judged, own = verdict["rank"] == self.spec.rank, verdict.get("judged"), self._own_words
        assert self._worker is not None
        if judged and ours and self._worker.status is None:
            error.why = f"that is this rank; the others have not waited for it\n{error.why}"
        elif not judged and own is not None and (ours or own.identifier == verdict["identifier"]):
            error = own
        elif not judged and not ours and own is None:
            self._words_of_another = str(verdict["identifier"])
            asyncio.get_running_loop().call_later(SAME_WITHIN, self._fail, error)
            return
        self._fail(error)

    def _coordinator_gone(self, reason: str) -> None:
        if self._over or self._left or self._run is None or self._words_of_another is not None:
            return
        before = "" if self._placed else " before all ranks had met"
        why = f"its connection to this rank ended{before}: {reason}"
        self._fail(self._own_words or self._rank_0_lost("is gone, without last words", why))

    def _rank_0_lost(self, what: str, why: str) -> MasterLost:
        assert self._run is not None
        return MasterLost(
            f"rank 0 ({self._run.host}, pid {self._run.pid}) {what}",
            why=f"{why}\nthis rank was {self._beat.at_step()}",
            next=f"look at rank 0's last lines and at {self._run.host}, then {self._run.start_again}",
        )

    async def _answer_stacks(self) -> None:
        assert self._worker is not None
        self._send({"stacks": await self._worker.stack()})

    # -- what the worker says -----------------------------------------------------------------------------------------

    def _take_from_worker(self, message: dict[str, Any]) -> None:
        self._worker_heard = time.monotonic()
        if "beat" in message:
            if message["beat"] is not None:
                before, self._beat = self._beat, Beat.from_message(message["beat"])
                if self._beat.phase != before.phase:
                    self._send_beat(self._worker_heard)
        elif "ready" in message:
            self._ready = message["ready"]
            self.steps.extend_from(message.get("steps", []))
            self._ready_came.set()
            self._send({"ready": self._ready})
        elif "notes" in message:
            self._notes, self._heeds = message["notes"], message["heeds"]
        elif "signalled" in message:
            self.take_signal(int(message["signalled"]), seen_by="script")
        elif "run_dir" in message:
            self._set_run_dir(message["run_dir"])
        elif "finished" in message:
            if self._alone or self._over:
                self._to_worker({"close": False})
            else:
                self._send_beat(self._worker_heard)
                self._send({"finished": True})
        elif "failed" in message:
            self._take_failure(message)
        elif "left" in message:
            self._do(self._part())
        elif "done" in message:
            self._result = message["done"]
            if stopped := message.get("stopped"):
                self._result = from_dict(stopped, int(stopped["exit_code"]))
            if self._left or self._alone:
                self._finish()

    def _take_failure(self, message: Mapping[str, Any]) -> None:
        """What has ended the worker, in its own words: the others are told, and may know better."""
        words = message["failed"]
        self._own_words = from_dict(words, int(words["exit_code"]))
        if self._own_words.identifier == self._words_of_another:
            self._fail(self._own_words)
            return
        self._send_beat(self._worker_heard)
        self._tell_the_run({**message, "broken": message.get("broken", False)}, self._own_words)

    def _worker_gone(self) -> None:
        if self._result is not None or self._own_words is not None:
            return  # it has said what there was to say
        worker = self._worker
        assert worker is not None
        if self._left and not worker.status:
            self._finish()
            return
        who = dataclasses.replace(self._joining.who, pid=worker.pid)
        again = self._run.start_again if self._run else "start this rank again"
        oom, stack = worker.ran_out_of_memory, worker.crash_stack
        verdict = verdicts.lost(who, self._beat, again, status=worker.status, oom=oom, stack=stack)
        self._tell_the_run({"lost": verdict}, as_error(verdict, self.spec.rank))

    def _tell_the_run(self, message: Mapping[str, Any], error: DdpManualError) -> None:
        """The coordinator answers with what ends the run; where it does not, that is ``error``."""
        if self._connection is None or self._connection.closed or self._over:
            self._fail(error)
        else:
            self._send(message)
            if message.get("broken"):  # which only the others can explain
                error = self._rank_0_lost(
                    f"has not said within {VERDICT_WITHIN} s which rank is to blame", f"in this rank {error.what}"
                )
            asyncio.get_running_loop().call_later(VERDICT_WITHIN, self._fail, error)

    async def _part(self) -> None:
        """The worker needs the others no more: say goodbye; rank 0 leaves last, since its worker has torch's store."""
        coordinator = self._joining.coordinator
        if coordinator is not None:
            waiting = Waiting(LEAVE_TIMEOUT, self.say)
            while late := coordinator.ranks_left:
                shown = ", ".join(map(str, late[:16]))
                if waiting.over:
                    self.say(f"not waiting longer for rank {shown}, which has not said that it left")
                    break
                waiting.about(f"keeping the store for rank {shown}, which has not left yet")
                await asyncio.sleep(0.02)
        self._left = True
        if coordinator is not None:
            coordinator.end()
        self._send({"bye": ""})
        self._to_worker({"over": True})
        if self._result is not None:
            self._finish()

    def _finish(self) -> None:
        if not self._done.done():
            self._done.set_result(self._result)

    # -- signals ------------------------------------------------------------------------------------------------------

    def take_signal(self, number: int, seen_by: str = "agent") -> None:
        """A signal to this process, or to the script that is the worker.

        Args:
            seen_by: a terminal sends Ctrl-C to agent and script alike, and the script may see it later.
        """
        if self._done.done():  # it is leaving
            self._ready_came.set()  # and does not wait for what a check may still find out
            return
        script, heeded = self.task.is_script, self._notes and self._heeds
        if script and not self._notes:
            return  # to the script it is what it always is
        if number == SAVE:
            if heeded and not script:
                self._to_worker({"save": True})
            self.say(f"SIGUSR1: {'a checkpoint at the next step all ranks agree on' if heeded else NOTHING_TO_SAVE}")
            return
        now = time.monotonic()
        if not self._notes:
            self._fail(Stopped(number))
        elif now - self._stopped_at.get(seen_by, now) > ONCE_WITHIN:
            self._fail(self._stopped_at_once(number))
        elif not self._stopped_at:
            if heeded and not script:
                self._to_worker({"stop": number})
            what = "stopping after the next step all ranks agree on" if heeded else "this rank is done, and is leaving"
            self.say(f"{asked_by(number)}: {what}; once more leaves at once")
        # A terminal and a program in between (timeout, an orchestrator) may both pass on the same Ctrl-C.
        self._stopped_at.setdefault(seen_by, now)

    def _stopped_at_once(self, number: int) -> Stopped:
        resume = f"; with --run_dir {self._run_dir} --resume auto they go on from the last one" if self._run_dir else ""
        return Stopped(
            number,
            "at once, by a second signal",
            why="the ranks had not yet agreed on a step to stop after: what was trained since the last save is lost"
            if self._heeds
            else "rank 0 left early; ranks that were still working lost their store"
            if self.spec.rank == 0
            else "this rank had done its part, and was leaving",
            # No command: the other ranks show this too, and each has one of its own.
            next=f"start all ranks again{resume}",
        )

    # -- as time goes by ----------------------------------------------------------------------------------------------

    def _tick(self) -> None:
        if not self._done.done():
            asyncio.get_running_loop().call_later(TICK, self._tick)
            self._guarded(self._look_around)(time.monotonic())

    def _look_around(self, now: float) -> None:
        passed, self._ticked = now - self._ticked, now
        if self._run is None or self._left or self._over:
            return
        if passed > self._run.peer_timeout:  # this process was stopped, perhaps with all its host
            self._heard = now
        if not self._placed:
            self._say_news()
        assert self._worker is not None
        if now >= self._next_look:
            self._next_look = now + LOOK_AT_WORKER
            self._beat = dataclasses.replace(self._beat, stopped=self._worker.stopped_by())
        if now >= self._next_beat:
            self._next_beat = now + self._run.beat_every
            self._send_beat(now)
        if now - self._heard > self._run.silence and passed < 1:
            lost = self._rank_0_lost(
                f"has been silent for {now - self._heard:.0f} s",
                "its agent is stopped or frozen, its host is down, or the network between the hosts is cut",
            )
            # What rank 0 reads if it is only stopped, and goes on.
            self._send({"failed": last_words(lost)})
            self._fail(lost)

    def _send_beat(self, now: float) -> None:
        beat = self._beat
        if beat.inside and now - self._worker_heard > WORKER_SILENT:
            beat = dataclasses.replace(beat, inside=False)
        if self._run is not None:
            self._send({"beat": vars(beat) if beat != self._sent_beat else None})
        self._sent_beat = beat

    # -- the end ------------------------------------------------------------------------------------------------------

    async def _leave(self, error: DdpManualError | None) -> None:
        """Say why, then end the worker; rank 0 gives the others the time to read why."""
        if error is not None:
            self._say_goodbye(error)
        failed = self._own_words is not None or self._worker is None or self._worker.ended.is_set()
        if error is not None and self.task.wait_until_ready and not failed and not isinstance(error, Stopped):
            self._begin(None)
            with suppress(TimeoutError, asyncio.TimeoutError):
                await asyncio.wait_for(self._ready_came.wait(), READY_WITHIN)
        for working in self._working:
            working.cancel()
        if error is not None and self._run is not None and not self._placed:
            self.steps.end(self._roll_call, error.what, "failed")
        if error is not None:
            if self._worker is not None:
                await self._worker.silence()
            self._write_failure(error)
            self._tell(error)
        own = error is not None and error is self._own_words
        keeps_store = own and self.spec.rank == 0 and not self.task.is_script
        if keeps_store:  # from which the other workers may learn the same
            await self._let_all_read()
        if self._worker is not None:
            await self._worker.end(error, own=own)
        if not keeps_store:
            await self._let_all_read()
        await self._close()

    def _say_goodbye(self, error: DdpManualError) -> None:
        """Unless the others know, since it was they who told."""
        if self._left:
            return
        if self._joining.coordinator is not None:
            who = f"rank 0 ({launchers.host_name()}, pid {self._pid})"
            before = MasterLost(f"{who} left before all ranks had joined", why=error.what, next="start all ranks again")
            self._joining.coordinator.end(before)
        if self._placed and not isinstance(error, PeerGone) and self._own_words is None:
            self._send({"failed": last_words(error)})
        elif not self._placed:
            self._send({"bye": error.what})

    def _write_failure(self, error: DdpManualError) -> None:
        """Leave the error as ``failure-rank<k>.json``, where this process is a rank and the run has a folder."""
        no_rank = isinstance(error, (RankTaken, RanksDoNotBelongTogether)) and not self._placed
        if self._run_dir is None or no_rank:
            return
        about = {"rank": self.spec.rank, "host": launchers.host_name(), "pid": self._pid}
        with suppress(DdpManualError, OSError):
            self._run_dir.mkdir(parents=True, exist_ok=True)
            run_folder.write_json(
                run_folder.RunPaths(self._run_dir).failure(self.spec.rank), {**last_words(error), **about}
            )

    @property
    def _pid(self) -> int:
        return self._worker.pid if self._worker is not None else os.getpid()

    async def _let_all_read(self) -> None:
        """What was told last."""
        coordinator, connection = self._joining.coordinator, self._connection
        deadline = time.monotonic() + LAST_WORD_WITHIN
        while time.monotonic() < deadline and (
            (coordinator is not None and (coordinator.unsent or coordinator.open_to_others))
            or (connection is not None and connection.unsent)
        ):
            await asyncio.sleep(0.01)

    async def _close(self) -> None:
        for one in (self._joining.answering, self._connection, self._joining.coordinator):
            if one is not None:
                one.close()
        await asyncio.sleep(0)

    # -- helpers ------------------------------------------------------------------------------------------------------

    def _send(self, message: Mapping[str, Any]) -> None:
        if self._connection is not None:
            self._connection.send(message)

    def give_up(self, error: DdpManualError) -> None:
        """End this rank for this reason, unless it has met the others, who then say why."""
        if not self._placed:
            self._fail(error)

    def _fail(self, error: DdpManualError) -> None:
        if not self._done.done():
            self._done.set_exception(error)

    def _to_worker(self, message: Mapping[str, Any]) -> None:
        if self._worker is not None:
            self._worker.send(message)

    def _guarded(self, handler: Callable[[Any], None]) -> Callable[[Any], None]:
        """What a handler raises ends this rank."""

        def guarded(message: Any) -> None:
            try:
                handler(message)
            except Exception as error:
                self._fail(self._as_ours(error))

        return guarded

    def _do(self, work: Coroutine[Any, Any, None]) -> None:
        """Do something that takes time; what it raises ends this rank."""

        async def guarded() -> None:
            try:
                await work
            except Exception as error:
                self._fail(self._as_ours(error))

        task = asyncio.ensure_future(guarded())
        self._working.add(task)
        task.add_done_callback(self._working.discard)

    def _as_ours(self, error: Exception) -> DdpManualError:
        if isinstance(error, DdpManualError):
            return error
        return MasterLost(
            f"the agent of rank {self.spec.rank} broke",
            why="".join(traceback.format_exception(error, limit=-5)).rstrip(),
            next="start all ranks again; this is a mistake in ddp_manual and worth reporting",
        )
