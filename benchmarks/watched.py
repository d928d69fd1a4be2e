"""Start one rank as ``run_multi_gpu_train.py`` does, with a worker that writes down which thread is its reporter.

python benchmarks/watched.py FOLDER <train options>

The worker writes ``reporter-rank=<k>`` in FOLDER: the ids of its process and of the thread, as in /proc.
"""

from __future__ import annotations

import os
import runpy
import sys
import threading
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
FOLDER = "DDP_MANUAL_BENCHMARK_FOLDER"


def work() -> None:
    """Run as the worker, in place of the usual program; the agent has started this process."""
    from ddp_manual.worker.reporter import Reporter

    run, name = Reporter._run, next(word for word in sys.argv if word.startswith("rank="))

    def note_and_run(reporter: Reporter) -> None:
        note = Path(os.environ[FOLDER], f"reporter-{name}")
        note.with_suffix(".new").write_text(f"{os.getpid()} {threading.get_native_id()}")
        note.with_suffix(".new").replace(note)
        run(reporter)

    Reporter._run = note_and_run  # type: ignore[method-assign, assignment]
    runpy.run_path(str(REPOSITORY / "ddp_manual" / "worker"), run_name="__main__")


def start(folder: str, options: list[str]) -> None:
    from ddp_manual.agent import start_worker
    from ddp_manual.cli.main import main

    os.environ[FOLDER] = folder
    start_worker.PROGRAM = Path(__file__)
    main(["train", *options])


if __name__ == "__main__":
    sys.path[0] = str(REPOSITORY)
    if sys.argv[1].isdigit():
        work()
    else:
        start(sys.argv[1], sys.argv[2:])
