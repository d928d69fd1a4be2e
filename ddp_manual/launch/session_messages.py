"""All messages between ``launch --hosts`` and its process on each host.

Each message is a line with a JSON object. The host's process reads messages from standard input, and writes its own to
standard output, behind ``MARK``, between the lines of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddp_manual.launch.job import Hosts, Job
from ddp_manual.messages import Message
from ddp_manual.ranks_and_runs import Count, LastWords, Port, Seconds
from ddp_manual.wire import Read, local_reader_of, reader_of

MARK = b"\x1eddp-manual "
# Seconds: how often each side says that it is alive, and after how long a silence it gives up the other side.
ALIVE_EVERY = 1.0
SILENT_AFTER = 5.0
# Seconds from the launcher's last message to the end of a host's process, whatever that does; the kernel ends the
# workers with it.
END_WITHIN = 8.5


class Alive(Message):
    """The sender is alive; each side sends this every second."""


class Order(Message):
    """What the host is to start, and as which of the hosts; the launcher's first message."""

    job: Job
    hosts: Hosts
    variables: Mapping[str, str]
    """The environment variables to set on the host."""


class Begin(Message):
    """Start all ranks of the host: every host is ready."""

    master_addr: str
    master_port: Port
    restarts: Count
    """How often all ranks were started before."""


class PassOn(Message):
    """Pass a signal that the launcher has got on to the ranks."""

    number: int


class GiveUp(Message):
    """End the ranks that still wait for others to join: the run is over."""


class HostIsGone(Message):
    """End the ranks within ``within`` seconds, since host ``name`` is gone and the run does not go on without it."""

    name: str
    within: Seconds


class Hello(Message):
    """The host's first message: its version of this package, and the two addresses of the connection by ssh."""

    version: str
    address: str
    reached_from: str


class Refused(Message):
    """Why the host cannot run its ranks."""

    words: LastWords


class HostReady(Message):
    """The host can run its ranks."""

    code: Mapping[str, str]
    """Part of the program -> digest of its source code there."""
    port: Port
    """A port that is free there, for rank 0."""


class RankFailed(Message):
    """A rank of the host has ended with an error."""

    rank: Count
    words: LastWords


class AttemptEnded(Message):
    """All ranks of the host have ended."""

    has_saved: bool


FromLauncher = Alive | Order | Begin | PassOn | GiveUp | HostIsGone
FromHost = Alive | Hello | Refused | HostReady | RankFailed | AttemptEnded

read_from_launcher: Read[FromLauncher] = local_reader_of(FromLauncher)
read_from_host: Read[FromHost] = reader_of(FromHost)
