"""What ``check`` and ``status`` print: text made of the same plain values that ``--json`` prints."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

# The matrix of round trips is as wide as it is high.
WIDEST_MATRIX = 16
MOST_ROWS = 64


def check_text(report: Mapping[str, Any]) -> str:
    """Rank 0's whole table, or another rank's own line; the findings first."""
    lines = [line for finding in report["findings"] for line in _finding(finding)]
    warnings = [step for step in report["steps"] if step["outcome"] == "warning"]
    lines += [f"warning: {step['name']}: {step['detail']}" for step in warnings]
    who = f"rank {report['rank']} on {report['host']}"
    verdict = "found a problem" if report["findings"] else "all is well"
    if report["rank"] != 0 and not report["findings"]:
        return "\n".join([*lines, f"{who}: {verdict}, {len(report['steps'])} steps in {report['seconds']:.1f} s"])
    lines += [f"{who}: {verdict}, in {report['seconds']:.1f} s", *_steps(report["steps"])]
    for other in report.get("ranks", [])[1:]:
        odd = [step for step in other["steps"] if step["outcome"] != "ok"]
        if odd:
            lines += [f"rank {other['rank']} on {other['host']}:", *_steps(odd)]
    if "roster" in report:
        lines += ["", *_roster(report["roster"])]
    if "measured" in report:
        lines += ["", *_measured(report["measured"], len(report["roster"]))]
    lines += [
        "",
        "settings:",
        *columns([[name, _shown(value), f"({source})"] for name, value, source in report["settings"]]),
    ]
    variables = [[name, value] for name, value in report["variables"].items()]
    lines += ["variables in force:", *columns(variables)] if variables else ["variables in force: none"]
    return "\n".join(lines)


def status_text(seen: Mapping[str, Any]) -> str:
    """A run as a third terminal sees it."""
    run = seen["run"]
    since = datetime.fromtimestamp(run["since"]).strftime("%Y-%m-%d %H:%M:%S")
    state = "all ranks are here" if seen["complete"] else f"{seen['here']} of {run['world_size']} ranks are here"
    lines = [f"run {run['run_id']}: rank 0 on {run['host']} (pid {run['pid']}) since {since}; {state}"]
    if run["run_dir"]:
        lines.append(f"files: {run['run_dir']}")
    lines += ["", *_roster(seen["ranks"], seen["progress"])]
    missing = [rank for first, last in seen["missing"] for rank in range(first, last + 1)]
    if missing:
        lines += ["", f"missing: {', '.join(map(str, missing[:MOST_ROWS]))}; to start one:"]
        lines += [f"  {run['command'].replace('{rank}', str(missing[0]))}"]
    lines += ["", *seen["refused"], *seen["gone"], *seen["warnings"]] if _any_notes(seen) else []
    if "stacks" in seen and not seen["progress"]:
        lines += ["", "no stacks yet: the ranks have not met"]
    elif "stacks" in seen:
        lines += _stacks(seen["ranks"], seen["stacks"])
    if seen["failure"]:
        lines += ["", *_finding(seen["failure"])]
    return "\n".join(lines)


def _stacks(ranks: Sequence[Mapping[str, Any]], stacks: Mapping[str, str]) -> list[str]:
    lines = []
    for line in ranks:
        lines += ["", f"rank {line['rank']} on {line['host']} (pid {line['pid']}):"]
        text = stacks.get(str(line["rank"]), "gave no answer: it has left, or is stopped or frozen")
        lines += [f"  {part}" for part in text.splitlines()]
    return lines


def checkpoints_text(found: Sequence[Mapping[str, Any]]) -> str:
    """The checkpoints of a run, one a line."""
    rows = [["step", "epochs", "test accuracy", "size", "written", "verdict", "file"]]
    for one in found:
        rows.append(
            [
                str(one["step"]),
                "-" if one["epochs"] is None else f"{one['epochs']:.2f}",
                "-" if one["test_accuracy"] is None else f"{100 * one['test_accuracy']:.2f}%",
                "-" if one["bytes"] is None else _size(one["bytes"]),
                "-" if one["written"] is None else datetime.fromtimestamp(one["written"]).strftime("%Y-%m-%d %H:%M:%S"),
                ", ".join([one["state"], *one["marks"]]),
                one["path"],
            ]
        )
    damaged = [f"{one['path']}: {one['verdict']}" for one in found if one["state"] != "ok"]
    return "\n".join([*columns(rows), *damaged])


def evaluation_text(report: Mapping[str, Any]) -> str:
    """What a model makes of a test set, class by class."""
    rows = [["class", "images", "accuracy", "most often taken for"]]
    for one in report["classes"]:
        accuracy = "-" if one["accuracy"] is None else f"{100 * one['accuracy']:.2f}%"
        mistaken = "{} ({})".format(*one["mistaken_for"]) if one["mistaken_for"] else "-"
        rows.append([one["name"], str(one["images"]), accuracy, mistaken])
    return "\n".join(
        [
            f"{report['model']} of {report['checkpoint']} on {report['dataset']}: {100 * report['accuracy']:.2f}% test "
            f"accuracy, test loss {report['loss']:.4f}, over {report['samples']} images",
            *columns(rows),
            *(f"  {path}" for path in report["files"]),
        ]
    )


def data_text(shown: Mapping[str, Any]) -> str:
    """What is in a data set: how many images of each class."""
    channels, height, width = shown["shape"]
    rows = [["class", "images"], *([name, str(count)] for name, count in shown["classes"])]
    return "\n".join(
        [
            f"{shown['dataset']}, {shown['part']}: {shown['images']} images of {width}x{height} pixels, "
            f"{'grey' if channels == 1 else 'in colour'}",
            *columns(rows),
            f"  {shown['picture']}",
        ]
    )


def _any_notes(seen: Mapping[str, Any]) -> bool:
    return any(seen[name] for name in ("refused", "gone", "warnings"))


def _finding(finding: Mapping[str, str]) -> list[str]:
    why, next = (finding[part].replace("\n", "\n        ") for part in ("why", "next"))
    return [f"error[{finding['identifier']}]: {finding['what']}", f"  why:  {why}", f"  next: {next}"]


def _steps(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    marks = dict(zip(("ok", "warning", "failed"), _marks(), strict=True))
    return columns(
        [[marks[step["outcome"]], step["name"], f"{step['seconds']:.2f} s", step["detail"]] for step in steps]
    )


def _marks() -> tuple[str, str, str]:
    """A tick, a warning, a cross; in words where the terminal cannot show them."""
    marks = ("\N{CHECK MARK}", "!", "\N{BALLOT X}")
    try:
        "".join(marks).encode(sys.stdout.encoding or "ascii")
    except (UnicodeEncodeError, LookupError):
        return ("ok", "!", "failed")
    return marks


def _roster(ranks: Sequence[Mapping[str, Any]], progress: Sequence[Mapping[str, Any]] | None = None) -> list[str]:
    header = ["rank", "host", "pid", "device", "address", "since", "versions"]
    rows = []
    for line in ranks[:MOST_ROWS]:
        since = datetime.fromtimestamp(line["since"]).strftime("%H:%M:%S")
        device = f"{line['device']} {line['gpu']}" if "gpu" in line else line["device"]
        row = [str(line["rank"]), line["host"], str(line["pid"]), device, line["address"], since]
        if progress:
            row += _doing(progress[line["rank"]])
        rows.append([*row, line["versions"]])
    if progress:
        header[-1:-1] = ["phase", "epoch", "step", "samples/s", "heard"]
    more = [f"  ... and {len(ranks) - MOST_ROWS} more"] if len(ranks) > MOST_ROWS else []
    return [*columns([header, *rows]), *more]


def _doing(line: Mapping[str, Any]) -> list[str]:
    rate = f"{line['samples_per_second']:,.0f}" if line["samples_per_second"] else "-"
    phase = line["phase"] + " (slow)" * line["slow"]
    return [phase, str(line["epoch"]), str(line["step"]), rate, f"{line['silent_seconds']:.0f} s ago"]


def _measured(measured: Mapping[str, Any], ranks: int) -> list[str]:
    lines = [f"barrier: {1e6 * measured['barrier_seconds']:.0f} us"]
    rows = [
        [_size(one["bytes"]), f"{1e3 * one['seconds']:.2f} ms", f"{_size(one['bus_bandwidth'], unit=1000)}/s"]
        for one in measured["all_reduce"]
    ]
    lines += columns([["all-reduce", "time", "bus bandwidth"], *rows])
    times = {(pair["rank"], pair["other"]): pair["seconds"] for pair in measured["round_trips"]}
    if not times:
        return lines
    lines.append("round trips in us:")
    if ranks > WIDEST_MATRIX:
        return lines + columns([[f"0 - {other}", f"{1e6 * seconds:.0f}"] for (_, other), seconds in times.items()])
    header = ["rank", *map(str, range(ranks))]
    rows = [
        [str(rank), *(_microseconds(times.get((min(rank, other), max(rank, other)))) for other in range(ranks))]
        for rank in range(ranks)
    ]
    return lines + columns([header, *rows])


def _size(count: float, unit: int = 1024) -> str:
    """Bytes, such as ``64 MB``; ``unit`` is 1000 where the field counts so, as in bandwidths."""
    for name in ("B", "KB", "MB"):
        if count < unit:
            return f"{count:.3g} {name}"
        count /= unit
    return f"{count:.3g} GB"


def _microseconds(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1e6 * seconds:.0f}"


def _shown(value: Any) -> str:
    return "not set" if value is None else str(value)


def columns(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of text with their columns one under the other; the last column may be any length."""
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]))] if rows else []
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
