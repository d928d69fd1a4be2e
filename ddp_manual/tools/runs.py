"""``ddp-manual runs``: list the runs of a folder, and how and why each has ended."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.ranks_and_runs import LONGEST_TEXT
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import columns, stdout_width
from ddp_manual.text_wrapping import labelled
from ddp_manual.tools.recorded_run import End, read_end, read_run
from ddp_manual.wire import printable

# The facts that no file of a failed start tells.
UNKNOWN = {**dict.fromkeys(("model", "dataset", "world_size", "epochs", "test_accuracy")), "epochs_done": 0}


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """List the runs in a folder, or the run whose folder it is; those that ended or began last come last.

    Folders of something else are left out.

    Returns:
        Of each run what ``compare`` knows of it too, such as run_dir, state, world_size, test_accuracy, ended and why.
        A start that failed has ``epochs_done`` 0 and None for what nobody knows. The state ``unreadable`` has in
        ``why`` which file is damaged.

    Raises:
        BadOption: no such folder, or it cannot be read.
    """
    try:
        below = [folder] if _may_be_run(folder) else [path for path in folder.iterdir() if _may_be_run(path)]
    except OSError as error:
        raise BadOption(
            f"{folder} is no folder that can be read",
            why=f"{error.strerror}: {error.filename or folder}",
            next="name the folder that holds the runs: without --run_dir a training makes one in runs, a script none",
        ) from error
    found = filter(None, map(_facts, below))
    return sorted(found, key=lambda run: (math.inf if run["ended"] is None else run["ended"], run["run_dir"]))


def _may_be_run(folder: Path) -> bool:
    paths = RunPaths(folder)
    try:
        return paths.config.exists() or any(paths.failures()) or any(folder.glob("log-rank*.txt"))
    except OSError:  # of another user
        return False


def _facts(folder: Path) -> dict[str, Any] | None:
    """Return what the files of a run say; None if its config.json is another program's."""
    paths = RunPaths(folder)
    try:
        if paths.config.exists():
            facts = read_run(folder).facts
            return None if facts["world_size"] is None else dict(facts)
        end = read_end(paths)  # of a start that failed, or in the folder of a script, which may hold anything
        if end.state == "unfinished":
            end = End("no failure", None, "no rank has left why it ended: it runs, has finished, or was killed")
    except BadOption as error:
        end = End("unreadable", None, f"{error.what}: {error.why}")
    except OSError as error:
        end = End("unreadable", None, f"{error.filename}: {error.strerror}")
    return {"run_dir": str(folder), **UNKNOWN, **end._asdict()}


def text(found: Sequence[Mapping[str, Any]]) -> str:
    """Format what ``list_runs`` returns: a line for each run, and below it why it ended if it did not finish."""
    rows = [["run", "state", "ranks", "accuracy", "epochs", "ended"]]
    for run in found:
        rows.append(
            [
                printable(os.path.basename(os.path.abspath(run["run_dir"]))),
                run["state"].partition(":")[0],
                str(run["world_size"] or "-"),
                "-" if run["test_accuracy"] is None else f"{run['test_accuracy']:.2%}",
                f"{run['epochs_done']}/{run['epochs']}" if run["epochs"] else "-",
                "-" if run["ended"] is None else f"{datetime.fromtimestamp(run['ended']):%Y-%m-%d %H:%M}",
            ]
        )
    head, *lines = columns(rows, width=(width := stdout_width()), least_first=("epochs", "ranks", "ended"))
    whys = ([labelled("    ", why, width)] if (why := _why(run)) else [] for run in found)
    return "\n".join([head, *(line for pair in zip(lines, whys, strict=True) for line in (pair[0], *pair[1]))])


def _why(run: Mapping[str, Any]) -> str:
    if run["state"] == "unfinished":
        return "no rank has said why: killed, or its host went down"
    identifier = run["state"].partition(": ")[2]
    return printable(": ".join(filter(None, (identifier, run["why"]))), LONGEST_TEXT)
