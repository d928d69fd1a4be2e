"""Events as lines of JSON in ``track.jsonl``, for a program of one's own to follow."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ddp_manual import run_folder
from ddp_manual.training.trackers.sink import About, PredictionTable, Sink


class JsonLines(Sink):
    """Each line has ``event``, ``time`` (seconds since 1970) and ``step``. Pictures are named, not copied."""

    name = "jsonl"

    def open(self, about: About) -> None:
        self._file = about.paths.track
        self._step = step = about.goes_on_after or 0
        if about.goes_on_after is not None:
            run_folder.keep_json_lines(self._file, lambda line: line["step"] <= step)
        self._write("started", step, name=about.name, hyperparameters=dict(about.hyperparameters))

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        self._write("scalars", step, **values)

    def image(self, step: int, name: str, file: Path) -> None:
        self._write("image", step, name=name, file=file.name)

    def table(self, step: int, name: str, table: PredictionTable) -> None:
        rows = [
            {
                "id": sample.number,
                "guess": sample.guess,
                "truth": sample.truth,
                "scores": dict(zip(table.classes, sample.scores, strict=True)),
            }
            for sample in table.samples
        ]
        self._write("table", step, name=name, rows=rows)

    def result(self, summary: Mapping[str, Any]) -> None:
        self._write("result", self._step, summary=dict(summary))

    def close(self, *, complete: bool) -> None:
        self._write("closed", self._step, complete=complete)

    def _write(self, event: str, step: int, **content: Any) -> None:
        self._step = step
        run_folder.append_json_line(
            self._file, {"event": event, "time": round(time.time(), 3), "step": step, **content}
        )
