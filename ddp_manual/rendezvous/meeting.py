"""From an address to a complete roll call, and at the end out of the store again with rank 0 last."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import shlex
import socket
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from ddp_manual import environment, rundir
from ddp_manual.errors import MasterLost, RankMissing
from ddp_manual.rendezvous import address as addresses
from ddp_manual.rendezvous import peernames
from ddp_manual.rendezvous.answer import Answered, Answering, answer
from ddp_manual.rendezvous.entries import Entry, Hello
from ddp_manual.rendezvous.group import first_line
from ddp_manual.rendezvous.introduction import OwnAddress, Program, introduce
from ddp_manual.rendezvous.keeper import open_lifelines
from ddp_manual.rendezvous.lastwords import as_ours, tell_by_store
from ddp_manual.rendezvous.listening import listen
from ddp_manual.rendezvous.probing import wait_for_store
from ddp_manual.rendezvous.reachability import Answerer, check_pairs
from ddp_manual.rendezvous.rollcall import RollCall
from ddp_manual.rendezvous.seal import Seal
from ddp_manual.rendezvous.steps import Steps
from ddp_manual.rendezvous.store import RunStore, StoreGone, interruptibly
from ddp_manual.rendezvous.verdicts import Member
from ddp_manual.rendezvous.waiting import POLL_EVERY, Waiting
from ddp_manual.rundir import RunFolder
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

# A torchrun agent's store outlives a rendezvous; the next one of the same script must not find the last one's keys.
_rendezvous_of_this_process = itertools.count()

# Rank 0 opens the roll call as soon as its store answers, so a store without one is somebody else's.
HELLO_TIMEOUT = 5.0
# Seconds within which ranks that did the same work have all done it. One that takes longer is waited for by rank 0
# alone, with the store; one that is stuck in a collective has to see its peers go.
FINISH_TOGETHER = 1.0
# Seconds rank 0 keeps the store for ranks that still work by themselves.
LEAVE_TIMEOUT = 60.0
# Seconds it keeps it for ranks that have to read why it leaves.
READ_WITHIN = 2.0
# Seconds for what a rank that leaves puts into the store.
LAST_WORD_WITHIN = 1.0


class Meeting:
    """One rank's part in the roll call: a client of the store and, on rank 0, the roll call itself.

    Args:
        device, backend: as ``device.choose`` found them.
        options: option -> (value, source), for all that the ranks must agree on.
        run_dir: where rank 0 wants the files of the run, with ``{run_id}`` for its name; None for no files.
        command: the command that starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers; None where a
            user's own script was started.
        steps: told what is done.
    """

    store: RunStore
    own: OwnAddress

    def __init__(
        self,
        spec: WorldSpec,
        *,
        device: str,
        backend: str,
        options: Mapping[str, tuple[Any, str]],
        run_dir: str | None,
        command: str | None,
        steps: Steps,
    ) -> None:
        self.spec = spec
        self.folder = RunFolder()
        self._run_dir = run_dir
        self._device = device
        self._backend = backend
        self._options = options
        self._command = command
        self._steps = steps
        self.seal = Seal(environment.token(spec.token_file))
        self.nonce = ""
        """Tells this process from any other that was, or wanted to be, the same rank."""
        self.lifelines: socket.socket | None = None
        """On rank 0: where the other ranks open their lifelines."""
        self.answerer: Answerer | None = None
        """Shows that this process lives, until its lifeline does; whoever has met closes it."""
        self._roll_call: RollCall | None = None
        self._met_rank_0 = False
        # Seconds. All ranks together ask the store 20,000 times a second at most.
        self._look_every = max(0.01, spec.world_size / 20_000)

    def meet(self) -> Answered:
        """Block until every rank has joined, and those of different hosts can connect to each other.

        Raises:
            DdpManualError: the ranks do not come together.
        """
        waiting = Waiting(self.spec.join_timeout, logger)
        # What takes long comes before rank 0 can be seen: once its store answers, so must its roll call.
        program = Program.of_this_process(self._device, script=self._command is None)
        peernames.ask_for_none()
        with self._steps.step("address") as step:
            found = addresses.resolve(self.spec.master_addr)
            step.detail = f"{self.spec.named('master_addr')} is {', '.join(found)}"
            if words := addresses.resolved(self.spec.master_addr, found):
                logger.info("%s", words)
            addresses.refuse_loopback(self.spec, found)
        done = len(self._steps)
        while True:
            try:
                self._open_store(found, waiting)
                return self._join(waiting, program)
            except StoreGone as ended:
                # Before rank 0 has answered, it was the store of the last run here; ours is still to come.
                if self._met_rank_0 or self.spec.rank == 0 or self.spec.agent_store or waiting.over:
                    raise
                waiting.about(f"{ended.what}: {ended.why}; waiting for the next run")
                del self._steps[done:]
                time.sleep(POLL_EVERY)

    def _join(self, waiting: Waiting, program: Program) -> Answered:
        if self.spec.rank != 0 or self.spec.agent_store:
            # Rank 0's own time counts from when it began to listen, so it ends first and for everybody.
            waiting = Waiting(self.spec.join_timeout, logger)
        self.nonce = secrets.token_hex(8)
        listening = self.store.clone()
        answered = None
        try:
            with self._steps.step("interface") as step:
                self.own = OwnAddress(self.store.address, self._backend)
                step.detail = f"{self.own.address} on {self.own.source}"
            self.answerer = Answerer(self.own.address)
            with self._steps.step("roll call") as step:
                answered = self._answer_roll_call(listening, program, self.answerer.port, waiting)
                step.detail = f"all {self.spec.world_size} ranks are here, on {answered.place.nodes} host(s)"
            self._stay_with_the_run(listening)
            with self._steps.step("reachability") as step:
                place = answered.place
                check_pairs(listening, self.spec.rank, place)
                step.detail = "one host" if place.nodes == 1 else f"{place.nodes} hosts can connect to each other"
            return answered
        except BaseException as error:
            if self.answerer is not None:
                self.answerer.close()
            if answered is not None:  # the others count on this rank
                tell_by_store(self.store, self.spec, error)
            self.leave(timeout=READ_WITHIN)
            if self.lifelines is not None:
                self.lifelines.close()
            raise

    def _stay_with_the_run(self, listening: RunStore) -> None:
        """The first connection may have been to the store of the last run here, which went just before the second was
        made, to this run's."""
        try:
            self.store.count_finished()
        except StoreGone:
            listening.count_finished()  # else it is this run's store that has gone, and connecting anew takes 10 s
            self.store = listening.clone()

    def _open_store(self, found: list[str], waiting: Waiting) -> None:
        if self.spec.rank == 0 and not self.spec.agent_store:
            with self._steps.step("listen") as step:
                self.store = RunStore.host(listen(self.spec, found))
                self.spec = replace(self.spec, master_port=self.store.port)
                step.detail = addresses.at(self.store.address, self.store.port)
                logger.info("listening at %s", step.detail)
            return
        with self._steps.step("rank 0's store") as step:
            rank_0_command = self._command_template().replace("{rank}", "0")
            address = wait_for_store(self.spec, found, waiting, rank_0_command)
            self.store = RunStore.connect(address, self.spec.master_port, self._attempt())
            step.detail = f"a store answers at {addresses.at(address, self.spec.master_port)}"

    def _answer_roll_call(self, listening: RunStore, program: Program, probe_port: int, waiting: Waiting) -> Answered:
        entry = introduce(self.spec, self._device, self._options, self.own, probe_port, program)
        if self.spec.rank == 0:
            self.lifelines = open_lifelines(self.own.address)
            roll_call = RollCall(self.store, self._hello(entry), entry, self.seal)
            roll_call.open()
            self._roll_call = roll_call
        how = Answering(
            seal=self.seal,
            met=self._met,
            hello_first=self.spec.agent_store,
            hello_timeout=self.spec.join_timeout if self.spec.agent_store else HELLO_TIMEOUT,
            nonce=self.nonce,
            give_up=self._roll_call.give_up if self._roll_call else None,
            abandon=self._abandon if self._roll_call else None,
        )
        return answer(listening, entry, waiting, how)

    def _abandon(self, error: BaseException) -> None:
        assert self._roll_call is not None
        if not isinstance(error, RankMissing):
            ours = as_ours(self.spec.rank, error)
            self._roll_call.abandon(
                MasterLost(
                    f"rank 0 ({environment.host_name()}, pid {os.getpid()}) left before all ranks had joined",
                    why=first_line(ours),
                    next="start all ranks again",
                )
            )

    def all_finish_soon(self) -> bool:
        """Say that this rank has done its work; whether the others have too, or do within ``FINISH_TOGETHER``.

        All ranks agree on it. One that comes late, and then sees all others, would wait in a last collective for those
        that have closed their groups without it; for good, if a script keeps a DDP module and with it the connections.
        """
        finished = self.store.set_finished(self.spec.rank)
        deadline = time.monotonic() + FINISH_TOGETHER
        while finished < self.spec.world_size and time.monotonic() < deadline:
            time.sleep(self._look_every)
            finished = self.store.count_finished()
        return self.store.close_together(finished >= self.spec.world_size)

    @property
    def members(self) -> list[Member]:
        """All ranks, on rank 0."""
        assert self._roll_call is not None
        return self._roll_call.members

    def drop(self) -> None:
        """Leave a run that has failed: the others are told by their lifelines, and wait for nothing in the store."""
        if self._roll_call is not None and not self.store.lost:
            self._briefly(self._roll_call.stop)

    def leave(self, *, timeout: float) -> None:
        """Tell the others that this rank needs the store no more; rank 0 stays until all have said so.

        Args:
            timeout: seconds rank 0 waits for the others.
        """
        if self.store.lost:
            return
        self._briefly(partial(self.store.set_left, self.nonce))
        if self._roll_call is None:
            return
        try:
            with suppress(MasterLost):
                self._keep_the_store(self._roll_call.end(), Waiting(timeout, logger))
        finally:
            self._briefly(self._roll_call.stop)

    def _briefly(self, call: Callable[[], None]) -> None:
        """A last word to a store that may be frozen, or gone."""
        with suppress(MasterLost, TimeoutError):
            interruptibly(call, Waiting(LAST_WORD_WITHIN, logger), "waiting for rank 0's store once more")

    def _keep_the_store(self, ranks: Mapping[int, str], waiting: Waiting) -> None:
        others = {rank: nonce for rank, nonce in ranks.items() if rank != 0}
        while others and not self.store.have_left(others.values()):
            if waiting.until_next_line == 0:
                late = ", ".join(str(rank) for rank, nonce in others.items() if not self.store.have_left([nonce]))
                if waiting.over:
                    logger.warning("not waiting longer for rank %s, which has not said that it left", late)
                    return
                waiting.about(f"keeping the store for rank {late}, which has not left yet")
            time.sleep(self._look_every)

    def _attempt(self) -> str:
        if self.spec.agent_store:
            return f"{environment.restart_count()}.{next(_rendezvous_of_this_process)}"
        return "0"

    def _met(self, hello: Hello) -> None:
        self._met_rank_0 = True
        # From here on a failure of this rank has a place on disk.
        self.folder.path = self.folder.of_rendezvous = Path(hello.run_dir) if hello.run_dir else None

    def _hello(self, entry: Entry) -> Hello:
        run_id = self.spec.run_id or rundir.new_run_id()
        return Hello(
            run_id=run_id,
            run_dir=self._run_dir.replace("{run_id}", run_id) if self._run_dir else None,
            world_size=self.spec.world_size,
            host=entry.host,
            pid=entry.pid,
            address=self.store.address,
            since=entry.since,
            challenge=secrets.token_hex(16) if self.seal else None,
            command=self._command_template(),
            lifeline=(self.own.address, self._lifeline_port()),
            peer_timeout=self.spec.peer_timeout,
            stall_timeout=self.spec.stall_timeout,
            script=self._command is None,
        )

    def _lifeline_port(self) -> int:
        assert self.lifelines is not None
        return int(self.lifelines.getsockname()[1])

    def _command_template(self) -> str:
        command = self._command or _library_command(self.spec)
        return command.replace("{master_port}", str(self.spec.master_port))


def _library_command(spec: WorldSpec) -> str:
    """How a rank of a user's own script is started: by variables, since its flags are not ours to know."""
    program, arguments = environment.typed_command()
    return (
        f"WORLD_SIZE={spec.world_size} RANK={{rank}} MASTER_ADDR={spec.master_addr} "
        f"MASTER_PORT={{master_port}} {shlex.join([*program, *arguments])}"
    )
