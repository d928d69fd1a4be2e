"""``ddp-manual checkpoints``: list the checkpoints of a run, and check that each is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption, CheckpointCorrupt, CheckpointMissing
from ddp_manual.terminal import columns, stdout_width
from ddp_manual.text_wrapping import wrapped
from ddp_manual.training.checkpoint_files import best, check, find, folder_of
from ddp_manual.wording import byte_size


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
            "written": checkpoint.written_at or None,
            "verdict": fault.why if fault else "ok",
            "state": "ok" if fault is None else "corrupt" if isinstance(fault, CheckpointCorrupt) else "unreadable",
            "marks": [mark for mark, chosen in marked.items() if checkpoint is chosen],
        }
        for checkpoint, fault in faults
    ]


def text(found: Sequence[Mapping[str, Any]]) -> str:
    """Format what ``list_checkpoints`` returns: the folder, a line for each checkpoint, then what is wrong with any."""
    rows = [["step", "epochs", "test accuracy", "size", "written", "verdict", "file"]]
    for one in found:
        epochs, accuracy, size, written = (one[name] for name in ("epochs", "test_accuracy", "bytes", "written"))
        rows.append(
            [
                str(one["step"]),
                "-" if epochs is None else f"{epochs:.2f}",
                "-" if accuracy is None else f"{accuracy:.2%}",
                "-" if size is None else byte_size(size),
                "-" if written is None else f"{datetime.fromtimestamp(written):%Y-%m-%d %H:%M:%S}",
                ", ".join([one["state"], *one["marks"]]),
                Path(one["path"]).name,
            ]
        )
    width = stdout_width()
    table = columns(rows, width=width, least_first=("size", "epochs", "written"))
    damaged = [(Path(one["path"]).name, one["verdict"]) for one in found if one["state"] != "ok"]
    faults = [wrapped(f"{name}: {verdict}", width) for name, verdict in damaged]
    return "\n".join([f"in {Path(found[0]['path']).parent}:", *table, *faults])
