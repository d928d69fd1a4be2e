"""Runs side by side: what ``ddp-manual compare`` prints, as text and as plain values."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.options import option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import columns
from ddp_manual.tools.recorded_run import RecordedRun, read_run
from ddp_manual.training.config import TrainConfig

logger = logging.getLogger(__name__)

# Characters; more runs than fit go into a further table below.
WIDEST_TABLE = 120
# Options that have a line in every table, whether they differ or not.
ALWAYS_SHOWN = ("model", "dataset", "epochs")


@dataclass(frozen=True)
class Comparison:
    """Two or more runs, in the order they were named, each with a name of its own."""

    runs: Mapping[str, RecordedRun]

    @property
    def base(self) -> str | None:
        """The run the others' efficiency is relative to: of those that can be compared with any other the one with the
        fewest ranks, of equals the first."""
        measured = {name: run for name, run in self.runs.items() if run.rate_per_rank and run.world_size}
        ranks = {
            name: run.world_size
            for name, run in measured.items()
            if any(_alike(run, other) for other in measured.values() if other is not run)
        }
        return min(ranks, key=lambda name: ranks[name] or 0, default=None)

    def efficiency(self, name: str) -> float | None:
        """Samples per second and rank, as a fraction of the base's; None where the work or the devices are others."""
        if self.base is None:
            return None
        run, base = self.runs[name], self.runs[self.base]
        if run.rate_per_rank is None or base.rate_per_rank is None or not _alike(run, base):
            return None
        return run.rate_per_rank / base.rate_per_rank

    def differing_options(self) -> dict[str, dict[str, Any]]:
        """Option -> name of the run -> value, for those that are not the same in all runs.

        A run of an older version that did not have the option did what is now the default; it is left out below it.
        """
        known = {name: run.options for name, run in self.runs.items() if run.options}
        found = {}
        for field in option_fields(TrainConfig):
            given = {name: options[field.name] for name, options in known.items() if field.name in options}
            values = [options.get(field.name, field.default) for options in known.values()]
            if field.name not in ALWAYS_SHOWN and given and any(value != values[0] for value in values):
                found[field.name] = given
        return found

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``: fractions, seconds and samples per second; null where it is not known."""
        return {
            "efficiency_relative_to": self.base,
            "runs": [{"name": name, **self._facts(name)} for name in self.runs],
            "differing_options": self.differing_options(),
        }

    def _facts(self, name: str) -> dict[str, Any]:
        run = self.runs[name]
        return {
            "run_dir": str(run.run_dir),
            "state": run.state,
            "model": run.options.get("model"),
            "dataset": run.options.get("dataset"),
            "world_size": run.world_size,
            "device": run.device,
            "global_batch_size": run.global_batch_size,
            "peak_lr": run.peak_lr,
            "samples_per_second": run.samples_per_second,
            "efficiency": self.efficiency(name),
            "epochs": run.options.get("epochs"),
            "epochs_done": len(run.test_accuracies),
            "steps_done": run.points[-1].step if run.points else 0,
            "final_loss": run.final_loss,
            "test_loss": run.test_loss,
            "test_accuracy": run.test_accuracy,
            "train_seconds": run.train_seconds,
            "seconds_are_estimated": run.estimated,
            "notes": list(run.notes),
        }

    def text(self) -> str:
        """The table, what differs, and what could not be read."""
        names = list(self.runs)
        facts = [["", *names], *([label, *map(value, names)] for label, value in self._lines())]
        options = [
            [label, *(_option(given[name]) if name in given else "-" for name in names)]
            for label, given in self.differing_options().items()
        ]
        lines = _table(facts, options)
        if self.base is not None:
            lines += ["", f"efficiency: samples/s per rank, relative to {self.base}"]
        notes = [f"{name}: {note}" for name, run in self.runs.items() for note in run.notes]
        guessed = ", ".join(name for name, run in self.runs.items() if run.estimated)
        if guessed:
            notes.append(f"{guessed}: metrics without seconds; times and ~ are worked out from steps and samples/s")
        return "\n".join([*lines, *([""] if notes else []), *notes])

    def _lines(self) -> Iterator[tuple[str, Callable[[str], str]]]:
        """Each line of the table: its label, and what it says of a run."""
        runs = self.runs
        yield "state", lambda name: runs[name].state
        yield "model", lambda name: str(runs[name].options.get("model", "-"))
        yield "dataset", lambda name: str(runs[name].options.get("dataset", "-"))
        yield "ranks", lambda name: _shown(runs[name].world_size, "{}")
        yield "device", lambda name: runs[name].device or "-"
        yield "global batch", lambda name: _shown(runs[name].global_batch_size, "{:,}")
        yield "peak learning rate", lambda name: _shown(runs[name].peak_lr, "{:.4g}")
        yield "epochs", lambda name: f"{len(runs[name].test_accuracies)} of {runs[name].options.get('epochs', '?')}"
        yield "samples/s", lambda name: _shown(runs[name].samples_per_second, "{:,.0f}")
        yield "efficiency", lambda name: _shown(self.efficiency(name), "{:.0%}")
        yield "train seconds", lambda name: _shown(runs[name].train_seconds, "{:.1f}", about=_guessed(runs[name]))
        yield "final loss", lambda name: _shown(runs[name].final_loss, "{:.4f}")
        yield "test loss", lambda name: _shown(runs[name].test_loss, "{:.4f}")
        yield "test accuracy", lambda name: _shown(runs[name].test_accuracy, "{:.2%}")


def compare(folders: Sequence[Path]) -> Comparison:
    """Read the runs in ``folders``; a start that failed is passed over, with a warning, where two runs remain.

    Raises:
        BadOption: there are fewer than two, one is named twice, or is not the folder of a run.
    """
    if len(folders) < 2:
        raise BadOption(
            f"{len(folders) or 'no'} run named; a comparison takes at least two",
            why="named: " + (", ".join(map(str, folders)) or "nothing"),
            next="ddp-manual compare runs/<one> runs/<another>",
        )
    resolved = [folder.resolve() for folder in folders]
    for index, folder in enumerate(resolved):
        if folder in resolved[:index]:
            raise BadOption(
                f"{folders[index]} is named twice",
                why=f"{folders[resolved.index(folder)]} is the same folder",
                next="name each run once",
            )
    failed = [folder for folder in folders if RunPaths(folder).is_failed_start]
    if failed and len(folders) - len(failed) >= 2:
        logger.warning("passed over, as nothing was trained there: %s", ", ".join(map(str, failed)))
        folders = [folder for folder in folders if folder not in failed]
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else list(map(str, folders))
    return Comparison({name: read_run(folder) for name, folder in zip(names, folders, strict=True)})


def _alike(run: RecordedRun, other: RecordedRun) -> bool:
    """Whether the samples per second of both are of the same work on the same kind of device, as far as is known."""
    known = run.options.keys() & other.options.keys()
    same_work = all(run.options[name] == other.options[name] for name in known & {"model", "dataset", "image_size"})
    return same_work and (run.device == other.device or None in (run.device, other.device))


def _option(value: Any) -> str:
    return "default" if value is None else str(value)


def _guessed(run: RecordedRun) -> bool:
    return run.estimated and run.state != "finished"


def _shown(value: float | None, form: str, *, about: bool = False) -> str:
    return "-" if value is None else "~" * about + form.format(value)


def _table(facts: Sequence[Sequence[str]], options: Sequence[Sequence[str]]) -> list[str]:
    """Both with their columns one under the other, in blocks that are not too wide; a row begins with its label."""
    rows = [*facts, *options]
    label, *cells = (max(len(row[index]) for row in rows) + 2 for index in range(len(rows[0])))
    per_block = max(1, (WIDEST_TABLE - label) // max(cells))
    lines: list[str] = []
    for first in range(1, len(rows[0]), per_block):
        block = columns([[row[0], *row[first : first + per_block]] for row in rows])
        lines += [""] * bool(lines) + block[: len(facts)]
        if options:
            lines += ["options that differ:", *block[len(facts) :]]
    return lines
