"""Every way a run can stop, as an exception that explains itself, with its identifier and its exit code.

Only ``cli`` turns an error into an exit status.
"""

from __future__ import annotations

import copyreg
import errno
import signal
import sys
import traceback
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from ddp_manual.text_wrapping import labelled, wrapped

if TYPE_CHECKING:
    from pathlib import Path

TRACEBACK_FRAMES = 10
TRACEBACK = "Traceback (most recent call last):"
# Lines: a rank repeats another rank's ``why`` only if it has no more than these.
LONGEST_WHY_OF_A_PEER = 2
SAVED = "rank 0 has saved a checkpoint"
"""Begins the ``why`` of a run that was stopped and has lost nothing."""
EVERY_ERROR: dict[str, type[DdpManualError]] = {}
"""Identifier -> class."""


class DdpManualError(Exception):
    """A run cannot start, or cannot continue.

    Args:
        what: One line saying what happened, naming rank and host if they are known.
        why: The observed facts, such as what was tried and what answered. May span lines; "" if ``what`` says it all.
        next: The command to type or the setting to change. May span lines, of which those with a command begin with
            two spaces, see ``text_wrapping``; "" if there is nothing to do.
    """

    identifier: str
    exit_code: int
    on_its_rank: tuple[str, int] | None = None
    """Identifier and exit code of this failure on the rank that it is about, where that is another rank."""
    of_rank: int | None = None
    """That rank, if it has said itself why it has failed."""

    def __init_subclass__(cls, identifier: str | None = None, exit_code: int | None = None) -> None:
        """Register the class by its identifier; what it lacks, it inherits from its family."""
        if exit_code is not None:
            cls.exit_code = exit_code
        if identifier is not None:
            cls.identifier = identifier
            EVERY_ERROR[identifier] = cls

    def __init__(self, what: str, *, why: str, next: str) -> None:
        super().__init__(what)
        self.what = what
        self.why = why
        self.next = next

    def __str__(self) -> str:
        """Include why and next, so that the end of a traceback shows them."""
        return self.render().removeprefix(f"error[{self.identifier}]: ")

    def __reduce__(self) -> tuple[Any, ...]:
        """Support copies to another process; Exception would call the class with ``args``, without the keywords."""
        return copyreg.__newobj__, (type(self), self.what), self.__dict__  # type: ignore[attr-defined]

    def render(self, width: int | None = None) -> str:
        """Return the three-part text that ends every failing rank's stderr.

        Args:
            width: of the terminal, in columns; None: lines are not wrapped.
        """
        headline, why, next = self.shown
        parts = (labelled("  why:  ", why, width), labelled("  next: ", next, width))
        return "\n".join([wrapped(headline, width), *(part for part in parts if part.strip() not in ("why:", "next:"))])

    @property
    def shown(self) -> tuple[str, str, str]:
        """The headline, why and next as a terminal shows them."""
        return f"error[{self.identifier}]: {self.what}", self.why, self.next

    def as_dict(self) -> dict[str, str]:
        """Return the fields that agents tell each other and ``failure-rank<k>.json`` holds."""
        return {"identifier": self.identifier, "what": self.what, "why": self.why, "next": self.next}


# One line for each error.
# fmt: off
class TrainingFailed(DdpManualError, identifier="training-failed", exit_code=1): ...  # the user's own code raised
class BadOption(DdpManualError, identifier="bad-option", exit_code=2): ...  # a flag, variable or file cannot be used
class RankMissing(DdpManualError, identifier="rank-missing", exit_code=10): ...  # not everybody came
class HostNotReady(DdpManualError, identifier="host-not-ready", exit_code=10): ...  # a host of launch --hosts

class MasterAddressError(DdpManualError, exit_code=11): ...  # rank 0's address
class MasterUnresolvable(MasterAddressError, identifier="master-unresolvable"): ...  # the name has no address
class MasterRefused(MasterAddressError, identifier="master-refused"): ...  # nothing listens there
class MasterUnreachable(MasterAddressError, identifier="master-unreachable"): ...  # no answer: dropped, or no route
class MasterNotAStore(MasterAddressError, identifier="master-not-a-store"): ...  # something else listens there
class PortInUse(MasterAddressError, identifier="port-in-use"): ...  # rank 0 cannot listen: the port is taken
class AddressNotLocal(MasterAddressError, identifier="address-not-local"): ...  # rank 0 was started on another host
class LoopbackMaster(MasterAddressError, identifier="loopback-master"): ...  # of loopback, with other hosts in the run

class RanksDoNotBelongTogether(DdpManualError, exit_code=12): ...  # the ranks were started differently
class WorldSizeMismatch(RanksDoNotBelongTogether, identifier="world-size-mismatch"): ...
class ConfigMismatch(RanksDoNotBelongTogether, identifier="config-mismatch"): ...  # other options, or other code
class VersionMismatch(RanksDoNotBelongTogether, identifier="version-mismatch"): ...  # also of a package
class TokenMismatch(RanksDoNotBelongTogether, identifier="token-mismatch"): ...  # no token, or another token

class RankTaken(DdpManualError, identifier="rank-taken", exit_code=13): ...  # another process holds this rank

class PeerGone(DdpManualError, exit_code=14): ...  # another rank is gone
class PeerLost(PeerGone, identifier="peer-lost"): ...  # it vanished, and reported no error
class PeerStalled(PeerGone, identifier="peer-stalled"): ...  # it lives, but others wait for it in vain
class CollectiveMismatch(PeerGone, identifier="collective-mismatch"): ...  # ranks called different collectives
class MasterLost(PeerGone, identifier="master-lost"): ...  # the rank that is gone is rank 0

