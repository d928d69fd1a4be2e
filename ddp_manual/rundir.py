"""Every file name of a run, and how a file is written so that nobody ever reads half of it."""

from __future__ import annotations

import json
import os
import secrets
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ddp_manual.errors import BadOption, writing


def new_run_id() -> str:
    """Eight hexadecimal digits, drawn anew for each run."""
    return secrets.token_hex(4)


def default_run_dir(run_id: str) -> str:
    """``runs/<start time>-<run_id>``, in local time."""
    return os.path.join("runs", f"{time.strftime('%Y%m%d-%H%M%S')}-{run_id}")


@dataclass(frozen=True)
class RunPaths:
    """The files below one ``run_dir``. Rank 0 writes them; only logs and failures belong to each rank."""

    run_dir: Path

    @property
    def config(self) -> Path:
        return self.run_dir / "config.json"

    @property
    def metrics(self) -> Path:
        return self.run_dir / "metrics.jsonl"

    @property
    def accuracies(self) -> Path:
        return self.run_dir / "accuracies.json"

    @property
    def model(self) -> Path:
        return self.run_dir / "model.pt"

    @property
    def samples(self) -> Path:
        return self.run_dir / "samples.png"

    @property
    def summary(self) -> Path:
        return self.run_dir / "summary.json"

    def log(self, rank: int) -> Path:
        return self.run_dir / f"log-rank{rank}.txt"

    def failure(self, rank: int) -> Path:
        return self.run_dir / f"failure-rank{rank}.json"

    def create(self) -> RunPaths:
        """Make the folder.

        Raises:
            BadOption: it cannot be written, or holds an earlier run, whose files would be lost.
        """
        with writing(self.run_dir, "--run_dir"):
            self.run_dir.mkdir(parents=True, exist_ok=True)
            if self.config.exists():
                raise BadOption(
                    f"--run_dir {self.run_dir} already holds a run",
                    why=f"{self.config} exists; training into it would overwrite its model and metrics",
                    next="choose another --run_dir, or leave the option out for a new one",
                )
            tempfile.TemporaryFile(dir=self.run_dir).close()
        return self


def write_bytes(path: Path, content: bytes) -> None:
    """Write through a temporary file and a rename: after a crash the old content or the new is there, whole.

    Raises:
        DiskFull, BadOption: the folder cannot take the file.
    """
    with writing(path, "--run_dir"):
        replace_file(path, content)


def replace_file(path: Path, content: bytes) -> None:
    """Like ``write_bytes``, with the operating system's own errors."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with open(temporary, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def write_json(path: Path, content: Any) -> None:
    write_bytes(path, (json.dumps(content, indent=2, allow_nan=False) + "\n").encode())


def append_json_line(path: Path, content: Any) -> None:
    """One line of a ``.jsonl`` file, in a single write."""
    with writing(path, "--run_dir"), open(path, "a", encoding="utf-8") as file:
        file.write(json.dumps(content, allow_nan=False) + "\n")
