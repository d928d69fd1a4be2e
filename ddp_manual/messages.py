"""What agent, coordinator and observer say to each other: this module is the whole list.

Each message is a JSON object on a line (``wire``), of one of the types below; the docstring of the type says who sends
it when. It is checked as it is read, against the types and bounds of its fields. Types that several messages contain
are in ``ranks_and_runs``. Messages between an agent and its own worker are in ``from_agent`` and ``from_worker``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from ddp_manual.ranks_and_runs import (
    Beat,
    Checked,
    Count,
    LastWords,
    Moment,
    Name,
    Place,
    Port,
    RankInfo,
    Ready,
    RunInfo,
    Seconds,
    Verdict,
)
from ddp_manual.wire import Read, reader_of

# What agents and coordinators of this version say to each other; another number is another version.
PROTOCOL = 3


def _tag(name: str) -> str:
    return "".join(f"_{letter.lower()}" if letter.isupper() else letter for letter in name).lstrip("_")


class Message(Checked, tag_field="type", tag=_tag):
    """A line between two processes: here between an agent, or an observer, and the coordinator."""


class Signed(Message):
    """A message whose content proves that its sender has the run's token, if the run has one: see ``Seal``."""

    content: msgspec.Raw
    signature: str = ""


class OfWorker(Message, kw_only=True):
    """What an agent says of its worker. It changes nothing once the coordinator has asked for another worker."""

    worker: Count = 0
    """How often the coordinator had asked for another worker, on this connection, when the agent started this one."""


# From a process that is no rank yet.


class Claim(Checked):
    """The content of a hello: who wants to be a rank, and a nonce over which the coordinator signs its reply."""

    info: RankInfo
    nonce: Name


class Hello(Signed):
    """Asks to be a rank; the first message of an agent, signed over the challenge. ``Claim`` is its content."""


class Question(Checked):
    """The content of a look."""

    nonce: Name
    stacks: bool = False
    """Whether to show the Python stacks of every rank too, once the ranks have met."""
    shrink: bool = False
    """Whether the run is to go on without the ranks that are missing."""


class Look(Signed):
    """Asks to see the run; from an observer, which may ask again after each answer. ``Question`` is its content."""


# From an agent that is a rank.


class WorkerReady(OfWorker):
    """The worker has loaded torch; sent again over a new connection."""

    ready: Ready


class Heartbeat(OfWorker):
    """The agent is alive; sent every 0.5 s, and at once when the worker's phase changes."""

    beat: Beat | None = None
    """What the worker does, if that is not what the last heartbeat said."""


class Finished(OfWorker):
    """The worker has done its work, and still has its process groups open."""


class Failed(OfWorker):
    """The worker has ended, or is about to; the agent waits for the verdict."""

    words: LastWords
    judged: bool = False
    """Whether these words are the agent's, since the worker could not say why."""
    broken_at: str | None = None
    """The line of the collective that has broken, if the worker ends because of that: another rank is to blame."""
    in_a_collective: bool = False
    """Whether torch itself has failed there, maybe since other ranks called something else."""


class Held(OfWorker):
    """The worker was ended and another is started, as the coordinator has asked; which state this rank holds."""

    moment: Moment | None = None
    steps_done: Count = 0


class StacksReply(OfWorker):
    """The Python stacks of the worker, as AskStacks has asked."""

    text: str


class Begun(Checked):
    """A collective that a rank has begun."""

    group: Name
    number: Count
    """How many collectives the rank had begun in this group, with this one."""
    begun: Count
    """How many collectives the rank had begun in all groups, with this one."""
    call: Name
    """Such as ``all_reduce float32[4]``."""
    detail: Name
    """Such as ``sum`` or ``from rank 0``; "" if there is none."""
    line: Name
    """Such as ``train.py:91``; "" if no Python called it."""


class GroupRecords(Checked):
    """The last collectives of a group."""

    name: Name
    chains: Sequence[tuple[Count, int]]
    """Number and chain: see ``collective_memory``."""


class RecordsReply(OfWorker):
    """The records of collectives that AskRecords has asked for."""

    number: Count
    groups: Mapping[Name, GroupRecords] = {}
    calls: Sequence[Begun] = ()
    """The calls that were asked for; if chains were, the last call of the rank."""


class Probed(Message):
    """Which of the hosts that Probe has named cannot be reached."""

    key: tuple[Count, Count]
    failures: Sequence[tuple[Count, str]]
    """The index of each of these hosts, and how the network responded."""


class Stopping(Message):
    """A signal has come to this rank, whose program stops with all others after the same step."""

    number: Count
    """The signal."""


class StepsDone(OfWorker):
    """The worker has done so many steps, and goes no further than the next one, as AskStep has asked."""

    steps: Count


class Tell(Message):
    """Asks the coordinator to tell the other ranks this about this rank."""

    text: str


class LostRank0(Message):
    """The agent has heard nothing of rank 0, and gives it up; a rank 0 that was only stopped reads this."""

    words: LastWords


class Leaves(Message):
    """The agent leaves, for a reason of its own, and its work is not done."""

    words: LastWords
    at_work: bool = False
    """Whether the ranks have begun to work, so that the others end with it."""


