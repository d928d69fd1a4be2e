"""``ddp-manual compare``: read what runs have left in their folders, and put them side by side."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.options import option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import columns
from ddp_manual.training.config import TrainConfig

logger = logging.getLogger(__name__)

# Characters; the runs that do not fit go into a further table below.
WIDEST_TABLE = 120
MOST_NAMED = 8
# Options that have a line in every table, whether they differ or not.
ALWAYS_SHOWN = ("model", "dataset", "epochs")
# Failures of ranks that only saw another rank fail: any other failure is nearer to the cause.
OF_A_PEER = ("peer-", "master-lost")
# A number beyond these is damage, and what is worked out from it could be infinite.
LARGEST = 2**53
# What json.loads, float() and look-ups raise for damaged or half-written files.
DAMAGED = (ValueError, TypeError, LookupError, ArithmeticError, RecursionError)


@dataclass(frozen=True)
class Point:
    """A line of ``metrics.jsonl``: over all ranks, since the line before.

    Args:
        accuracy: a fraction.
        seconds: of training since the run began, without evaluations.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float
    samples_per_second: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What the files of a run say of it; None (or nothing) where no file says it.

    Args:
        state: finished, running, stopped, ``failed: <identifier>`` or unfinished (killed, or not begun).
        options: those of TrainConfig that all ranks share.
        test_accuracies: fractions, one for each complete epoch.
        notes: what could not be read.
    """

    run_dir: Path
    state: str
    options: Mapping[str, Any]
    world_size: int | None
    device: str | None
    batch_size_per_rank: int | None
    peak_lr: float | None
    points: Sequence[Point]
    test_accuracies: Sequence[float]
    test_loss: float | None
    samples_per_second: float | None
    train_seconds: float | None
    notes: Sequence[str]

    @property
    def rate_per_rank(self) -> float | None:
        """Samples per second and rank."""
        return self.samples_per_second / self.world_size if self.samples_per_second and self.world_size else None

    @property
    def work(self) -> list[Any]:
        """What has to be the same for two runs' samples per second to be comparable."""
        return [*(self.options.get(name) for name in ("model", "dataset", "image_size")), self.device]

    def epoch_ends(self) -> list[tuple[Point, float]]:
        """The last point of each complete epoch, and the test accuracy after it."""
        last = {point.epoch: point for point in self.points}
        return [(last[epoch], found) for epoch, found in enumerate(self.test_accuracies, start=1) if epoch in last]


def read_run(folder: Path) -> RecordedRun:
    """Read what the run in ``folder`` has left; what is damaged becomes a note.

    Raises:
        BadOption: there is no such folder, it holds no file of a run, or a file cannot be read.
    """
    paths, notes = RunPaths(folder), list[str]()
    try:
        if not _holds_a_run(folder):
            raise _no_run(folder)
        config, summary = _read_json(paths.config, notes, {}, expected=True), _read_json(paths.summary, notes, {})
        run = config.get("run") if isinstance(config.get("run"), dict) else {}
        points = _read_points(paths.metrics, notes)
        accuracies = _read_json(paths.accuracies, notes, [])
        numbers = [_number(accuracies, index) for index in range(len(accuracies))]
        notes += [f"{paths.accuracies.name} is damaged"] * (None in numbers)
        state = _state(paths, finished="final_test_accuracy" in summary)
    except OSError as error:
        raise BadOption(
            f"{error.filename or folder} cannot be read",
            why=error.strerror or str(error),
            next="name a run's folder that this user may read",
        ) from error
    rate, seconds = _number(summary, "samples_per_second"), _number(summary, "train_seconds")
    return RecordedRun(
        run_dir=folder,
        state=state,
        options={
            field.name: config[field.name]
            for field in option_fields(TrainConfig)
            if field.metadata["shared"] and field.name in config
        },
        world_size=_count(run, "world_size") or _count(summary, "world_size"),
        device=next((where["device"] for where in (run, summary) if isinstance(where.get("device"), str)), None),
        batch_size_per_rank=_count(run, "batch_size_per_rank"),
        peak_lr=_number(run, "peak_lr"),
        points=points,
        test_accuracies=[] if None in numbers else [number for number in numbers if number is not None],
        test_loss=_number(summary, "final_test_loss"),
        samples_per_second=rate or _mean_rate(points, _count(run, "goes_on_after_step") or 0),
        train_seconds=seconds or (points[-1].seconds if points else None),
        notes=notes,
    )


