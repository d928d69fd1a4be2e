"""All messages between ``launch --hosts`` and its process on each host.

Each message is a line with a JSON object. The host's process reads messages from standard input; it writes messages to
standard output, behind ``MARK``, between the lines of ranks.
"""

from __future__ import annotations

from collections.abc import Mapping

from ddp_manual.launch.job import Hosts, Job
from ddp_manual.messages import Message
from ddp_manual.ranks_and_runs import Count, LastWords, Port, Seconds
from ddp_manual.wire import Read, local_reader_of, reader_of

MARK = b"\x1eddp-manual "
# Seconds. Each side sends Alive every ALIVE_EVERY, and gives up the other if nothing has come for SILENT_AFTER.
ALIVE_EVERY = 1.0
SILENT_AFTER = 5.0
# Seconds from the launcher's last sign of life to the end of a host's process, even if that process hangs; the kernel
# ends its workers with it.
END_WITHIN = 8.5


class Alive(Message):
    """A sign of life, without content; each side sends one every second."""


class Order(Message):
    """The launcher's first message: what the host is to start, and which of the hosts of the run it is."""

    job: Job
    hosts: Hosts
    variables: Mapping[str, str]
    """The environment variables to set on the host."""


class Begin(Message):
    """Start all ranks of the host: every host is ready."""

    master_addr: str
    master_port: Port
    restarts: Count
    """How often all ranks were started again before."""


class PassOn(Message):
    """Pass on to the ranks a signal that the launcher has received."""

    number: int


class GiveUp(Message):
    """End the ranks that still wait for others to join: the run is over."""


class HostIsGone(Message):
    """End the ranks within this time: another host is gone, and the run does not go on without it."""

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
    """Part of the program -> digest of its source code on the host."""
    port: Port
    """A port that is free on the host, should rank 0 be there."""


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
