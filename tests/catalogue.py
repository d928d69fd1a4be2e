"""The table of provoked faults in docs/faults.md: each test that provokes one records what was seen.

DDP_MANUAL_FAULT_TABLE=faults.jsonl ./scripts/test tests/hosts tests/world && python -m tests.catalogue faults.jsonl
"""

from __future__ import annotations

import json
import os
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path


def record(
    fault: str,
    identifier: str,
    named: str,
    *,
    seconds: float | None,
    within: float | None,
    codes: Sequence[int],
    row: int,
) -> None:
    """Hold a fault to its deadline, and keep it for the table if one is being made.

    Args:
        fault: what was provoked, in a few words.
        identifier: of the error or, where nothing has to leave, of the line that told it.
        named: what the text named (rank, host, address, ...), in a few words; the test has asserted it.
        seconds: from the moment the fact could be known until it was told; None where there is nothing to tell.
        within: what is promised.
        codes: the exit code of every rank, in rank order, then of those turned away.
        row: orders the table.
    """
    if seconds is not None and within is not None:
        assert seconds <= within, f"{fault}: told after {seconds:.1f} s, not {within} s"
        seconds = round(seconds, 1)
    table = os.environ.get("DDP_MANUAL_FAULT_TABLE")
    if table:
        line = {"row": row, "fault": fault, "identifier": identifier, "named": named, "seconds": seconds}
        with open(table, "a", encoding="utf-8") as file:
            file.write(json.dumps({**line, "within": within, "codes": list(codes)}) + "\n")


def main(table: str) -> None:
    took = defaultdict[tuple[float, str], list[float]](list)
    lines = [json.loads(line) for line in Path(table).read_text(encoding="utf-8").splitlines()]
    for line in sorted(lines, key=lambda line: line["row"]):
        if line["seconds"] is not None:
            took[line["within"], line["identifier"]].append(line["seconds"])
    print("| within | told as: seconds that it took, least to most |\n|---|---|")
    for promised in sorted({within for within, _ in took}):
        told = [
            f"`{identifier}` {min(seconds)}" + (f" to {max(seconds)}" if min(seconds) < max(seconds) else "")
            for (within, identifier), seconds in took.items()
            if within == promised
        ]
        print(f"| {promised:g} s | {'; '.join(told)} |")


if __name__ == "__main__":
    main(sys.argv[1])