def _holds_a_run(folder: Path) -> bool:
    paths = RunPaths(folder)
    return folder.is_dir() and any(path.exists() for path in (paths.config, paths.metrics, paths.summary))


def _no_run(folder: Path) -> BadOption:
    paths, around = RunPaths(folder), folder if folder.is_dir() else folder.parent
    near = sorted(path for path in (around, *around.glob("*")) if _holds_a_run(path))[-MOST_NAMED:]
    why = f"it has neither {paths.config.name} nor {paths.metrics.name} nor {paths.summary.name}"
    if not folder.is_dir():
        why = "it is a file" if folder.exists() else "there is no such folder"
    names = ":\n" + "\n".join(map(str, near)) if near else " runs/<start time>-<run_id>"
    return BadOption(f"{folder} is not the folder of a run", why=why, next=f"name folders of runs, such as{names}")


def _read_json(path: Path, notes: list[str], empty: Any, *, expected: bool = False) -> Any:
    """Read a file with content of ``empty``'s type; ``empty``, with a note, where it is damaged or missing."""
    try:
        found = json.loads(path.read_bytes())
    except FileNotFoundError:
        notes += [f"no {path.name}"] * expected
        return empty
    except DAMAGED:
        found = None
    if isinstance(found, type(empty)):
        return found
    notes.append(f"{path.name} is damaged")
    return empty


def _read_points(path: Path, notes: list[str]) -> list[Point]:
    """Read the lines of ``metrics.jsonl``; a kill may have cut one off."""
    points: list[Point] = []
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except FileNotFoundError:
        notes.append(f"no {path.name}")
        return points
    for line in lines:
        try:
            found = json.loads(line)
            floats = (float(found[name]) for name in ("loss", "accuracy", "samples_per_second", "seconds"))
            point = Point(int(found["step"]), int(found["epoch"]), *floats)
        except DAMAGED:
            continue
        if all(abs(number) <= LARGEST for number in astuple(point)) and (not points or point.step > points[-1].step):
            points.append(point)
    if len(points) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(points)} of {len(lines)} lines cannot be read")
    return points


def _number(content: Any, key: str | int) -> float | None:
    """Return a number; None where there is none, or one that only damage explains."""
    try:
        number = float(content[key])
    except DAMAGED:
        return None
    return number if abs(number) <= LARGEST else None  # nan is not


def _count(content: Mapping[str, Any], name: str) -> int | None:
    number = _number(content, name)
    return int(number) if number is not None and number >= 1 else None


def _state(paths: RunPaths, *, finished: bool) -> str:
    if finished:
        return "finished"
    if paths.in_use:
        return "running"
    # A run that is started again writes its options anew: the failures of before no longer count.
    began = paths.config.stat().st_mtime if paths.config.exists() else 0.0
    failures = [_read_json(path, [], {}) for path in paths.failures() if path.stat().st_mtime >= began]
    identifiers = [str(failure["identifier"]) for failure in failures if "identifier" in failure]
    if not identifiers:
        return "unfinished"
    nearest = min(identifiers, key=lambda identifier: identifier.startswith(OF_A_PEER))
    return "stopped" if nearest == "stopped" else f"failed: {nearest}"


def _mean_rate(points: Sequence[Point], began: int) -> float | None:
    """Average the samples per second after step ``began``, where the run was resumed, maybe with other ranks."""
    starts = [0.0, *(point.seconds for point in points)]
    spans = [(point, point.seconds - start) for point, start in zip(points, starts, strict=False) if point.step > began]
    seconds = sum(span for _, span in spans)
    return sum(point.samples_per_second * span for point, span in spans) / seconds if seconds > 0 else None


