"""The picture of ``ddp-manual compare --plot``: how runs learnt and how fast they went, side by side."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ddp_manual import run_folder
from ddp_manual.errors import BadOption, writing
from ddp_manual.tools.compare import Comparison
from ddp_manual.tools.recorded_run import Point, RecordedRun
from ddp_manual.training.config import require

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Above this many points a line shows its course without a mark on each.
MOST_MARKS = 40
# Ranks: from this ratio of most to fewest on, the axis doubles from tick to tick.
WIDE = 8
REFERENCE: dict[str, Any] = {"color": "0.6", "linestyle": "--", "linewidth": 1.0, "zorder": 0}


def write_plot(comparison: Comparison, path: Path) -> None:
    """Draw loss and accuracy against step and against time, samples/s and efficiency against ranks, into ``path``.

    Raises:
        BadOption: matplotlib is not installed, the name ends in no format it knows, or the file cannot be written.
    """
    require("plots", "--plot")
    from matplotlib.figure import Figure

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
        run_folder.replace_file(path, content.getvalue())


def _draw(comparison: Comparison, figure: Figure) -> None:
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    axes = figure.subplots(3, 2)
    seconds, unit = _unit(comparison)
    against: list[tuple[str, Callable[[Point], float | None]]] = [
        ("step", lambda point: point.step),
        (f"training time ({unit})", lambda point: None if point.seconds is None else point.seconds / seconds),
    ]
    for column, (label, where) in enumerate(against):
        for index, run in enumerate(comparison.runs.values()):
            _draw_course(axes[0][column], axes[1][column], run, where, index)
        for row, what in enumerate(("training loss", "accuracy (%): training as lines, test as circles")):
            axes[row][column].set(xlabel=label, ylabel=what)
        axes[0][column].set_yscale("log")
        axes[0][column].yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
        axes[0][column].yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        axes[0][column].yaxis.set_minor_formatter(NullFormatter())
    _draw_by_ranks(comparison, axes[2][0], axes[2][1])
    axes[2][0].yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    for one in axes.flat:
        one.grid(alpha=0.3)
    handles = [figure.axes[0].plot([], [], **_style(index))[0] for index in range(len(comparison.runs))]
    names = [f"{name} ({_ranks(run.world_size)})" for name, run in comparison.runs.items()]
    figure.legend(handles, names, loc="outside upper center", ncols=max(1, min(3, len(names))))


def _draw_course(
    losses: Axes, accuracies: Axes, run: RecordedRun, where: Callable[[Point], float | None], index: int
) -> None:
    placed = [(at, point) for point in run.points if (at := where(point)) is not None]
    ats = [at for at, _ in placed]
    line = {**_style(index), "marker": "." if len(placed) <= MOST_MARKS else ""}
    # A loss of 0, as with a single class, has no place on a logarithmic axis.
    above = [(at, point.loss) for at, point in placed if point.loss > 0]
    losses.plot([at for at, _ in above], [loss for _, loss in above], **line)
    accuracies.plot(ats, [100 * point.accuracy for _, point in placed], **{**line, "marker": "", "alpha": 0.5})
    ends = [(at, accuracy) for point, accuracy in run.epoch_ends() if (at := where(point)) is not None]
    accuracies.plot(
        [at for at, _ in ends],
        [100 * accuracy for _, accuracy in ends],
        **{**_style(index), "linestyle": "", "marker": "o"},
    )


def _draw_by_ranks(comparison: Comparison, rates: Axes, efficiencies: Axes) -> None:
    counts: list[int] = []
    for index, (name, run) in enumerate(comparison.runs.items()):
        if run.world_size is None or run.samples_per_second is None:
            continue
        counts.append(run.world_size)
        dot = {**_style(index), "linestyle": "", "marker": "o", "markersize": 9}
        rates.plot([run.world_size], [run.samples_per_second], **dot)
        efficiency = comparison.efficiency(name)
        if efficiency is not None:
            efficiencies.plot([run.world_size], [100 * efficiency], **dot)
    base = comparison.runs[comparison.base].rate_per_rank if comparison.base is not None else None
    if base is not None:
        ends = [min(counts), max(counts)]
        rates.plot(ends, [base * count for count in ends], label="in proportion to ranks", **REFERENCE)
        rates.legend(loc="upper left")
    efficiencies.axhline(100, **REFERENCE)
    rates.set(ylabel="samples/s over all ranks")
    rates.set_ylim(bottom=0)
    efficiencies.set(ylabel="efficiency (%): samples/s per rank,\nrelative to the fewest ranks")
    efficiencies.set_ylim(bottom=0, top=max(110.0, efficiencies.get_ylim()[1]))
    for one in (rates, efficiencies):
        one.set(xlabel="ranks")
        if counts and max(counts) >= WIDE * min(counts):
            one.set_xscale("log", base=2)
        one.set_xticks(sorted(set(counts)), labels=[str(count) for count in sorted(set(counts))])
        one.minorticks_off()


def _style(index: int) -> dict[str, Any]:
    """Ten colours, then the same with other lines."""
    return {"color": f"C{index % 10}", "linestyle": ("-", "--", ":")[index // 10 % 3]}


def _ranks(count: int | None) -> str:
    return "? ranks" if count is None else "1 rank" if count == 1 else f"{count} ranks"


def _unit(comparison: Comparison) -> tuple[float, str]:
    """Seconds in the unit of the time axis, and its name."""
    longest = max((point.seconds or 0.0 for run in comparison.runs.values() for point in run.points), default=0.0)
    for seconds, unit in ((3600.0, "h"), (60.0, "min")):
        if longest >= 3 * seconds:
            return seconds, unit
    return 1.0, "s"
