"""The checkpoint files of a run, without torch: their names, how they are written, checked, read, kept and removed.

A checkpoint is ``step-00000120-1a2b3c4d.pt``, named after its step and the first digits of its SHA-256, so that no
other content ever takes its place. Beside it is a ``.json`` that a person can read and that has the whole digest. Both
files are on disk before they get their names, the ``.json`` last: where that is, the ``.pt`` was written whole.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import logging
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual import atomic_files, run_folder
from ddp_manual.environment import torchrun
from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing, writing
from ddp_manual.option_fields import as_flags
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.options import TrainConfig

logger = logging.getLogger(__name__)

AUTO = "auto"
NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})\.(pt|json)")
# A folder beside the checkpoints, for those that could not be read when the run went on from an earlier one.
SET_ASIDE = "set-aside"
# Every later format keeps ``format`` and ``sha256_of_this``, so that an older program can tell that it is another one.
# In format 1 there is also the state of Python's generator, which is passed over.
FORMAT = 2

Fault = CheckpointCorrupt | BadOption
"""Why a checkpoint cannot be read: it is damaged, or it may be whole and this process cannot read it now."""


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint, as its ``.json`` describes it.

    Args:
        path: the path of the ``.pt``.
        described: what the ``.json`` says; {} where it cannot be read.
        fault: what is wrong with the description, or None. ``check`` and ``read`` look at the content too.
    """

    path: Path
    described: Mapping[str, Any]
    fault: Fault | None

    @property
    def step(self) -> int:
        return int(self.path.name.split("-")[1])

    @property
    def written_at(self) -> float:
        """The Unix time at which it was written, as its description says; 0 if that cannot be read."""
        return float(self.described.get("written", 0.0))

    @property
    def test_accuracy(self) -> float | None:
        """The test accuracy of exactly these parameters; None for a checkpoint within an epoch."""
        return self.described.get("test_accuracy")


