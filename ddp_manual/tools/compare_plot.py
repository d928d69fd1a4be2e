"""``ddp-manual compare --plot``: draw how runs learnt and how fast they were. Needs matplotlib, an extra."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.tools.compare import Comparison, Point, RecordedRun

# A line of more points than this has no mark on each.
MOST_MARKS = 40
# From this ratio of the most ranks to the fewest, the axis doubles from tick to tick.
WIDE = 8
REFERENCE: dict[str, Any] = {"color": "0.6", "linestyle": "--", "linewidth": 1.0, "zorder": 0}


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw loss and accuracy against step and against time, samples/s and efficiency against ranks, into ``path``.

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
            _draw_learning(losses, accuracies, run, place, index)
        losses.set(xlabel=label, ylabel="training loss", yscale="log")
        losses.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        losses.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        losses.yaxis.set_minor_formatter(NullFormatter())
        accuracies.set(xlabel=label, ylabel="accuracy (%): training as lines, test as circles")
    _draw_speed(comparison, *axes[2])
    for one in axes.flat:
        one.grid(alpha=0.3)
    handles = [figure.axes[0].plot([], [], **_style(index))[0] for index in range(len(comparison.runs))]
    names = [f"{name} ({_ranks(run.world_size)})" for name, run in comparison.runs.items()]
    figure.legend(handles, names, loc="outside upper center", ncols=min(3, len(names)))


def _draw_learning(
    losses: Axes, accuracies: Axes, run: RecordedRun, place: Callable[[Point], float], index: int
) -> None:
    """Draw training loss and accuracy at the ``place`` of each point, and a circle for each test accuracy."""
    line, points = _style(index), run.points
    above_0 = [point for point in points if point.loss > 0]  # the axis is logarithmic; a single class has loss 0
    marker = "." if len(points) <= MOST_MARKS else ""
    losses.plot([*map(place, above_0)], [point.loss for point in above_0], marker=marker, **line)
    accuracies.plot([*map(place, points)], [100 * point.accuracy for point in points], alpha=0.5, **line)
    ends = run.epoch_ends()
    circles = {**line, "linestyle": "", "marker": "o"}
    accuracies.plot([place(point) for point, _ in ends], [100 * accuracy for _, accuracy in ends], **circles)


def _draw_speed(comparison: Comparison, rates: Axes, efficiencies: Axes) -> None:
    counts = set()
    for index, (name, run) in enumerate(comparison.runs.items()):
        if run.world_size is None or run.samples_per_second is None:
            continue
        counts.add(run.world_size)
        dot = {**_style(index), "linestyle": "", "marker": "o", "markersize": 9}
        rates.plot([run.world_size], [run.samples_per_second], **dot)
        if (efficiency := comparison.efficiency(name)) is not None:
            efficiencies.plot([run.world_size], [100 * efficiency], **dot)
    if comparison.base is not None:
        rate = comparison.runs[comparison.base].rate_per_rank or 0.0
        ends = [min(counts), max(counts)]
        rates.plot(ends, [rate * count for count in ends], label="in proportion to ranks", **REFERENCE)
        rates.legend(loc="upper left")
    efficiencies.axhline(100, **REFERENCE)
    rates.set(ylabel="samples/s over all ranks")
    rates.set_ylim(bottom=0)
    rates.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    efficiencies.set(ylabel="efficiency (%): samples/s per rank,\nrelative to the fewest ranks")
    efficiencies.set_ylim(bottom=0, top=max(110.0, efficiencies.get_ylim()[1]))
    for one in (rates, efficiencies):
        one.set(xlabel="ranks")
        if counts and max(counts) >= WIDE * min(counts):
            one.set_xscale("log", base=2)
        one.set_xticks(sorted(counts), labels=map(str, sorted(counts)))
        one.minorticks_off()


def _style(index: int) -> dict[str, Any]:
    """Ten colours, then the same colours with other lines."""
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}


def _ranks(count: int | None) -> str:
    return "? ranks" if count is None else f"{count} rank{'s'[: count > 1]}"
