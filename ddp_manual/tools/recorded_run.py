"""What a run has left in its folder, and how it stands: finished, running, stopped or failed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import msgspec

from ddp_manual.agent.waiting_rank_0s import waiting_runs
from ddp_manual.errors import BadOption
from ddp_manual.option_fields import option_fields
from ddp_manual.ranks_and_runs import named_from_outside
from ddp_manual.run_folder import RunPaths
from ddp_manual.training.options import TrainConfig

T = TypeVar("T")

# Failures of ranks that only saw another rank fail: any other failure is nearer to the cause.
OF_A_PEER = ("peer-", "master-lost")
# A number beyond these is damage, and what is computed from it could be infinite.
Number = Annotated[float, msgspec.Meta(ge=-(2**53), le=2**53)]


class Numbers(msgspec.Struct):
    """What ``summary.json``, and ``config.json`` below ``run``, say, as far as it is needed."""

    run_id: str | None = None
    world_size: int | None = None
    device: str | None = None
    batch_size_per_rank: int | None = None
    peak_lr: Number | None = None
    goes_on_after_step: int | None = None
    samples_per_second: Number | None = None
    train_seconds: Number | None = None
    final_test_loss: Number | None = None


class Point(msgspec.Struct):
    """A line of ``metrics.jsonl``: of all ranks, since the line before; ``seconds`` are those since the run began."""

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
    """For ``--json``: fractions, seconds, samples per second; None where no file says it. ``End``
    describes state, ended and why."""
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
        "train_seconds": summary.train_seconds or (sum(_spans(points)) if points else None),
        "notes": [f"no {path.name}" for path in (paths.config, paths.metrics) if not path.exists()],
    }
    shared = (field.name for field in option_fields(TrainConfig) if field.metadata["shared"])
    return RecordedRun(facts, {name: options[name] for name in shared if name in options})


def _read(path: Path, kind: type[T], otherwise: bytes = b"{}") -> T:
    """Return what is in a JSON file, or ``otherwise`` if it is not there; raise OSError, which names it, if damaged."""
    try:
        return msgspec.json.decode(path.read_bytes() if path.exists() else otherwise, type=kind)
    except (msgspec.MsgspecError, RecursionError):
        raise OSError(0, "it is damaged", str(path)) from None


def _read_points(path: Path) -> list[Point]:
    points: list[Point] = []
    for line in path.read_bytes().splitlines() if path.exists() else ():
        try:
            points.append(msgspec.json.decode(line, type=Point))
        except msgspec.ValidationError:
            raise OSError(0, "it is damaged", str(path)) from None
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
    waits = _read(paths.config, Config).run.run_id in waiting_runs()  # a lost rank's seat is kept, and nobody trains
    if waits or paths.holder is not None:
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
    spans = [(point, span) for point, span in zip(points, _spans(points), strict=True) if point.step > began]
    seconds = sum(span for _, span in spans)
    return sum(point.samples_per_second * span for point, span in spans) / seconds if seconds else None


def _spans(points: Sequence[Point]) -> list[float]:
    """Return the seconds from each point to the next; a script that is started again counts from 0 again."""
    starts = [0.0, *(point.seconds for point in points)]
    return [point.seconds - start * (point.seconds >= start) for point, start in zip(points, starts, strict=False)]
