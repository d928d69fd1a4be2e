"""What a worker says to its agent: ``FromWorker`` is the whole list, with what the agent passes on to rank 0. What the
agent says is in ``from_agent``.

Both are processes of one rank on one machine, connected by a pair of sockets that nobody else has. Each message is a
JSON object on a line (``wire.encode_local``), of one of the types below; the docstring of the type says when it is
sent. It is checked as it is read. Texts, such as the names of files, arrive as they are.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from numbers import Real
from typing import Any, TypeVar

from ddp_manual.join_steps import Step
from ddp_manual.messages import Finished, Message, StepsDone
from ddp_manual.ranks_and_runs import JOINING, LARGEST, OPENING, Beat, LastWords, Ready
from ddp_manual.wire import Read, local_reader_of, printable

# Characters of ``Beat.place``, which names a line of the program.
LONGEST_PLACE = 200
T = TypeVar("T")


@dataclass
class Progress:
    """What a rank is doing: the training loop writes it, the reporter's thread reads it.

    ``world.progress(step=120, steps=600, loss=loss.item())`` in a script's own loop sets these fields; ``status`` shows
    them, and messages say at which step a rank was. The numbers must be Python's: a tensor counts as 0, since reading
    it could wait for a GPU.
    """

    phase: str = JOINING
    """joining, loading, training, evaluating, saving, leaving or ended; running in a script that does not say."""
    epoch: int = 0
    step: int = 0
    steps: int = 0
    """How many there are in all; 0 if that is not known."""
    samples_per_second: float = 0.0
    """The samples of this rank alone."""
    step_seconds: float = 0.0
    """This rank's own work per step, without waiting for the others; 0 if not measured."""
    loss: float | None = None
    """The last loss; rank 0 also writes it to the run's ``metrics.jsonl``, once a second."""
    loss_said: Callable[[], None] | None = None
    """Called when the script has given a loss."""
    saving: list[str] = field(default_factory=list)
    """For each block that is writing files, which it must finish before its process is ended, the phase before it; one
    block may be inside another one, or beside that of another thread."""

    def __call__(
        self,
        *,
        step: int | None = None,
        steps: int | None = None,
        epoch: int | None = None,
        phase: str | None = None,
        samples_per_second: float | None = None,
        loss: float | None = None,
    ) -> None:
        given = {"step": step, "steps": steps, "epoch": epoch, "phase": phase, "loss": loss}
        given["samples_per_second"] = samples_per_second
        vars(self).update({name: value for name, value in given.items() if value is not None})
        if loss is not None and self.loss_said is not None:
            self.loss_said()

    @property
    def number_of_loss(self) -> float | None:
        """The loss; None if it is no number of Python, or is beyond LARGEST."""
        return _number(self.loss, None)

    @property
    def rate(self) -> float:
        """The samples per second; 0 if they are no number of Python, or are beyond LARGEST."""
        return _number(self.samples_per_second, 0.0)

    @property
    def whole_step(self) -> int:
        return int(_number(self.step, 0.0))

    @property
    def whole_epoch(self) -> int:
        return int(_number(self.epoch, 0.0))

    def beat(self, *, place: str, timeouts: Mapping[str, float], **seen: Any) -> Beat:
        """Return a heartbeat that can be read, whatever a script has put into these fields.

        Texts are cut and made printable; numbers that are not finite become 0; the shortest time-out is sent once.

        Args:
            seen: other fields of ``Beat``, as they are.
        """
        shortest = min(timeouts.values(), default=0.0)
        longer = {group: seconds for group, seconds in timeouts.items() if seconds > shortest or group == OPENING}
        return Beat(
            phase=printable(str(self.phase)),
            epoch=self.whole_epoch,
            step=self.whole_step,
            steps=int(_number(self.steps, 0.0)),
            samples_per_second=round(self.rate, 1),
            step_seconds=round(_number(self.step_seconds, 0.0), 6),
            loss=self.number_of_loss,
            timeouts={"": shortest, **longer} if shortest > 0 else {},
            place=printable(place, LONGEST_PLACE),
            **seen,
        )


def _number(value: Any, otherwise: T) -> float | T:
    """Return a number of Python up to LARGEST; ``otherwise`` for a tensor too: reading it could wait for a hung GPU."""
    with suppress(OverflowError):
        return float(value) if isinstance(value, Real) and abs(float(value)) <= LARGEST else otherwise
    return otherwise


class Born(Message):
    """The worker's process runs; its first message, except from a script that has started its agent itself."""

    pid: int
    """The pid, which only the process itself knows if it was forked."""


class Attach(Message):
    """A user's own script has called ``join``; its first message to the agent that it has started."""

    pid: int
    spec: Mapping[str, Any]
    """The options of ``WorldSpec``."""
    sources: Mapping[str, str]
    """Option -> where its value comes from."""
    run_dir: str | None
    typed: Sequence[str]
    """What was typed to start the script."""
    script: str | None
    """The file of the script, if it has one."""
    attempt: str
    """Differs for each time that the ranks of one torchrun join."""


