"""The files of a run's checkpoints: their names, how they are written, checked, listed and removed. No torch.

A checkpoint is ``step-00000120-1a2b3c4d.pt``, named after its step and the beginning of its digest so that no other
content ever takes its place, and beside it a ``.json`` that a person can read and that has the whole digest. The
``.json`` is written last and removed first: where it is, the ``.pt`` has been written whole.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual import rundir
from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing, writing

logger = logging.getLogger(__name__)

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})\.(pt|json)")
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Checkpoint:
    """One checkpoint as its description tells it.

    Args:
        path: of the ``.pt``.
        described: what the ``.json`` says; {} where it cannot be read.
        fault: what is wrong with the description, or None. The content may be damaged all the same: see ``read``.
    """

    path: Path
    described: Mapping[str, Any]
    fault: str | None

    @property
    def step(self) -> int:
        match = NAME.fullmatch(self.path.name)
        assert match
        return int(match[1])

    @property
    def written(self) -> float:
        """Seconds since 1970."""
        return float(self.described.get("written", 0.0))

    @property
    def test_accuracy(self) -> float | None:
        """Of exactly these parameters: None within an epoch."""
        accuracy: float | None = self.described.get("test_accuracy")
        return accuracy


def write(folder: Path, step: int, content: bytes, about: Mapping[str, Any]) -> Path:
    """Write a checkpoint and then its description; returns the path of the ``.pt``.

    Args:
        about: what the description says besides step, size, digest and time.

    Raises:
        DiskFull, BadOption: the folder cannot take it. The checkpoints before it are as they were.
    """
    digest = hashlib.sha256(content).hexdigest()
    path = folder / f"step-{step:08d}-{digest[:8]}.pt"
    described = {
        "format": FORMAT,
        "step": step,
        **about,
        "bytes": len(content),
        "sha256": digest,
        "written": round(time.time(), 3),
    }
    with writing(folder, "--run_dir"):
        folder.mkdir(exist_ok=True)
        try:
            rundir.replace_file(path, content)
            text = json.dumps({**described, "sha256_of_this": _digest_of(described)}, indent=2, allow_nan=False)
            rundir.replace_file(path.with_suffix(".json"), (text + "\n").encode())
        except OSError:
            # What has no description is no checkpoint; on a full disk it would only take the room of the next.
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)
            raise
    return path


def find(folder: Path) -> list[Checkpoint]:
    """Those of a folder with a description, newest first; {} and a fault where it cannot be read."""
    try:
        names = [path for path in folder.iterdir() if NAME.fullmatch(path.name) and path.suffix == ".json"]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise _unreadable(folder, error) from error
    found = [describe(path.with_suffix(".pt")) for path in names]
    return sorted(found, key=lambda checkpoint: (checkpoint.step, checkpoint.written), reverse=True)


def describe(path: Path) -> Checkpoint:
    """A checkpoint by the path of its ``.pt``, without a look at its content."""
    try:
        described = json.loads(path.with_suffix(".json").read_bytes())
        fault = _fault(path, described)
    except FileNotFoundError:
        described, fault = {}, f"{path.with_suffix('.json').name}, which has its digest, is not there"
    except OSError as error:
        described, fault = {}, f"{path.with_suffix('.json').name} cannot be read: {error.strerror}"
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or brackets without end
        described, fault = {}, f"{path.with_suffix('.json').name} is not JSON"
    return Checkpoint(path=path, described={} if fault else described, fault=fault)


def _fault(path: Path, described: Any) -> str | None:
    name = NAME.fullmatch(path.name)
    if not name:
        return f"{path.name} is not the name of a checkpoint"
    if not isinstance(described, dict) or described.pop("sha256_of_this", None) != _digest_of(described):
        return f"{path.with_suffix('.json').name} has been changed"
    if described.get("format") != FORMAT:
        return f"it is of format {described.get('format')}, this program reads format {FORMAT}"
    kinds: dict[str, Any] = {"step": int, "sha256": str, "bytes": int, "written": (int, float)}
    if not all(isinstance(described.get(field), kind) for field, kind in kinds.items()):
        return f"{path.with_suffix('.json').name} describes no checkpoint"
    if described["step"] != int(name[1]) or not described["sha256"].startswith(name[2]):
        return "its name and its description are of different checkpoints"
    return None


def _digest_of(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def read(checkpoint: Checkpoint) -> bytes:
    """The content, whole and as it was written.

    Raises:
        CheckpointCorrupt: it is not.
    """
    if checkpoint.fault:
        raise corrupt(checkpoint.path, checkpoint.fault)
    try:
        content = checkpoint.path.read_bytes()
    except OSError as error:
        raise corrupt(checkpoint.path, f"it cannot be read: {error.strerror}") from error
    fault = _content_fault(checkpoint, len(content), hashlib.sha256(content).hexdigest())
    if fault:
        raise corrupt(checkpoint.path, fault)
    return content


def check(checkpoint: Checkpoint) -> str | None:
    """What is wrong with a checkpoint, if anything; reads all of it, a MiB at a time."""
    if checkpoint.fault:
        return checkpoint.fault
    digest, size = hashlib.sha256(), 0
    try:
        with checkpoint.path.open("rb") as file:
            while block := file.read(1 << 20):
                digest.update(block)
                size += len(block)
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    return _content_fault(checkpoint, size, digest.hexdigest())


def _content_fault(checkpoint: Checkpoint, size: int, digest: str) -> str | None:
    described = checkpoint.described
    if size != described["bytes"]:
        return f"it has {size} bytes instead of {described['bytes']}"
    if digest != described["sha256"]:
        return f"its digest is {digest[:8]} instead of {described['sha256'][:8]}: some of its bytes have changed"
    return None


def corrupt(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} is not the checkpoint that was written",
        why=why,
        next="go on from an earlier one: --resume auto takes the newest that is whole\n"
        f"what there is: ddp-manual checkpoints {path.parent}",
    )


def newest_whole(folder: Path) -> tuple[Checkpoint, bytes] | None:
    """The newest checkpoint that is what was written, and its content; a warning names each that is not. None: the
    folder has no checkpoint at all.

    Raises:
        CheckpointCorrupt: it has some, and none of them is whole.
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


