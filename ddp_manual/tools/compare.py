"""``ddp-manual compare``: read what runs have left in their folders, and put them side by side."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ddp_manual.errors import BadOption
from ddp_manual.messages import named_from_outside
from ddp_manual.option_fields import option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.terminal import columns
from ddp_manual.training.options import TrainConfig

T = TypeVar("T")
logger = logging.getLogger(__name__)

# Characters; the runs that do not fit go into a further table below.
WIDEST_TABLE = 120
# Options that have a line in every table, whether they differ or not.
ALWAYS_SHOWN = ("model", "dataset", "epochs")
# Failures of ranks that only saw another rank fail: any other failure is nearer to the cause.
OF_A_PEER = ("peer-", "master-lost")
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
# A number beyond these is damage, and what is computed from it could be infinite.
Number = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]


class Numbers(msgspec.Struct):
    """What ``summary.json``, and ``config.json`` below ``run``, say, as far as it is needed."""

    world_size: int | None = None
    device: str | None = None
    batch_size_per_rank: int | None = None
    peak_lr: Number | None = None
    goes_on_after_step: int | None = None
    samples_per_second: Number | None = None
    train_seconds: Number | None = None
    final_test_loss: Number | None = None


class Point(msgspec.Struct):
    """A line of ``metrics.jsonl``: over all ranks, since the line before; ``seconds`` since the run began."""

    step: int
    loss: Number
    samples_per_second: Number
    seconds: Number


class Failure(msgspec.Struct):
    """What a ``failure-rank<k>.json`` says, as far as it is needed."""

    identifier: str
    what: str = ""
    rank: int | None = None


class Config(msgspec.Struct):
    """What a run adds to its options in ``config.json``; other files of that name have no ``run``."""

    run: Numbers = msgspec.field(default_factory=Numbers)


class RecordedRun(NamedTuple):
    """What the files of a run say."""

    facts: Mapping[str, Any]
    """For ``--json``: fractions, seconds, samples per second; None where no file says it. For the first three see
    ``End``."""
    options: Mapping[str, Any]
    """Those of TrainConfig that all ranks share."""

    @property
    def rate_per_rank(self) -> float | None:
        """Samples per second and rank."""
        rate, ranks = self.facts["samples_per_second"], self.facts["world_size"]
        return rate / ranks if rate and ranks else None

    @property
    def work(self) -> list[Any]:
        """What has to be the same for two runs' samples per second to be comparable."""
        return [*(self.options.get(name) for name in ("model", "dataset", "image_size")), self.facts["device"]]


def read_run(folder: Path) -> RecordedRun:
    """Read what the run in ``folder`` has left.

    Raises:
        BadOption: the folder holds no file of a run, or one that is damaged or cannot be read.
    """
    paths = RunPaths(folder)
    try:
        if not any(path.exists() for path in (paths.config, paths.metrics, paths.summary)):
            raise BadOption(
                f"{folder} is not the folder of a run",
                why=f"it has neither {paths.config.name} nor {paths.metrics.name} nor {paths.summary.name}",
                next="name folders of runs, such as runs/<start time>-<run_id>",
            )
        options, run = _read(paths.config, dict[str, Any]), _read(paths.config, Config).run
        summary, accuracies = _read(paths.summary, Numbers), _read(paths.accuracies, list[Number], b"[]")
        points, end = _read_points(paths.metrics), read_end(paths)
    except OSError as error:
        raise BadOption(
            f"{error.filename or folder} cannot be read", why=str(error.strerror), next="leave this run out"
        ) from error
    last = points[-1] if points else None
    batch = (run.world_size or 0) * (run.batch_size_per_rank or 0)
    facts = {
        "run_dir": str(folder),
        **end._asdict(),
        "model": options.get("model"),
        "dataset": options.get("dataset"),
        "world_size": run.world_size,
        "device": run.device,
        "global_batch_size": batch or None,
        "peak_lr": run.peak_lr,
        "samples_per_second": summary.samples_per_second or _mean_rate(points, run.goes_on_after_step or 0),
        "efficiency": None,  # relative to another run
        "epochs": options.get("epochs"),
        "epochs_done": len(accuracies),
        "steps_done": last.step if last else 0,
        "final_loss": last.loss if last else None,
        "test_loss": summary.final_test_loss,
        "test_accuracy": accuracies[-1] if accuracies else None,
        "train_seconds": summary.train_seconds or (last.seconds if last else None),
        "notes": [f"no {path.name}" for path in (paths.config, paths.metrics) if not path.exists()],
    }
    shared = (field.name for field in option_fields(TrainConfig) if field.metadata["shared"])
    return RecordedRun(facts, {name: options[name] for name in shared if name in options})


