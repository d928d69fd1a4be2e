"""Every file name of a run, and its lock."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

from ddp_manual.errors import BadOption, escaped, writing

logger = logging.getLogger(__name__)

# Seconds. A rank 0 that is started again may find the previous one still ending.
LOCK_TIMEOUT = 3.0
# The files that each rank leaves, not rank 0 alone.
OF_A_RANK = ("failure-rank*.json", "log-rank*.txt")
# A name that neither leads out of its folder nor is hidden.
_PLAIN_NAME = "[A-Za-z0-9_-][A-Za-z0-9._-]*"
# The part of ``default_run_dir`` before the run_id.
_DEFAULT_BEGINS = r"runs/\d{8}-\d{6}-"


def new_run_id() -> str:
    """Draw eight hexadecimal digits."""
    return secrets.token_hex(4)


def default_run_dir(run_id: str) -> str:
    """Return ``runs/<start time>-<run_id>``, in local time."""
    return os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}")


def unused_run_dir(run_id: str) -> str:
    """Return the default, with a number behind it if one process trains several times within a second."""
    name = default_run_dir(run_id)
    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(name for name in names if not os.path.exists(name))


def is_default_name(run_dir: str, run_id: str) -> bool:
    """Return whether the folder has the name that a run gives its folder if nobody else names it."""
    return re.fullmatch(rf"{_DEFAULT_BEGINS}{re.escape(run_id)}(-\d+)?", run_dir) is not None


def holds_another_run(run_dir: str, run_id: str) -> bool:
    """Return whether the files of another run are in a folder."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        return bool(json.loads(RunPaths(Path(run_dir)).config.read_text(encoding="utf-8"))["run"]["run_id"] != run_id)
    return False


def own_run_dir(named: str | None, own: str | None) -> str | None:
    """Return the folder that rank 0 has named if this rank would have chosen it too, otherwise None: a rank writes
    nowhere else, whatever the network says.

    Args:
        own: this rank's option, with ``{run_id}`` for the name that rank 0 gives the run; or its default.
    """
    if named is None or own is None:
        return None
    named, own = os.path.normpath(named), os.path.normpath(own)
    if named in (own, escaped(own)):
        return own
    if re.fullmatch(rf"{_DEFAULT_BEGINS}\{{run_id\}}", own):  # the default, in which rank 0's clock counts
        return named if re.fullmatch(f"runs/{_PLAIN_NAME}", named) else None
    return named if re.fullmatch(re.escape(own).replace(re.escape("{run_id}"), _PLAIN_NAME), named) else None


def torchrun_run_dir(torchrun: str) -> str:
    """Return ``runs/torchrun-<digest>``, the same for all ranks of one torchrun, also after it restarts them."""
    return os.path.join("runs", f"torchrun-{hashlib.sha256(torchrun.encode()).hexdigest()[:8]}")


def in_a_file_name(dataset: str) -> str:
    """Make the name of a data set, which may contain a path, a part of a file name that no other data set has."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-.")[-80:]
    if name == re.sub("^folder:", "folder-", dataset):
        return name
    return f"{name}-{hashlib.sha256(dataset.encode(errors='surrogateescape')).hexdigest()[:8]}"


class _Named:
    """A path below the ``folder`` of the object it is an attribute of."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __get__(self, paths: PredictionPaths | RunPaths, owner: type) -> Path:
        return paths.folder / self.name


@dataclass(frozen=True)
class PredictionPaths:
    """The files about a model's predictions on a test set, below one ``folder``."""

    folder: Path
    table = _Named("predictions.csv")
    picture = _Named("mistakes.png")
    confusion_table = _Named("confusion.csv")
    confusion_picture = _Named("confusion.png")

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.table, self.picture, self.confusion_table, self.confusion_picture)


