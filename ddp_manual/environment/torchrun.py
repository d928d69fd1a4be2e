"""What torchrun says of itself: its store, its restarts, and which torchrun it is."""

from __future__ import annotations

import os

from ddp_manual import process_status
from ddp_manual.environment import machine, user_variables


def store_at(master_addr: str, master_port: int) -> bool:
    """Return whether torchrun hosts a TCPStore at that address, so that rank 0 is a client too.

    Like torch, trust the variable only for the address that torchrun exported beside it.
    """
    return (
        os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        and os.environ.get("MASTER_ADDR") == master_addr
        and os.environ.get("MASTER_PORT") == str(master_port)
    )


def restart_count() -> int:
    """Return how often torchrun has restarted this group; keys of an earlier roll call may still be in its store."""
    return user_variables.count("TORCHELASTIC_RESTART_COUNT")


def identity() -> str | None:
    """Identify the torchrun process that started this rank, across its restarts; None without torchrun.

    TORCHELASTIC_RUN_ID does not: it is "none" unless the user chooses one, and may be chosen again another day.
    """
    if "TORCHELASTIC_RESTART_COUNT" not in os.environ:
        return None
    agent = os.getppid()
    if fields := process_status.process_stat(agent):
        started = fields[19]  # in ticks since boot: proc(5)
    else:  # not Linux
        import psutil

        started = str(psutil.Process(agent).create_time())
    return f"{machine.host_id()}/{agent}/{started}"
