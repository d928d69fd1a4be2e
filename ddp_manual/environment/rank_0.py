"""Where rank 0 is, as far as the variables of a launcher tell, and whether ranks on several hosts can find it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ddp_manual.errors import BadOption

Environment = Mapping[str, str]


class Sourced(NamedTuple):
    """The value of an option, and the variable it comes from."""

    value: int | str
    source: str

    @property
    def assignment(self) -> str:
        return f"{self.source}={self.value}"


Identity = dict[str, Sourced]
"""Option -> its value and source; an option that no variable tells is missing."""

# Below 32768: from there on Linux chooses the ports of outgoing connections.
FIRST_JOB_PORT, JOB_PORTS = 16384, 16384


def job_port(job: int, step: int = 0) -> int:
    """Return the port at which the ranks of a step of a batch job meet; other jobs rarely get the same port."""
    return FIRST_JOB_PORT + (31 * job + step) % JOB_PORTS


def check_is_found(
    host: Sourced | None,
    *,
    host_of_rank_0: str | None,
    is_here: bool,
    spread: str,
    place: str,
    told: str,
    moved: str = "",
) -> None:
    """Check that the ranks that a launcher has started on several hosts can find rank 0.

    Args:
        host: where the ranks look for rank 0; None if no variable tells.
        host_of_rank_0: the name of this host if this process is rank 0; None if it is another rank.
        is_here: whether the ranks look for rank 0 on this process's host.
        spread: the variables that show several hosts.
        place: where the ranks look for rank 0, such as "mpirun's host".
        told: the command that tells all ranks by a variable, with {} for the host.
        moved: what else to do so that rank 0 runs at that place, with {} for its host; "" if nothing.

    Raises:
        BadOption: no variable tells rank 0's host, or this is rank 0 and runs on another host.
    """
    name = host_of_rank_0 or "HOST"
    next_step = (
        f"say where rank 0 is{'' if host_of_rank_0 else ', with the name of its host for HOST'}: "
        f"--master_addr {name}\nor, for any program: {told.format(name)}"
    )
    if host is None:
        raise BadOption(
            "no variable says on which host rank 0 is",
            why=f"the ranks are on several hosts: {spread}",
            next=next_step,
        )
    if host_of_rank_0 and not is_here:
        raise BadOption(
            f"rank 0 runs on {host_of_rank_0}, and the other ranks look for it on {place}",
            why=f"{place}, {host.value}, is the only one that every rank knows ({host.source})",
            next=next_step + (f"\nor {moved.format(name)}" if moved else ""),
        )
