"""``ddp-manual compare``: put what runs have left in their folders side by side."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.option_fields import option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import columns, stdout_width
from ddp_manual.tools.recorded_run import RecordedRun, read_run
from ddp_manual.training.options import TrainConfig
from ddp_manual.wire import printable

logger = logging.getLogger(__name__)

# Characters; the runs that do not fit go into a further table below.
WIDEST_TABLE = 120
# Options that have a line in every table, whether they differ or not.
ALWAYS_SHOWN = ("model", "dataset", "epochs")
# The lines of the table: label, fact and format.
ROWS = (
    ("state", "state", "{}"),
    ("model", "model", "{}"),
    ("dataset", "dataset", "{}"),
    ("ranks", "world_size", "{}"),
    ("device", "device", "{}"),
    ("global batch", "global_batch_size", "{:,}"),
    ("peak learning rate", "peak_lr", "{:.4g}"),
    ("epochs", "epochs", "{}"),
    ("samples/s", "samples_per_second", "{:,.0f}"),
    ("efficiency", "efficiency", "{:.0%}"),
    ("train seconds", "train_seconds", "{:.1f}"),
    ("final loss", "final_loss", "{:.4f}"),
    ("test loss", "test_loss", "{:.4f}"),
    ("test accuracy", "test_accuracy", "{:.2%}"),
)


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Read the runs in ``folders``; a start that failed is passed over, with a warning, where two runs remain.

    Returns:
        ``runs``: the name and the facts of each, in the order in which they were named. Its efficiency is its samples
        per second and rank, as a fraction of that of the run ``efficiency_relative_to``; None where the work or the
        devices differ. ``differing_options``: option -> name of the run -> value, for runs that have it.

    Raises:
        BadOption: there are fewer than two different folders, or one is not that of a run.
    """
    different = list({os.path.realpath(folder): folder for folder in folders}.values())
    if len(different) < 2:
        raise BadOption(
            f"{len(different) or 'no'} run named; a comparison takes at least two",
            why="named: " + (", ".join(map(str, folders)) or "nothing"),
            next="ddp-manual compare runs/<one> runs/<another>",
        )
    failed = [folder for folder in different if RunPaths(folder).is_failed_start]
    if failed and len(different) - len(failed) >= 2:
        logger.warning("passed over, as nothing was trained there: %s", ", ".join(map(str, failed)))
        different = [folder for folder in different if folder not in failed]
    short = [os.path.basename(os.path.realpath(folder)) for folder in different]
    names = short if len(set(short)) == len(short) else list(map(str, different))
    runs = {name: read_run(folder) for name, folder in zip(names, different, strict=True)}
    rates = {name: rate for name, run in runs.items() if (rate := run.rate_per_rank)}
    works = [runs[name].work for name in rates]
    matched = [name for name in rates if works.count(runs[name].work) > 1]
    base = min(matched, key=lambda name: (runs[name].facts["world_size"], -rates[name]), default=None)
    alike = [] if base is None else [name for name in matched if runs[name].work == runs[base].work]
    efficiencies = {name: rates[name] / rates[str(base)] for name in alike}
    return {
        "efficiency_relative_to": base,
        "runs": [{"name": name, **run.facts, "efficiency": efficiencies.get(name)} for name, run in runs.items()],
        "differing_options": _differing_options(runs),
    }


def _differing_options(runs: Mapping[str, RecordedRun]) -> dict[str, dict[str, Any]]:
    found = {}
    for option in (field.name for field in option_fields(TrainConfig) if field.name not in ALWAYS_SHOWN):
        values = {name: run.options[option] for name, run in runs.items() if option in run.options}
        if any(value != first for first in [*values.values()][:1] for value in values.values()):
            found[option] = values
    return found


def text(compared: Mapping[str, Any]) -> str:
    """Format what ``compare`` returns: the table, the options that differ, and which files are missing."""
    runs, base = compared["runs"], compared["efficiency_relative_to"]
    epochs = [f"{run['epochs_done']} of {run['epochs']}" if run["epochs"] else None for run in runs]
    rows = [["", *(run["name"] for run in runs)]]
    for label, key, form in ROWS:
        values = epochs if key == "epochs" else [run[key] for run in runs]
        rows.append([label, *("-" if value is None else form.format(value) for value in values)])
    for option, of_runs in compared["differing_options"].items():
        values = [of_runs.get(name, "-") for name in rows[0][1:]]
        rows.append([option, *("default" if value is None else str(value) for value in values)])
    first_width, *widths = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    runs_per_table = max(1, ((stdout_width() or WIDEST_TABLE) - first_width) // max(widths))
    lines: list[str] = []
    for first in range(1, len(rows[0]), runs_per_table):
        table = columns([[row[0], *map(printable, row[first : first + runs_per_table])] for row in rows])
        lines += [""] * bool(lines) + table[: len(ROWS) + 1]
        if differing := table[len(ROWS) + 1 :]:
            lines += ["options that differ:", *differing]
    if base is not None:
        lines += ["", f"efficiency: samples/s per rank, relative to {base}"]
        if any(run["efficiency"] and run["efficiency"] > 1 for run in runs):
            lines[-1] += "; above 100%: each rank was faster than there, such as on a host that did less besides"
    notes = [f"{run['name']}: {note}" for run in runs for note in run["notes"]]
    return "\n".join([*lines, *([""] if notes else []), *notes])
