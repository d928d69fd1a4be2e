"""What a third terminal can see of a run: it reads the store, joins nothing and changes nothing."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from ddp_manual.config import WorldSpec
from ddp_manual.errors import MasterNotAStore
from ddp_manual.rendezvous.address import at, resolve
from ddp_manual.rendezvous.entries import Hello, situation
from ddp_manual.rendezvous.probing import wait_for_store
from ddp_manual.rendezvous.store import RunStore
from ddp_manual.rendezvous.waiting import Waiting

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Observation:
    """A run at one moment."""

    hello: Hello
    summary: Mapping[str, Any]
    """The roll call: see ``RollCall``."""
    progress: Mapping[str, Any] | None
    """What each rank does, once they have met: see ``progress.py``."""
    failure: Mapping[str, Any] | None

    def situation(self) -> str:
        """One line: who is here and who is missing."""
        return situation(self.summary, self.hello.world_size)

    def as_dict(self) -> dict[str, Any]:
        hello = {name: value for name, value in asdict(self.hello).items() if name != "challenge"}
        return {"run": hello, **self.summary, "progress": self.progress, "failure": self.failure}


def observe(address: str, port: int) -> Observation:
    """Read the run whose store answers at an IP address.

    Raises:
        MasterNotAStore: it is not a run of this program. MasterLost: it ends while it is read.
    """
    store = RunStore.connect(address, port)
    store.join_attempt()
    try:
        hello = store.hello_if_any()
        if hello is None:
            raise MasterNotAStore(
                f"the store at {at(address, port)} has no roll call",
                why="a TCPStore answers there, but no rank 0 of this program has used it",
                next="check --master_addr and --master_port against those of the run",
            )
        try:
            return Observation(Hello(**hello), store.summary(), store.progress_if_any(), store.failure_if_any())
        except (TypeError, ValueError) as error:
            raise MasterNotAStore(
                f"the run at {at(address, port)} is of another version of this program",
                why=f"reading it gave {type(error).__name__}: {error}",
                next="use the version of ddp_manual that the run uses",
            ) from None
    finally:
        store.close()


def find(spec: WorldSpec, rank_0_command: str) -> str:
    """The IP address at which rank 0's store answers, now.

    Raises:
        MasterUnresolvable, MasterRefused, MasterUnreachable, MasterNotAStore: none does.
    """
    return wait_for_store(spec, resolve(spec.master_addr), Waiting(0.0, logger), rank_0_command, who="status")