class Goodbye(Message):
    """The agent leaves: its work is done."""


# From the coordinator.


class Greeting(Message, forbid_unknown_fields=False):
    """The first line of each connection; later versions may say more in it."""

    protocol: int
    challenge: Name
    host: Name
    pid: Count
    """The pid of rank 0's worker."""
    token: bool
    """Whether the run has a token."""


class Welcome(Signed):
    """The process is a rank now. ``RunInfo`` is the content."""


class Refused(Signed):
    """The process is no rank, is a rank no longer, or may not see the run. ``LastWords`` is the content."""


class Later(Message):
    """This run is over: ask again, for the next one."""


class Seen(Signed):
    """Shows the run to an observer, and once more when it has ended."""


class News(Message):
    """Who is here, and who is missing; to all ranks that are here, when it changes. A range is (first, last) rank."""

    here: Count
    left_out: Sequence[tuple[Count, Count]] = ()
    named: Sequence[str] = ()
    """Some of the ranks that are here, with their hosts."""
    missing: Sequence[tuple[Count, Count]] = ()
    loading: Sequence[tuple[Count, Count]] = ()
    """The ranks that are here and still load torch."""
    refused: Sequence[str] = ()
    gone: Sequence[str] = ()
    warnings: Sequence[str] = ()
    complete: bool = False
    waited: Seconds = 0.0
    """Seconds for which rank 0 has waited for the ranks that are missing or loading."""
    timeout: Annotated[float, Meta(ge=0)] = 0.0
    for_lost: bool = False
    """Whether the missing ranks were lost, which a line of rank 0 has said."""


class Line(Message):
    """A line for the person at the rank's terminal."""

    text: str


class Probe(Message):
    """Try to reach the other hosts; to the first rank of each host, once all ranks are here."""

    key: tuple[Count, Count]
    """The round and the index of the host, which the reply repeats."""
    hosts: Sequence[tuple[Count, str, Port]]
    """The index, the address and the port of each host."""


class Losses(Checked):
    """What a run has lost so far."""

    count: Count
    seconds: Seconds


class Placed(Message):
    """All ranks are here: the worker begins to work at this place."""

    place: Place
    store: tuple[str, Port]
    """The address and port of torch's store."""
    generation: Count
    holds: bool
    """Whether the ranks hold their state."""
    state_from: Count | None
    """The rank, in torch's process group, whose state all go on from."""
    losses: Losses
    run: RunInfo
    on_cpu: str | None = None
    """Why all ranks use the CPU, though some have GPUs."""
    roster: Sequence[Any] = ()
    """What a person wants to know of each rank; to rank 0 alone."""


class Alive(Message):
    """The coordinator is alive; to all ranks, every 0.5 s."""


class AskStacks(Message):
    """Send the Python stacks of the worker."""


class AskRecords(Message):
    """Send these records of collectives: the last ones of all groups, or what was called."""

    number: Count
    """The number of the question, which the reply repeats."""
    chains: Count = 0
    """How many chains to send, of all groups together."""
    calls: Mapping[Name, Sequence[Count]] = {}
    """Group -> the numbers of the collectives whose calls are asked for."""


class AskStep(Message):
    """Say how many steps the worker has done; it goes no further than the next one: a signal has asked all to stop."""


class StopAfter(Message):
    """Stop after this step; to all ranks, none of which has passed it."""

    step: Count
    """Counted from 1 since all ranks have begun, or have gone on after a loss."""
    number: Count
    """The signal that has asked all ranks to stop."""
    ranks: Sequence[Count]
    """The ranks that have got such a signal."""


class Replace(Message):
    """End the worker, and start another one: a rank was lost."""

    worker: Count
    """The number that messages about the new worker have: see ``OfWorker``."""


class SeatLost(Message):
    """The rank may ask for its seat again, from another rank 0 or this one."""

    why: str
    """Such as that it was silent for too long, or that rank 0 leaves."""


class Expired(Message):
    """Nobody has taken a lost rank's seat in time: go on for a step, save a checkpoint, and stop."""

    verdict: Verdict


class Close(Message):
    """Close the process groups: all other ranks have finished, or this rank is to wait for them no longer."""


class RunEnds(Message):
    """The run ends, or only this rank of it; to all ranks, except those that leave in order."""

    verdict: Verdict


class Rank0Leaves(Message):
    """Rank 0 has done its work and leaves; nobody watches the others any more."""


FromStranger = Hello | Look
FromRank = (
    WorkerReady | Heartbeat | Finished | Failed | Held | StacksReply | RecordsReply | Probed | Stopping | StepsDone
    | Tell | LostRank0 | Leaves | Goodbye
)  # fmt: skip
FromRank0 = (
    Greeting | Welcome | Refused | Later | Seen | News | Line | Probe | Placed | Alive | AskStacks | AskRecords
    | AskStep | StopAfter | Replace | SeatLost | Expired | Close | RunEnds | Rank0Leaves
)  # fmt: skip

read_from_stranger: Read[FromStranger] = reader_of(FromStranger)
read_from_rank: Read[FromRank] = reader_of(FromRank)
read_from_rank_0: Read[FromRank0] = reader_of(FromRank0)
