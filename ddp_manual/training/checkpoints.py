"""The checkpoints of a run: which there are, which to go on from, which stay. ``checkpoint_file`` knows one."""

from __future__ import annotations

import itertools
import logging
import os
import shlex
from pathlib import Path

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing, writing
from ddp_manual.options import as_flags
from ddp_manual.training.checkpoint_file import NAME, SET_ASIDE, Checkpoint, check, describe, read, run_dir_of

logger = logging.getLogger(__name__)

MOST_NAMED = 8


def find(folder: Path) -> list[Checkpoint]:
    """Those of a folder, newest first, also where only one of their two files is left; none that is being written."""
    try:
        paths = {path.with_suffix(".pt") for path in folder.iterdir() if NAME.fullmatch(path.name)}
        paths -= _unfinished(folder)
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error
    return sorted(map(describe, paths), key=lambda checkpoint: (checkpoint.step, checkpoint.written), reverse=True)


def _unfinished(folder: Path) -> set[Path]:
    """Each ``.pt`` whose description has yet to take its name: it is being written, or was when a kill came."""
    names = [name for _, name in run_folder.unfinished(folder) if NAME.fullmatch(name) and name.endswith(".json")]
    return {(folder / name).with_suffix(".pt") for name in names if not (folder / name).exists()}


def newest_whole(folder: Path) -> tuple[Checkpoint, bytes] | None:
    """The newest checkpoint that is what was written, and its content; a warning names each that is not. None: the
    folder has no checkpoint at all.

    Raises:
        CheckpointCorrupt: it has some, and none of them is whole.
        BadOption: a newer one may be whole, but cannot be read.
    """
    found = find(folder)
    faults = []
    for checkpoint in found:
        try:
            return checkpoint, read(checkpoint)
        except CheckpointCorrupt as error:
            logger.warning("%s: %s; taking the one before", error.what, error.why)
            faults.append(f"{checkpoint.path.name}: {error.why}")
    if not found:
        return None
    raise CheckpointCorrupt(
        f"none of the {len(found)} checkpoints in {folder} is what was written",
        why="\n".join(faults),
        next="start anew with another --run_dir, without --resume",
    )


def holds(folder: Path, step: int) -> bool:
    """Whether there is a checkpoint of that step, as far as its description tells."""
    return any(checkpoint.step == step and checkpoint.fault is None for checkpoint in find(folder))


def exists(path: Path) -> None:
    """Raises CheckpointMissing if ``--resume path`` names nothing, or no checkpoint; for before the ranks meet."""
    if not path.exists() and not path.with_suffix(".json").exists():
        raise _missing(path, "there is no such file or folder")
    if not path.is_dir() and not NAME.fullmatch(path.name):
        raise _another_file(path)


def named(path: Path) -> tuple[Checkpoint, bytes]:
    """What ``--resume path`` means: that file, by either of its names, or the newest of that folder.

    Raises:
        CheckpointMissing, CheckpointCorrupt, BadOption: there is none, or it is damaged, or cannot be read.
    """
    if path.is_dir():
        found = newest_whole(folder_of(path))
        if found is None:
            raise _missing(path, "the folder has no checkpoint")
        return found
    exists(path)
    path = path.with_suffix(".pt")
    checkpoint = describe(path)
    return checkpoint, read(checkpoint)


def folder_of(path: Path) -> Path:
    """The folder of the checkpoints, given that or the run's."""
    below = run_folder.RunPaths(path).checkpoints
    return below if below.is_dir() else path


def _another_file(path: Path) -> CheckpointMissing:
    """There is a file, and its name is no checkpoint's: most likely the run's ``model.pt``."""
    run = run_folder.RunPaths(run_dir_of(path))
    why = (
        f"a checkpoint is called step-<number>-<digest>.pt, and has a .json of that name beside it; {path.name} is not"
    )
    if path.name == run.model.name:
        why = f"{path.name} has the parameters alone, a checkpoint also what training needs to go on"
    there = find(folder_of(run.run_dir))
    return CheckpointMissing(
        f"{path} is no checkpoint",
        why=why,
        next=f"go on from the newest of that run: {as_flags({'run_dir': run.run_dir, 'resume': 'auto'})}\n"
        f"what there is: ddp-manual checkpoints {shlex.quote(str(run.run_dir))}"
        if there
        else "name a checkpoint or the folder of a run that has some; or start from the beginning, without --resume",
    )


def _missing(path: Path, why: str) -> CheckpointMissing:
    folder = path if path.is_dir() else path.parent
    beside = sorted({run.parent.parent for run in folder.glob("*/checkpoints/*.json")}) if folder.is_dir() else []
    there = [str(one) for one in ([folder] if folder.is_dir() and find(folder_of(folder)) else beside)[-MOST_NAMED:]]
    return CheckpointMissing(
        f"no checkpoint at {path}",
        why=why,
        next="\n".join(
            [
                *(f"what there is: ddp-manual checkpoints {one}" for one in there),
                "name a checkpoint or the folder of a run that has some; or start from the beginning, without --resume",
            ]
        ),
    )


def best(found: list[Checkpoint]) -> Checkpoint | None:
    """The one with the highest test accuracy, of equals the newest."""
    rated = [checkpoint for checkpoint in found if checkpoint.test_accuracy is not None]
    return max(rated, key=lambda one: (one.test_accuracy, one.step, one.written), default=None)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest and the best. One without a good description stays where it is."""
    found = [checkpoint for checkpoint in find(folder) if checkpoint.fault is None]
    for checkpoint in found[keep:]:
        if checkpoint is not best(found):
            _remove(checkpoint)


def rewind(folder: Path, step: int) -> None:
    """Remove what comes after ``step``, from which the run goes on, and what a killed process has left.

    What cannot be read as it was written may be the only copy of something: it is set aside instead.
    """
    _sweep(folder)
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


def _sweep(folder: Path) -> None:
    """Remove what processes that were killed have left. Only for who holds the run's folder."""
    for path in _unfinished(folder):
        path.unlink(missing_ok=True)
    run_folder.sweep(folder, NAME)


def _remove(checkpoint: Checkpoint) -> None:
    """The description last: a ``.pt`` without one would be somebody's loss."""
    with writing(checkpoint.path, "--run_dir"):
        checkpoint.path.unlink(missing_ok=True)
        checkpoint.path.with_suffix(".json").unlink(missing_ok=True)


def _set_aside(checkpoint: Checkpoint) -> None:
    """Move both files, under their names or, where those are taken, with a number behind."""
    aside = checkpoint.path.parent / SET_ASIDE
    with writing(aside, "--run_dir"):
        aside.mkdir(exist_ok=True)
        for path in (checkpoint.path, checkpoint.path.with_suffix(".json")):
            names = (aside / f"{path.name}{f'.{number}' if number else ''}" for number in itertools.count())
            if os.path.lexists(path):
                os.replace(path, next(name for name in names if not os.path.lexists(name)))


def _unreadable(folder: Path, error: OSError) -> BadOption:
    return BadOption(
        f"{folder} cannot be read",
        why=f"{error.strerror}: {error.filename or folder}",
        next="name a run's folder that this user may read",
    )
