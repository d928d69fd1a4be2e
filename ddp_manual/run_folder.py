"""Every file name of a run, and how a file is written so that nobody ever reads half of it."""

from __future__ import annotations

import fcntl
import hashlib
import itertools
import json
import logging
import os
import re
import secrets
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption, writing

logger = logging.getLogger(__name__)

# Seconds: a rank 0 that is started again may come while the last one is still ending.
LOCK_TIMEOUT = 3.0


def new_run_id() -> str:
    """Eight hexadecimal digits, drawn anew for each run."""
    return secrets.token_hex(4)


def default_run_dir(run_id: str) -> str:
    """``runs/<start time>-<run_id>``, in local time."""
    return os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}")


def unused_run_dir(run_id: str) -> str:
    """The same, with a number behind it where one process trains several times within a second."""
    name = default_run_dir(run_id)
    candidates = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
    return next(candidate for candidate in candidates if not os.path.exists(candidate))


def run_dir_of_agent(agent: str) -> str:
    """``runs/torchrun-<digest>``: the same for every rank that one torchrun starts, also after a failure."""
    return os.path.join("runs", f"torchrun-{hashlib.sha256(agent.encode()).hexdigest()[:8]}")


def in_a_file_name(dataset: str) -> str:
    """The name of a data set, which may have a path in it, as a part of a file's name, another for each."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", dataset).strip("-.")[-80:]
    if name == re.sub("^folder:", "folder-", dataset):
        return name
    return f"{name}-{hashlib.sha256(dataset.encode(errors='surrogateescape')).hexdigest()[:8]}"


@dataclass
class RunFolder:
    """Where the files of a run go, from when the ranks have agreed on it.

    Args:
        path: None: they have not, or the run keeps no files.
        of_join: what they agreed on when they met, as opposed to what they do now.
    """

    path: Path | None = None
    of_join: Path | None = None


@dataclass(frozen=True)
class PredictionPaths:
    """The files that say what a model made of a test set, below one ``folder``."""

    folder: Path

    @property
    def table(self) -> Path:
        return self.folder / "predictions.csv"

    @property
    def picture(self) -> Path:
        return self.folder / "predictions.png"

    @property
    def confusion_table(self) -> Path:
        return self.folder / "confusion.csv"

    @property
    def confusion_picture(self) -> Path:
        return self.folder / "confusion.png"

    @property
    def all(self) -> tuple[Path, ...]:
        return (self.table, self.picture, self.confusion_table, self.confusion_picture)


@dataclass(frozen=True)
class RunPaths:
    """The files below one ``run_dir``. Rank 0 writes them; only logs and failures belong to each rank."""

    run_dir: Path

    @property
    def config(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def accuracies(self) -> Path:
        return self.run_dir / "accuracies.json"

    @property
    def model(self) -> Path:
        return self.run_dir / "model.pt"

    @property
    def samples(self) -> Path:
        return self.run_dir / "samples.png"

    @property
    def summary(self) -> Path:
        return self.run_dir / "summary.json"

    @property
    def predictions(self) -> PredictionPaths:
        return PredictionPaths(self.run_dir)

    def evaluation(self, dataset: str, checkpoint: str | None) -> Path:
        """A folder of its own for each data set and each checkpoint, so that none takes another's files away."""
        return self.run_dir / "-".join(filter(None, ("evaluation", in_a_file_name(dataset), checkpoint)))

    @property
    def checkpoints(self) -> Path:
        """A folder; ``checkpoints`` names what is in it."""
        return self.run_dir / "checkpoints"

    @property
    def track(self) -> Path:
        return self.run_dir / "track.jsonl"

    @property
    def tensorboard(self) -> Path:
        """A folder, in which TensorBoard names the files."""
        return self.run_dir / "tensorboard"

    @property
    def wandb(self) -> Path:
        """A folder, in which wandb names the files."""
        return self.run_dir / "wandb"

    @property
    def wandb_id(self) -> Path:
        """Which of wandb's runs this one is, also after it has been resumed."""
        return self.run_dir / "wandb.json"

    @property
    def lock(self) -> Path:
        return self.run_dir / ".lock"

    def log(self, rank: int) -> Path:
        return self.run_dir / f"log-rank{rank}.txt"

    def failure(self, rank: int) -> Path:
        return self.run_dir / f"failure-rank{rank}.json"

    def failures(self) -> list[Path]:
        """Of the ranks of the last attempt, in the order of their names; earlier attempts are set aside."""
        return sorted(path for path in self.run_dir.glob("failure-rank*.json") if path.stem.count(".") == 0)

    @property
    def is_failed_start(self) -> bool:
        """Whether the folder holds but why ranks have left and what they printed, if that: no run has begun there."""
        try:
            there = {path.name for path in self.run_dir.iterdir()} - {self.lock.name}
        except OSError:
            return False
        return all(fnmatch(name, "failure-rank*.json") or fnmatch(name, "log-rank*.txt") for name in there)

    @property
    def in_use(self) -> bool:
        """Whether a process trains into the folder, as far as its file system knows of locks."""
        try:
            with open(self.lock, encoding="utf-8") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def set_failure_aside(self, rank: int, restart: int) -> None:
        """Keep why a rank left before restart number ``restart`` + 1, if it has left a word, under another name."""
        failure = self.failure(rank)
        if failure.exists():
            os.replace(failure, failure.with_name(f"{failure.stem}.restart{restart}.json"))

    def create(self, *, resuming: bool = False) -> RunPaths:
        """Make the folder.

        Args:
            resuming: it may hold a run already, which is to go on.

        Raises:
            BadOption: it cannot be written, or holds an earlier run, whose files would be lost.
        """
        with writing(self.run_dir, "--run_dir"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            there = next((path for path in (self.config, self.checkpoints) if path.exists()), None)
            if there is not None and not resuming:
                raise BadOption(
                    f"--run_dir {self.run_dir} already holds a run",
                    why=f"{there} exists; training into it would overwrite its model and metrics",
                    next="choose another --run_dir, or leave the option out for a new one\n"
                    "or go on with that run: --resume auto",
                )
            tempfile.TemporaryFile(dir=self.run_dir).close()
        return self

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep the folder for this process while the body runs; the kernel gives it back even after a SIGKILL.

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
            file.write(f"pid {os.getpid()} on {os.uname().nodename}\n")
            file.flush()
            yield


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        # Some network file systems know no locks; then nobody can be told apart, and the run is as before there were.
        logger.warning("no lock on the run's folder, so a second run into it would go unnoticed: %s", error.strerror)
    return True


def write_bytes(path: Path, content: bytes) -> None:
    """Write through a temporary file and a rename: after a crash the old content or the new is there, whole.

    Raises:
        DiskFull, BadOption: the folder cannot take the file.
    """
    with writing(path, "--run_dir"):
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Like ``write_bytes``, with the operating system's own errors."""
    replace_files({path: content})


def replace_files(contents: Mapping[Path, bytes | Iterable[bytes]]) -> None:
    """Each takes its name in this order, once all are on disk under temporary ones. An error names the file."""
    temporary = {path: path.with_name(f".{path.name}.{os.getpid()}.tmp") for path in contents}
    try:
        for path, content in contents.items():
            _write(path, temporary[path], [content] if isinstance(content, bytes) else content)
        for path in contents:
            os.replace(temporary[path], path)
            _flush_names(path.parent)
    finally:
        for left in temporary.values():
            left.unlink(missing_ok=True)


def _write(path: Path, temporary: Path, pieces: Iterable[bytes]) -> None:
    try:
        with open(temporary, "wb") as file:
            file.writelines(pieces)
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        if error.filename is None:  # of open() alone does it say
            error.filename = str(path)
        raise


def _flush_names(folder: Path) -> None:
    """A new name is on disk only once its folder is."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def unfinished(folder: Path) -> Iterator[tuple[Path, str]]:
    """Each temporary file that is being written, or was when its process was killed, and the name it was to take."""
    for path in folder.glob(".*.tmp"):
        if name := re.fullmatch(r"\.(.+)\.\d+\.tmp", path.name):
            yield path, name[1]


def sweep(folder: Path, names: re.Pattern[str]) -> None:
    """Remove what processes that were killed while they wrote files of these ``names`` have left behind.

    Only for who holds the folder: nobody else may be writing there.
    """
    for path, name in unfinished(folder):
        if names.fullmatch(name):
            path.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def append_json_line(path: Path, content: Any) -> None:
    """One line of a ``.jsonl`` file, in a single write."""
    with writing(path, "--run_dir"), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(content, allow_nan=False) + "\n")


def keep_json_lines(path: Path, wanted: Callable[[Any], bool]) -> None:
    """Keep those lines of a ``.jsonl`` file, if it is there; one that a kill has cut off goes."""
    if not path.exists():
        return
    kept = []
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            if wanted(json.loads(line)):
                kept.append(line + "\n")
        except (ValueError, LookupError, TypeError):
            continue  # cut off, or none of ours
    write_bytes(path, "".join(kept).encode())