def _read(path: Path, kind: type[T], otherwise: bytes = b"{}") -> T:
    """Return what is in a JSON file, or ``otherwise`` if it is not there; raise OSError, which names it, if damaged."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.exists() else otherwise, type=kind)
    except (msgspec.MsgspecError, RecursionError):
        raise _damaged(path) from None


def _damaged(path: Path) -> OSError:
    return OSError(0, "it is damaged", str(path))


def _read_points(path: Path) -> list[Point]:
    points: list[Point] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except msgspec.ValidationError:
            raise _damaged(path) from None
        except msgspec.DecodeError:
            continue  # a kill has cut it off
    return points


class End(NamedTuple):
    """How a run stands."""

    state: str
    """finished, running, stopped, ``failed: <identifier>``, or unfinished: killed, or not begun."""
    ended: float | None
    """Seconds since 1970; of a killed run when it last wrote."""
    why: str | None
    """What a run that failed has said."""


def read_end(paths: RunPaths) -> End:
    """Return how the run stands, as its files say. An OSError names the file that is damaged or cannot be read."""
    if paths.summary.exists():
        return End("finished", paths.summary.stat().st_mtime, None)
    if paths.holder is not None:
        return End("running", None, None)
    # A run that is started again writes its options anew: the failures of before no longer count.
    began = paths.config.stat().st_mtime if paths.config.exists() else 0.0
    dated = [(path, path.stat().st_mtime) for path in paths.failures()]
    failures = [(_read(path, Failure), ended) for path, ended in dated if ended >= began]
    if not failures:
        written = [path.stat().st_mtime for path in (paths.config, paths.metrics, paths.accuracies) if path.exists()]
        return End("unfinished", max(written, default=None), None)
    failure, ended = min(failures, key=lambda one: one[0].identifier.startswith(OF_A_PEER))
    why = named_from_outside(failure.what, failure.rank)
    return End("stopped" if failure.identifier == "stopped" else f"failed: {failure.identifier}", ended, why)


def _mean_rate(points: Sequence[Point], began: int) -> float | None:
    """Average the samples per second after step ``began``, where the run was resumed, maybe with other ranks."""
    starts = [0.0, *(point.seconds for point in points)]
    spans = [(point, point.seconds - start) for point, start in zip(points, starts, strict=False) if point.step > began]
    seconds = sum(span for _, span in spans)
    return sum(point.samples_per_second * span for point, span in spans) / seconds if seconds else None


def compare(folders: Sequence[Path]) -> dict[str, Any]:
    """Read the runs in ``folders``; a start that failed is passed over, with a warning, where two runs remain.

    Returns:
        ``runs``: the name and the facts of each, in the order in which they were named. Its efficiency is its samples
        per second and rank, as a fraction of that of the run ``efficiency_relative_to``; None where the work or the
        devices differ. ``differing_options``: option -> name of the run -> value, of those that have it.

    Raises:
        BadOption: there are fewer than two different folders, or one is not that of a run.
    """
    different = list({folder.resolve(): folder for folder in folders}.values())
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
    short = [folder.resolve().name for folder in different]
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
    runs_per_table = max(1, (WIDEST_TABLE - first_width) // max(widths))
    lines: list[str] = []
    for first in range(1, len(rows[0]), runs_per_table):
        table = columns([[row[0], *row[first : first + runs_per_table]] for row in rows])
        lines += [""] * bool(lines) + table[: len(ROWS) + 1]
        if differing := table[len(ROWS) + 1 :]:
            lines += ["options that differ:", *differing]
    if base is not None:
        lines += ["", f"efficiency: samples/s per rank, relative to {base}"]
        if any(run["efficiency"] and run["efficiency"] > 1 for run in runs):
            lines[-1] += "; above 100%: each rank was faster than there, such as on a host that did less besides"
    notes = [f"{run['name']}: {note}" for run in runs for note in run["notes"]]
    return "\n".join([*lines, *([""] if notes else []), *notes])