def write(folder: Path, step: int, content: bytes, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint and its description, and return the path of the ``.pt``.

    Args:
        about: what the description says besides step, size, digest and time.

    Raises:
        DiskFull, BadOption: the folder cannot take it. Earlier checkpoints are as they were.
    """
    digest = hashlib.sha256(content).hexdigest()
    path = folder / _name_of(step, digest)
    file = path.with_suffix(".json")
    written = round(time.time(), 3)
    described = {"format": FORMAT, "step": step, **about, "bytes": len(content), "sha256": digest, "written": written}
    text = json.dumps({**described, "sha256_of_this": _digest_of(described)}, indent=2, allow_nan=False)
    with writing(folder, "--run_dir"):
        folder.mkdir(exist_ok=True)
        try:
            atomic_files.replace_files({path: content, file: (text + "\n").encode()})
        except OSError:
            # A ``.pt`` alone is no checkpoint; on a full disk it would only take the room of the next one.
            if not file.exists():
                path.unlink(missing_ok=True)
            raise
    return path


def describe(path: Path) -> Checkpoint:
    """Return the checkpoint whose ``.pt`` is ``path``; this reads only its ``.json``."""
    try:
        return Checkpoint(path=path, described=_description(path), fault=None)
    except (CheckpointCorrupt, BadOption) as fault:
        return Checkpoint(path=path, described={}, fault=fault)


def _description(path: Path) -> dict[str, Any]:
    file = path.with_suffix(".json")
    try:
        described: Any = json.loads(_content(path, file))
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or brackets nested too deeply
        raise corrupt(path, f"{file.name} is not JSON") from None
    if not isinstance(described, dict) or described.pop("sha256_of_this", None) != _digest_of(described):
        raise corrupt(path, f"{file.name} has been changed")
    if described.get("format") not in range(1, FORMAT + 1):
        raise _unreadable(path, f"it is of format {described.get('format')}, this program reads 1 to {FORMAT}")
    if path.name != _name_of(described["step"], described["sha256"]):
        raise corrupt(path, "its name and its description are of different checkpoints")
    return described


def _name_of(step: int, digest: str) -> str:
    return f"step-{step:08d}-{digest[:8]}.pt"


def _digest_of(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def check(checkpoint: Checkpoint) -> Fault | None:
    """Read all of a checkpoint, and return what is wrong with it; None if it is whole."""
    try:
        read(checkpoint)
    except (CheckpointCorrupt, BadOption) as fault:
        return fault
    return None


def read(checkpoint: Checkpoint) -> bytes:
    """Return the content, whole and as it was written.

    Raises:
        CheckpointCorrupt: it is not what was written.
        BadOption: it may be whole, but cannot be read now; perhaps another user can, or this one after a mount.
    """
    if checkpoint.fault:
        raise checkpoint.fault
    path, size, expected = checkpoint.path, checkpoint.described["bytes"], checkpoint.described["sha256"]
    content = _content(path, path)
    if len(content) != size:
        raise corrupt(path, f"it has {len(content)} bytes instead of {size}")
    digest = hashlib.sha256(content).hexdigest()
    if digest != expected:
        raise corrupt(path, f"its digest is {digest[:8]} instead of {expected[:8]}: some of its bytes have changed")
    return content


def _content(path: Path, file: Path) -> bytes:
    """Read one of the two files of the checkpoint ``path``."""
    try:
        return file.read_bytes()
    except FileNotFoundError:
        raise corrupt(path, f"{file.name} is not there") from None
    except OSError as error:
        raise _unreadable(path, f"{file.name} cannot be read: {error.strerror}") from error


def corrupt(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} is not the checkpoint that was written",
        why=why,
        next=f"go on from an earlier one: --run_dir {run_dir_of(path)} --resume auto takes the newest that is whole\n"
        f"list the checkpoints: ddp-manual checkpoints {path.parent}",
    )


def _unreadable(path: Path, why: str) -> BadOption:
    return BadOption(
        f"{path} may be whole, but cannot be read here",
        why=why,
        next="fix that, since an earlier checkpoint would lose what this one has\n"
        f"or name an earlier one yourself: ddp-manual checkpoints {path.parent}, then --resume its path",
    )


def run_dir_of(path: Path) -> Path:
    """Return the folder of the run to which ``path`` belongs, a file or a folder in it."""
    folder = path if path.is_dir() else path.parent
    while not (below := RunPaths(folder).checkpoints).is_dir():
        if Path(os.path.abspath(folder)).name not in (below.name, SET_ASIDE):
            break
        folder = folder / ".." if folder.name in ("", "..") else folder.parent
    return folder


def folder_of(path: Path) -> Path:
    """Return the folder of the checkpoints, given that folder or the run's."""
    below = RunPaths(path).checkpoints
    return below if below.is_dir() else path


def find(folder: Path) -> list[Checkpoint]:
    """Return the checkpoints of a folder, newest first. One that has lost one of its two files is among them; a
    half-written one is not."""
    try:
        paths = {path.with_suffix(".pt") for path in folder.iterdir() if NAME.fullmatch(path.name)}
        paths -= _half_written(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise BadOption(
            f"{folder} cannot be read",
            why=f"{error.strerror}: {error.filename or folder}",
            next="name a run's folder that this user may read",
        ) from error
    return sorted(map(describe, paths), key=lambda checkpoint: (checkpoint.step, checkpoint.written_at), reverse=True)


def _half_written(folder: Path) -> set[Path]:
    """Return each ``.pt`` whose ``.json`` has no final name yet: it is being written, or its writer was killed."""
    names = [name for _, name in atomic_files.unfinished(folder) if NAME.fullmatch(name) and name.endswith(".json")]
    return {(folder / name).with_suffix(".pt") for name in names if not (folder / name).exists()}


def newest_whole(folder: Path) -> tuple[Checkpoint, bytes] | None:
    """Return the newest checkpoint that is whole, and its content; warn of each newer one that is damaged.

    Returns:
        None if the folder has no checkpoint at all.

    Raises:
        CheckpointCorrupt: the folder has checkpoints, and none of them is whole.
        BadOption: a newer one may be whole, but cannot be read.
    """
    damaged: dict[str, CheckpointCorrupt] = {}
    for checkpoint in find(folder):
        try:
            content = read(checkpoint)
        except CheckpointCorrupt as error:
            damaged[checkpoint.path.name] = error
            continue
        for newer in damaged.values():
            logger.warning("%s: %s; taking the one before", newer.what, newer.why)
        return checkpoint, content
    if not damaged:
        return None
    raise CheckpointCorrupt(
        f"none of the {len(damaged)} checkpoints in {folder} is what was written",
        why="\n".join(f"{name}: {error.why}" for name, error in damaged.items()),
        next="start anew with another --run_dir, without --resume",
    )


def named(path: Path) -> tuple[Checkpoint, bytes]:
    """Return the checkpoint of ``--resume path`` and its content. In a folder that is the newest whole one.

    Raises:
        CheckpointMissing, CheckpointCorrupt, BadOption: there is none, or it is damaged, or cannot be read.
    """
    check_named(path)
    if not path.is_dir():
        checkpoint = describe(path.with_suffix(".pt"))
        return checkpoint, read(checkpoint)
    if found := newest_whole(folder_of(path)):
        return found
    raise _missing(path, "the folder has no checkpoint")


def check_named(path: Path) -> None:
    """Raise CheckpointMissing if ``--resume path`` names no checkpoint; called before the ranks meet."""
    if not path.exists() and not path.with_suffix(".json").exists():
        raise _missing(path, "there is no such file or folder")
    if path.name == RunPaths(path.parent).model.name:
        raise _missing(path, f"{path.name} has the parameters alone, a checkpoint also what training needs to go on")
    if not path.is_dir() and not NAME.fullmatch(path.name):
        raise _missing(path, "a checkpoint is called step-<number>-<digest>.pt, and has a .json of that name beside it")


def _missing(path: Path, why: str) -> CheckpointMissing:
    run_dir = run_dir_of(path)
    advice = "name a checkpoint or the folder of a run that has some; or leave --resume out"
    if find(folder_of(run_dir)):
        go_on = as_flags({"run_dir": run_dir, "resume": AUTO})
        advice = f"go on from the newest checkpoint of that run: {go_on}\n{advice}"
    return CheckpointMissing(f"no checkpoint at {path}", why=why, next=advice)


def holds(folder: Path, step: int) -> bool:
    """Tell whether the folder has a checkpoint of ``step`` whose ``.json`` is intact; its content is not read."""
    return any(checkpoint.step == step and checkpoint.fault is None for checkpoint in find(folder))


def best(checkpoints: list[Checkpoint]) -> Checkpoint | None:
    """Return the checkpoint with the best test accuracy, of equal ones the newest; None if no accuracy is known."""
    rated = [checkpoint for checkpoint in checkpoints if checkpoint.test_accuracy is not None]
    return max(rated, key=lambda one: (one.test_accuracy, one.step, one.written_at), default=None)


def prune(folder: Path, keep: int) -> None:
    """Remove all checkpoints except the ``keep`` newest and the best. One whose ``.json`` cannot be read stays."""
    found = [checkpoint for checkpoint in find(folder) if checkpoint.fault is None]
    for checkpoint in found[keep:]:
        if checkpoint is not best(found):
            _remove(checkpoint)


def rewind(folder: Path, step: int) -> None:
    """Remove checkpoints after ``step``, from which the run goes on, and files that a killed process left half-written.

    A checkpoint that cannot be read, or is damaged, may be the only copy: it is set aside instead. Only the process
    that holds the run's folder may call this.
    """
    for path in _half_written(folder):
        path.unlink(missing_ok=True)
    atomic_files.sweep(folder, NAME)
    for checkpoint in find(folder):
        if checkpoint.step <= step:
            continue
        fault = check(checkpoint)
        if fault is None:
            logger.warning("removing %s: the run goes on from step %d", checkpoint.path, step)
            _remove(checkpoint)
        else:
            logger.warning("setting %s aside, in %s: %s", checkpoint.path, folder / SET_ASIDE, fault.why)
            _set_aside(checkpoint)


def _remove(checkpoint: Checkpoint) -> None:
    """Remove both files, the ``.pt`` first: a ``.pt`` without its description would be kept as a damaged checkpoint."""
    with writing(checkpoint.path, "--run_dir"):
        checkpoint.path.unlink(missing_ok=True)
        checkpoint.path.with_suffix(".json").unlink(missing_ok=True)


def _set_aside(checkpoint: Checkpoint) -> None:
    """Move both files, under their names or, where those are taken, with a number added."""
    aside = checkpoint.path.parent / SET_ASIDE
    with writing(aside, "--run_dir"):
        aside.mkdir(exist_ok=True)
        for path in (checkpoint.path, checkpoint.path.with_suffix(".json")):
            names = (aside / f"{path.name}{f'.{number}' if number else ''}" for number in itertools.count())
            if os.path.lexists(path):
                os.replace(path, next(name for name in names if not os.path.lexists(name)))


def with_torchrun_run_dir(config: TrainConfig) -> TrainConfig:
    """Return the config with a ``run_dir`` for ``--resume auto`` under torchrun, if none was given.

    The folder is named after the torchrun process that has started this rank, so the ranks that it starts again after
    a failure find the checkpoints of the attempt before. Another torchrun has another folder.
    """
    identity = torchrun.identity()
    if config.resume != AUTO or config.run_dir is not None or identity is None:
        return config
    return dataclasses.replace(config, run_dir=run_folder.torchrun_run_dir(identity))


def check_run_dir(config: TrainConfig, *, may_go_on: bool = False) -> None:
    """Check that the run's folder can be made, if its name is known by now; on rank 0, before the ranks meet.

    Args:
        may_go_on: whether this process may take the seat of an earlier rank 0, whose run is in the folder.

    Raises:
        CheckpointMissing: there is nothing at the path of ``--resume``.
        BadOption: the folder cannot be used; or ``--resume auto`` has no folder to look in.
    """
    if config.resume not in (None, AUTO):
        check_named(Path(str(config.resume)))
    if config.run_dir is not None:
        run_dir = Path(config.run_dir)
        RunPaths(run_dir).check(resuming=may_go_on or resumes_in(config.resume, run_dir))
    elif config.resume == AUTO:
        raise BadOption(
            "--resume auto needs a --run_dir to look in",
            why="without --run_dir each start has a new folder, which holds no checkpoint",
            next="give the --run_dir of the run that is to go on; or a checkpoint: --resume runs/.../checkpoints/...",
        )


def resumes_in(resume: str | None, run_dir: Path) -> bool:
    """Tell whether the run in ``run_dir`` goes on; False: a new run begins there, perhaps from another's checkpoint."""
    if resume is None or resume == AUTO:
        return resume == AUTO
    return run_dir_of(Path(resume)).resolve() == run_dir.resolve()
