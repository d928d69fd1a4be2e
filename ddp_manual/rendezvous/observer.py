"""What a third terminal can see of a run: it reads the store, joins nothing, and asks for nothing but stacks."""

from __future__ import annotations

import logging
import secrets
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from ddp_manual import environment
from ddp_manual.errors import MasterLost, MasterNotAStore
from ddp_manual.rendezvous.address import at, resolve
from ddp_manual.rendezvous.entries import Hello, situation
from ddp_manual.rendezvous.probing import wait_for_store
from ddp_manual.rendezvous.store import RunStore, interruptibly
from ddp_manual.rendezvous.waiting import Waiting
from ddp_manual.world_spec import WorldSpec

logger = logging.getLogger(__name__)

LOOK_EVERY = 1.0
ANSWER_TIMEOUT = 5.0


@dataclass(frozen=True)
class Observation:
    """A run at one moment."""

    hello: Hello
    summary: Mapping[str, Any]
    """The roll call: see ``RollCall``."""
    progress: Mapping[str, Any] | None
    """What each rank does, once they have met: see ``progress.py``."""
    failure: Mapping[str, Any] | None
    stacks: Mapping[str, str] | None = None
    """By rank: its Python stacks, if they were asked for and it has given them."""

    def situation(self) -> str:
        """One line: who is here and who is missing."""
        return situation(self.summary, self.hello.world_size)

    def as_dict(self) -> dict[str, Any]:
        hello = {name: value for name, value in asdict(self.hello).items() if name != "challenge"}
        known = {name: value for name, value in self.summary.items() if name not in ("named", "prove")}
        seen = {"run": hello, **known, "progress": self.progress, "failure": self.failure}
        return seen if self.stacks is None else {**seen, "stacks": self.stacks}


class Observer:
    """A client that only reads, of the store that answers at an IP address."""

    def __init__(self, address: str, port: int) -> None:
        self._where = at(address, port)
        self._store = RunStore.connect(address, port)

    def observe(self, *, stacks: bool = False) -> Observation:
        """The run as it is now, with ``stacks`` those of every rank, once they have met.

        Raises:
            MasterNotAStore: it is not a run of this program, or of another version. MasterLost: it has ended, or does
                not answer.
        """
        waiting = Waiting(ANSWER_TIMEOUT, logger)
        try:
            seen = interruptibly(self._read, waiting, f"waiting for {self._where}")
            if stacks and seen.progress is None:
                return replace(seen, stacks={})  # there is nobody to ask yet
            if stacks:
                return replace(seen, stacks=interruptibly(self._read_stacks, waiting, "waiting for the stacks"))
            return seen
        except TimeoutError:
            raise MasterLost(
                f"rank 0's store at {self._where} does not answer",
                why=f"it was asked for the run, and said nothing for {ANSWER_TIMEOUT:.0f} s",
                next="look whether rank 0 is stopped or frozen",
            ) from None

    def _read(self) -> Observation:
        store = self._store
        store.join_attempt()
        hello = store.hello_if_any()
        if hello is None:
            raise MasterNotAStore(
                f"the store at {self._where} has no roll call",
                why="a TCPStore answers there, but no rank 0 of this program has used it",
                next="check --master_addr and --master_port against those of the run",
            )
        try:
            return Observation(Hello(**hello), store.summary(), store.progress_if_any(), store.failure_if_any())
        except (TypeError, ValueError) as error:
            raise MasterNotAStore(
                f"the run at {self._where} is of another version of this program",
                why=f"reading it gave {type(error).__name__}: {error}",
                next="use the version of ddp_manual that the run uses",
            ) from None

    def _read_stacks(self) -> Mapping[str, str]:
        key = secrets.token_hex(8)
        self._store.ask_stacks(key)
        found: Mapping[str, str] = self._store.stacks(key)
        return found

    def close(self) -> None:
        self._store.close()


def look(spec: WorldSpec, *, again: bool, stacks: bool = False) -> Iterator[dict[str, Any]]:
    """The run at rank 0's address, now and with ``again`` every second until it has ended; ``stacks``: see Observer.

    Raises:
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: there is none, and why.
    """
    environment.bound_reverse_lookups()
    environment.quiet_torch_warnings()
    start_rank_0 = (
        f"ddp-manual train --world_size N --rank 0 --master_addr {spec.master_addr} --master_port {spec.master_port}"
    )
    addresses = resolve(spec.master_addr)
    address = wait_for_store(spec, addresses, Waiting(0.0, logger), start_rank_0, who="status")
    observer = Observer(address, spec.master_port)
    try:
        yield observer.observe(stacks=stacks).as_dict()
        while again:
            time.sleep(LOOK_EVERY)
            try:
                yield observer.observe(stacks=stacks).as_dict()
            except MasterLost:
                return
    finally:
        observer.close()
