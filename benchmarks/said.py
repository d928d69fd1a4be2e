"""Pick the lines that matter from the output of torchrun, accelerate and ddp-manual; table for benchmarks/faults.py."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

LONGEST = 400
# The prefixes of torch's loggers in C++ and in Python, and of its excepthook.
PREFIX = re.compile(r"^(\[rank\d+\]:\s?|\[[A-Z]\d{4} [\d:.]+ [\w.]+:\d+\] |[A-Z]\d{4} [\d:.]+ \d+ \S+\] )")
SOURCE = re.compile(r"\[/\S+:\d+\] ")
EXCEPTION = re.compile(r"^[\w.]*(Error|Exception|Exit)\b.*?: ")
# Warnings since the hosts here have no names for addresses; and errors of the launcher, whose own summary follows.
UNIMPORTANT = re.compile(r"hostname of the client socket|ChildFailedError|failed \(exitcode")
OUR_STATE = re.compile(r"waiting for|nothing listens|no answer|.*cannot|.*is not heard")

Said = tuple[float, str]
"""Seconds since the fault, and a line."""


def of_torch(lines: Sequence[Said]) -> list[Said]:
    """Return exceptions and warnings, and what the launcher takes for the root cause, without prefixes and stacks."""
    told: list[Said] = []
    cause: dict[str, str] = {}
    for at, line in lines:
        text = SOURCE.sub("", PREFIX.sub("", line))
        if found := re.match(r"  (rank|exitcode) +: (.*)", text):
            cause[found[1]] = re.sub(r" \((local_rank|pid): \d+\)", "", found[2])
            if found[1] == "exitcode":
                told.append((at, f"Root Cause (first observed failure): rank {cause['rank']}, exitcode {found[2]}"))
        elif not UNIMPORTANT.search(text) and (EXCEPTION.match(text) or text.startswith(("[c10d]", "trained"))):
            told.append((at, text))
    return told


def of_ours(lines: Sequence[Said]) -> list[Said]:
    """Return the error or, without one, each state in which a rank waits; with the reason and the advice below it."""
    told: list[Said] = []
    for place, (at, line) in enumerate(lines):
        text = re.sub(r"^\[rank \d+\] | \(\d+ s of \d+ s\)", "", line)
        below = [line for _, line in lines[place + 1 :]]
        if text.startswith("error["):
            told.append(
                (at, " / ".join([text, *(line.strip() for line in below if line.startswith(("  why:", "  next:")))]))
            )
            break
        if text.startswith("trained") or (OUR_STATE.match(text) and not any(said.startswith(text) for _, said in told)):
            told.append((at, " / ".join([text, *advice(below)])))
    return told


def advice(below: Sequence[str]) -> list[str]:
    """Return the advice of a rank that waits: the first command to type, and what else may be wrong."""
    if not below or not below[0].endswith("to start what is missing:"):
        return []
    return [
        "to start what is missing:" + below[1][1:],
        *(line.strip() for line in below[2:4] if line.startswith("  (")),
    ]


def rows(fault: str, program: str, commands: Sequence[Mapping[str, Any]]) -> str:
    """Return the row of the table that says what a program has printed; ranks that have said the same share a line."""
    telling = of_ours if "ddp-manual" in program else of_torch
    groups: dict[str, list[tuple[int, float, str]]] = {}
    for command in commands:
        rank = int(re.search(r"rank (\d+)", command["typed"])[1])  # type: ignore[index]
        for at, text in telling([(at, line) for at, line in command["lines"] if at >= 0]):
            key = re.sub(r"(?<!rank )\b\d+\b", "", text)
            groups.setdefault(key, []).append((rank, at, text))
    parts = []
    for same in groups.values():
        who = ", ".join(f"rank {rank} after {at:.1f} s" for rank, at, _ in same)
        parts.append(f"{who}: `{shortened(same[0][2])}`")
    ends = [
        ("-", "-") if command["gone"] is None else (f"{command['gone']:.0f}", str(command["exit code"]))
        for command in commands
    ]
    gone, codes = (", ".join(column) for column in zip(*ends, strict=True))
    return f"| {fault} | {program} | {'<br>'.join(parts) or 'nothing'} | {gone} | {codes} |"


def shortened(text: str) -> str:
    text = re.sub(r"  +", " ", re.sub(r"[^ -~]", "", text)).replace("|", "/").replace("`", "'").strip()
    return text if len(text) <= LONGEST else f"{text[:LONGEST].rsplit(' ', 1)[0]} ..."


def table_of(found: Mapping[str, Mapping[str, Any]]) -> list[str]:
    lines = ["| fault | started by | printed | gone after, s | exit codes |", "|---|---|---|---|---|"]
    for title, by in found.items():
        for number, (program, commands) in enumerate(by.items()):
            lines.append(rows("" if number else title, program, commands))
    return lines