def named(path: Path) -> tuple[Checkpoint, bytes]:
    """What ``--resume path`` means: that file, by either of its names, or the newest of that folder.

    Raises:
        CheckpointMissing, CheckpointCorrupt: there is none, or it is damaged.
    """
    if path.is_dir():
        found = newest_whole(folder_of(path))
        if found is None:
            raise _missing(path, "the folder has no checkpoint")
        return found
    path = path.with_suffix(".pt") if path.suffix == ".json" else path
    if not path.exists() and not path.with_suffix(".json").exists():
        raise _missing(path, "there is no such file")
    checkpoint = describe(path)
    return checkpoint, read(checkpoint)


def folder_of(path: Path) -> Path:
    """The folder of the checkpoints, given that or the run's."""
    below = rundir.RunPaths(path).checkpoints
    return below if below.is_dir() else path


def _missing(path: Path, why: str) -> CheckpointMissing:
    folder = path if path.is_dir() else path.parent
    return CheckpointMissing(
        f"no checkpoint at {path}",
        why=why,
        next=f"what there is: ddp-manual checkpoints {folder}\nor start from the beginning, without --resume",
    )


def listed(path: Path) -> list[dict[str, Any]]:
    """What ``ddp-manual checkpoints`` shows, newest first: path, step, epochs, test_accuracy, bytes, written, verdict
    (``ok`` or what is wrong) and marks (``newest``, ``best``).

    Raises:
        BadOption: no such folder. CheckpointMissing: it has no checkpoint.
    """
    if not path.is_dir():
        raise BadOption(
            f"{path} is not a folder",
            why="the checkpoints of a run are in its --run_dir, below checkpoints",
            next="name the run's folder, such as runs/<start time>-<run_id>",
        )
    found = find(folder_of(path))
    if not found:
        raise CheckpointMissing(
            f"no checkpoint in {path}",
            why=f"looked for step-<number>-<digest>.json in {folder_of(path)}",
            next="name the run's folder; a run saves a checkpoint each epoch, or every --checkpoint_steps",
        )
    verdicts = {checkpoint.path: check(checkpoint) for checkpoint in found}
    whole = [checkpoint for checkpoint in found if verdicts[checkpoint.path] is None]
    best_one = best(whole)
    return [
        {
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "epochs": checkpoint.described.get("epochs"),
            "test_accuracy": checkpoint.test_accuracy,
            "bytes": checkpoint.described.get("bytes"),
            "written": checkpoint.written or None,
            "verdict": verdicts[checkpoint.path] or "ok",
            "marks": [
                mark
                for mark, whose in (("newest", whole[0] if whole else None), ("best", best_one))
                if checkpoint is whose
            ],
        }
        for checkpoint in found
    ]


def best(found: list[Checkpoint]) -> Checkpoint | None:
    """The one with the highest test accuracy, of equals the newest."""
    rated = [checkpoint for checkpoint in found if checkpoint.test_accuracy is not None]
    return max(rated, key=lambda one: (one.test_accuracy, one.step, one.written), default=None)


def prune(folder: Path, keep: int) -> None:
    """Remove all but the ``keep`` newest and the best. Only files that are named like ours go."""
    found = find(folder)
    for checkpoint in found[keep:]:
        if checkpoint is not best(found):
            remove(checkpoint)


def rewind(folder: Path, step: int) -> None:
    """Remove what comes after ``step``, from which the run goes on, and what a killed process has left."""
    for checkpoint in find(folder):
        if checkpoint.step > step:
            logger.warning("removing %s: the run goes on from step %d", checkpoint.path, step)
            remove(checkpoint)
    sweep(folder)


def sweep(folder: Path) -> None:
    """Remove what processes that were killed have left. Only for who holds the run's folder."""
    rundir.sweep(folder, NAME)
    for path in _contents(folder):
        if not path.with_suffix(".json").exists():
            path.unlink(missing_ok=True)


def _contents(folder: Path) -> Iterator[Path]:
    return (path for path in folder.glob("step-*.pt") if NAME.fullmatch(path.name))


def remove(checkpoint: Checkpoint) -> None:
    with writing(checkpoint.path, "--run_dir"):
        checkpoint.path.with_suffix(".json").unlink(missing_ok=True)
        checkpoint.path.unlink(missing_ok=True)


def _unreadable(folder: Path, error: OSError) -> BadOption:
    return BadOption(
        f"{folder} cannot be read",
        why=f"{error.strerror}: {error.filename or folder}",
        next="name a run's folder that this user may read",
    )