class Loaded(Message):
    """The worker has loaded torch, and waits for its place."""

    ready: Ready
    steps: Sequence[Step] = ()
    """What it has done for that, as ``check`` shows it."""


class Doing(Message):
    """The worker is alive; its reporter sends it every 0.25 s, and at once when its work is done."""

    beat: Beat | None = None
    """What the worker does, if that has changed since its last message."""
    blocked: bool = False
    """Whether its main thread is in a collective, where Python calls no handler of a signal."""


class RecordsMemory(Message):
    """The worker records its collectives from now on; before it opens a process group."""

    descriptor: int
    """The worker's file descriptor of the memory that it shares with its agent."""
    complete: bool
    """Whether it records all of them: torch before 2.14 does not tell what C++ begins."""
    compared: bool
    """Whether they are compared with those of other ranks, or only counted."""


class GroupOpened(Message):
    """The worker has opened a process group; sent for each type of device that has a backend of its own in it."""

    identity: int
    """The number that its records have for the group, or for the backend."""
    key: str
    """What the group is called on all its ranks."""
    ranks: Sequence[int]
    description: str
    device: str
    """The type of device, if the group has a backend for each type; otherwise ""."""


class GroupClosed(Message):
    """The worker takes part no more in a process group, which torch is about to forget."""

    key: str
    begun: int | None
    """How many collectives it has begun there, as torch counts them; None if they are not countable."""
    raised: str = ""
    """If it is the default group: the exception that was being handled, or that is about to end the program."""
    broken: bool = False
    """Whether that was the exception of a collective which had broken: other ranks had taken part no more."""


class NotCompared(Message):
    """The worker cannot record its collectives any more; or its agent, which makes this message, cannot read them."""

    why: str


class StartsProcesses(Message):
    """The program starts so many processes with torch.multiprocessing."""

    count: int


class ProgramBegins(Message):
    """The worker becomes the program, which handles its signals itself; sent just before its first line."""

    hears: bool = True
    """Whether the program hears its agent: an executable does not."""


class Replaced(Message):
    """The program has become another one by exec; its agent makes this message itself, and the worker sends no more."""


class Joins(Message):
    """The program calls ``join``: it will say when it has done its work, and will leave in order."""


class Handling(enum.Enum):
    """What the worker does about signals."""

    LOADING = "loading"
    """Its program has not begun: a signal simply ends the rank."""
    BY_ITSELF = "by itself"
    """Its program handles them, as any program does."""
    WITH_ALL = "with all"
    """It stops with all ranks after the same step, and saves when it is asked to."""
    DONE = "done"
    """It has done its part: after a signal, a line says that this rank is leaving."""


class HandlesSignals(Message):
    """The program does something else about signals from now on."""

    handling: Handling


class Signalled(Message):
    """A program that takes stops has got a signal."""

    number: int


class RunFolder(Message):
    """The ranks that train have agreed on the folder of the run."""

    run_dir: str
    own: bool
    """Whether this rank writes its failure into that folder."""
    chosen: bool
    """Whether the user has named the folder."""


class Holds(Message):
    """A user's own program has asked for its held state, and so it will hold its state."""


class Failed(Message):
    """An exception ends the worker; sent before it closes anything."""

    words: LastWords
    broken: bool = False
    """Whether the exception is raised because a collective has broken."""
    in_a_collective: bool = False
    """Whether torch has raised the exception in a collective."""
    exits: bool = False
    """Whether the exception is SystemExit, by which the program ends itself."""
    place: str = ""
    """The line of the user's program that has raised the exception."""


class Left(Message):
    """The worker has closed its process groups, or its program has ended: it has only torch's store to keep."""


class Result(Message):
    """The work of a program that has called ``join`` is done, and its files are written; after ``Left``."""

    result: Any = None
    """The result of the work."""
    stopped: LastWords | None = None
    """Set if a signal has stopped all ranks after the same step."""
    process_continues: bool = False
    """Whether the process goes on without its agent, which it has started itself."""


class IsQuiet(Message):
    """The worker writes nothing more; the reply to ``BeQuiet``."""


class IsSaving(Message):
    """The worker may be writing a checkpoint; the first reply to ``BeforeTheEnd``. ``MayEnd`` follows."""


class MayEnd(Message):
    """The worker is not, or is no longer, writing a checkpoint: nothing is lost if it is killed."""


class Noticed(Message):
    """An exception is on its way through a user's own script, which ends by itself; sent once the script knows why the
    run ends, or has waited for that."""


FromWorker = (
    Born | Attach | Loaded | Doing | RecordsMemory | GroupOpened | GroupClosed | NotCompared | StartsProcesses
    | ProgramBegins | Replaced | Joins | HandlesSignals | Signalled | StepsDone | RunFolder | Holds | Finished | Failed
    | Left | Result | IsQuiet | IsSaving | MayEnd | Noticed
)  # fmt: skip

read: Read[FromWorker] = local_reader_of(FromWorker)
