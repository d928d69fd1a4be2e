"""One checkpoint on disk: its names, how it is written, described, checked and read. No torch.

A checkpoint is ``step-00000120-1a2b3c4d.pt``, named after its step and the beginning of its digest so that no other
content ever takes its place, and beside it a ``.json`` that a person can read and that has the whole digest. Both are
on disk before either takes its name, the ``.json`` last: where it is, the ``.pt`` has been written whole.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, CheckpointCorrupt, writing

NAME = re.compile(r"step-(\d{8,})-([0-9a-f]{8})\.(pt|json)")
# A folder beside the checkpoints, for those that a run could not read when it went on from an earlier one.
SET_ASIDE = "set-aside"
# Another one keeps ``format`` and ``sha256_of_this``, so that a program that does not know it can tell.
FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Fault:
    """Why a checkpoint cannot be read.

    Args:
        damaged: it is not what was written. Else it may be, and only this process cannot read it, or not now.
    """

    why: str
    damaged: bool = True


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
    fault: Fault | None

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
    text = json.dumps({**described, "sha256_of_this": _digest_of(described)}, indent=2, allow_nan=False)
    with writing(folder, "--run_dir"):
        folder.mkdir(exist_ok=True)
        try:
            run_folder.replace_files({path: content, path.with_suffix(".json"): (text + "\n").encode()})
        except OSError:
            # What has no description is no checkpoint; on a full disk it would only take the room of the next.
            if not path.with_suffix(".json").exists():
                path.unlink(missing_ok=True)
            raise
    return path


def describe(path: Path) -> Checkpoint:
    """A checkpoint by the path of its ``.pt``, without a look at its content."""
    file = path.with_suffix(".json")
    described: Any = {}
    try:
        described = json.loads(file.read_bytes())
        fault = _fault(path, described)
    except FileNotFoundError:
        fault = Fault(why=f"{file.name}, which has its digest, is not there")
    except OSError as error:
        fault = _not_now(file, error)
    except (ValueError, RecursionError):  # not JSON, not UTF-8, or brackets without end
        fault = Fault(why=f"{file.name} is not JSON")
    return Checkpoint(path=path, described={} if fault else described, fault=fault)


def _fault(path: Path, described: Any) -> Fault | None:
    file = path.with_suffix(".json").name
    name = NAME.fullmatch(path.name)
    if not name:
        return Fault(why=f"{path.name} is not the name of a checkpoint")
    if not isinstance(described, dict) or described.pop("sha256_of_this", None) != _digest_of(described):
        return Fault(why=f"{file} has been changed")
    if described.get("format") != FORMAT:
        return Fault(
            why=f"it is of format {described.get('format')}, this program reads format {FORMAT}", damaged=False
        )
    kinds: dict[str, Any] = {"step": int, "sha256": str, "bytes": int, "written": (int, float)}
    if not all(isinstance(described.get(field), kind) for field, kind in kinds.items()):
        return Fault(why=f"{file} describes no checkpoint")
    if described["step"] != int(name[1]) or not described["sha256"].startswith(name[2]):
        return Fault(why="its name and its description are of different checkpoints")
    return None


def _digest_of(described: Any) -> str:
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def _not_now(path: Path, error: OSError) -> Fault:
    """A file that could not be read may be whole: on another day, for another user, after a mount."""
    return Fault(why=f"{path.name} cannot be read: {error.strerror}", damaged=False)


def read(checkpoint: Checkpoint) -> bytes:
    """The content, whole and as it was written.

    Raises:
        CheckpointCorrupt: it is not.
        BadOption: it may be, but cannot be read.
    """
    fault, content = checkpoint.fault, b""
    if fault is None:
        try:
            content = checkpoint.path.read_bytes()
            fault = _content_fault(checkpoint, len(content), hashlib.sha256(content).hexdigest())
        except OSError as error:
            fault = _reading_fault(checkpoint.path, error)
    if fault is None:
        return content
    if fault.damaged:
        raise corrupt(checkpoint.path, fault.why)
    raise BadOption(
        f"{checkpoint.path} may be whole, but cannot be read here",
        why=fault.why,
        next="mend that, since taking an earlier one would lose what this one has\n"
        f"or name an earlier one yourself: ddp-manual checkpoints {checkpoint.path.parent}, then --resume its path",
    )


def check(checkpoint: Checkpoint) -> Fault | None:
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
        return _reading_fault(checkpoint.path, error)
    return _content_fault(checkpoint, size, digest.hexdigest())


def _reading_fault(path: Path, error: OSError) -> Fault:
    return Fault(why=f"{path.name} is not there") if isinstance(error, FileNotFoundError) else _not_now(path, error)


def _content_fault(checkpoint: Checkpoint, size: int, digest: str) -> Fault | None:
    described = checkpoint.described
    if size != described["bytes"]:
        return Fault(why=f"it has {size} bytes instead of {described['bytes']}")
    if digest != described["sha256"]:
        return Fault(
            why=f"its digest is {digest[:8]} instead of {described['sha256'][:8]}: some of its bytes have changed"
        )
    return None


def run_dir_of(path: Path) -> Path:
    """The folder of the run that ``path``, a file of it or a folder, belongs to."""
    folder = path if path.is_dir() else path.parent
    checkpoints = run_folder.RunPaths(folder).checkpoints
    *_, above, name = "", *Path(os.path.abspath(folder)).parts
    if (above, name) == (checkpoints.name, SET_ASIDE):
        return _above(_above(folder))
    return _above(folder) if name == checkpoints.name and not checkpoints.is_dir() else folder


def _above(folder: Path) -> Path:
    return folder / ".." if folder.name in ("", "..") else folder.parent


def corrupt(path: Path, why: str) -> CheckpointCorrupt:
    return CheckpointCorrupt(
        f"{path} is not the checkpoint that was written",
        why=why,
        next=f"go on from an earlier one: --run_dir {run_dir_of(path)} --resume auto takes the newest that is whole\n"
        f"what there is: ddp-manual checkpoints {path.parent}",
    )
