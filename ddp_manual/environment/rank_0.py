"""Whether ranks that a launcher has started on several hosts can find rank 0."""

from __future__ import annotations

from typing import NamedTuple

from ddp_manual.errors import BadOption


class Search(NamedTuple):
    """How ranks on several hosts look for rank 0, as far as the variables of their launcher tell.

    Attributes:
        is_rank_0: whether this process is rank 0 itself.
        own_host: the name of its host.
        spread: the variables that show several hosts.
        place: where the ranks look for rank 0, such as "mpirun's host".
        host, source: the name of that host and its variable; None and "" if no variable tells it.
        is_here: whether this process runs there.
        told: the command that tells all ranks by a variable, with {} for the host.
        moved: what else to do so that rank 0 runs at that place; "" if nothing.
    """

    is_rank_0: bool
    own_host: str
    spread: str
    place: str
    host: str | None
    source: str
    is_here: bool
    told: str
    moved: str = ""

    def check(self) -> None:
        """Raise BadOption if no variable tells rank 0's host, or this is rank 0 on another one."""
        host = self.own_host if self.is_rank_0 else "HOST"
        next_step = (
            f"say where rank 0 is{'' if self.is_rank_0 else ', with the name of its host for HOST'}: "
            f"--master_addr {host}\nor, for any program: {self.told.format(host)}"
        )
        if self.host is None:
            raise BadOption(
                "no variable says on which host rank 0 is",
                why=f"the ranks are on several hosts: {self.spread}",
                next=next_step,
            )
        if self.is_rank_0 and not self.is_here:
            raise BadOption(
                f"rank 0 runs on {self.own_host}, and the other ranks look for it on {self.place}",
                why=f"{self.place}, {self.host}, is the only one that every rank knows ({self.source})",
                next=next_step + (f"\nor {self.moved}" if self.moved else ""),
            )