@dataclass(frozen=True)
class Comparison:
    """Two or more runs, in the order they were named, each under a name of its own."""

    runs: Mapping[str, RecordedRun]

    @property
    def base(self) -> str | None:
        """The run that efficiency is relative to: the one with the fewest ranks of those that have a match."""
        measured = [name for name, run in self.runs.items() if run.rate_per_rank]
        works = [self.runs[name].work for name in measured]
        ranks = {name: self.runs[name].world_size or 0 for name in measured if works.count(self.runs[name].work) > 1}
        return min(ranks, key=ranks.__getitem__, default=None)

    def efficiency(self, name: str) -> float | None:
        """Samples per second and rank, as a fraction of the base's; None where the work or the devices differ."""
        run, base = self.runs[name], self.runs.get(self.base or "")
        if base is None or base.rate_per_rank is None or run.rate_per_rank is None or run.work != base.work:
            return None
        return run.rate_per_rank / base.rate_per_rank

    def differing_options(self) -> dict[str, dict[str, Any]]:
        """Option -> name of the run -> value, for the options that are not the same in all runs."""
        known = {name: run.options for name, run in self.runs.items() if run.options}
        found = {}
        for option in (field.name for field in option_fields(TrainConfig) if field.name not in ALWAYS_SHOWN):
            values = {name: options[option] for name, options in known.items() if option in options}
            if any(value != first for first in [*values.values()][:1] for value in values.values()):
                found[option] = values
        return found

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for ``--json``: fractions, seconds, samples per second; None where it is not known."""
        return {
            "efficiency_relative_to": self.base,
            "runs": [{"name": name, **self._facts(name)} for name in self.runs],
            "differing_options": self.differing_options(),
        }

    def _facts(self, name: str) -> dict[str, Any]:
        run = self.runs[name]
        batch = run.world_size * run.batch_size_per_rank if run.world_size and run.batch_size_per_rank else None
        return {
            "run_dir": str(run.run_dir),
            "state": run.state,
            "model": run.options.get("model"),
            "dataset": run.options.get("dataset"),
            "world_size": run.world_size,
            "device": run.device,
            "global_batch_size": batch,
            "peak_lr": run.peak_lr,
            "samples_per_second": run.samples_per_second,
            "efficiency": self.efficiency(name),
            "epochs": run.options.get("epochs"),
            "epochs_done": len(run.test_accuracies),
            "steps_done": run.points[-1].step if run.points else 0,
            "final_loss": run.points[-1].loss if run.points else None,
            "test_loss": run.test_loss,
            "test_accuracy": run.test_accuracies[-1] if run.test_accuracies else None,
            "train_seconds": run.train_seconds,
            "notes": list(run.notes),
        }

    def text(self) -> str:
        """Format the table, the options that differ, and what could not be read."""
        facts = {name: self._facts(name) for name in self.runs}
        for of_run in facts.values():
            of_run["epochs"] = f"{of_run['epochs_done']} of {of_run['epochs'] or '?'}"
        rows = [["", *facts]]
        rows += [[label, *(_shown(of_run[key], form) for of_run in facts.values())] for label, key, form in ROWS]
        options = [
            [option, *("default" if (value := values.get(name, "-")) is None else str(value) for name in facts)]
            for option, values in self.differing_options().items()
        ]
        lines = _table(rows, options)
        if self.base is not None:
            lines += ["", f"efficiency: samples/s per rank, relative to {self.base}"]
        notes = [f"{name}: {note}" for name, run in self.runs.items() for note in run.notes]
        return "\n".join([*lines, *([""] if notes else []), *notes])


# The lines of the table: label, which fact, and its format.
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


def _shown(value: Any, form: str) -> str:
    return "-" if value is None else form.format(value)


def _table(facts: Sequence[Sequence[str]], options: Sequence[Sequence[str]]) -> list[str]:
    """Align both in the same columns, in blocks that are not too wide; each row begins with its label."""
    rows = [*facts, *options]
    label, *cells = (max(map(len, column)) + 2 for column in zip(*rows, strict=True))
    per_block = max(1, (WIDEST_TABLE - label) // max(cells))
    lines: list[str] = []
    for first in range(1, len(rows[0]), per_block):
        block = columns([[row[0], *row[first : first + per_block]] for row in rows])
        lines += [""] * bool(lines) + block[: len(facts)]
        if options:
            lines += ["options that differ:", *block[len(facts) :]]
    return lines


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
    resolved: dict[Path, Path] = {}
    for folder in folders:
        if (first := resolved.setdefault(folder.resolve(), folder)) is not folder:
            raise BadOption(f"{folder} is named twice", why=f"{first} is the same folder", next="name each run once")
    failed = [folder for folder in folders if RunPaths(folder).is_failed_start]
    if failed and len(folders) - len(failed) >= 2:
        logger.warning("passed over, as nothing was trained there: %s", ", ".join(map(str, failed)))
        folders = [folder for folder in folders if folder not in failed]
    short = [folder.resolve().name for folder in folders]
    names = short if len(set(short)) == len(short) else list(map(str, folders))
    return Comparison({name: read_run(folder) for name, folder in zip(names, folders, strict=True)})