class ReplicasDiffer(DdpManualError, identifier="replicas-differ", exit_code=14): ...  # other values than other ranks

class RunFilesError(DdpManualError, exit_code=15): ...  # what a run keeps on disk
class DiskFull(RunFilesError, identifier="disk-full"): ...  # a file of the run could not be written
class CheckpointMissing(RunFilesError, identifier="checkpoint-missing"): ...  # no checkpoint to continue from
class CheckpointCorrupt(RunFilesError, identifier="checkpoint-corrupt"): ...  # its bytes are not what was written
class CheckpointMismatch(RunFilesError, identifier="checkpoint-mismatch"): ...  # it is from another run

class DataError(DdpManualError, exit_code=16): ...  # the data set
class DataMissing(DataError, identifier="data-missing"): ...
class DataCorrupt(DataError, identifier="data-corrupt"): ...
class DataDiffers(DataError, identifier="data-differs"): ...  # between ranks

class DeviceError(DdpManualError, exit_code=17): ...  # the device
class DeviceMissing(DeviceError, identifier="device-missing"): ...
class DeviceTaken(DeviceError, identifier="device-taken"): ...  # two ranks on one GPU
class BackendUnavailable(DeviceError, identifier="backend-unavailable"): ...
class OutOfMemory(DeviceError, identifier="out-of-memory"): ...

class PeerUnreachable(DdpManualError, identifier="peer-unreachable", exit_code=18): ...  # ranks met, but cannot connect
# fmt: on


class PeerFailed(PeerGone, identifier="peer-failed"):
    """Another rank reported an error."""

    @property
    def shown(self) -> tuple[str, str, str]:
        """The parts without a long ``why``, such as a traceback: the terminal of that rank shows it."""
        headline, why, next = super().shown
        shows_nothing = "the program exited with code" in headline  # Python shows no traceback then
        if shows_nothing or len(why.splitlines()) <= LONGEST_WHY_OF_A_PEER:
            return headline, why, next
        rest = "traceback" if TRACEBACK in why else "rest"
        return headline, "", f"look at its terminal, which has the {rest}\n{next}"


class Stopped(DdpManualError, identifier="stopped"):
    """A signal asked this process to stop; the exit code is 128 + its number.

    Args:
        where: how far the run got, such as "after step 120".
    """

    def __init__(self, number: int, where: str = "", *, why: str = "", next: str = "") -> None:
        super().__init__(" ".join(filter(None, (f"stopped by {asked_by(number)}", where))), why=why, next=next)
        self.exit_code = 128 + number  # the only code that is not fixed per class

    @property
    def shown(self) -> tuple[str, str, str]:
        """The parts; not called an error if nothing is lost, since somebody has asked for the stop."""
        headline, why, next = super().shown
        return self.what if SAVED in why else headline, why, next


def signal_name(number: int) -> str:
    # Real-time signals have no name.
    return signal.Signals(number).name if number in set(signal.Signals) else f"signal {number}"


def asked_by(number: int) -> str:
    """Name a signal as the person or the orchestrator that sent it would."""
    return "Ctrl-C (SIGINT)" if number == signal.SIGINT else signal_name(number)


class StopSignal(BaseException):
    """Signal ``number``, raised by its handler. Not an Exception, since libraries catch every Exception."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def stopped_by(signalled: BaseException, *, next: str = "") -> Stopped:
    """Return the error for a signal; Python raises KeyboardInterrupt where no handler is set."""
    return Stopped(signalled.number if isinstance(signalled, StopSignal) else signal.SIGINT, next=next)


def from_dict(fields: Mapping[str, object]) -> DdpManualError:
    """Rebuild an error from ``as_dict``; its exit code is that of its class."""
    kind = EVERY_ERROR.get(str(fields.get("identifier")), PeerFailed)
    error = kind.__new__(kind)
    what, why, next = (str(fields.get(part, "")) for part in ("what", "why", "next"))
    DdpManualError.__init__(error, what, why=why, next=next)
    return error


def not_installed(package: str) -> BackendUnavailable:
    return BackendUnavailable(
        f"{package} is not installed in this Python",
        why=f"{sys.executable} cannot import it",
        next="install this package with what it needs: pip install .\n"
        "or, after ./scripts/demo, use its environment: . .venv/bin/activate",
    )


def escaped(text: str, keep: str = "\n") -> str:
    """Escape what a terminal would obey, such as ESC as ``\\x1b``, and what is not Unicode, such as a stray byte in the
    name of a file; newlines are kept."""
    if text.isprintable():
        return text
    return "".join(
        letter if letter.isprintable() or letter in keep else letter.encode("unicode_escape").decode()
        for letter in text
    )


def traceback_of(error: BaseException) -> str:
    """Return the end of an exception's traceback, for the ``why`` of an error that no code expected."""
    return "".join(traceback.format_exception(error, limit=-TRACEBACK_FRAMES)).rstrip()


@contextmanager
def writing(path: Path, option: str) -> Iterator[None]:
    """Turn an OSError of the body into disk-full, or a complaint about ``option``, which named ``path``."""
    try:
        yield
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise DiskFull(
                f"no space left to write {path}",
                why=f"{error.strerror}: {error.filename or path}",
                next=f"free some space there, or choose another {option}",
            ) from error
        raise BadOption(
            f"{option} {path} cannot be written",
            why=f"{error.strerror}: {error.filename or path}",
            next=f"correct the path, or create {path.parent}"
            if error.errno == errno.ENOENT
            else f"choose a {option} that this user can write to",
        ) from error