@dataclass(frozen=True)
class RunPaths:
    """The files below one ``run_dir``. Rank 0 writes them, except the log and the failure of each other rank."""

    run_dir: Path
    config = _Named("config.json")
    metrics = _Named("metrics.jsonl")
    losses = _Named("losses.jsonl")
    accuracies = _Named("accuracies.json")
    model = _Named("model.pt")
    samples = _Named("samples.png")
    summary = _Named("summary.json")
    checkpoints = _Named("checkpoints")
    """A folder; ``training/checkpoint_files.py`` names the files in it."""
    track = _Named("track.jsonl")
    tensorboard = _Named("tensorboard")
    """A folder, in which TensorBoard names the files."""
    wandb = _Named("wandb")
    """A folder, in which wandb names the files."""
    wandb_id = _Named("wandb.json")
    """The id of this run in wandb, which it keeps when it is resumed."""
    lock = _Named(".lock")

    @property
    def folder(self) -> Path:
        return self.run_dir

    @property
    def predictions(self) -> PredictionPaths:
        return PredictionPaths(self.run_dir)

    def evaluation(self, dataset: str, checkpoint: str | None) -> Path:
        """Return a folder for one data set and one checkpoint, so that evaluations do not overwrite each other."""
        return self.run_dir / "-".join(filter(None, ("evaluation", in_a_file_name(dataset), checkpoint)))

    @property
    def begun(self) -> Path | None:
        """What shows that the folder holds a run; None if it holds none."""
        return next((path for path in (self.config, self.checkpoints) if path.exists()), None)

    def log(self, rank: int) -> Path:
        return self.run_dir / f"log-rank{rank}.txt"

    def failure(self, rank: int) -> Path:
        return self.run_dir / f"failure-rank{rank}.json"

    def failures(self) -> list[Path]:
        """Return the failures of the last attempt, sorted by name; those of earlier attempts have other names."""
        return sorted(path for path in self.run_dir.glob("failure-rank*.json") if path.stem.count(".") == 0)

    @property
    def is_failed_start(self) -> bool:
        """Whether the folder holds at most failures and logs, so that no run has begun there."""
        return self._holds_only(self.lock.name, *OF_A_RANK)

    def _holds_only(self, *patterns: str) -> bool:
        try:
            names = [path.name for path in self.run_dir.iterdir()]
        except OSError:
            return False
        return all(any(fnmatch(name, pattern) for pattern in patterns) for name in names)

    def remove_start(self) -> None:
        """Remove the folder of a start that has ended before its first step, unless it holds more than such a start
        writes."""
        of_rank_0 = (self.config, self.samples, self.accuracies, self.lock)  # of the accuracies an empty list
        of_trackers = (self.track, self.tensorboard, self.wandb, self.wandb_id)
        if self._holds_only(*(path.name for path in (*of_rank_0, *of_trackers)), *OF_A_RANK, ".*.tmp"):
            shutil.rmtree(self.run_dir, ignore_errors=True)
            with suppress(OSError):  # other runs are in there
                self.run_dir.parent.rmdir()

    @property
    def holder(self) -> str | None:
        """The process that trains into the folder, see ``holder_of``; None if no process does, or locks are missing."""
        with suppress(OSError), open(self.lock, encoding="utf-8", errors="replace") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return file.read().strip() or "another process"
        return None

    def set_failures_aside(self, rank: int, world_size: int | None = None) -> None:
        """Rename the failure that a rank has left when it was started before.

        Args:
            world_size: set on rank 0, which also renames the failures of the ranks from this number on.
        """
        for failure in self.failures():
            of = failure.stem.removeprefix("failure-rank")
            if of == str(rank) or (world_size is not None and of.isdigit() and int(of) >= world_size):
                with suppress(OSError):  # of another user, or on a disk that this rank may only read
                    os.replace(failure, self.of_another_attempt(failure))

    @staticmethod
    def of_another_attempt(failure: Path) -> Path:
        """Return a free name for a failure that is not the run's end: the run went on since, or was not resumed yet."""
        names = (failure.with_name(f"{failure.stem}.restart{number}.json") for number in itertools.count())
        return next(name for name in names if not name.exists())

    def check(self, *, resuming: bool) -> None:
        """Raise what ``create`` would raise; makes no folder: launches on several hosts may check the same."""
        if self.holder is not None:
            with self.locked():  # unless it is still held after a few seconds
                pass
        self._check_is_free(resuming=resuming)

    def create(self, *, resuming: bool = False) -> None:
        """Make the folder.

        Args:
            resuming: whether it may hold a run already, which then continues.

        Raises:
            BadOption: it cannot be written, or it holds an earlier run, whose files would be lost.
        """
        with writing(self.run_dir, "--run_dir"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
        self._check_is_free(resuming=resuming)

    def _check_is_free(self, *, resuming: bool) -> None:
        """Raise BadOption if the folder holds another run, or it, or the first above that exists, cannot be written."""
        with writing(self.run_dir, "--run_dir"):
            if (there := self.begun) is not None and not resuming:
                raise BadOption(
                    f"--run_dir {self.run_dir} already holds a run",
                    why=f"{there} exists; training into it would overwrite its model and metrics",
                    next="choose another --run_dir, or leave the option out for a new one\n"
                    "or go on with that run: --resume auto",
                )
            exists = next(folder for folder in (self.run_dir, *self.run_dir.absolute().parents) if folder.exists())
            tempfile.TemporaryFile(dir=exists).close()

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Lock the folder for this process while the body runs; the kernel unlocks it even after a SIGKILL.

        Raises:
            BadOption: another process writes there, and still does after a few seconds.
        """
        with writing(self.run_dir, "--run_dir"):
            file = open(self.lock, "a+", encoding="utf-8")  # noqa: SIM115  # closed below, where the lock ends
        with file:
            deadline = time.monotonic() + LOCK_TIMEOUT
            while not _lock(file.fileno()):
                if time.monotonic() > deadline:
                    file.seek(0)
                    raise BadOption(
                        f"--run_dir {self.run_dir} is in use",
                        why=f"{file.read().strip() or 'another process'} holds {self.lock} and trains into that folder",
                        next="wait until that run has ended, or stop it; or choose another --run_dir",
                    )
                time.sleep(0.1)
            file.truncate(0)
            file.write(f"{holder_of(os.getpid(), os.uname().nodename)}\n")
            file.flush()
            yield


def holder_of(pid: int, host: str) -> str:
    """Return what the lock of a run's folder says of the process that holds it."""
    return f"pid {pid} on {host}"


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems have no locks.
        logger.warning("no lock on the run's folder, so a second run into it would go unnoticed: %s", error.strerror)
    return True
