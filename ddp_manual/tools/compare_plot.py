"""``ddp-manual compare --plot``: draw how runs learnt and how fast they were. Needs matplotlib, an extra."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.tools.compare import Comparison, Point, RecordedRun


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw loss and accuracy against step and against time, samples/s and efficiency of each run, into ``path``.

    Raises:
        BadOption: the name ends in no format that matplotlib knows, or the file cannot be written.
    """
    figure = Figure(figsize=(12, 12), layout="constrained")
    form = path.suffix.removeprefix(".").lower()
    known = figure.canvas.get_supported_filetypes()
    if form not in known:
        raise BadOption(
            f"--plot {path} ends in {path.suffix or 'nothing'}, which is no picture format",
            why=f"known are {', '.join(sorted(known))}",
            next=f"--plot {path.with_suffix('.png')}",
        )
    _draw(comparison, figure)
    content = io.BytesIO()
    figure.savefig(content, format=form, dpi=100)
    with writing(path, "--plot"):
        run_folder.replace_files({path: content.getvalue()})


def _draw(comparison: Comparison, figure: Figure) -> None:
    axes = figure.subplots(3, 2)
    longest = max((run.points[-1].seconds for run in comparison.runs.values() if run.points), default=0.0)
    seconds, unit = next((one for one in ((3600, "h"), (60, "min")) if longest >= 3 * one[0]), (1, "s"))
    against: list[tuple[str, Callable[[Point], float]]] = [
        ("step", lambda point: point.step),
        (f"training time ({unit})", lambda point: point.seconds / seconds),
    ]
    for (label, place), losses, accuracies in zip(against, axes[0], axes[1], strict=True):
        for index, run in enumerate(comparison.runs.values()):
            _draw_learning(losses, accuracies, run, place, _style(index))
        losses.set(xlabel=label, ylabel="training loss", yscale="log")
        accuracies.set(xlabel=label, ylabel="accuracy (%): training as lines, test as circles")
    _draw_speed(comparison, *axes[2])
    for one in axes.flat:
        one.grid(alpha=0.3)
    handles = [figure.axes[0].plot([], [], **_style(index))[0] for index in range(len(comparison.runs))]
    names = [f"{name} (world size {run.facts['world_size'] or '?'})" for name, run in comparison.runs.items()]
    figure.legend(handles, names, loc="outside upper center", ncols=min(3, len(names)))


def _draw_learning(
    losses: Axes, accuracies: Axes, run: RecordedRun, place: Callable[[Point], float], style: Mapping[str, Any]
) -> None:
    """Draw training loss and accuracy at the ``place`` of each point, and a circle for each test accuracy."""
    points = run.points
    above_0 = [point for point in points if point.loss > 0]  # the axis is logarithmic; a single class has loss 0
    losses.plot([*map(place, above_0)], [point.loss for point in above_0], marker=".", **style)
    accuracies.plot([*map(place, points)], [100 * point.accuracy for point in points], alpha=0.5, **style)
    last = {point.epoch: point for point in points}
    ends = [(last[epoch], found) for epoch, found in enumerate(run.test_accuracies, start=1) if epoch in last]
    circles = {**style, "linestyle": "", "marker": "o"}
    accuracies.plot([place(point) for point, _ in ends], [100 * accuracy for _, accuracy in ends], **circles)


def _draw_speed(comparison: Comparison, rates: Axes, efficiencies: Axes) -> None:
    """Draw a bar for each run, above its number of ranks; it has no height where the speed is not known."""
    names, runs = [*comparison.runs], [*comparison.runs.values()]
    look: dict[str, Any] = {
        "color": [_style(index)["color"] for index in range(len(runs))],
        "tick_label": [str(run.facts["world_size"] or "?") for run in runs],
    }
    rates.bar(range(len(runs)), [run.facts["samples_per_second"] or 0 for run in runs], **look)
    rates.set(xlabel="ranks", ylabel="samples/s over all ranks")
    efficiencies.bar(range(len(runs)), [100 * (comparison.efficiency(name) or 0) for name in names], **look)
    efficiencies.set(xlabel="ranks", ylabel="efficiency (%): samples/s per rank,\nrelative to the fewest ranks")


def _style(index: int) -> dict[str, Any]:
    """Ten colours, then the same colours with other lines."""
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}
