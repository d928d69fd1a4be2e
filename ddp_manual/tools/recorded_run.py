"""What a run has left in its folder, read back: of a finished, running, stopped or damaged one whatever can be read."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption
from ddp_manual.options import option_fields
from ddp_manual.run_folder import RunPaths
from ddp_manual.training import config_file
from ddp_manual.training.config import TrainConfig

MOST_NAMED = 8
# Beyond these a number is damage, and what is worked out from it would be infinite.
LARGEST_COUNT = 2**53
LARGEST, SMALLEST_RATE = 1e30, 1e-9
# What ranks say that have only seen another one fail: any other failure is nearer to the cause.
OF_A_PEER = ("peer-", "master-lost")


@dataclass(frozen=True, kw_only=True)
class Point:
    """A line of ``metrics.jsonl``: over all ranks, since the line before; ``accuracy`` is a fraction.

    Args:
        seconds: of training since the run began, evaluation left out; None where it can neither be read nor worked out.
    """

    step: int
    epoch: int
    loss: float
    accuracy: float
    samples_per_second: float
    seconds: float | None


@dataclass(frozen=True, kw_only=True)
class RecordedRun:
    """What is known of a run; None (or nothing) where no file says it.

    Args:
        state: finished, running, stopped, ``failed: <identifier>`` or unfinished (killed, or not begun).
        options: those of TrainConfig that all ranks share.
        train_seconds: without evaluations; ``estimated`` where they are worked out from steps and samples per second.
        test_accuracies: fractions, one per epoch that is done.
        notes: what could not be read.
    """

    run_dir: Path
    state: str
    options: Mapping[str, Any]
    world_size: int | None
    device: str | None
    global_batch_size: int | None
    peak_lr: float | None
    points: tuple[Point, ...]
    test_accuracies: tuple[float, ...]
    test_loss: float | None
    samples_per_second: float | None
    train_seconds: float | None
    estimated: bool
    notes: tuple[str, ...]

    @property
    def final_loss(self) -> float | None:
        """Of training, since the metrics before the last."""
        return self.points[-1].loss if self.points else None

    @property
    def test_accuracy(self) -> float | None:
        return self.test_accuracies[-1] if self.test_accuracies else None

    @property
    def rate_per_rank(self) -> float | None:
        """Samples per second."""
        if self.samples_per_second is None or self.world_size is None:
            return None
        return self.samples_per_second / self.world_size

    def epoch_ends(self) -> list[tuple[Point, float]]:
        """The last metrics of each epoch that is done, and the test accuracy after it."""
        last = {point.epoch: point for point in self.points}
        accuracies = enumerate(self.test_accuracies, start=1)
        return [(last[epoch], accuracy) for epoch, accuracy in accuracies if epoch in last]


def read_run(folder: Path) -> RecordedRun:
    """Read what the run in ``folder`` has left.

    Raises:
        BadOption: there is no such folder, none of the files of a run is in it, or it cannot be read.
    """
    paths = RunPaths(folder)
    _check_that_a_run_is_there(paths)
    notes: list[str] = []
    config = _read_object(paths.config, notes)
    summary = _read_object(paths.summary, notes, expected=False)
    options, run = config_file.apart(config)
    followed = run if isinstance(run, dict) else {}
    world_size = _count(followed, "world_size") or _count(summary, "world_size")
    batch_size = _count(followed, "batch_size_per_rank")
    global_batch_size = world_size * batch_size if world_size and batch_size else None
    points, estimated = _read_points(paths.metrics, global_batch_size, notes)
    rate, seconds = _number(summary, "samples_per_second"), _number(summary, "train_seconds")
    return RecordedRun(
        run_dir=folder,
        state=_state(paths, finished="final_test_accuracy" in summary),
        options=_options(options),
        world_size=world_size,
        device=_text(followed, "device") or _text(summary, "device"),
        global_batch_size=global_batch_size,
        peak_lr=_number(followed, "peak_lr"),
        points=points,
        test_accuracies=_read_accuracies(paths.accuracies, notes),
        test_loss=_number(summary, "final_test_loss"),
        samples_per_second=_mean_rate(points, _count(followed, "goes_on_after_step") or 0) if rate is None else rate,
        train_seconds=points[-1].seconds if seconds is None and points else seconds,
        estimated=estimated,
        notes=tuple(notes),
    )


def _check_that_a_run_is_there(paths: RunPaths) -> None:
    folder = paths.run_dir
    try:
        if not folder.is_dir():
            why = "it is a file" if folder.exists() else "there is no such folder"
        elif _holds_a_run(paths):
            return
        else:
            why = f"it has neither {paths.config.name} nor {paths.metrics.name} nor {paths.summary.name}"
        around = folder if folder.is_dir() else folder.parent
        beside = [one for one in (around, *around.iterdir()) if one.is_dir() and _holds_a_run(RunPaths(one))]
    except FileNotFoundError:
        beside = []
    except OSError as error:
        raise _unreadable(error.filename or folder, error) from error
    newest = sorted(beside)[-MOST_NAMED:]
    raise BadOption(
        f"{folder} is not the folder of a run",
        why=why,
        next="name folders of runs, such as:\n" + "\n".join(map(str, newest))
        if newest
        else "name folders of runs, such as runs/<start time>-<run_id>",
    )


def _holds_a_run(paths: RunPaths) -> bool:
    return any(path.exists() for path in (paths.config, paths.metrics, paths.summary))


def _unreadable(path: Path | str, error: OSError) -> BadOption:
    return BadOption(
        f"{path} cannot be read", why=error.strerror or str(error), next="name a run's folder that this user may read"
    )


def _state(paths: RunPaths, *, finished: bool) -> str:
    if finished:
        return "finished"
    if paths.in_use:
        return "running"
    failures = sorted(filter(None, map(_failure, _newest_failures(paths))), key=lambda name: name.startswith(OF_A_PEER))
    if not failures:
        return "unfinished"
    return "stopped" if failures[0] == "stopped" else f"failed: {failures[0]}"


def _newest_failures(paths: RunPaths) -> list[Path]:
    """Why ranks have left, but for what they said before the run was started again, which writes its options anew."""
    began = paths.config.stat().st_mtime if paths.config.exists() else 0.0
    return [path for path in paths.failures() if path.stat().st_mtime >= began]


def _failure(path: Path) -> str | None:
    """Its identifier."""
    return _text(_read_object(path, []), "identifier")


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except FileNotFoundError:
        raise
    except OSError as error:
        raise _unreadable(path, error) from error


def _read_object(path: Path, notes: list[str], *, expected: bool = True) -> dict[str, Any]:
    """An empty one where the file is not there (which is noted if it is ``expected``) or damaged."""
    try:
        content = json.loads(_read(path))
    except FileNotFoundError:
        if expected:
            notes.append(f"no {path.name}")
        return {}
    except (ValueError, RecursionError):
        content = None
    if not isinstance(content, dict):
        notes.append(f"{path.name} is damaged")
        return {}
    return content


def _read_accuracies(path: Path, notes: list[str]) -> tuple[float, ...]:
    try:
        content = json.loads(_read(path))
    except FileNotFoundError:
        return ()
    except (ValueError, RecursionError):
        content = None
    accuracies = [_finite(one) for one in content] if isinstance(content, list) else [None]
    if None in accuracies:
        notes.append(f"{path.name} is damaged")
        return ()
    return tuple(one for one in accuracies if one is not None)


def _read_points(path: Path, global_batch_size: int | None, notes: list[str]) -> tuple[tuple[Point, ...], bool]:
    """The lines that can be read, and whether the seconds of some had to be worked out.

    Runs that were written before lines had ``seconds`` have samples per second; with a full batch at each step these
    give the seconds. The last batch of an epoch may have been smaller, so they are a little too many.
    """
    points: list[Point] = []
    estimated = False
    try:
        lines = _read(path).splitlines()
    except FileNotFoundError:
        notes.append(f"no {path.name}")
        return (), False
    for line in lines:
        point = _parse(line)
        last_step, last_seconds = (points[-1].step, points[-1].seconds) if points else (0, 0.0)
        if point is None or point.step <= last_step:
            continue
        if point.seconds is None and last_seconds is not None and global_batch_size:
            samples = (point.step - last_step) * global_batch_size
            point = replace(point, seconds=last_seconds + samples / point.samples_per_second)
            estimated = True
        points.append(point)
    if len(points) < len(lines):
        notes.append(f"{path.name}: {len(lines) - len(points)} of {len(lines)} lines cannot be read")
    if points and points[-1].seconds is None:
        notes.append(f"{path.name} has no seconds")
    return tuple(points), estimated


def _parse(line: str) -> Point | None:
    """None if a kill has cut the line off, or it is none of ours."""
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(content, dict):
        return None
    step, epoch = _count(content, "step"), _count(content, "epoch")
    loss, accuracy, rate = (_number(content, name) for name in ("loss", "accuracy", "samples_per_second"))
    if step is None or epoch is None or loss is None or accuracy is None or rate is None or rate < SMALLEST_RATE:
        return None
    seconds = _number(content, "seconds")
    return Point(step=step, epoch=epoch, loss=loss, accuracy=accuracy, samples_per_second=rate, seconds=seconds)


def _mean_rate(points: Sequence[Point], began: int) -> float | None:
    """Samples per second over all points after step ``began``, where the run last went on, maybe with another number of
    ranks: what was trained between them, over the seconds that took."""
    ends = [point.seconds for point in points if point.seconds is not None]
    if len(ends) < len(points):
        return None
    spans = [(point, end - start) for point, start, end in zip(points, [0.0, *ends], ends, strict=False)]
    counted = [(point.samples_per_second * span, span) for point, span in spans if point.step > began]
    seconds = sum(span for _, span in counted)
    return sum(samples for samples, _ in counted) / seconds if seconds > 0 else None


def _options(there: Mapping[str, Any]) -> dict[str, Any]:
    shared = [field.name for field in option_fields(TrainConfig) if field.metadata["shared"]]
    return {name: there[name] for name in shared if name in there}


def _count(content: Mapping[str, Any], name: str) -> int | None:
    value = content.get(name)
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 < value <= LARGEST_COUNT else None


def _number(content: Mapping[str, Any], name: str) -> float | None:
    return _finite(content.get(name))


def _finite(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if abs(value) <= LARGEST else None  # nan is not


def _text(content: Mapping[str, Any], name: str) -> str | None:
    value = content.get(name)
    return value if isinstance(value, str) else None
