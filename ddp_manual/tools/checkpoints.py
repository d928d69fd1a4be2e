"""``ddp-manual checkpoints``: list the checkpoints of a run, and check that each is whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing
from ddp_manual.training.checkpoint_files import best, check, find, folder_of


def list_checkpoints(path: Path) -> list[dict[str, Any]]:
    """List the checkpoints of a run, newest first.

    Returns:
        Of each checkpoint: path, step, epochs, test_accuracy, bytes, written (seconds since 1970), verdict (``ok`` or
        what is wrong), state (ok, corrupt, unreadable) and marks (``newest``, ``best``).

    Raises:
        BadOption: no such folder. CheckpointMissing: it has no checkpoint.
    """
    if not path.is_dir():
        raise BadOption(
            f"{path} is not a folder",
            why="the checkpoints of a run are in its --run_dir, below checkpoints",
            next="name the run's folder, such as runs/<start time>-<run_id>",
        )
    faults = [(checkpoint, check(checkpoint)) for checkpoint in find(folder_of(path))]
    if not faults:
        raise CheckpointMissing(
            f"no checkpoint in {path}",
            why=f"looked for step-<number>-<digest>.pt in {folder_of(path)}",
            next="name the run's folder; a run saves a checkpoint each epoch, or every --checkpoint_steps",
        )
    whole = [checkpoint for checkpoint, fault in faults if fault is None]
    marked = {"newest": whole[0], "best": best(whole)} if whole else {}
    return [
        {
            "path": str(checkpoint.path),
            "step": checkpoint.step,
            "epochs": checkpoint.described.get("epochs"),
            "test_accuracy": checkpoint.test_accuracy,
            "bytes": checkpoint.described.get("bytes"),
            "written": checkpoint.written or None,
            "verdict": fault.why if fault else "ok",
            "state": "ok" if fault is None else "corrupt" if isinstance(fault, CheckpointCorrupt) else "unreadable",
            "marks": [mark for mark, chosen in marked.items() if checkpoint is chosen],
        }
        for checkpoint, fault in faults
    ]
