"""``ddp-manual compare --plot``: draw how runs learnt and how fast they were. Needs matplotlib, an extra."""

from __future__ import annotations

import io
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.tools.compare import Comparison, Point


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw loss and accuracy against step and against time, samples/s and efficiency of each run, into ``path``; what
    no run has is left out.

    Raises:
        BadOption: there is nothing to draw; or the name ends in no format that matplotlib knows, or the file cannot be
            written.
    """
    figure = Figure(layout="constrained")
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
    runs = comparison.runs.values()
    rows: list[list[Callable[[Axes], None]]] = []
    if any(run.points for run in runs):
        places = _places(comparison)
        rows.append([partial(_draw_losses, comparison, *place) for place in places])
        rows.append([partial(_draw_accuracies, comparison, *place) for place in places])
    speeds: list[Callable[[Axes], None]] = []
    if any(run.facts["samples_per_second"] for run in runs):
        speeds.append(partial(_draw_rates, comparison))
    if comparison.base is not None:
        speeds.append(partial(_draw_efficiencies, comparison))
    rows += [speeds] if speeds else []
    if not rows:
        raise BadOption(
            "--plot has nothing to draw",
            why="none of the runs has a line of metrics or a speed",
            next="leave --plot out, or name runs that have trained",
        )
    figure.set_size_inches(12, 4 * len(rows))
    for row, panels in enumerate(rows):
        for column, draw in enumerate(panels, start=1):
            axes = figure.add_subplot(len(rows), len(panels), row * len(panels) + column)
            draw(axes)
            axes.grid(alpha=0.3)
    handles = [Line2D([], [], **_style(index)) for index in range(len(runs))]
    names = [f"{name} (world size {run.facts['world_size'] or '?'})" for name, run in comparison.runs.items()]
    figure.legend(handles, names, loc="outside upper center", ncols=min(3, len(names)))


def _places(comparison: Comparison) -> list[tuple[str, Callable[[Point], float]]]:
    """Return what learning is drawn against: a label, and the place of a point on that axis."""
    longest = max(run.points[-1].seconds for run in comparison.runs.values() if run.points)
    seconds, unit = next((one for one in ((3600, "h"), (60, "min")) if longest >= 3 * one[0]), (1, "s"))
    return [
        ("step", lambda point: point.step),
        (f"training time ({unit})", lambda point: point.seconds / seconds),
    ]


def _draw_losses(comparison: Comparison, label: str, place: Callable[[Point], float], axes: Axes) -> None:
    for index, run in enumerate(comparison.runs.values()):
        above_0 = [point for point in run.points if point.loss > 0]  # the axis is logarithmic; one class has loss 0
        axes.plot([*map(place, above_0)], [point.loss for point in above_0], marker=".", **_style(index))
    axes.set(xlabel=label, ylabel="training loss", yscale="log")


def _draw_accuracies(comparison: Comparison, label: str, place: Callable[[Point], float], axes: Axes) -> None:
    """Draw training accuracy at the ``place`` of each point, and a circle for each test accuracy."""
    for index, run in enumerate(comparison.runs.values()):
        points, style = run.points, _style(index)
        axes.plot([*map(place, points)], [100 * point.accuracy for point in points], alpha=0.5, **style)
        last = {point.epoch: point for point in points}
        ends = [(last[epoch], found) for epoch, found in enumerate(run.test_accuracies, start=1) if epoch in last]
        circles = {**style, "linestyle": "", "marker": "o"}
        axes.plot([place(point) for point, _ in ends], [100 * accuracy for _, accuracy in ends], **circles)
    axes.set(xlabel=label, ylabel="accuracy (%): training as lines, test as circles")


def _draw_rates(comparison: Comparison, axes: Axes) -> None:
    _draw_bars(comparison, axes, [run.facts["samples_per_second"] or 0 for run in comparison.runs.values()])
    axes.set(ylabel="samples/s over all ranks")


def _draw_efficiencies(comparison: Comparison, axes: Axes) -> None:
    _draw_bars(comparison, axes, [100 * (comparison.efficiency(name) or 0) for name in comparison.runs])
    axes.set(ylabel="efficiency (%): samples/s per rank,\nrelative to the fewest ranks")


def _draw_bars(comparison: Comparison, axes: Axes, heights: Sequence[float]) -> None:
    """Draw a bar for each run, above its name and ranks; it has no height where the run has no such number."""
    axes.bar(range(len(heights)), heights, color=[_style(index)["color"] for index in range(len(heights))])
    labels = [f"{name} ({run.facts['world_size'] or '?'})" for name, run in comparison.runs.items()]
    axes.set_xticks(range(len(heights)), labels, rotation=30, horizontalalignment="right")
    axes.set(xlabel="run (ranks)")


def _style(index: int) -> dict[str, Any]:
    """Ten colours, then the same colours with other lines."""
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}
