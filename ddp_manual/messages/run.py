"""What the ranks of a run know of it: as rank 0 tells each of them, and as they tell a new rank 0."""

from __future__ import annotations

import shlex
from dataclasses import dataclass

from ddp_manual.messages.checked import Checked, Count, Moment, Name, Seconds, ip_address
from ddp_manual.on_loss import LEAVE

# Of the time-out of a process group: ranks wait for less long in a collective. After the time-out torch ends those that
# wait, and nobody would name the rank that they wait for.
SHARE_OF_TIMEOUT = 0.8


class RunSoFar(Checked):
    """What the ranks of a run know of it, and tell a new rank 0."""

    run_id: Name
    run_dir: str | None
    generation: Count
    """How often the ranks have begun anew, since others took the places of lost ones."""
    losses: Count
    """How often ranks were lost."""
    lost_seconds: Seconds
    """From each loss until all ranks went on."""
    host: Name
    pid: Count
    """Of rank 0's worker, which was lost."""
    address: Name
    """The IP address that rank 0 listened on."""
    lost: Name = ""
    """How it was lost."""
    seconds: Seconds = 0.0
    """Since then."""
    held: Moment | None = None
    """Of the state that the rank holds, if it holds one."""

    def __post_init__(self) -> None:
        ip_address(self.address)


class RunInfo(Checked):
    """What run this is, as rank 0 tells each rank that joins."""

    run_id: str
    run_dir: str | None
    world_size: Count
    host: str
    pid: Count
    """Of rank 0's worker."""
    address: str
    """The IP address rank 0 listens on."""
    since: float
    """When the run began, in seconds since the epoch by rank 0's clock."""
    command: str
    """The command that starts a rank of this run, with ``{rank}`` for its number; cut if nobody would type it."""
    launched: str | None
    """The ``launch`` command that continues the run, if ``launch`` started the ranks; cut as above."""
    peer_timeout: float
    stall_timeout: float
    script: bool
    """Whether the ranks run the user's own script, whose options are unknown here."""
    stall_timeout_is_default: bool = False
    """Whether nobody has set it for a script: then it counts only where the time-outs of its process groups are not
    known."""
    on_loss: str = LEAVE
    """What the ranks do when one of them is lost: see ``WorldSpec``."""
    rejoin_timeout: float = 0.0
    shrink_after: float | None = None
    on_loss_of_own_code: bool = False

    def __post_init__(self) -> None:
        ip_address(self.address)

    @property
    def start_again(self) -> str:
        """What to do after the run has ended, as the end of a sentence."""
        if self.run_dir is None or self.script:
            return "start all ranks again"
        return from_last_checkpoint(self.launched or first_command_and(self.run_dir))

    def longest_wait(self, timeout: float | None, until_known: float) -> LongestWait:
        """Return how long ranks may wait in a collective of a process group.

        Args:
            timeout: the seconds of the group's own time-out; None if that is not known.
            until_known: seconds from the begin of a wait until rank 0 knows of it, at most.
        """
        own = LongestWait(self.stall_timeout)
        if timeout is None:
            return own
        of_group = LongestWait(max(timeout / 2, SHARE_OF_TIMEOUT * timeout - until_known), timeout)
        return of_group if self.stall_timeout_is_default or of_group.seconds < own.seconds else own

    def command_for(self, rank: int) -> str:
        return self.command.replace("{rank}", str(rank), 1)  # a program may have an argument with such a word

    @property
    def only_on_its_host(self) -> bool:
        """Whether rank 0 listens on loopback, which no other host reaches."""
        return ip_address(self.address).is_loopback


@dataclass(frozen=True)
class LongestWait:
    """How long ranks may wait in a collective for one that lives but does not come."""

    seconds: float
    timeout: float | None = None
    """The time-out of their process group, if it follows from that; otherwise it is ``stall_timeout``."""

    @property
    def reason(self) -> str:
        if self.timeout is None:
            return "--stall_timeout"
        return f"{SHARE_OF_TIMEOUT:.0%} of their process group's time-out of {self.timeout:g} s"

    @property
    def larger(self) -> str:
        """What makes it longer."""
        if self.timeout is None:
            return "a larger --stall_timeout"
        return (
            f"a larger timeout in\ninit_process_group or new_group: it is {self.timeout:g} s, and the run ends before "
            "torch ends the ranks that wait\n(for the group that join() opens, a larger stall_timeout)"
        )


def timeout_for(stall_timeout: float) -> float:
    """Return the seconds of a time-out that ends no collective before ``stall_timeout`` does."""
    return stall_timeout / SHARE_OF_TIMEOUT + 10


def more_seconds(world_size: int) -> float:
    """Return how much longer to wait in a large world for what rank 0 says once it has read from every rank: reading a
    reply of 4 KB, or a hello, takes it 0.3 to 0.7 ms."""
    return world_size / 1000


def resume_flags(run_dir: str) -> str:
    return f"--resume auto --run_dir {shlex.quote(run_dir)}"


def first_command_and(run_dir: str) -> str:
    """Say how ranks that were started by hand go on with the run in ``run_dir``: in words that are right for each."""
    return f"each rank with its first command and {resume_flags(run_dir)}"


def from_last_checkpoint(how: str) -> str:
    return f"start all ranks again, from the last checkpoint if there is one: {how}"
