"""From an address to a complete roll call, and at the end out of the store again with rank 0 last."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from ddp_manual import environment, rundir
from ddp_manual.config import WorldSpec
from ddp_manual.errors import MasterLost, RankMissing
from ddp_manual.rendezvous import address as addresses
from ddp_manual.rendezvous.answer import Answered, answer
from ddp_manual.rendezvous.entries import Entry, Hello
from ddp_manual.rendezvous.group import first_line
from ddp_manual.rendezvous.lastwords import WORDS_TIMEOUT
from ddp_manual.rendezvous.rollcall import RollCall
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.waiting import Waiting

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


class Meeting:
    """One rank's part in the roll call: a client of the store and, on rank 0, the roll call itself.

    Args:
        options: option -> (value, source), for all that the ranks must agree on.
        run_dir: where rank 0 wants the files of the run, with ``{run_id}`` for its name; None for no files.
        command: the command that starts a rank, with ``{rank}`` and ``{master_port}`` for the numbers.
    """

    store: RunStore

    def __init__(
        self,
        spec: WorldSpec,
        device: str,
        options: Mapping[str, tuple[Any, str]],
        run_dir: str | None,
        command: str | None,
    ) -> None:
        self.spec = spec
        self.run_dir: Path | None = None
        self._run_dir = run_dir
        self._device = device
        self._options = options
        self._command = command
        self._roll_call: RollCall | None = None

    def meet(self) -> Answered:
        """Block until every rank has joined.

        Raises:
            DdpManualError: the ranks do not come together.
        """
        waiting = Waiting(self.spec.join_timeout, logger)
        if self.spec.rank == 0 and not self.spec.agent_store:
            self.store = RunStore.host(addresses.listen(self.spec))
            self.spec = replace(self.spec, master_port=self.store.port)
            logger.info("listening at %s", addresses.at(self.store.address, self.store.port))
        else:
            found = addresses.wait_for_store(self.spec, waiting, self._command_template().replace("{rank}", "0"))
            self.store = RunStore.connect(found, self.spec.master_port, self._attempt())
            # Rank 0's own time counts from when it began to listen, so it ends first and for everybody.
            waiting = Waiting(self.spec.join_timeout, logger)
        entry = self._entry()
        if self.spec.rank == 0:
            self._roll_call = RollCall(self.store, self._hello(entry), entry)
            self._roll_call.open()
        try:
            return answer(
                self.store.clone(),
                entry,
                waiting,
                met=self._met,
                hello_timeout=self.spec.join_timeout if self.spec.agent_store else HELLO_TIMEOUT,
                give_up=self._roll_call.give_up if self._roll_call else None,
            )
        except BaseException as error:
            if self._roll_call and not isinstance(error, RankMissing):
                self._roll_call.abandon(_rank_0_left(entry, error))
            self.leave(timeout=WORDS_TIMEOUT)
            raise

    def all_finish_soon(self) -> bool:
        """Say that this rank has done its work; whether the others have too, or do within ``FINISH_TOGETHER``."""
        finished = self.store.set_finished(self.spec.rank)
        deadline = time.monotonic() + FINISH_TOGETHER
        while finished < self.spec.world_size and time.monotonic() < deadline:
            time.sleep(0.01)
            finished = self.store.count_finished()
        return finished >= self.spec.world_size

    def leave(self, *, timeout: float) -> None:
        """Tell the others that this rank needs the store no more; rank 0 stays until all have said so.

        Args:
            timeout: seconds rank 0 waits for the others.
        """
        if self.store.lost:
            return
        with suppress(MasterLost):
            self.store.set_left(self.spec.rank)
            if self._roll_call is None:
                return
            others = [rank for rank in self._roll_call.stop() if rank != 0]
            waiting = Waiting(timeout, logger)
            while others and not self.store.have_left(others):
                if waiting.until_next_line == 0:
                    late = ", ".join(str(rank) for rank in others if not self.store.have_left([rank]))
                    if waiting.over:
                        logger.warning("not waiting longer for rank %s, which has not said that it left", late)
                        return
                    waiting.about(f"done; keeping the store for rank {late}, which has not finished")
                time.sleep(0.01)

    def _attempt(self) -> str:
        if self.spec.agent_store:
            return f"{environment.restart_count()}.{next(_rendezvous_of_this_process)}"
        return "0"

    def _met(self, hello: Hello) -> None:
        # From here on a failure of this rank has a place on disk.
        self.run_dir = Path(hello.run_dir) if hello.run_dir else None

    def _entry(self) -> Entry:
        return Entry(
            rank=self.spec.rank,
            world_size=self.spec.world_size,
            host=environment.host_name(),
            host_id=environment.host_id(),
            pid=os.getpid(),
            since=time.time(),
            device=self._device,
            local_rank=self.spec.local_rank,
            options=self._options,
        )

    def _hello(self, entry: Entry) -> Hello:
        run_id = self.spec.run_id or rundir.new_run_id()
        return Hello(
            run_id=run_id,
            run_dir=self._run_dir.replace("{run_id}", run_id) if self._run_dir else None,
            world_size=self.spec.world_size,
            host=entry.host,
            pid=entry.pid,
            command=self._command_template(),
        )

    def _command_template(self) -> str:
        command = self._command or _library_command(self.spec)
        return command.replace("{master_port}", str(self.spec.master_port))


def _rank_0_left(entry: Entry, error: BaseException) -> MasterLost:
    return MasterLost(
        f"{entry.who()} left before all ranks had joined",
        why=first_line(error),
        next="start all ranks again",
    )


def _library_command(spec: WorldSpec) -> str:
    """How a rank of a user's own script is started: by variables, since its flags are not ours to know."""
    program, arguments = environment.typed_command()
    return (
        f"WORLD_SIZE={spec.world_size} RANK={{rank}} MASTER_ADDR={spec.master_addr} "
        f"MASTER_PORT={{master_port}} {shlex.join([*program, *arguments])}"
    )
